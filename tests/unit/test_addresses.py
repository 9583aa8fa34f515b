"""Addresses over remotes in memory: names and keys, what is there, and what is asked to know it."""

from __future__ import annotations

import copy
import io
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from gpuload.errors import BusyError, PlanError, ReadError, StoreError
from gpuload.formats import addresses, recognise
from gpuload.formats.addresses import Address, at_addresses, check_given, first_bytes
from gpuload.formats.recognise import HDF5
from gpuload.remote import RemoteObject

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def error(kind: type[ReadError] = ReadError, *, is_denied: bool = False) -> ReadError:
    made = kind("as the server says")
    made.is_denied = is_denied
    return made


class Shelf:
    """Objects in memory, and errors in place of some; records what is asked.

    Each address is a remote with these keys or, if there is a root, with those below it.
    """

    def __init__(
        self, held: dict[str, bytes | ReadError], *, root: str = "", can_list: bool = True, denies: bool = False
    ) -> None:
        self.name, self.held, self.root, self.can_list, self.denies = "", held, root, can_list, denies
        self.folder = ""
        self.asked: list[str] = []
        self.n_busy = 0
        self.opened: list[tuple[str, dict[str, Any]]] = []

    def open(self, url: str, **options: Any) -> Shelf:
        self.opened.append((url, options))
        if not self.root:
            self.name = url
            return self
        at = copy.copy(self)
        at.folder = f"{url.removeprefix(self.root)}/".lstrip("/")
        return at

    def _answer(self, asked: str) -> None:
        self.asked.append(asked)
        if self.n_busy:
            self.n_busy -= 1
            raise error(BusyError)

    def head(self, key: str) -> RemoteObject | None:
        self._answer(f"head {self.folder}{key}")
        content = self.held.get(self.folder + key, error(is_denied=True) if self.denies else None)
        if isinstance(content, ReadError):
            raise content
        return None if content is None else RemoteObject(key, len(content), "1")

    def list(self, prefix: str) -> Iterator[RemoteObject]:
        self._answer(f"list {self.folder}{prefix}")
        for key, content in self.held.items():
            if key.startswith(self.folder + prefix):
                assert isinstance(content, bytes)
                yield RemoteObject(key.removeprefix(self.folder), len(content), "1")

    def get(self, wanted: RemoteObject, start: int, stop: int) -> bytes:
        self._answer(f"get {self.folder}{wanted.key} {start} {stop}")
        content = self.held[self.folder + wanted.key]
        if isinstance(content, ReadError):
            raise content
        assert stop <= len(content)
        return content[start:stop]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuload.remote.patience.time.sleep", lambda _: None)


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts objects where every address leads."""

    def put(held: dict[str, bytes | ReadError] | Iterable[str] = (), **settings: Any) -> Shelf:
        made = Shelf(held if isinstance(held, dict) else {key: key.encode() for key in held}, **settings)
        monkeypatch.setattr(addresses, "open_remote", made.open)
        return made

    return put


SIGNED = "?v=1&X-Amz-Signature=secret"


@pytest.mark.parametrize(
    ("url", "name", "own_name", "remote", "key"),
    [
        ("s3://b/a/c.h5ad", "s3://b/a/c.h5ad", "c.h5ad", "s3://b/a", "c.h5ad"),
        ("s3://b/a/c.zarr//", "s3://b/a/c.zarr", "c.zarr", "s3://b/a", "c.zarr"),
        ("s3://b/a/my%20cells?", "s3://b/a/my%20cells?", "my%20cells?", "s3://b/a", "my%20cells?"),
        ("s3://b", "s3://b", "b", "s3://b", ""),
        (
            f"http://h/a/my%20cells{SIGNED}",
            "http://h/a/my%20cells?v=1",
            "my%20cells",
            f"http://h/a{SIGNED}",
            "my cells",
        ),
        (f"https://h{SIGNED}", "https://h?v=1", "h", f"https://h{SIGNED}", ""),
    ],
)
def test_parts_of_an_address(shelf: Any, url: str, name: str, own_name: str, remote: str, key: str) -> None:
    """Its name has no signature, but the remote gets it; only in web addresses is a key encoded."""
    there, given = shelf(), {"region": "x"}
    address = Address.of(url, options=given)
    assert (str(address), address.own_name, address.key) == (name, own_name, key)
    assert address.remote is there
    assert there.opened == [(remote, given)]


@pytest.mark.parametrize("url", ["s3://", "http://", "http://?v=1"])
def test_address_of_no_place(shelf: Any, url: str) -> None:
    there, address = shelf(), Address.of(url)
    assert address.key == ""
    with pytest.raises(PlanError, match="it has no bucket or host; expected, for example, s3://bucket"):
        _ = address.remote
    assert not there.opened


@pytest.mark.parametrize(("base", "query", "key"), [("s3://b/a", "", "x%20y"), ("http://h/a", SIGNED, "x y")])
def test_child_is_reached_as_its_folder_is(shelf: Any, base: str, query: str, key: str) -> None:
    there = shelf([f"a/{key}", "a/other"])
    folder = Address.of(base + query, options={"region": "x"})
    child = folder.child("x%20y")
    assert (child.base, child.query, child.key, child.options) == (f"{base}/x%20y", query, f"a/{key}", folder.options)
    assert child.remote is folder.remote is there
    assert child.parent() == folder
    assert (child.parent().query, child.parent().options, child.parent().clients) == (
        query,
        folder.options,
        child.clients,
    )
    assert child.is_file
    assert Address.of(base + query, clients=folder.clients).remote is there
    assert len(there.opened) == 1


def test_child_that_was_listed_is_not_asked_for(shelf: Any) -> None:
    there = shelf(["a/x", "a/y"])
    folder = Address.of("s3://b/a")
    assert folder.listed is not None
    there.asked.clear()
    assert folder.child("x").object().nbytes == 3
    assert not there.asked
    assert folder.child("none").found is None
    assert there.asked == ["head a/none"]


def test_address_in_another_process_has_its_own_clients(shelf: Any) -> None:
    there, address = shelf(["x"]), Address.of("s3://b/x", options={"region": "x"})
    sent = pickle.loads(pickle.dumps(address))
    assert (sent, sent.base, sent.options) == ("s3://b/x", "s3://b/x", {"region": "x"})
    assert sent.clients is not address.clients
    assert sent.is_file
    assert there.opened == [("s3://b", {"region": "x"})]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_listing_has_what_is_in_the_folder_alone(shelf: Any, has_prefix: bool) -> None:
    """By its keys there; a remote of a user's own lists all that it has."""
    there = shelf(["a/x", "a/b/y", "ab/z", "a"])
    if not has_prefix:
        del there.can_list
        whole = there.list
        there.list = lambda: whole("")
    found = Address.of("s3://bucket/a").listed
    assert found is not None
    assert {name: one.key for name, one in found.items()} == {"x": "a/x", "b/y": "a/b/y"}


