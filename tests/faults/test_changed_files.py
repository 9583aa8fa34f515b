"""Files that are truncated, or changed while they are open."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix, save_npz

import gpuload
from gpuload import formats, opening
from gpuload.backends import host
from gpuload.formats import members, obs_table, scdl  # noqa: F401 - what is replaced in them
from gpuload.formats.arrays import damage_to_metadata
from gpuload.formats.obs import damage_of
from gpuload.source import FileSource
from tests import several
from tests.mutants import by_gpuload, by_h5py, is_same, write_base
from tests.other_forms import FORMS
from tests.variants import read_matrix
from tests.writers import counts, write_csr, write_dense, write_h5ad

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import StoreVariant
    from tests.variants import Stored

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.mark.parametrize("name", ["gzip4", "contiguous", "latest", "dense-contiguous", "lzf"])
def test_truncated_at_many_lengths(tmp_path: Path, name: str) -> None:
    path = tmp_path / "whole.h5ad"
    write_base(name, path)
    whole, expected = path.read_bytes(), by_h5py(path)
    found = by_gpuload(path)
    assert all(is_same(found[part], expected[part]) for part in found)
    lengths = {
        0,
        1,
        7,
        8,
        95,
        96,
        *range(0, len(whole), max(1, len(whole) // 60)),
        *(len(whole) - k for k in range(1, 9)),
    }
    for length in sorted(lengths):
        path.write_bytes(whole[:length])
        with pytest.raises(gpuload.GpuloadError) as caught:
            by_gpuload(path)
        assert str(path) in str(caught.value)


def test_truncated_values_with_intact_metadata_are_reported(tmp_path: Path) -> None:
    """HDF5 notices a short file by its superblock; with that patched, ranges beyond the end are found at opening."""
    path = tmp_path / "cut.h5ad"
    write_h5ad(path, lambda f: write_csr(f, "X", counts(4000), indptr={"chunks": (500,)}), 4000)
    with h5py.File(path) as file:
        offsets = [file[f"X/{name}"].id.get_offset() for name in ("data", "indices")]
    cut = max(offsets) + 100
    content = bytearray(path.read_bytes()[:cut])
    content[40:48] = cut.to_bytes(8, "little")  # end of file address, superblock version 0
    path.write_bytes(content)
    with pytest.raises(gpuload.GpuloadError) as caught, gpuload.open_loader(path) as loader:
        list(loader)
    assert str(path) in str(caught.value)


def test_a_replaced_file_keeps_its_old_bytes(plain: Stored, copy_of: Callable[[str], Path], tmp_path: Path) -> None:
    path, other = copy_of("old.h5ad"), tmp_path / "new.h5ad"
    write_h5ad(other, lambda f: write_csr(f, "X", counts(seed=9), data={"compression": "gzip"}))
    with gpuload.open_loader(path, batch_size=8, fetch_factor=2, prefetch=1) as loader:
        batches = iter(loader)
        next(batches)
        other.replace(path)
        for batch in batches:
            np.testing.assert_array_equal(batch.X, plain.dense[batch.rows])
        for batch in loader:
            np.testing.assert_array_equal(batch.X, plain.dense[batch.rows])
    with gpuload.open_loader(path) as loader:
        (batch,) = [*loader][:1]
        np.testing.assert_array_equal(batch.X, counts(seed=9).toarray()[batch.rows])


def test_file_replaced_during_opening_is_reported(
    copy_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = copy_of("old.h5ad"), h5py.File

    def replaced_first(*args: Any, **kwargs: Any) -> h5py.File:
        other = tmp_path / "new.h5ad"
        other.write_bytes(path.read_bytes())
        other.replace(path)
        return real(*args, **kwargs)

    monkeypatch.setattr("gpuload.formats.hdf5.h5py.File", replaced_first)
    told = rf"^{path}: the file was replaced while it was being opened; open it again\.$"
    with pytest.raises(gpuload.ReadError, match=told):
        gpuload.open_loader(path)


def test_file_replaced_between_the_opening_of_its_matrices_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each matrix is opened by itself: those of two states of a file must not be taken for the same cells'."""
    path, other = several.write(tmp_path, [several.part(seed, genes=["a", "b", "c"]) for seed in (0, 1)])
    real = formats.open_store

    def replace_after(*args: Any, **kwargs: Any) -> Any:
        store = real(*args, **kwargs)
        if other.exists():
            other.replace(path)
        return store

    monkeypatch.setattr(formats, "open_store", replace_after)
    told = rf"^{path}: the file was replaced while it was being opened; open it again\.$"
    with pytest.raises(gpuload.ReadError, match=told):
        gpuload.open_loader(path, layer=["X", "spliced"])
    with gpuload.open_loader(path, layer=["X", "spliced"]) as loader:
        assert loader.n_obs == 23


