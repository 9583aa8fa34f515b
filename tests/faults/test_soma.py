"""Damaged SOMA experiments: refused in a sentence, or read as written; never a crash, a hang or another exception.

TileDB keeps no checksums by default. So what is changed within a stored value may be read as another value, by TileDB
too; what is changed in metadata may not.
"""

from __future__ import annotations

import errno
import os
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuload
from gpuload.formats.tiledb_tiles import read_generic_tile
from tests.soma_writers import note_index, write_experiment
from tests.writers import cells_frame, counts

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("tiledb")

N_QUICK, N_SLOW = 40, 3000
OBS = ["cell_line", "donor", "number", "n_counts"]
STORAGE: dict[str, dict[str, Any]] = {
    "dense": {"frames": {"text": ("zstd",)}},
    "narrow": {
        "tiles": (16, 8),
        "parts": (60,),
        "columns": ("byteshuffle", "zstd"),
        "values": ("double-delta",),
        "frames": {"text": ("dictionary", "zstd"), "numbers": ("double-delta",)},
    },
    "runs": {
        "tiles": (16, 8),
        "rows": ("rle",),
        "columns": ("delta", "lz4"),
        "values": ("bit-width", "gzip"),
        "frames": {"text": ("rle",), "numbers": ("rle",)},
    },
    "wide": {
        "rows": ("double-delta", "bit-width", "zstd"),
        "columns": ("bitshuffle", "lz4"),
        "values": ("xor", "zstd"),
        "frames": {"text": ("dictionary",), "numbers": ("bit-width", "zstd")},
    },
}


def read(path: Path) -> bool:
    """Return whether all that is read is what was written."""
    frame = cells_frame()
    wanted = {name: frame[name].astype(object).where(frame[name].notna(), None) for name in OBS}
    is_right = True
    with gpuload.open_loader(path, obs=OBS, batch_size=16, fetch_factor=3, num_threads=1) as loader:
        for batch in loader:
            is_right &= np.array_equal(batch.X, counts()[batch.rows].toarray())
            for name in ("cell_line", "donor"):
                known = np.append(loader.categories[name], None)
                is_right &= list(known[batch.obs[name]]) == list(wanted[name].iloc[batch.rows])
    return is_right


def damage(raw: bytes, rng: np.random.Generator) -> bytes:
    """Cut the end off, or change some bytes."""
    if rng.random() < 0.25:
        return raw[: rng.integers(len(raw))]
    changed = np.frombuffer(raw, dtype=np.uint8).copy()
    at = rng.integers(0, changed.size, rng.integers(1, 5))
    changed[at] ^= rng.integers(1, 256, at.size).astype(np.uint8)
    return changed.tobytes()


def check(name: str, folder: Path, numbers: range) -> None:
    X = counts().toarray() if name == "dense" else counts().astype(np.int32)
    path = write_experiment(folder / "cells", {"data": X}, **STORAGE[name])
    note_index(path / "ms" / "RNA" / "var", None)
    assert read(path)
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.stat().st_size]
    n_refused = n_right = 0
    for number in numbers:
        rng = np.random.default_rng((list(STORAGE).index(name), number))
        file = files[rng.integers(len(files))]
        raw = file.read_bytes()
        file.write_bytes(damage(raw, rng))
        is_right: bool | None
        try:
            is_right = read(path)
        except gpuload.GpuloadError as error:
            is_right, message = None, str(error)
        else:
            message = "."
        n_refused, n_right = n_refused + (is_right is None), n_right + bool(is_right)
        assert "\n" not in message, (number, file)
        assert message.endswith((".", "?")), (number, file, message)
        may_differ = file.parent.parent.name == "__fragments" and file.name[0] in "ad"
        assert may_differ or is_right is not False, (number, file)
        file.write_bytes(raw)
    assert n_refused > len(numbers) // 4
    assert n_right > 0