def test_busy_remote_is_asked_again(shelf: Any) -> None:
    there = shelf(["a/x", "x"])
    there.n_busy = 2
    assert set(Address.of("s3://b/a").listed or ()) == {"x"}
    address = Address.of("s3://b/x")
    there.n_busy = 2
    assert address.is_file
    there.n_busy = 2
    assert address.first_bytes(1) == b"x"
    there.n_busy = 2
    assert Address.of("s3://b/a").metadata("x") is not None
    assert there.n_busy == 0


def test_web_server_lists_nothing(shelf: Any) -> None:
    there = shelf(["a/x"], can_list=False)
    address = Address.of("http://h/a")
    assert address.listed is None
    assert not address.can_list
    assert not address.is_folder
    assert not any(asked.startswith("list") for asked in there.asked)


@pytest.mark.parametrize("can_list", [True, False])
@pytest.mark.parametrize("name", [".zgroup", "zarr.json", ".zarray"])
def test_folder_of_a_zarr_store(shelf: Any, name: str, can_list: bool) -> None:
    """What a web server answers for the folder itself, such as a page, is no file."""
    there = shelf(
        {f"cells/{name}": b"{}", "cells": b"<html>"} if not can_list else [f"cells/{name}"], can_list=can_list
    )
    address = Address.of("http://h/cells" if not can_list else "s3://b/cells")
    assert address.is_zarr
    assert there.asked == ["list cells"] or not can_list
    assert (address.is_zarr, address.is_file, address.is_folder) == (True, False, True)