def versions(folder: Path, form: str) -> list[Path]:
    """Write two data sets of 23 cells, which have the same names, in another order."""
    parts = [several.part(seed, genes=["a", "b", "c"]) for seed in (0, 1)]
    parts[0].obs_names = [f"cell_{i}" for i in range(23)]
    parts[1].obs_names = parts[0].obs_names[::-1]
    if form == "h5ad":
        return several.write(folder, parts)
    if form == "zarr":
        return [several.write_zarr(folder / f"{seed}.zarr", part) for seed, part in enumerate(parts)]
    for name in "01":
        (folder / name).mkdir()
    return [Path(FORMS[form](folder / name).path) for name in "01"]


@pytest.fixture(scope="module", params=["h5ad", "zarr", "scdl"])
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return `versions`, written before descriptors are counted: zarr keeps some."""
    return versions(tmp_path_factory.mktemp("versions"), request.param)


def lead_elsewhere(link: Path, target: Path) -> None:
    """Have a link lead to another folder, as those do that name the current version of a data set."""
    new = link.with_name("new")
    new.symlink_to(target)
    new.replace(link)


@pytest.mark.parametrize(
    ("two", "place"), [("zarr", "members.read_column"), ("scdl", "scdl._obs_column")], indirect=["two"]
)
def test_folder_replaced_during_opening_is_reported(
    two: list[Path], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its columns must not be taken for those of the cells of the other."""
    old, new = two
    link = tmp_path / "current"
    link.symlink_to(old)
    module, name = place.split(".")
    real = getattr(getattr(formats, module), name)

    def replaced_first(*args: Any) -> Any:
        if link.resolve() == old:
            lead_elsewhere(link, new)
        return real(*args)

    monkeypatch.setattr(getattr(formats, module), name, replaced_first)
    told = rf"^{link}: the folder was replaced while it was being opened; open it again\.$"
    with pytest.raises(gpuload.ReadError, match=told):
        gpuload.open_loader(link, obs=["depth"])
    with gpuload.open_loader(link, obs=["depth"]) as loader:
        assert sum(len(batch) for batch in loader) == loader.n_obs


