"""Labels from a table, where they cannot be added: one sentence, the exit code, and a file that is as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import h5py
import pytest

from pipelines import add_labels
from tests import writers

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("table", "columns", "code", "message"),
    [
        ("stage,kind\nlate,a\n", ["stage"], 2, "--columns stage: rows are matched by this column"),
        ("", ["kind"], 1, "table.csv: not a table: No columns to parse from file. Check the file."),
        ("stage,kind\n", ["kind"], 1, "the table has none of the labels in 'stage'"),
        ("stage,kind\nLATE,a\n", ["kind"], 1, "the table has none of the labels in 'stage'"),
    ],
)
def test_a_table_that_adds_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, columns: list[str], code: int, message: str
) -> None:
    writers.write_plain(tmp_path / "cells.h5ad")
    before = (tmp_path / "cells.h5ad").read_bytes()
    (tmp_path / "table.csv").write_text(table)
    command = [str(tmp_path / "table.csv"), str(tmp_path / "cells.h5ad"), "--by", "stage", "--columns", *columns]
    assert add_labels.main(command) == code
    assert message in capsys.readouterr().err
    assert (tmp_path / "cells.h5ad").read_bytes() == before


def test_a_file_without_obs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    h5py.File(tmp_path / "cells.h5ad", "w").close()
    (tmp_path / "table.csv").write_text("stage,kind\nlate,a\n")
    command = [str(tmp_path / "table.csv"), str(tmp_path / "cells.h5ad"), "--by", "stage", "--columns", "kind"]
    assert add_labels.main(command) == 1
    assert capsys.readouterr().err.endswith("cells.h5ad: it has no obs with columns; expected an .h5ad file.\n")
