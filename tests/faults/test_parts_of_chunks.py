"""Chunks of which only a part is wanted, or stored; and stored bytes that are too many."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import h5py
import hdf5plugin
import numpy as np
import pytest

import gpuload
from gpuload.backends import host
from tests.writers import counts, write_dense, write_h5ad
from tests.zarr_writers import written

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

X = np.random.default_rng(5).integers(0, 9, (64, 53)).astype(np.float32)


def one_chunk(path: Path, change: Callable[[bytes], bytes], mask: int = 0, **filters: Any) -> Path:
    """Write a matrix of one chunk, and change its stored bytes and the mask of the filters that it skipped."""
    write_h5ad(path, lambda file: write_dense(file, "X", X, chunks=X.shape, **filters), *X.shape)
    with h5py.File(path, "r+") as file:
        _, stored = file["X"].id.read_direct_chunk((0, 0))
        file["X"].id.write_direct_chunk((0, 0), change(stored), mask)
    return path


@pytest.mark.parametrize(
    "filters",
    [{"compression": "lzf"}, dict(hdf5plugin.LZ4(nbytes=1024)), dict(hdf5plugin.Bitshuffle(nelems=256, cname="lz4"))],
    ids=["lzf", "lz4", "bitshuffle"],
)
def test_the_first_time_a_chunk_is_decoded_to_its_end(tmp_path: Path, filters: dict[str, Any]) -> None:
    """These codecs have no checksum; but what follows the rows wanted is found to be missing, unless told not to."""
    path = one_chunk(tmp_path / "cut.h5ad", lambda stored: stored[:-2], **filters)
    for verify in ("once", "always"):
        with (
            gpuload.open_loader(path, device="cpu", verify=verify) as loader,
            pytest.raises(gpuload.CorruptDataError, match="chunk 0 of /X "),
        ):
            loader.take([1])
    with gpuload.open_loader(path, device="cpu", verify="never") as loader:
        np.testing.assert_array_equal(loader.take([1]).X, X[[1]])
        assert (loader.stats.n_chunks, loader.stats.n_chunks_partial) == (1, 1)
        assert 0 < loader.stats.decoded_nbytes < X.nbytes
        with pytest.raises(gpuload.CorruptDataError, match="chunk 0 of /X "):
            loader.take([63])


def test_the_first_time_a_chunk_of_numcodecs_is_decoded_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "cut.zarr"
    shutil.copytree(written("v2-dense-lz4"), path)
    chunk = path / "X" / "0.0"
    chunk.write_bytes(chunk.read_bytes()[:-2])
    with (
        gpuload.open_loader(path, device="cpu", verify="once") as loader,
        pytest.raises(gpuload.CorruptDataError, match=r"X/0\.0"),
    ):
        loader.take([1])
    with gpuload.open_loader(path, device="cpu", verify="never") as loader:
        np.testing.assert_array_equal(loader.take([1]).X, counts().toarray()[[1]])
        with pytest.raises(gpuload.CorruptDataError, match=r"X/0\.0"):
            loader.take([15])  # its last row


@pytest.mark.parametrize("filters", [{}, {"compression": "gzip"}])
@pytest.mark.parametrize("verify", ["once", "never"])
@pytest.mark.parametrize("n", [1, 3])
def test_fewer_bytes_than_a_checksum(tmp_path: Path, filters: dict[str, Any], verify: str, n: int) -> None:
    path = one_chunk(tmp_path / "short.h5ad", lambda stored: stored[:n], fletcher32=True, **filters)
    with (
        gpuload.open_loader(path, device="cpu", verify=verify) as loader,
        pytest.raises(gpuload.CorruptDataError, match=r"chunk 0 of /X at byte .*its fletcher32 checksum does not"),
    ):
        loader.take([1])


@pytest.mark.parametrize("n_more", [-4, 4])
@pytest.mark.parametrize("filters", [{}, {"fletcher32": True}], ids=["plain", "fletcher32"])
def test_a_chunk_that_skipped_its_codec_has_the_size_of_its_elements(
    tmp_path: Path, filters: dict[str, Any], n_more: int
) -> None:
    """One that is larger must not be copied behind the memory of a chunk."""
    filters, mask = {"compression": "gzip", **filters}, 0b11 if filters else 0b1
    path = one_chunk(tmp_path / "size.h5ad", lambda _: (X.tobytes() + bytes(4))[: X.nbytes + n_more], mask, **filters)
    with (
        gpuload.open_loader(path, device="cpu") as loader,
        pytest.raises(gpuload.CorruptDataError, match=r"chunk 0 of /X at byte .*its decoded size is wrong"),
    ):
        loader.take([1])


def test_a_bad_chunk_is_named_in_whichever_part_of_a_fetch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "TASK_NBYTES", 1)
    path, wide = tmp_path / "later.h5ad", np.random.default_rng(0).normal(size=(4, 300_000)).astype(np.float32)
    write_h5ad(
        path, lambda file: write_dense(file, "X", wide, chunks=(1, 300_000), compression="gzip"), *wide.shape
    )  # each chunk is too long to be read together with others
    with h5py.File(path, "r+") as file:
        file["X"].id.write_direct_chunk((2, 0), b"no deflate", 0)
    with (
        gpuload.open_loader(path, device="cpu", batch_size=4, shuffle=False) as loader,
        pytest.raises(gpuload.CorruptDataError, match="chunk 2 of /X "),
    ):
        list(loader)


def test_the_last_rows_of_a_chunk_that_was_shuffled_before_a_codec_of_blocks(tmp_path: Path) -> None:
    """Its rows are spread over all blocks: none may be left out."""
    filters = dict(hdf5plugin.Bitshuffle(nelems=256, cname="lz4"))
    path = one_chunk(tmp_path / "both.h5ad", lambda stored: stored, shuffle=True, **filters)
    with gpuload.open_loader(path, device="cpu", verify="never") as loader:
        for row in (63, 0, 31):
            np.testing.assert_array_equal(loader.take([row]).X, X[[row]])


def test_chunks_that_were_compressed_twice(tmp_path: Path) -> None:
    def twice(file: h5py.File) -> None:
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_chunk((16, 53))
        plan.set_deflate(1)
        plan.set_filter(h5py.h5z.FILTER_LZF, h5py.h5z.FLAG_OPTIONAL, ())
        h5py.h5d.create(file.id, b"X", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple(X.shape), plan)
        file["X"][:] = X
        file["X"].attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})

    path = tmp_path / "twice.h5ad"
    write_h5ad(path, twice, *X.shape)
    with gpuload.open_loader(path, device="cpu") as loader:
        np.testing.assert_array_equal(loader.take([40, 3]).X, X[[40, 3]])