@pytest.mark.parametrize("two", ["zarr"], indirect=True)
def test_folder_replaced_between_the_opening_of_its_matrices_is_reported(
    two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = two
    real, link = formats.open_store, tmp_path / "current"
    link.symlink_to(old)

    def replace_after(*args: Any, **kwargs: Any) -> Any:
        store = real(*args, **kwargs)
        if link.resolve() == old:
            lead_elsewhere(link, new)
        return store

    monkeypatch.setattr(formats, "open_store", replace_after)
    told = rf"^{link}: the folder was replaced while it was being opened; open it again\.$"
    with pytest.raises(gpuload.ReadError, match=told):
        gpuload.open_loader(link, layer=["X", "spliced"])
    with gpuload.open_loader(link, layer=["X", "spliced"]) as loader:
        assert loader.n_obs == 23


@pytest.mark.parametrize("two", ["h5ad", "zarr"], indirect=True)
def test_cells_replaced_before_their_names_are_read_are_reported(
    two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a table would be matched to other cells."""
    old, new = two
    link, real = tmp_path / "current", obs_table.table_columns
    link.symlink_to(old)

    def replaced_first(*args: Any) -> Any:
        if link.resolve() == old:
            lead_elsewhere(link, new)
        return real(*args)

    monkeypatch.setattr(formats, "table_columns", replaced_first)
    table = pd.DataFrame({"number": np.arange(23)}, index=[f"cell_{i}" for i in range(23)])
    told = rf"^{link}: the (file|folder) was replaced while it was being opened; open it again\.$"
    with pytest.raises(gpuload.ReadError, match=told):
        gpuload.open_loader(link, obs=["number"], obs_table=table)
    with gpuload.open_loader(link, obs=["number"], obs_table=table, shuffle=False) as loader:
        assert next(iter(loader)).obs["number"].reshape(-1).tolist() == list(range(23))[::-1]


@pytest.mark.parametrize("two", ["h5ad", "zarr"], indirect=True)
def test_cells_replaced_before_labels_are_compared_with_their_names(
    two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels in the order of other cells would be taken for theirs."""
    old, new = two
    link, real = tmp_path / "current", opening.bind
    link.symlink_to(old)

    def replaced_first(*args: Any) -> Any:
        if link.resolve() == old:
            lead_elsewhere(link, new)
        return real(*args)

    monkeypatch.setattr(opening, "bind", replaced_first)
    labels = pd.Series(np.arange(23) % 2, index=[f"cell_{i}" for i in reversed(range(23))])
    told = rf"^{link}: the (file|folder) was replaced while it was being opened; open it again\.$"
    with pytest.raises(gpuload.ReadError, match=told):
        gpuload.open_loader(link, sampler=gpuload.ClassBalanced(labels))
    with gpuload.open_loader(link, sampler=gpuload.ClassBalanced(labels)) as loader:
        lead_elsewhere(link, old)
        with pytest.raises(gpuload.ReadError, match=told):
            loader.obs_names()


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_an_array_that_is_replaced_while_it_is_opened(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    X = counts(seed=3)

    def save(cells: csr_matrix) -> Path:
        path = tmp_path / f"X.{suffix}"
        if suffix == "npy":
            np.save(path, cells.toarray())
        else:
            save_npz(path, cells, compressed=False)
        return path

    path = save(csr_matrix(X[:30]))
    other = path.rename(tmp_path / "other")
    path = save(csr_matrix(X))

    class Replaced(FileSource):
        def __init__(self, path: str) -> None:
            super().__init__(path)
            other.replace(path)

    monkeypatch.setattr("gpuload.formats.numpy.FileSource", Replaced)
    with gpuload.open_loader(path, shuffle=False, batch_size=X.shape[0]) as loader:
        (batch,) = loader
        np.testing.assert_array_equal(batch.X, X.toarray())


def test_a_deleted_file_stays_readable(plain: Stored, copy_of: Callable[[str], Path]) -> None:
    path = copy_of("gone.h5ad")
    with gpuload.open_loader(path, batch_size=8, fetch_factor=2) as loader:
        path.unlink()
        for batch in loader:
            np.testing.assert_array_equal(batch.X, plain.dense[batch.rows])


def overwrite(path: Path) -> None:
    """Change bytes in place, and the time stamp with them."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * 64)
    os.utime(path, (1, 1))


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("change", [overwrite, append, truncate])
@pytest.mark.parametrize("when", ["before the first epoch", "during an epoch", "between epochs"])
def test_file_changed_in_place_is_reported(
    copy_of: Callable[[str], Path], change: Callable[[Path], None], when: str
) -> None:
    path = copy_of("changed.h5ad")
    with gpuload.open_loader(path, batch_size=4, fetch_factor=2, prefetch=1) as loader:
        if when == "between epochs":
            list(loader)
        batches = iter(loader)
        if when == "during an epoch":
            next(batches)
        change(path)
        with pytest.raises(gpuload.ReadError) as caught:
            list(batches)
        assert str(path) in str(caught.value)
        assert "changed" in str(caught.value) or "truncated" in str(caught.value)
        with pytest.raises(gpuload.ReadError):
            list(loader)


@pytest.mark.parametrize("changed", ["rna", "prot"])
def test_file_changed_during_its_last_fetch_is_reported(
    copy_of: Callable[[str], Path], changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, plain = {name: copy_of(f"{name}.h5ad") for name in ("rna", "prot")}, host.read_extents

    def change_after(*arguments: Any) -> None:
        plain(*arguments)
        os.utime(paths[changed], (1, 1))

    monkeypatch.setattr(host, "read_extents", change_after)
    with (
        gpuload.open_loader(paths, modality=list(paths), device="cpu") as loader,  # a fetch holds all of them
        pytest.raises(
            gpuload.ReadError,
            match=rf"{changed}\.h5ad: .*changed while it was open \(modified since; its size is still \d+ bytes\)",
        ),
    ):
        next(iter(loader))


def test_fetch_checks_only_the_files_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of files, a fetch reads few: each is checked before and after."""
    checked: list[str] = []
    paths = [tmp_path / f"{number}.h5ad" for number in range(6)]
    for path in paths:
        write_h5ad(path, lambda f: [write_csr(f, name, counts(9)) for name in ("X", "layers/counts")], 9)
    plain = FileSource.check_unchanged

    def check(source: FileSource) -> None:
        checked.append(os.path.basename(source.name)[0])
        plain(source)

    monkeypatch.setattr(FileSource, "check_unchanged", check)
    with gpuload.open_loader(paths, layer=["X", "counts"], device="cpu") as loader:
        checked.clear()
        loader.take(np.arange(15, 20))
    assert checked == ["1", "2"] * 4  # both matrices, before and after


def test_too_many_open_files_are_not_damage(copy_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Unable to synchronously open file (Too many open files)")

    path = copy_of("cells.h5ad")
    monkeypatch.setattr(h5py, "File", refuse)
    with pytest.raises(gpuload.ReadError, match=r"cells.h5ad: Too many open files; raise the limit \(ulimit -n\)"):
        gpuload.open_loader(path)


def test_a_package_that_cannot_be_imported_is_not_damage() -> None:
    with pytest.raises(ImportError, match="libcublas"), damage_to_metadata("cells.h5ad"):
        raise ImportError("libcublas cannot be loaded")


@pytest.mark.parametrize("error", [ImportError("libcublas cannot be loaded"), MemoryError("Unable to allocate")])
def test_what_is_no_damage_of_a_column_is_raised_as_it_is(error: Exception) -> None:
    """Of too little memory, `damage_to_metadata` says what may be done."""
    with pytest.raises(type(error)) as caught, damage_of("cells.h5ad", "cell_line"):
        raise error
    assert caught.value is error


def test_truncation_during_a_read_raises_a_short_read(
    copy_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size is checked before each fetch; a cut between check and read must be noticed by the read itself."""
    path = copy_of("short.h5ad")
    monkeypatch.setattr(FileSource, "check_unchanged", lambda _: None)
    with gpuload.open_loader(path, batch_size=4, fetch_factor=2) as loader:
        os.truncate(path, 0)
        with pytest.raises(gpuload.ReadError) as caught:
            list(loader)
    message = str(caught.value)
    assert all(part in message for part in (str(path), "short read", "byte", "wanted", "got 0", "truncated"))


@pytest.mark.parametrize(
    ("name", "verify"),
    [
        *((name, "once") for name in ("gzip4", "gzip4-shuffle", "fletcher32", "gzip-fletcher32", "zstd-fletcher32")),
        ("gzip-fletcher32-shuffle", "always"),
    ],
)
def test_each_flipped_byte_under_a_checksum_is_found(
    store_variant: StoreVariant, tmp_path: Path, name: str, verify: str
) -> None:
    """Every 5th byte of one chunk, whichever rows are requested; errors name dataset, chunk and byte offset."""
    whole = store_variant(f"csr-{name}").path.read_bytes()
    path = tmp_path / "flipped.h5ad"
    path.write_bytes(whole)
    with h5py.File(path) as file:
        info = file["X/data"].id.get_chunk_info(3)
    for at in range(info.byte_offset, info.byte_offset + info.size, 5):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        with (
            pytest.raises(gpuload.CorruptDataError) as caught,
            gpuload.open_loader(path, batch_size=2, fetch_factor=1, block_size=1, verify=verify) as loader,
        ):
            list(loader)
        assert all(part in str(caught.value) for part in (str(path), "/X/data", "chunk 3", f"byte {info.byte_offset}"))


@pytest.mark.parametrize("damaged", [0, 1])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_verified_chunk_does_not_vouch_for_the_one_inflated_beside_it(
    tmp_path: Path, shuffle: bool, damaged: int
) -> None:
    path, X = tmp_path / "two.h5ad", np.random.default_rng(0).integers(0, 4000, (8, 50)).astype(np.float32)
    write_h5ad(path, lambda f: write_dense(f, "X", X, chunks=(4, 50), compression="gzip", shuffle=shuffle), *X.shape)
    with h5py.File(path) as file:
        info = file["X"].id.get_chunk_info(damaged)
    content = bytearray(path.read_bytes())
    content[info.byte_offset + info.size - 1] ^= 1  # of the checksum alone
    path.write_bytes(content)
    with gpuload.open_loader(path, device="cpu") as loader:
        other = 4 * (1 - damaged)
        np.testing.assert_array_equal(loader.take([other]).X, X[[other]])
        with pytest.raises(gpuload.CorruptDataError, match=f"chunk {damaged} of /X at byte .* adler32 checksum"):
            loader.take([0, 4])


@pytest.mark.parametrize(
    "place", [100 << 24, 1500, 301, 200, 700, 0], ids=["far", "next", "between", "twice", "later", "first"]
)
@pytest.mark.parametrize("name", ["csr-gzip4", "csr-chunked"])
def test_damaged_chunk_key_never_gives_wrong_values(
    store_variant: StoreVariant, tmp_path: Path, name: str, place: int
) -> None:
    """One chunk of 15 claims to lie elsewhere: never numbers that h5py would not read."""
    content = store_variant(name).path.read_bytes()
    path = tmp_path / "key.h5ad"
    path.write_bytes(content)
    with h5py.File(path) as file:
        key = struct.pack("<IIQQ", file["X/data"].id.get_chunk_info(3).size, 0, 300, 0)
    assert content.count(key) == 1
    path.write_bytes(content.replace(key, key[:8] + struct.pack("<QQ", place, 0)))
    expected = None
    with contextlib.suppress(OSError):
        expected = read_matrix(path, "X").toarray()
    with (
        contextlib.suppress(gpuload.CorruptDataError),
        gpuload.open_loader(path, shuffle=False, batch_size=1000) as loader,
    ):
        found = next(iter(loader)).X
        assert expected is not None, "h5py refuses the file"
        np.testing.assert_array_equal(found, expected)


def test_verified_chunks_may_be_decoded_in_part(store_variant: StoreVariant) -> None:
    stored = store_variant("csr-gzip9")
    with gpuload.open_loader(stored.path, batch_size=2, fetch_factor=1, block_size=1, verify="once") as loader:
        list(loader)
        assert loader.stats.n_chunks_partial < loader.stats.n_chunks
        before = loader.stats.n_chunks_partial
        for batch in loader:
            np.testing.assert_array_equal(batch.X, stored.dense[batch.rows])
        assert loader.stats.n_chunks_partial > before


def test_invalid_verify_is_refused(plain: Stored) -> None:
    with pytest.raises(gpuload.PlanError, match="verify='sometimes'"):
        gpuload.open_loader(plain.path, verify="sometimes")


@pytest.mark.parametrize("verify", ["never", "once", "always"])
def test_the_values_do_not_depend_on_verify(stored_small: Any, verify: str) -> None:
    with gpuload.open_loader(stored_small.path, batch_size=8, fetch_factor=2, verify=verify) as loader:
        for _ in range(2):
            for batch in loader:
                np.testing.assert_array_equal(batch.X, stored_small.dense[batch.rows])


@pytest.fixture(
    params=[
        "csr-gzip9",
        "csr-gzip4-shuffle",
        "csr-gzip-fletcher32-shuffle",
        "csr-filter-masks",
        "dense-gzip4-shuffle-tiles",
    ]
)
def stored_small(request: pytest.FixtureRequest, store_variant: StoreVariant) -> Stored:
    return store_variant(request.param)
