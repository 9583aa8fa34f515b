"""The remote of the tests of sample stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.remotes import CountingRemote, fill
from tests.sample_stores import N

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def remote(tmp_path: Path) -> CountingRemote:
    return CountingRemote(fill(tmp_path / "remote", N))
