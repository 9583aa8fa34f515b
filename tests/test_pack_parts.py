"""The parts between the two passes of `gpuload.pack`: a file equals the part in memory, and is opened once."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuload
from gpuload.packing import parts, passes
from gpuload.packing.parts import PartFile, PartInMemory, Segment, Summary, kept_open, save_part
from gpuload.packing.rows import Judged
from tests.test_pack import MEMORY, assert_same_rows, cells, written
from tests.test_pack_faults import contents, fail, work_on

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

FIELDS = ("dest", "length", "indices", "values")


def numbers(rng: np.random.Generator, n: int, dtype: str) -> NDArray[Any]:
    return rng.integers(0, 200, n).astype(dtype)


def random_part(counts: list[tuple[int, int]], dest: str, length: str, indices: str, values: str) -> PartInMemory:
    """Return a part with the given numbers of pieces and elements per bucket; arrays of dtype "" are absent."""
    rng = np.random.default_rng(len(counts))
    pieces, elements = (np.concatenate([[0], np.cumsum([c[i] for c in counts])]).astype(np.int64) for i in (0, 1))
    sizes = {"dest": pieces[-1], "length": pieces[-1], "indices": elements[-1], "values": elements[-1]}
    dtypes = {"dest": dest, "length": length, "indices": indices, "values": values}
    arrays = {name: numbers(rng, int(sizes[name]) if dtypes[name] else 0, dtypes[name] or "i8") for name in FIELDS}
    return PartInMemory(Summary(2**64 - 1, Judged(7.5, are_counts=False)), pieces, elements, Segment(**arrays))


@pytest.mark.parametrize("values", ["u1", "u2", "u4", "f4", "f8"])
@pytest.mark.parametrize(
    ("dest", "length", "indices"),
    [("i8", "i8", "u2"), ("i8", "i8", "i4"), ("i8", "i8", ""), ("i4", "", "u2"), ("i4", "", "i4")],
    ids=["csr", "csr-wide", "dense", "csc", "csc-wide"],
)
def test_saved_part_round_trips(dest: str, length: str, indices: str, values: str, tmp_path: Path) -> None:
    counts = [(1, 3), (0, 0), (2, 5), (3, 3), (0, 0)]
    counts = counts if length else [(n, n) for _, n in counts]
    part = random_part(counts, dest, length, indices, values)
    save_part(str(tmp_path / "part"), part)
    file = PartFile(str(tmp_path / "part"))
    assert file.summary == part.summary
    for bucket in [4, 0, 1, 2, 3]:
        found, wanted = file.segment(bucket), part.segment(bucket)
        for name in FIELDS:
            one, other = getattr(found, name), getattr(wanted, name)
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
            assert one.flags.aligned, name
            assert one.flags.writeable, "kernels would be compiled once more"


def test_empty_part_round_trips(tmp_path: Path) -> None:
    save_part(str(tmp_path / "part"), random_part([(0, 0), (0, 0)], "i8", "i8", "u2", "u1"))
    assert PartFile(str(tmp_path / "part")).segment(1).values.size == 0


class Opens:
    """How often each file of parts is opened."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.is_on = True
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.is_on and event == "open" and isinstance(args[0], str) and os.path.basename(args[0]).isdecimal():
            path = args[0]
            if os.path.basename(os.path.dirname(path)) == "parts":
                self.counts[path] = self.counts.get(path, 0) + 1


@pytest.fixture
def opens() -> Iterator[Opens]:
    heard = Opens()
    yield heard
    heard.is_on = False


@pytest.mark.parametrize("is_by_columns", [False, True])
def test_a_part_is_not_opened_for_every_bucket(is_by_columns: bool, opens: Opens, tmp_path: Path) -> None:
    adata = cells(3_000, 200)
    adata.X = adata.X.tocsc() if is_by_columns else adata.X
    path = written(adata, tmp_path / "in.h5ad")
    gpuload.pack(path, tmp_path / "out.zarr", memory=MEMORY, block_size=16)
    assert_same_rows(tmp_path / "out.zarr", path)
    assert len(opens.counts) > 5
    assert max(opens.counts.values()) <= 3  # its head, twice, and its segments