@pytest.mark.parametrize("nbytes", [8, 12, 24])
def test_damage_within_compressed_metadata(tmp_path: Path, nbytes: int) -> None:
    path = write_experiment(tmp_path / "cells")
    (file,) = (path / "obs" / "__schema").glob("__[0-9]*")
    version = file.read_bytes()[:4]
    plain = read_generic_tile(file.read_bytes(), "").raw
    at = plain.index(struct.pack("<Q", 16), plain.index(b"soma_joinid"))  # the size of its domain: two integers
    domain = plain[at + 8 : at + 24].ljust(nbytes, b"\0")[:nbytes]
    plain = plain[:at] + struct.pack("<Q", nbytes) + domain + plain[at + 24 :]
    tile = struct.pack("<QIII", 1, len(plain), len(plain), 0) + plain
    head = struct.pack("<QQBQBI", len(tile), len(plain), 4, 1, 0, 8)
    file.write_bytes(version + head + struct.pack("<II", 1 << 16, 0) + tile)  # not compressed
    with pytest.raises(gpuload.CorruptDataError, match=f"^{path}: its metadata cannot be read .*; restore the file"):
        read(path)


@pytest.mark.parametrize(
    ("folder", "file"),
    [
        ("ms/RNA/X/data", "__fragments/*/d1.tdb"),
        ("ms/RNA/X/data", "__fragments/*/__fragment_metadata.tdb"),
        ("obs", "__fragments/*/a1.tdb"),
        ("obs", "__schema/__enumerations/*"),
    ],
)
def test_missing_files_are_named(tmp_path: Path, folder: str, file: str) -> None:
    path = write_experiment(tmp_path / "cells")
    found = min((path / folder).glob(file))
    found.unlink()
    words = rf"^{found}: cannot be read: No such file or directory\. Is the TileDB array complete\?$"
    with pytest.raises(gpuload.ReadError, match=words):
        gpuload.open_loader(path, obs=["cell_line", "stage", "year"])  # any may have the first of the enumerations


def test_damage_to_a_band_is_said_of_a_file_that_it_needs(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells", tiles=(16, 8), parts=(64,))
    fragments = sorted((path / "ms/RNA/X/data/__fragments").iterdir())
    file = fragments[1] / "d1.tdb"
    file.write_bytes(b"\xff" * file.stat().st_size)
    with gpuload.open_loader(path) as loader:
        np.testing.assert_array_equal(loader.take([3]).X, counts()[[3]].toarray())
        with pytest.raises(gpuload.CorruptDataError, match=rf"^{fragments[1]}/"):
            loader.take([129])


@pytest.mark.parametrize("tiles", [(16, 4096), (16, 8)])
def test_files_that_are_too_short_are_named(tmp_path: Path, tiles: tuple[int, int]) -> None:
    path = write_experiment(tmp_path / "cells", tiles=tiles)
    (file,) = (path / "ms/RNA/X/data/__fragments").glob("*/d1.tdb")
    raw = file.read_bytes()
    file.write_bytes(raw[:-1])
    words = rf"^{file}: it is damaged \(it has {len(raw) - 1} bytes of {len(raw)}\); restore it"
    with pytest.raises(gpuload.CorruptDataError, match=words):
        gpuload.open_loader(path)


@pytest.mark.parametrize("folder", ["__group", "obs/__schema", "ms/RNA/X/data/__commits"])
def test_unlistable_folders_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    path = write_experiment(tmp_path / "cells")
    listed = os.listdir

    def listdir(place: str) -> list[str]:
        if place == str(path / folder):
            raise PermissionError(errno.EACCES, "Permission denied")
        return listed(place)

    monkeypatch.setattr(os, "listdir", listdir)
    words = rf"^{path / folder}: cannot be listed: Permission denied\. Check its permissions\.$"
    with pytest.raises(gpuload.ReadError, match=words):
        gpuload.open_loader(path)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("name", STORAGE)
def test_damaged_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULOAD_INDEX", "off")
    check(name, tmp_path, range(N_QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("name", STORAGE)
def test_many_damaged_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULOAD_INDEX", "off")
    check(name, tmp_path, range(N_QUICK, N_SLOW))