@pytest.mark.parametrize("name", ["cells.h5ad", "cells.parquet"])
def test_file_by_its_name_takes_one_request(shelf: Any, name: str) -> None:
    there = shelf([name], can_list=False)
    assert Address.of(f"http://h/{name}").is_file
    assert there.asked == [f"head {name}"]


def test_object_that_is_there_is_no_folder(shelf: Any) -> None:
    shelf(["cells", "cells/x"])
    address = Address.of("s3://b/cells")
    assert (address.is_file, address.is_folder) == (True, False)
    shelf(["cells/x"])
    address = Address.of("s3://b/cells")
    assert (address.is_file, address.is_zarr, address.is_folder) == (False, False, True)


def test_remote_itself_is_no_object(shelf: Any) -> None:
    there = shelf({"": error()})
    assert not Address.of("s3://bucket").is_file
    assert not there.asked


def test_objects_of_the_remote_itself(shelf: Any) -> None:
    shelf(["x", "a/y"])
    whole = Address.of("s3://bucket")
    assert set(whole.listed or ()) == {"x", "a/y"}
    assert (whole.child("x").key, whole.child("x").is_file) == ("x", True)


def test_denied_object_of_a_web_server_is_missing_for_that_reason(shelf: Any) -> None:
    denied = error(is_denied=True)
    shelf({"x": denied}, can_list=False)
    address = Address.of("http://h/x")
    assert address.found is None
    assert address.missing() is denied
    for can_list, other in ((True, denied), (False, error()), (True, error())):
        shelf({"x": other}, can_list=can_list)
        with pytest.raises(ReadError) as caught:
            _ = Address.of("http://h/x").found
        assert caught.value is other


@pytest.mark.parametrize(
    ("url", "can_list", "told"),
    [
        ("s3://b/x", True, r"^s3://b/x: no such object\. Check the address\.$"),
        ("http://h/x.h5ad", False, r"^http://h/x\.h5ad: no such object\. Check the address\.$"),
        ("http://h/x.zarr", False, r"^http://h/x\.zarr: no such object\. Check the address\.$"),
        ("http://h/x?v=1", False, r"^http://h/x\?v=1: no such object, and a web server lists no folders\. "),
    ],
)
def test_missing_object(shelf: Any, url: str, can_list: bool, told: str) -> None:
    shelf(can_list=can_list)
    with pytest.raises(ReadError, match=told):
        Address.of(url).object()


@pytest.mark.parametrize("denies", [True, False])
def test_denied_metadata_is_missing_if_whatever_is_missing_is_denied(shelf: Any, denies: bool) -> None:
    denied, other = error(is_denied=True), error()
    shelf({"a/denied": denied, "a/other": other, "a/here": b"1"}, can_list=False, denies=denies)
    address = Address.of("http://h/a")
    found = address.metadata("here")
    assert found is not None
    assert found.nbytes == 1
    assert address.metadata("none") is None
    if denies:
        assert address.metadata("denied") is None
    else:
        with pytest.raises(ReadError) as caught:
            address.metadata("denied")
        assert caught.value is denied
    with pytest.raises(ReadError) as caught:
        address.metadata("other")
    assert caught.value is other


def test_metadata_of_a_remote_that_lists_is_not_taken_for_missing(shelf: Any) -> None:
    there = shelf(denies=True)
    with pytest.raises(ReadError, match="as the server says"):
        Address.of("s3://b/a").metadata("x")
    assert there.asked == ["head a/x"]


def test_server_that_fails_meanwhile_denies_nothing(shelf: Any) -> None:
    there = shelf({"a/denied": error(is_denied=True)}, can_list=False)
    failed = error()
    there.held[f"a/{addresses._NOT_THERE}"] = failed
    with pytest.raises(ReadError) as caught:
        Address.of("http://h/a").metadata("denied")
    assert caught.value is failed


