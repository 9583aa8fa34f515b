"""A transform of an X that says that it was log-transformed is warned of, whatever the format, and no other is."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pytest

import gpuload
from gpuload import Transform
from tests.several import part, write, write_zarr

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def cells(*, is_marked: bool = True, seed: int = 0) -> anndata.AnnData:
    made = part(seed, genes=[f"gene_{i}" for i in range(9)])
    made.raw = made.copy()
    if is_marked:
        made.uns["log1p"] = {}  # as scanpy's log1p leaves it when written, whatever its base
    return made


def in_h5ad(folder: Path) -> Any:
    return write(folder, [cells()])[0]


def in_zarr(folder: Path) -> Any:
    pytest.importorskip("zarr", minversion="3.0")
    return write_zarr(folder / "cells.zarr", cells())


def in_zip(folder: Path) -> Any:
    from tests import zarr_writers

    zarr_writers.pack(in_zarr(folder), folder / "cells.zip")
    return folder / "cells.zip"


def in_collection(folder: Path) -> Any:
    from tests import zarr_writers

    zarr_writers.collection(folder / "collection.zarr", 1)
    write_zarr(folder / "collection.zarr" / "dataset_0", cells())
    return folder / "collection.zarr"


def in_mudata(folder: Path) -> Any:
    with h5py.File(folder / "cells.h5mu", "w") as file:
        file.attrs["encoding-type"] = "MuData"
        modalities = file.create_group("mod")
        anndata.io.write_elem(modalities, "rna", cells())
        anndata.io.write_elem(modalities, "prot", cells(is_marked=False))
    return f"{folder / 'cells.h5mu'}/rna"


def in_memory(folder: Path) -> Any:
    del folder
    return cells()


def in_a_view(folder: Path) -> Any:
    del folder
    return cells()[3:9]


def backed(folder: Path) -> Any:
    return anndata.read_h5ad(in_h5ad(folder), backed="r")


def backed_and_marked_in_memory(folder: Path) -> Any:
    found = anndata.read_h5ad(write(folder, [cells(is_marked=False)])[0], backed="r")
    found.uns["log1p"] = {}
    return found


PLACES = (in_h5ad, in_zarr, in_zip, in_collection, in_mudata, in_memory, in_a_view, backed, backed_and_marked_in_memory)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Return a function that opens a loader and returns the warnings."""

    def of(paths: Any, **settings: Any) -> list[str]:
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING, logger="gpuload"),
            gpuload.open_loader(paths, **{"device": "cpu", "transform": Transform(), **settings}) as loader,
        ):
            assert loader.n_obs
        return [record.getMessage() for record in caplog.records]

    return of


@pytest.mark.parametrize("place", PLACES)
def test_a_logarithm_of_a_logarithm_is_warned_of(place: Any, tmp_path: Path, warned: Any) -> None:
    paths = place(tmp_path)
    (said,) = warned(paths)
    name = "<AnnData>" if isinstance(paths, anndata.AnnData) else str(paths)
    name += "/dataset_0" if place is in_collection else ""
    assert said == (
        f"transform: X of {name} is log-transformed already, as its uns['log1p'] says, and a transform is for counts; "
        "name the matrix that holds these, such as layer='raw.X', or leave transform out."
    )


@pytest.mark.parametrize("place", [in_h5ad, in_zarr, in_memory, backed])
@pytest.mark.parametrize(
    ("settings", "is_of_x"),
    [
        ({"transform": None}, False),
        ({"transform": Transform(target_sum=None, log1p=False)}, False),
        ({"transform": Transform(target_sum=None)}, True),
        ({"transform": Transform(log1p=False)}, True),
        ({"layer": "raw.X"}, False),
        ({"layer": "spliced", "output": "csr"}, False),
        ({"layer": ["spliced", "X"]}, True),
        ({"layer": ["X", "spliced"], "transform": {"spliced": Transform()}}, False),
        ({"layer": ["X", "spliced"]}, True),
    ],
    ids=str,
)
def test_only_a_transform_of_x_is_warned_of(
    place: Any, settings: dict[str, Any], is_of_x: bool, tmp_path: Path, warned: Any
) -> None:
    assert len(warned(place(tmp_path), **settings)) == is_of_x


def test_what_is_not_marked_is_not_warned_of(tmp_path: Path, warned: Any) -> None:
    path = in_mudata(tmp_path).replace("/rna", "/prot")
    assert warned(path) == warned(cells(is_marked=False)) == []
    rna, prot = cells(), cells(is_marked=False)
    assert warned({"prot": prot, "rna": rna}) == []  # a transform is of the first only
    assert len(warned({"prot": prot, "rna": rna}, transform={"rna": Transform()})) == 1
    assert len(warned({"more": rna, "rna": rna}, transform={"X": Transform(), "rna": Transform()})) == 1  # once


def test_another_matrix_in_place_of_x_is_not_warned_of(tmp_path: Path, warned: Any) -> None:
    with h5py.File(in_h5ad(tmp_path), "r") as file:
        given = cells()
        given.X = anndata.io.sparse_dataset(file["X"])
        assert len(warned(given)) == 1
        given.X = anndata.io.sparse_dataset(file["raw/X"])
        assert warned(given) == []


def test_several_files_are_warned_of_once(tmp_path: Path, warned: Any) -> None:
    paths = write(tmp_path, [cells(is_marked=k != 1, seed=k) for k in range(4)])
    (said,) = warned(paths)
    assert said.startswith(f"transform: X of {paths[0]}, and of 2 more, is log-transformed already")


@pytest.mark.parametrize("how", ["data set", "broken link", "link to nothing", "null"])
def test_odd_notes_do_not_prevent_opening(how: str, tmp_path: Path, warned: Any) -> None:
    path = in_h5ad(tmp_path)
    with h5py.File(path, "r+") as file:
        del file["uns"]
        if how == "data set":
            file["uns"] = np.arange(3)
        elif how == "broken link":
            file["uns"] = h5py.ExternalLink("none.h5", "/")
        elif how == "link to nothing":
            file["uns/log1p"] = h5py.SoftLink("/nothing")
        else:
            file["uns/log1p"] = h5py.Empty("f4")
    assert warned(path) == []