def test_open_parts_stay_within_the_descriptor_limit(
    opens: Opens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(cells(3_000, 200), tmp_path / "in.h5ad")
    gpuload.pack(path, tmp_path / "whole.zarr", memory=MEMORY, block_size=16)
    before, most = own_descriptors("parts"), 0
    plain = passes.write_bucket

    def count(*args: Any) -> None:
        nonlocal most
        most = max(most, len(own_descriptors("parts")))
        plain(*args)

    monkeypatch.setattr(passes, "write_bucket", count)
    monkeypatch.setattr(parts.resource, "getrlimit", lambda _: (8, 8))
    gpuload.pack(path, tmp_path / "out.zarr", memory=MEMORY, block_size=16)
    assert 0 < most <= 2 + passes.AT_ONE_TIME
    assert own_descriptors("parts") == before
    assert contents(tmp_path / "out.zarr") == contents(tmp_path / "whole.zarr")


def own_descriptors(folder: str) -> list[str]:
    """Return the files in folders of a name that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # closed meanwhile
            continue
    return sorted(path for path in found if f"/{folder}/" in path)


def test_parts_are_closed_when_a_bucket_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(cells(3_000, 200), tmp_path / "in.h5ad")
    monkeypatch.setattr(passes, "write_bucket", fail)
    with pytest.raises(RuntimeError):
        gpuload.pack(path, tmp_path / "out.zarr", memory=MEMORY)
    assert own_descriptors("parts") == []


def test_truncated_part_is_named_and_can_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, target = written(cells(3_000, 200), tmp_path / "in.h5ad"), tmp_path / "out.zarr"
    with monkeypatch.context() as patch:
        patch.setattr(passes, "write_bucket", fail)
        with pytest.raises(RuntimeError):
            gpuload.pack(path, target, memory=MEMORY)
    part = work_on(target) / "parts" / "000001"
    os.truncate(part, part.stat().st_size - 1)
    words = rf"^{part}: short read of a part at byte \d+: wanted \d+ bytes, got \d+[.] Was it truncated[?] Remove it"
    with pytest.raises(gpuload.ReadError, match=words):
        gpuload.pack(path, target, memory=MEMORY)
    part.unlink()
    assert gpuload.pack(path, target, memory=MEMORY).n_resumed > 0
    assert_same_rows(target, path)


def test_parts_stay_open_within_kept_open(tmp_path: Path) -> None:
    part = random_part([(1, 3), (2, 5)], "i8", "i8", "u2", "u1")
    for name in ("1", "2"):
        save_part(str(tmp_path / name), part)
    files = [PartFile(str(tmp_path / name)) for name in ("1", "2")]
    with kept_open(files):
        (tmp_path / "1").unlink()
        np.testing.assert_array_equal(files[0].segment(1).values, part.segment(1).values)
    with pytest.raises(FileNotFoundError):
        files[0].segment(1)


def test_a_part_that_is_being_read_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt may end the block, and the descriptor would be that of the next file to be opened."""
    part, other = (random_part([(n, 3), (2, 5)], "i8", "i8", "u2", "u1") for n in (1, 2))
    for name, each in (("1", part), ("2", other)):
        save_part(str(tmp_path / name), each)
    file, read_at = PartFile(str(tmp_path / "1")), parts.read_at
    with ExitStack() as block, ExitStack() as opened:
        block.enter_context(kept_open([file]))

        def interrupted(descriptor: int, *args: Any) -> int:
            block.close()
            opened.enter_context(kept_open([PartFile(str(tmp_path / "2"))]))
            return read_at(descriptor, *args)

        monkeypatch.setattr(parts, "read_at", interrupted)
        found = file.segment(0)
    np.testing.assert_array_equal(found.values, part.segment(0).values)
    assert own_descriptors(tmp_path.name) == []