def test_first_bytes_are_no_more_than_there_are(shelf: Any) -> None:
    there = shelf({"a": b"0123456789", "short": b"012", "empty": b""})
    assert first_bytes("s3://b/a") == b"01234567"
    assert first_bytes("s3://b/short") == b"012"
    there.asked.clear()
    assert first_bytes("s3://b/empty") == b""
    assert there.asked == ["head empty"]
    address = Address.of("s3://b/a")
    assert address.content(address.object()) == b"0123456789"


# --- through a cache


class Cached:
    """A cache over a remote, as `BlockCache` is: it has the names of the remote."""

    def __init__(self, store: Shelf) -> None:
        self.name, self.inner, self.head = store.name, store, store.head


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuload.cache.BlockCache", Cached)


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize(
    ("name", "url", "key"),
    [
        ("s3://data", "s3://data/a/x%20y", "a/x%20y"),
        ("s3://data/a", "s3://data/a/x%20y", "x%20y"),
        ("s3://data/a", "s3://data/a", ""),
        ("http://h", "http://h/a%20b/x%20y", "a b/x y"),
    ],
)
def test_key_in_a_cache_is_what_follows_its_name(shelf: Any, name: str, url: str, key: str) -> None:
    there = shelf([key])
    there.name = name
    known = addresses._Clients()
    one, two = (Address.of(url, cache=there, clients=known) for _ in range(2))
    assert one.key == key
    assert isinstance(one.remote, Cached)
    assert one.remote is two.remote
    if key:
        assert one.first_bytes(3) == key.encode()[:3]
        assert there.asked[-1] == f"get {key} 0 3", "it was not read past the cache"


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("s3://data-2/x", r"^s3://data-2/x: the cache is for s3://data; open it over BlockRemote"),
        ("s3://dat", r"^s3://dat: the cache is for s3://data; "),
        ("http://h/x?v=1", r"^http://h/x\?v=1: a cache reads it as its own remote does, without what follows"),
    ],
)
def test_cache_of_another_place(shelf: Any, url: str, told: str) -> None:
    there = shelf()
    there.name = "s3://data"
    with pytest.raises(PlanError, match=told):
        _ = Address.of(url, cache=there).remote


# --- what an address leads to

H5MU, ZARR = (
    {"a/cells.h5mu": HDF5 + b"..."},
    dict.fromkeys(
        ("a/c.zarr/.zgroup", "a/c.zarr/mod/.zgroup", "a/c.zarr/mod/rna/.zgroup", "a/c.zarr/mod/rna/X/.zarray"), b"{}"
    ),
)
SOMA = dict.fromkeys(("a/soma/__group/x", "a/soma/ms/__group/x", "a/soma/ms/rna/__group/x"), b"")


@pytest.mark.parametrize(
    ("held", "given", "whole", "modality"),
    [
        (H5MU, "cells.h5mu", "cells.h5mu", ""),
        (H5MU, "cells.h5mu/rna", "cells.h5mu", "rna"),
        (H5MU, "cells.h5mu/mod/rna", "cells.h5mu", "rna"),
        (ZARR, "c.zarr", "c.zarr", ""),
        (ZARR, "c.zarr/rna", "c.zarr", "rna"),
        (ZARR, "c.zarr/mod/rna", "c.zarr", "rna"),
        (ZARR, "c.zarr/none", "c.zarr", "none"),
        (SOMA, "soma", "soma", ""),
        (SOMA, "soma/rna", "soma", "rna"),
        (SOMA, "soma/ms/rna", "soma", "rna"),
        ({"a/mod/c.zarr/.zgroup": b"{}"}, "mod/c.zarr", "mod/c.zarr", ""),  # a folder that is only named like a group
        ({"a/ms/.zgroup": b"{}"}, "ms", "ms", ""),
    ],
)
def test_modality_of_an_address(shelf: Any, held: dict[str, bytes], given: str, whole: str, modality: str) -> None:
    shelf(held, root="s3://b")
    assert recognise._modality(Address.of(f"s3://b/a/{given}")) == (f"s3://b/a/{whole}", modality)
    if "zarr" in whole:
        assert recognise.folder_form(Address.of(f"s3://b/a/{whole}")) == "zarr"
    assert recognise.is_soma(f"s3://b/a/{given}") == (held is SOMA)


