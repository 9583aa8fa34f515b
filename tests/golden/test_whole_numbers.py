"""Whole numbers of obs that float64 cannot hold are delivered exactly or refused, never rounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import gpuload
from tests.other_forms import write_parquet, write_scdl
from tests.writers import counts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LARGEST = 2**53
"""float64 holds every whole number up to this one, but not the next."""

MESSAGE = r"column 'barcode' holds the whole number {} and would become float64.* exact to 9007199254740992 only"


def write(path: Path, values: Any) -> Path:
    obs = pd.DataFrame({"barcode": values}, index=[f"{path.stem}_{i}" for i in range(len(values))])
    ad.AnnData(counts(len(values)), obs).write_h5ad(path)
    return path


def nullable(number: int, folder: Path) -> Any:
    values = pd.array([number, None, 3], dtype="UInt64" if number >= 2**63 else "Int64")
    return {"paths": write(folder / "a.h5ad", values)}


def with_fractions_in_another_file(number: int, folder: Path) -> Any:
    dtype = np.uint64 if number >= 2**63 else np.int64
    one, other = np.array([1, number, 3], dtype=dtype), np.array([0.5, 1, 2])
    return {"paths": [write(folder / "a.h5ad", other), write(folder / "b.h5ad", one)]}


def with_other_signs_in_another_file(number: int, folder: Path) -> Any:
    mine, others = (np.uint64, np.int64) if number >= 2**63 else (np.int64, np.uint64)
    files = {"a": np.array([1, number, 3], dtype=mine), "b": np.array([4, 5, 6], dtype=others)}
    return {"paths": [write(folder / f"{name}.h5ad", values) for name, values in files.items()]}


def missing_in_parquet(number: int, folder: Path) -> Any:
    pa = pytest.importorskip("pyarrow")

    values = pa.array([number, None, 3], pa.uint64() if number >= 2**63 else pa.int64())
    write_parquet(folder / "a.parquet", counts(3), {"barcode": values})
    return {"paths": folder / "a.parquet"}


def scdl(folder: Path, *parts: Any) -> Any:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    write_scdl(folder, counts(3 * len(parts)))
    for k, part in enumerate(parts):
        parquet.write_table(pa.table({"barcode": part}), folder / "obs_features" / f"dataframe_{k}.parquet")
    return {"paths": folder}


def missing_in_scdl(number: int, folder: Path) -> Any:
    return scdl(folder, pd.array([number, None, 3], dtype="UInt64" if number >= 2**63 else "Int64"))


def with_fractions_in_another_part_of_scdl(number: int, folder: Path) -> Any:
    dtype = np.uint64 if number >= 2**63 else np.int64
    return scdl(folder, np.array([0.5, 1, 2]), np.array([1, number, 3], dtype=dtype))


def missing_from_a_table(number: int, folder: Path) -> Any:
    dtype = np.uint64 if number >= 2**63 else np.int64
    table = pd.DataFrame({"barcode": np.array([number, 3], dtype=dtype)}, index=[0, 2])
    return {"paths": write(folder / "a.h5ad", [0, 0, 0]), "obs_table": table}


WAYS = [
    nullable,
    with_fractions_in_another_file,
    with_other_signs_in_another_file,
    missing_in_parquet,
    missing_in_scdl,
    with_fractions_in_another_part_of_scdl,
    missing_from_a_table,
]


def all_of(paths: Any, **settings: Any) -> np.ndarray:
    with gpuload.open_loader(paths, obs="barcode", shuffle=False, batch_size=6, **settings) as loader:
        (batch,) = loader
    assert batch.obs["barcode"].dtype == np.float64
    return batch.obs["barcode"]


@pytest.mark.parametrize("number", [LARGEST + 1, -LARGEST - 1, 2**63 - 1, -(2**63), 2**64 - 1])
@pytest.mark.parametrize("way", WAYS)
def test_integers_beyond_float64_are_refused(way: Callable[[int, Path], Any], number: int, tmp_path: Path) -> None:
    given = way(number, tmp_path)
    with pytest.raises((gpuload.StoreError, gpuload.PlanError), match=MESSAGE.format(number)):
        all_of(**given)


@pytest.mark.parametrize("number", [LARGEST, -LARGEST])
@pytest.mark.parametrize("way", WAYS)
def test_integers_exact_in_float64_are_delivered(way: Callable[[int, Path], Any], number: int, tmp_path: Path) -> None:
    assert number in [int(value) for value in all_of(**way(number, tmp_path)) if not np.isnan(value)]


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_integers_of_one_dtype_stay_exact(dtype: type, tmp_path: Path) -> None:
    values = np.array([np.iinfo(dtype).max, LARGEST + 1, np.iinfo(dtype).min], dtype=dtype)
    paths = [write(tmp_path / f"{i}.h5ad", values[::step]) for i, step in enumerate((1, -1))]
    with gpuload.open_loader(paths, obs="barcode", shuffle=False, batch_size=6) as loader:
        (batch,) = loader
        assert batch.obs["barcode"].tolist() == [*values.tolist(), *values[::-1].tolist()]
        assert loader.obs["barcode"].tolist() == batch.obs["barcode"].tolist()


def test_categories_stay_exact_beside_fractions(tmp_path: Path) -> None:
    wholes, fractions = pd.Categorical([LARGEST, LARGEST + 1, 2**64 - 1]), pd.Categorical([0.5, 1, 0.5])
    paths = [write(tmp_path / "a.h5ad", wholes), write(tmp_path / "b.h5ad", fractions)]
    with gpuload.open_loader(paths, obs="barcode") as loader:
        assert loader.obs["barcode"].tolist() == [LARGEST, LARGEST + 1, 2**64 - 1, 0.5, 1, 0.5]


def test_packing_refuses_integers_beyond_float64(tmp_path: Path) -> None:
    one = write(tmp_path / "a.h5ad", np.array([1, LARGEST + 1, 3]))
    other = write(tmp_path / "b.h5ad", np.array([0.5, 1, 2]))
    with pytest.raises(gpuload.StoreError, match=MESSAGE.format(LARGEST + 1)):
        gpuload.pack([one, other], tmp_path / "out.zarr")
    assert not (tmp_path / "out.zarr").exists()


def test_packing_keeps_integers_beside_missing_values(tmp_path: Path) -> None:
    path = nullable(LARGEST + 1, tmp_path)["paths"]
    again = write(tmp_path / "b.h5ad", np.array([1, LARGEST + 3, 3]))
    gpuload.pack([path, again], tmp_path / "out.zarr", keep_order=True)
    found = ad.read_zarr(tmp_path / "out.zarr").obs["barcode"]
    assert [None if pd.isna(value) else int(value) for value in found] == [LARGEST + 1, None, 3, 1, LARGEST + 3, 3]
