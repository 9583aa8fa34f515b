"""Settings files: what is taken from them, what wins over them, and what is refused."""

from __future__ import annotations

import errno
import json
import os

import pytest

import gpuload
from gpuload.errors import PlanError, ReadError
from gpuload.settings import takes_settings, write_settings
from gpuload.source import saving

SAVED = {"batch_size": 16, "block_size": "chunk", "fetch_factor": 3, "num_threads": 1, "prefetch": 1}


@takes_settings
def echo(paths, *, batch_size=64, prefetch=2, shuffle=True, block_size=16, sampler=None, settings=None):
    """Return what it was given."""
    return {k: v for k, v in locals().items() if k != "settings"}


@pytest.fixture
def saved(tmp_path):
    """Return the path of a settings file."""
    path = tmp_path / "settings.json"
    write_settings(path, SAVED, {"cells_per_s": 1})
    return path


@pytest.mark.parametrize("kind", ["path", "text", "content", "dict"])
def test_a_loader_takes_its_settings_from_a_file_or_a_dict(plain, saved, kind):
    settings = {"path": saved, "text": str(saved), "content": json.loads(saved.read_text()), "dict": SAVED}[kind]
    with (
        gpuload.open_loader(plain.path, settings=settings) as loader,
        gpuload.open_loader(plain.path, **SAVED) as other,
    ):
        assert loader.batch_size == 16
        assert [b.rows.tolist() for b in loader] == [b.rows.tolist() for b in other]


def test_given_arguments_win_even_if_they_equal_the_default(saved):
    assert echo("x", settings={"batch_size": 16, "prefetch": 1}) == echo("x", batch_size=16, prefetch=1)
    assert echo("x", settings={"batch_size": 16}, batch_size=64)["batch_size"] == 64
    assert echo("x", batch_size=8)["batch_size"] == 8
    assert echo("x", settings=None) == echo("x")


def test_a_given_sampler_overrides_saved_order_and_block_size(plain):
    saved = {"shuffle": False, "block_size": 16}
    assert echo("x", settings=saved, sampler=lambda: 1)["shuffle"] is True
    assert echo("x", settings=saved, sampler=lambda: 1)["block_size"] == 16
    sampler = gpuload.BlockShuffle(4)
    assert "block_size" in SAVED
    with gpuload.open_loader(plain.path, settings=SAVED, sampler=sampler) as loader:
        assert sum(len(b) for b in loader) == loader.n_obs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"blocksize": 4},
            r"^settings: 'blocksize' is not a setting that a file can hold; known settings are batch_size, prefetch",
        ),
        ({"settings": {"batch": 4}}, r"^settings: 'batch' is not a setting"),
        ({"sampler": 3}, r"^settings: 'sampler' is not a setting"),
        (
            {"settings": {}, "mesured": 1},
            r"^settings: next to 'settings' there is 'mesured'; expected 'measured' or no",
        ),
        ({"settings": 3}, r"^settings: 'settings' is 3; expected names with values\.$"),
        (3, r"^settings=3: expected the path of a settings file, a dict or None\.$"),
    ],
)
def test_an_unknown_setting_is_refused(settings, message):
    with pytest.raises(PlanError, match=message):
        echo("x", settings=settings)


def test_files_that_are_not_settings_are_refused(tmp_path, plain):
    path = tmp_path / "settings.json"
    with pytest.raises(
        ReadError, match=r"settings\.json: cannot be opened: No such file or directory\. Check the path"
    ):
        echo("x", settings=path)
    path.write_text("block_size: 3")
    with pytest.raises(
        PlanError, match=r"settings\.json: it is not a settings file: .*\. Write one with gpuload tune\.$"
    ):
        echo("x", settings=path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"settings\.json: it is not a settings file: "):
        echo("x", settings=path)
    path.write_text("[1]")
    with pytest.raises(PlanError, match=r"settings\.json: it holds a list; expected names with values\.$"):
        echo("x", settings=path)
    with pytest.raises(ReadError, match=r"settings\.json: cannot be written: No such file or directory\. Choose"):
        write_settings(tmp_path / "none" / "settings.json", {}, {})
    with pytest.raises(PlanError, match=r"^batch_size=0: expected a whole number of at least 1\.$"):
        gpuload.open_loader(plain.path, settings={"batch_size": 0})