def test_bucket_is_no_store_of_modalities(shelf: Any) -> None:
    """It may hold anything, so it is not listed to see."""
    there = shelf({".zgroup": b"{}", "mod/rna/.zgroup": b"{}"}, root="s3://b")
    assert recognise._modality(Address.of("s3://b/mod/rna")) == ("s3://b/mod/rna", "")
    for missing in ("none", "x/y/z/none"):
        with pytest.raises(ReadError, match=rf"^s3://b/{missing}: no such object"):
            recognise._modality(Address.of(f"s3://b/{missing}"))
    assert "list " not in there.asked
    assert "head x/y" in there.asked
    assert "head x" not in there.asked


@pytest.mark.parametrize(
    ("content", "is_whole"),
    [
        (b"<html>" + bytes(4000), False),
        (HDF5, True),
        (bytes(512) + HDF5 + bytes(4000), True),
        (bytes(2048) + HDF5, True),
        (bytes(100) + HDF5 + bytes(4000), False),
        (error(), False),
    ],
)
def test_page_of_a_web_server_has_no_modalities(shelf: Any, content: Any, is_whole: bool) -> None:
    """Servers answer for a folder too; only what holds HDF5 may have parts."""
    there = shelf({"cells": content}, root="http://h", can_list=False)
    if isinstance(content, ReadError):  # it does not send parts of what it has
        there.held["cells"] = b""
        there.get = there.head = lambda key, *_: _fail(content) if isinstance(key, RemoteObject) else _found(key)
    address = Address.of("http://h/cells/rna")
    if is_whole:
        assert recognise._modality(address) == ("http://h/cells", "rna")
    else:
        with pytest.raises(ReadError, match=r"^http://h/cells/rna: no such object"):
            recognise._modality(address)


def _fail(raised: ReadError) -> None:
    raise raised


def _found(key: str) -> RemoteObject | None:
    return RemoteObject(key, 4, "1") if key == "cells" else None


def test_busy_web_server_is_not_taken_for_a_page(shelf: Any) -> None:
    there = shelf({"cells": HDF5}, root="http://h", can_list=False)
    there.get = lambda *_: _fail(error(BusyError))
    with pytest.raises(BusyError):
        recognise._modality(Address.of("http://h/cells/rna"))


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("p*", ["p1.h5ad", "p2.zarr"]),
        ("*.h5ad", ["p1.h5ad"]),
        (".*", [".hidden.h5ad"]),
        ("*/*.h5ad", ["deep/p3.h5ad"]),
        ("d*/p?.h5ad", ["deep/p3.h5ad"]),
        ("*.parquet", ["x.parquet"]),
    ],
)
def test_addresses_that_match_a_pattern(shelf: Any, pattern: str, found: list[str]) -> None:
    """As on a disk: whole names, folders too, and none that begins with a dot unless the pattern does."""
    names = ["p2.zarr/.zgroup", "p2.zarr/X/.zarray", "p1.h5ad", ".hidden.h5ad", "deep/p3.h5ad", "deep/.p4.h5ad"]
    shelf([f"a/{name}" for name in (*names, "x.parquet", recognise.GENES_FILE)], root="s3://b")
    assert recognise.expand(f"s3://b/a/{pattern}") == [f"s3://b/a/{name}" for name in found]


def test_pattern_that_nothing_matches(shelf: Any) -> None:
    shelf(["a/x.h5ad", "a/y[1].h5ad"], root="s3://b")
    with pytest.raises(ReadError, match=r"^s3://b/a/z\*: no file matches this pattern"):
        recognise.expand("s3://b/a/z*")
    assert recognise.expand("s3://b/a/y[1].h5ad") == ["s3://b/a/y[1].h5ad"]
    shelf(["x"], can_list=False)
    with pytest.raises(ReadError, match=r"^http://h/\*: a web server cannot list what matches a pattern"):
        recognise.expand("http://h/*")


