"""Arrays of several dimensions per cell, such as images, in every form: equal to the array that was written."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pytest
from anndata.io import write_elem

import gpuload
from gpuload.cli import main
from gpuload.errors import PlanError, StoreError
from gpuload.formats import open_store

if TYPE_CHECKING:
    from pathlib import Path

SMALL: dict[str, Any] = {"batch_size": 7, "fetch_factor": 3, "block_size": 4, "device": "cpu"}
SHAPE = (53, 3, 5, 4)


def cells_of(images: np.ndarray) -> anndata.AnnData:
    counts = np.arange(len(images) * 2, dtype=np.float32).reshape(-1, 2)
    return anndata.AnnData(counts, obsm={"image": images})


def npy(folder: Path, images: np.ndarray) -> Any:
    np.save(folder / "images.npy", images)
    return folder / "images.npy", {}


def array(folder: Path, images: np.ndarray) -> Any:
    return images, {}


def fortran_array(folder: Path, images: np.ndarray) -> Any:
    return np.asfortranarray(images), {}


def in_memory(folder: Path, images: np.ndarray) -> Any:
    return cells_of(images), {"layer": "obsm/image"}


def h5ad(folder: Path, images: np.ndarray) -> Any:
    cells_of(images).write_h5ad(folder / "cells.h5ad")
    return folder / "cells.h5ad", {"layer": "obsm/image"}


def h5ad_chunked(folder: Path, images: np.ndarray, chunks: tuple[int, ...] = (6, 2, 5, 4)) -> Any:
    """The second axis, of length 3, is split into a chunk of 2 and a padded chunk of 1."""
    path = folder / "cells.h5ad"
    with h5py.File(path, "w") as file:
        write_elem(file, "/", cells_of(images))
        del file["obsm/image"]
        file.create_dataset("obsm/image", data=images, chunks=chunks, compression="gzip", shuffle=True)
    return path, {"layer": "obsm/image"}


def zarr_array(folder: Path, images: np.ndarray, zarr_format: int = 3, **options: Any) -> Any:
    zarr = pytest.importorskip("zarr", minversion="3.0")
    path = folder / "images.zarr"
    options.setdefault("chunks", (6, 2, 5, 4))
    stored = zarr.create_array(str(path), shape=images.shape, dtype=images.dtype, zarr_format=zarr_format, **options)
    stored[:] = images
    return path, {}


def zarr_array_2(folder: Path, images: np.ndarray) -> Any:
    return zarr_array(folder, images, zarr_format=2)


def zarr_array_sharded(folder: Path, images: np.ndarray) -> Any:
    return zarr_array(folder, images, shards=(24, 4, 5, 4))


def zarr_array_zipped(folder: Path, images: np.ndarray) -> Any:
    zarr = pytest.importorskip("zarr", minversion="3.0")
    path = folder / "images.zip"
    with zarr.storage.ZipStore(str(path), mode="w") as store:
        stored = zarr.create_array(store, shape=images.shape, dtype=images.dtype, chunks=(6, 3, 5, 4))
        stored[:] = images
    return path, {}


def zarr_anndata(folder: Path, images: np.ndarray) -> Any:
    pytest.importorskip("zarr")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cells_of(images).write_zarr(folder / "cells.zarr")
    return folder / "cells.zarr", {"layer": "obsm/image"}


FORMS = [
    npy,
    array,
    fortran_array,
    in_memory,
    h5ad,
    h5ad_chunked,
    zarr_array,
    zarr_array_2,
    zarr_array_sharded,
    zarr_array_zipped,
    zarr_anndata,
]


def images_of(dtype: Any = np.uint8, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 200, shape).astype(dtype)


def assert_images(loader: gpuload.Loader, images: np.ndarray, *, n_epochs: int = 2) -> None:
    for _ in range(n_epochs):
        rows = []
        for batch in loader:
            assert batch.X.dtype == np.float32
            np.testing.assert_array_equal(batch.X, images[batch.rows].astype(np.float32))
            rows.append(batch.rows)
        assert sorted(np.concatenate(rows)) == list(range(len(images)))


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("form", FORMS)
def test_images_are_read_as_written(form: Any, dtype: Any, tmp_path: Path) -> None:
    images = images_of(dtype)
    source, settings = form(tmp_path, images)
    with gpuload.open_loader(source, **settings, **SMALL) as loader:
        assert loader.tables["X"].row_shape == SHAPE[1:]
        assert "53 cells x arrays of (3, 5, 4) in 1 file" in repr(loader)
        assert_images(loader, images)
        rows = np.array([9, 0, 52, 9])
        np.testing.assert_array_equal(loader.take(rows).X, images[rows])


@pytest.mark.parametrize("compression", ["gzip", None])
@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        (SHAPE, (6, 3, 2, 4)),
        (SHAPE, (6, 3, 5, 3)),
        (SHAPE, (6, 2, 2, 3)),
        (SHAPE, (60, 1, 1, 1)),
        (SHAPE, (1, 2, 3, 4)),
        ((53, 7, 5), (6, 3, 2)),
        ((53, 2, 3, 4, 5), (8, 1, 2, 4, 2)),
        ((53, 2, 3, 4, 5), (8, 2, 2, 3, 5)),
    ],
)
def test_chunks_may_split_every_axis(
    shape: tuple[int, ...], chunks: tuple[int, ...], compression: str | None, tmp_path: Path
) -> None:
    images = images_of(shape=shape)
    path = tmp_path / "cells.h5ad"
    with h5py.File(path, "w") as file:
        write_elem(file, "/", cells_of(images))
        del file["obsm/image"]
        options = {"maxshape": (None, *shape[1:])} if chunks[0] > shape[0] else {}
        file.create_dataset("obsm/image", data=images, chunks=chunks, compression=compression, **options)
    with gpuload.open_loader(path, layer="obsm/image", **SMALL) as loader:
        assert_images(loader, images)
        rows = np.array([9, 0, 52, 9])
        np.testing.assert_array_equal(loader.take(rows).X, images[rows])


def test_each_chunk_is_decoded_once(tmp_path: Path) -> None:
    path, settings = h5ad_chunked(tmp_path, images_of(), chunks=(6, 2, 2, 3))
    store = open_store([str(path)], obs=(), **settings)
    (read,) = store.recipe(np.array([[2, 5], [5, 9], [30, 41]])).reads
    store.close()
    n_rows_of_chunks = len({0, 1, 5, 6})
    assert read.chunk_id.size == np.unique(read.chunk_id).size == n_rows_of_chunks * 2 * 3 * 2
    assert (read.piece_width * read.piece_rows).sum() == 18 * 3 * 5 * 4


@pytest.mark.parametrize(
    ("chunks", "n_pieces"),
    [((6, 3, 5, 4), 1), ((6, 2, 5, 4), 2), ((6, 1, 5, 4), 3), ((6, 3, 2, 4), 3 * 3), ((6, 2, 2, 3), 3 * 5 * 2)],
)
def test_cells_are_copied_in_few_pieces(tmp_path: Path, chunks: tuple[int, ...], n_pieces: int) -> None:
    """Axes along which chunks are whole are joined, and so are cells that are whole; each has 3 x 5 x 4 values."""
    path, settings = h5ad_chunked(tmp_path, images_of(), chunks)
    store = open_store([str(path)], obs=(), **settings)
    (read,) = store.recipe(np.array([[7, 11]])).reads
    store.close()
    assert read.piece_rows.tolist() == [1 if n_pieces == 1 else 4] * n_pieces
    assert (read.piece_width * read.piece_rows).sum() == 4 * 3 * 5 * 4


def test_images_written_by_anndata_with_gzip(tmp_path: Path) -> None:
    images = images_of(shape=(600, 3, 32, 32))
    cells_of(images).write_h5ad(tmp_path / "cells.h5ad", compression="gzip")
    with h5py.File(tmp_path / "cells.h5ad") as file:
        assert file["obsm/image"].chunks[2] < 32  # h5py cuts all axes
    with gpuload.open_loader(tmp_path / "cells.h5ad", layer="obsm/image", **SMALL) as loader:
        assert_images(loader, images, n_epochs=1)


def test_chunks_longer_than_the_inner_axes(tmp_path: Path) -> None:
    path, _ = zarr_array(tmp_path, images_of(), chunks=(6, 3, 5, 8))  # each row is padded inside
    with gpuload.open_loader(path, **SMALL) as loader:
        assert_images(loader, images_of())


def test_absent_chunks_are_the_fill_value(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr", minversion="3.0")
    images = np.full(SHAPE, 7, np.uint8)
    images[10:20, 1:, :3, 2:] = 9
    path = tmp_path / "images.zarr"
    options = {"shape": SHAPE, "dtype": "u1", "chunks": (6, 2, 2, 3), "fill_value": 7}
    zarr.create_array(str(path), **options)[10:20, 1:, :3, 2:] = 9
    with gpuload.open_loader(path, **SMALL) as loader:
        assert_images(loader, images)


@pytest.mark.parametrize("shape", [(53, 6, 1), (53, 1, 6), (53, 2, 3, 4, 5), (53, 0, 4), (0, 2, 3)])
def test_other_shapes(shape: tuple[int, ...]) -> None:
    images = images_of(shape=shape)
    if not shape[0]:
        with gpuload.open_loader(images, **SMALL) as loader:
            assert list(loader) == []
        return
    with gpuload.open_loader(images, **SMALL) as loader:
        assert_images(loader, images)


def test_images_in_obsm_are_read_beside_X(tmp_path: Path) -> None:
    images = images_of()
    path, _ = h5ad_chunked(tmp_path, images)
    with gpuload.open_loader(path, obsm=["image"], **SMALL) as loader:
        for batch in loader:
            assert batch.X.shape == (len(batch), 2)
            np.testing.assert_array_equal(batch.obsm["image"], images[batch.rows])


def test_files_must_have_the_same_array_shape(tmp_path: Path) -> None:
    images = images_of()
    np.save(tmp_path / "0.npy", images[:20])
    np.save(tmp_path / "1.npy", images[20:])
    with gpuload.open_loader(tmp_path, **SMALL) as loader:
        assert_images(loader, images)
    np.save(tmp_path / "1.npy", images[20:].reshape(-1, 3, 20))
    with pytest.raises(StoreError, match=r"1.npy: its cells have arrays of shape \(3, 20\) but those of .*open them"):
        gpuload.open_loader(tmp_path, **SMALL)
    np.save(tmp_path / "1.npy", images[20:].reshape(-1, 60))
    with pytest.raises(StoreError, match=r"arrays of shape \(60,\) but those of .* have \(3, 5, 4\)"):
        gpuload.open_loader(tmp_path, join="inner", **SMALL)
    with pytest.raises(StoreError, match=r"arrays of shape \(3, 5, 4\) but those of .* have \(60,\)"):
        gpuload.open_loader([tmp_path / "1.npy", tmp_path / "0.npy"], join="inner", **SMALL)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype: str) -> None:
    images = images_of()
    with gpuload.open_loader(images, dtype=dtype, **SMALL) as loader:
        for batch in loader:
            assert batch.X.shape[1:] == SHAPE[1:]
            X = batch.X if dtype == "float16" else (batch.X.astype(np.uint32) << 16).view(np.float32)
            np.testing.assert_array_equal(X, images[batch.rows])  # integers below 256 are exact


def test_images_become_torch_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from gpuload.torch import CellDataset

    images = images_of()
    kept = []
    with gpuload.open_loader(cells_of(images), obsm=["image"], **SMALL) as loader:
        for batch in CellDataset(loader):
            assert isinstance(batch["obsm/image"], torch.Tensor)
            kept.append((batch["rows"], batch["obsm/image"]))
    for rows, X in kept:  # memory that is still referenced is not reused
        np.testing.assert_array_equal(X.numpy(), images[rows.numpy()])


def test_dali_delivers_images(tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali")
    pytest.importorskip("torch")
    from gpuload.dali import CellIterator, cell_pipeline

    images = images_of()
    with gpuload.open_loader(images, **SMALL) as loader:
        for pipeline in (None, cell_pipeline(loader)):
            for (batch,) in CellIterator(loader, pipeline):
                np.testing.assert_array_equal(batch["X"].numpy(), images[batch["rows"].numpy().reshape(-1)])


def test_inspect_shows_the_array_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = npy(tmp_path, images_of())
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"array of a cell +3 x 5 x 4\n", out)
    assert "genes" not in out


# --- refusals


def test_genes_and_csr_are_refused_for_arrays() -> None:
    for settings, name in (({"genes": ["0"]}, "genes"), ({"output": "csr"}, "output='csr'")):
        with pytest.raises(PlanError, match=rf"{name}: cells of <ndarray> have arrays of shape \(3, 5, 4\); leave it"):
            gpuload.open_loader(images_of(), **settings, **SMALL)


def test_join_by_names_is_refused_for_arrays() -> None:
    with pytest.raises(PlanError, match=r"join: cells of <ndarray> have arrays of shape \(3, 5, 4\); leave it out"):
        gpuload.open_loader(images_of(), join=["0", "1"], **SMALL)


def test_genes_are_refused_for_an_array_layer() -> None:
    with pytest.raises(PlanError, match=r"genes: .* of shape \(3, 5, 4\) in obsm/image, which obsm= returns without"):
        gpuload.open_loader(cells_of(images_of()), layer=["X", "obsm/image"], genes=["1"], **SMALL)


def test_tune_refuses_csr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = npy(tmp_path, images_of())
    assert main(["tune", str(path), "--output", "csr", "--seconds", "0.1"]) == 2
    assert "output='csr': cells of" in capsys.readouterr().err


def test_zarr_array_has_no_obs_layers_or_obsm(tmp_path: Path) -> None:
    path, _ = zarr_array(tmp_path, images_of())
    with pytest.raises(StoreError, match=r"this format has no obs, so obs=\['a'\]"):
        gpuload.open_loader(path, obs=["a"], **SMALL)
    with pytest.raises(StoreError, match="this format has no layer"):
        gpuload.open_loader(path, layer="raw.X", **SMALL)
    with pytest.raises(StoreError, match="no obsm"):
        gpuload.open_loader(path, obsm=["a"], **SMALL)


def test_one_dimensional_zarr_array_is_refused(tmp_path: Path) -> None:
    path, _ = zarr_array(tmp_path, np.arange(4), chunks=(2,))
    with pytest.raises(StoreError, match="it has 1 dimensions; expected a matrix of cells x columns"):
        gpuload.open_loader(path, **SMALL)


def test_damaged_chunk_is_reported(tmp_path: Path) -> None:
    path, _ = zarr_array_2(tmp_path, images_of())
    chunk = next(file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith("."))
    chunk.write_bytes(chunk.read_bytes()[:-3])
    with gpuload.open_loader(path, **SMALL) as loader, pytest.raises(gpuload.CorruptDataError, match=r"images\.zarr"):
        list(loader)


def test_packing_arrays_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("zarr", minversion="3.0")
    path, _ = h5ad(tmp_path, images_of())
    with pytest.raises(StoreError, match=r"in obsm/image, cells have arrays of shape \(3, 5, 4\); only matrices can"):
        gpuload.pack(path, tmp_path / "packed.zarr", obsm=["image"])


def test_estimators_refuse_arrays() -> None:
    from gpuload.estimators import TruncatedSVD

    with gpuload.open_loader(images_of(), **SMALL) as loader, pytest.raises(PlanError, match=r"shape \(3, 5, 4\)"):
        TruncatedSVD(2).fit(loader)