def test_a_saved_file_replaces_what_a_link_leads_to(tmp_path):
    """With the mode that it had, and nothing is left beside it."""
    link, there = tmp_path / "settings.json", tmp_path / "shared" / "fast.json"
    there.parent.mkdir()
    link.symlink_to("shared/fast.json")
    write_settings(link, {}, {})  # a link to nothing yet
    there.chmod(0o640)
    write_settings(link, SAVED, {})
    assert link.is_symlink()
    assert (json.loads(there.read_text())["settings"], there.stat().st_mode & 0o777) == (SAVED, 0o640)
    before, inode = there.read_text(), there.stat().st_ino
    with pytest.raises(ValueError, match="half"), saving(link) as file:
        raise ValueError(file.write(b"half") and "half of it")
    assert (there.read_text(), there.stat().st_ino) == (before, inode)
    assert sorted(tmp_path.rglob("*")) == [link, there.parent, there]


@pytest.mark.parametrize("path", ["/dev/stdout", "/proc/self/fd/1", "/dev/null", "protected.json"])
def test_what_is_no_file_of_its_own_or_protected_is_not_replaced(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "protected.json").write_text("{}")
    monkeypatch.setattr(os, "access", lambda name, _: "protected" not in str(name))  # as for another user than root
    reason = "this user may not write there" if path == "protected.json" else "it is no regular file"
    with pytest.raises(ReadError, match=f"^{path}: cannot be written: {reason}. Choose another place.$"):
        write_settings(path, SAVED, {})
    assert (tmp_path / "protected.json").read_text() == "{}"


def test_a_file_is_saved_where_modes_cannot_be_changed(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    path = tmp_path / "settings.json"
    path.write_text("{}")
    monkeypatch.setattr(os, "chmod", refuse)
    write_settings(path, SAVED, {})
    assert json.loads(path.read_text())["settings"] == SAVED
    with pytest.raises(ReadError, match=r"^other: gone$"), saving(path):  # an error with words of its own keeps them
        raise ReadError("other: gone")


def test_known_settings_are_those_of_the_loader(plain):
    with pytest.raises(PlanError) as error:
        gpuload.open_loader(plain.path, settings={"x": 1})
    known = str(error.value).split("known settings are ")[1].rstrip(".").split(", ")
    assert {"block_size", "fetch_factor", "num_threads", "prefetch", "seed", "layer", "device"} <= set(known)
    assert not {"paths", "settings", "sampler", "transform", "rank", "world_size"} & set(known)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_workers", 4, "num_workers=4: open_loader has no such argument of PyTorch's DataLoader; threads read, s"),
        ("pin_memory", True, "pin_memory=True: .*; with device='cuda' minibatches are made on the GPU, so leave it ou"),
        ("prefetch_factor", 2, "prefetch_factor=2: .*; use prefetch, which counts fetches of fetch_factor minibatches"),
        ("persistent_workers", True, "persistent_workers=True: .*; there are no worker processes, so leave it out"),
        ("worker_init_fn", None, "worker_init_fn=None: .*; there are no worker processes, so leave it out"),
        ("multiprocessing_context", "spawn", "multiprocessing_context='spawn': .*; there are no worker processes, "),
        (
            "collate_fn",
            len,
            r"collate_fn=<built-in function len>: .*; change its minibatches in gpuload\.Mapped\(loader, ",
        ),
        ("batch_sampler", [], r"batch_sampler=\[\]: .*; use sampler\."),
        ("generator", 1, r"generator=1: .*; use seed\."),
    ],
)
def test_a_pytorch_argument_is_refused_with_a_replacement(name, value, message):
    with pytest.raises(PlanError, match=f"^{message}"):
        gpuload.open_loader("none.h5ad", **{name: value})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("batchsize", "batch_size"),
        ("shufle", "shuffle"),
        ("num_thread", "num_threads"),
        ("normalize", "transform"),
        ("log1p", "transform"),
        ("obs_keys", "obs"),
        ("label", "obs"),
        ("label_key", "obs"),
        ("filename", "paths"),
    ],
)
def test_a_misspelt_argument_gets_a_suggestion(name, meant):
    with pytest.raises(TypeError, match=rf"^open_loader\(\) got .* argument '{name}'; did you mean '{meant}'\?$"):
        gpuload.open_loader("none.h5ad", **{name: 1})


def test_an_unknown_argument_raises_pythons_own_error():
    with pytest.raises(TypeError, match=r"^open_loader\(\) got an unexpected keyword argument 'xyz'$"):
        gpuload.open_loader("none.h5ad", xyz=1)