def test_folder_at_an_address_stands_for_its_files(shelf: Any) -> None:
    names = [f"{number}.h5ad" for number in range(8)]
    others = ["a/.3.h5ad", "a/notes", f"a/{recognise.GENES_FILE}", "z/c.zarr/.zgroup", "e/x"]
    shelf([*(f"a/{name}" for name in reversed(names)), *others], root="s3://b")
    found = recognise.expand("s3://b/a")
    assert found == [f"s3://b/a/{name}" for name in names]
    assert [Address.of(one).key for one in found] == names
    assert recognise.expand("s3://b/z") == ["s3://b/z/c.zarr"]
    assert recognise.expand("s3://b/z/c.zarr") == ["s3://b/z/c.zarr"]
    with pytest.raises(StoreError, match=r"^s3://b/e: this folder has no cells"):
        recognise.expand("s3://b/e")
    shelf(["a/x.h5ad", "a/y.parquet"], root="s3://b")
    with pytest.raises(StoreError, match=r"several formats \(\.h5ad, \.parquet\)"):
        recognise.expand("s3://b/a")


def test_bytes_at_an_address(shelf: Any) -> None:
    shelf({"a/c.zarr/.zgroup": b"{}", "a/c.zarr/X/0": b"12345", "a/cells.h5mu": b"123"}, root="s3://b")
    for name, n in (("c.zarr", 7), ("cells.h5mu", 3), ("cells.h5mu/rna", 3), ("c.zarr/rna", 7)):
        assert recognise.nbytes_at(Address.of(f"s3://b/a/{name}")) == n


@pytest.mark.parametrize(
    ("name", "content", "form"),
    [
        ("cells.h5ad", b"PAR1", "hdf5"),
        ("cells.h5mu?v=1", b"PAR1", "hdf5"),
        ("cells", HDF5, "hdf5"),
        ("cells", bytes(512), "hdf5"),
        ("cells", b"PAR1", "parquet"),
        ("cells", b"\x93NUMPY", ""),
        ("cells", b"PK\x03\x04", ""),
    ],
)
def test_form_of_an_object(shelf: Any, name: str, content: bytes, form: str) -> None:
    """By its name nothing is read; else by its first bytes."""
    there = shelf({name.partition("?")[0]: content})
    if form:
        assert recognise._form(Address.of(f"http://h/{name}")) == form
        assert (f"get cells 0 {min(8, len(content))}" in there.asked) == (name == "cells")
    else:
        with pytest.raises(StoreError, match=r"\.npy, \.npz and zip files cannot; copy it first"):
            recognise._form(Address.of(f"http://h/{name}"))
    assert recognise.is_parquet(f"http://h/{name}") is False
    assert recognise.is_parquet("http://h/cells.parquet?v=1") is True


# --- what is given as paths


def test_addresses_are_found_wherever_they_are(shelf: Any) -> None:
    there, cells = shelf(), object()
    given = {"rna": ["s3://b/x", ("/disk/y", cells)], "other": "file:///disk/my%20cells.h5ad"}
    found = at_addresses(given, None, {"region": "x"})
    assert found == {"rna": ["s3://b/x", ["/disk/y", cells]], "other": "/disk/my cells.h5ad"}
    assert isinstance(found["rna"][0], Address)
    one, two = at_addresses(["s3://b/x", "s3://b/y"], None, {"region": "x"})
    assert one.remote is two.remote
    assert there.opened == [("s3://b", {"region": "x"})]


@pytest.mark.parametrize("options", [{}, {"region": "x"}])
def test_options_are_for_addresses(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"^storage_options: it is for addresses such as"):
        at_addresses(["cells.h5ad"], None, options)


@pytest.mark.parametrize(
    ("options", "found"),
    [("secret", "str"), ([("secret", 1)], "list"), ({1: "secret"}, "dict with the name 1")],
    ids=["text", "pairs", "number"],
)
def test_options_are_named(options: Any, found: str) -> None:
    with pytest.raises(PlanError, match=rf"expected a dict from names to settings, .*, got {found}\.$") as caught:
        at_addresses("s3://b/x", None, options)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (b"cells.h5ad", "a path is text"),
        (bytearray(b"cells.h5ad"), "a path is text"),
        ("", "expected the path of a file or folder; it is empty"),
        (io.BytesIO(b"cells"), "it is already open; pass its path"),
        ({"s3://b/x", "s3://b/y"}, "a list, in whose order"),
    ],
    ids=["bytes", "bytearray", "empty", "open", "set"],
)
def test_what_is_no_path(given: Any, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        check_given(given)
