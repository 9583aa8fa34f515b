"""Samples by ID: the tutorial's dictionaries, PyTorch's DataLoader unchanged, our own loader, and their faults."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import gpuload
from gpuload.backends.buffers import BufferPool
from gpuload.errors import CorruptDataError, MissingDependencyError, PlanError, ReadError
from gpuload.samples import SampleLoader, SampleSet
from gpuload.samples.batches import BatchInProgress
from gpuload.stats import Stats
from tests.remotes import CountingRemote, FlakyRemote

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

N = 50


def value(i: int) -> Any:
    return torch.full((3, 4), float(i)) + torch.arange(12).reshape(3, 4) / 100


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for i in range(N):
        torch.save(value(i), folder / f"id-{i}.pt")
        np.save(folder / f"id-{i}.npy", value(i).numpy())
    return folder


IDS = [f"id-{i}" for i in range(N)]
LABELS = {id_: int(id_[3:]) for id_ in IDS}


def is_right(X: Any, y: Any) -> bool:
    return all(torch.equal(x, value(int(label))) for x, label in zip(X, y, strict=True))


@pytest.mark.parametrize("decode", ["pt", "npy"])
@pytest.mark.parametrize("n_workers", [0, 2])
def test_pytorchs_loader_takes_a_sample_set_unchanged(data: Path, decode: str, n_workers: int) -> None:
    samples = SampleSet(IDS, LABELS, data, decode)
    assert is_right([samples[3][0]], [samples[3][1]])
    loader = torch.utils.data.DataLoader(samples, batch_size=8, shuffle=True, num_workers=n_workers)
    batches = list(loader)
    assert [len(y) for _, y in batches] == [8] * 6 + [2]
    assert sorted(int(label) for _, y in batches for label in y) == list(range(N))
    assert all(is_right(X, y) for X, y in batches)


@pytest.mark.parametrize("decode", ["pt", "npy"])
def test_our_loader_returns_what_pytorchs_does(data: Path, decode: str) -> None:
    with_order = SampleLoader(SampleSet(IDS, LABELS, data, decode), batch_size=8)
    theirs = torch.utils.data.DataLoader(SampleSet(IDS, LABELS, data, decode), batch_size=8)
    for (X, y), (wanted_X, wanted_y) in zip(with_order, theirs, strict=True):
        assert torch.equal(X, wanted_X)
        assert X.dtype == wanted_X.dtype
        assert torch.equal(y, wanted_y)
        assert y.dtype == wanted_y.dtype


def test_epochs_orders_and_states(data: Path) -> None:
    def loader(**settings: Any) -> SampleLoader:
        return SampleLoader(SampleSet(IDS, LABELS, data), batch_size=8, shuffle=True, **settings)

    one = loader()
    assert len(one) == 7
    kept = [list(one) for _ in range(2)]  # batches are the consumer's own
    assert all(is_right(X, y) for epoch in kept for X, y in epoch)
    orders = [[int(label) for _, y in epoch for label in y] for epoch in kept]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(N))
    assert orders[0] != orders[1]
    again = loader(num_workers=1, in_flight=1)
    for n_done in range(8):
        again.set_epoch(0)
        batches = iter(again)
        for _ in range(n_done):
            next(batches, None)
        state = json.loads(json.dumps(again.state_dict()))
        rest = loader()
        rest.load_state_dict(state)
        wanted = orders[0][n_done * 8 :]
        assert [int(label) for _, y in rest for label in y] == (wanted or orders[1]) or n_done == 7
    assert len(SampleLoader(SampleSet(IDS, LABELS, data), batch_size=8, drop_last=True)) == 6
    assert len(list(SampleLoader(SampleSet(IDS, LABELS, data), batch_size=N, drop_last=True))) == 1


def test_the_order_is_frozen(data: Path) -> None:
    """States depend on it: by SplitMix64 of a sample's number and a key of seed and epoch, mixed and never added."""

    def slow_hash(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) % 2**64
        return x ^ x >> 31

    for seed, epoch in ((0, 0), (1, 0), (0, 1), (2**40, 7)):
        loader = SampleLoader(SampleSet(IDS, LABELS, data), 8, True, seed=seed)
        words = [seed % 2**32, seed >> 32, epoch, 0, 41, 0]
        key = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
        assert loader.order(epoch).tolist() == sorted(range(N), key=lambda i: slow_hash(i ^ key))


def test_a_state_of_other_data_or_settings_is_refused(data: Path) -> None:
    def loader(ids: list[str] = IDS, **settings: Any) -> SampleLoader:
        return SampleLoader(SampleSet(ids, LABELS, data), **{"batch_size": 8, "shuffle": True, **settings})

    first = loader()
    next(iter(first))
    state = json.loads(json.dumps(first.state_dict()))
    for other, told in (
        (loader(batch_size=4), "batch_size=8 in the state, 4 here"),
        (loader(shuffle=False), "shuffle=True in the state, False here"),
        (loader(drop_last=True), "drop_last=False in the state, True here"),
        (loader(seed=1), "seed=0 in the state, 1 here"),
        (loader(IDS[::-1]), "digest of the IDs='[0-9a-f]+' in the state, '[0-9a-f]+' here"),
        (loader(IDS[1:], seed=2), "n=50 in the state, 49 here; digest .*; seed=0 in the state, 2 here"),
    ):
        with pytest.raises(PlanError, match=f"^state: it is of other data or settings than this loader: {told}"):
            other.load_state_dict(state)
        assert other.state_dict()["step"] == 0
    one, other = (SampleLoader(SampleSet(ids, None, data)) for ids in (["a", "bc"], ["ab", "c"]))
    with pytest.raises(PlanError, match="digest of the IDs="):
        other.load_state_dict(one.state_dict())
    flat = {"epoch": 0, "step": 1, "seed": 0, "n": N}
    for odd in (None, [], {"epoch": 0}, flat, {**state, "fingerprint": None}):
        with pytest.raises(PlanError, match=r"^state: expected what a loader's state_dict\(\) returns, got "):
            first.load_state_dict(odd)
    for odd in ({"epoch": -1}, {"step": -1}, {"step": 8}, {"step": 1.5}, {"epoch": "1"}, {"epoch": None}):
        with pytest.raises(PlanError, match=r"^state: epoch=.*, step=.* is not a position in an epoch of 7 batches"):
            first.load_state_dict({**state, **odd})
    for epoch in (-3, 1.5, "1", True):
        with pytest.raises(PlanError, match=rf"^epoch={epoch!r}: expected a whole number of at least 0\.$"):
            first.set_epoch(epoch)  # type: ignore[arg-type]
    assert first.state_dict() == state
    alike = loader(num_workers=1, prefetch=1, in_flight=1, on_error="skip")
    alike.load_state_dict({**state, "step": 7})
    assert list(alike) == []


def test_a_state_of_another_kind_of_loader_is_refused(data: Path) -> None:
    cells = gpuload.open_loader(np.ones((N, 3), dtype=np.float32), batch_size=8, device="cpu")
    ours = SampleLoader(SampleSet(IDS, LABELS, data), batch_size=8)
    with pytest.raises(PlanError, match=r"^state: expected what a loader's state_dict\(\) returns, got a dict with"):
        cells.load_state_dict(ours.state_dict())
    with pytest.raises(PlanError, match=r"^state: it is of other data or settings .*1 files in the state, 0 here"):
        ours.load_state_dict(cells.state_dict())


def test_ids_may_repeat_and_keep_their_order(data: Path) -> None:
    ids = ["id-7", "id-7", "id-3", "id-7"]
    for loader in (SampleLoader, torch.utils.data.DataLoader):
        ((X, y),) = list(loader(SampleSet(ids, LABELS, data), batch_size=4))
        assert y.tolist() == [7, 7, 3, 7]
        assert is_right(X, y)


def test_values_are_copied_not_deserialised(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n_loads = [0]
    load = torch.load

    def counted(*args: Any, **kwargs: Any) -> Any:
        n_loads[0] += 1
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", counted)
    samples = SampleSet(IDS, LABELS, data)
    assert all(is_right(X, y) for X, y in SampleLoader(samples, batch_size=8, num_workers=1, in_flight=1))
    assert n_loads[0] <= 2
    assert all(is_right([X], [y]) for X, y in (samples[i] for i in range(N)))
    assert n_loads[0] <= 2


@pytest.mark.parametrize(
    "odd",
    [
        torch.arange(6, dtype=torch.int16).reshape(2, 3),
        torch.arange(12, dtype=torch.bfloat16),
        torch.tensor(4.5),
        torch.arange(24.0).reshape(4, 6).T,
        torch.arange(24.0)[3:9],
        torch.zeros(0, 3),
        torch.tensor([True, False]),
    ],
    ids=["int16", "bfloat16", "scalar", "transposed", "part", "empty", "bool"],
)
def test_all_kinds_of_tensors_are_read(data: Path, odd: Any) -> None:
    torch.save(odd, data / "odd.pt")
    samples = SampleSet(["odd", "odd"], None, data)
    for _ in range(2):
        X, y = samples[0]
        assert torch.equal(X, odd)
        assert (X.dtype, y) == (odd.dtype, "odd")
    ((X, _),) = list(SampleLoader(samples, batch_size=2))
    assert torch.equal(X, torch.stack([odd, odd]))


def test_a_blank_view_does_not_mislead_later_reads(data: Path) -> None:
    """The values of a sample stored at an offset may happen to equal those at the start of the storage."""
    images = (torch.arange(6 * 2 * 16).reshape(6, 2, 4, 4) % 7).float()
    images[2] = 0
    for i in range(6):
        torch.save(images[i].clone()[1], data / f"{i}.pt")
    samples = SampleSet(range(6), None, data)
    for _ in range(2):
        for i in range(6):
            assert torch.equal(samples[i][0], images[i, 1]), i


def test_a_blank_transposed_sample_does_not_mislead_later_reads(data: Path) -> None:
    """Its values, in their order, equal the bytes of the file, but those of the next sample do not."""
    wanted = [torch.zeros(4, 3).T, torch.arange(12.0).reshape(4, 3).T]
    for i, values in enumerate(wanted):
        torch.save(values, data / f"{i}.pt")
    samples = SampleSet(range(2), None, data)
    for i, values in enumerate(wanted):
        assert torch.equal(samples[i][0], values), i


def test_a_blank_big_endian_file_does_not_mislead_later_reads(data: Path) -> None:
    """As torch.save writes files on big-endian machines; torch.load handles them."""
    for name, values in (("a", torch.zeros(4)), ("b", torch.arange(4.0))):
        torch.save(values, data / "little.pt")
        with zipfile.ZipFile(data / "little.pt") as little:
            found = {info.filename.partition("/")[2]: little.read(info) for info in little.infolist()}
        found |= {"byteorder": b"big", "data/0": values.numpy().astype(">f4").tobytes()}
        big = torch._C.PyTorchFileWriter(str(data / f"{name}.pt"))
        for record in ("data.pkl", "byteorder", "data/0"):
            big.write_record(record, found[record], len(found[record]))
        big.write_end_of_file()
    samples = SampleSet(["a", "b"], None, data)
    assert [X.tolist() for X, _ in (samples[0], samples[1])] == [[0] * 4, [0, 1, 2, 3]]


@pytest.mark.parametrize("of", ["conj", "imag"])
def test_lazily_conjugated_tensors_are_resolved(data: Path, of: str) -> None:
    values = torch.complex(torch.arange(4.0), torch.ones(4))
    expected = values.conj() if of == "conj" else values.conj().imag
    for i in range(3):
        torch.save(expected, data / f"{i}.pt")
    for X, _ in SampleLoader(SampleSet(range(3), None, data), batch_size=1):
        assert torch.equal(X[0], expected.resolve_conj().resolve_neg())


def test_a_batch_of_mixed_dtypes_matches_pytorch(data: Path) -> None:
    torch.save(torch.arange(12, dtype=torch.int32).reshape(3, 4), data / "whole.pt")
    samples = SampleSet(["id-1", "whole", "id-2"], None, data)
    ((X, _),) = list(SampleLoader(samples, batch_size=3, num_workers=1, in_flight=1))
    ((wanted, _),) = list(torch.utils.data.DataLoader(samples, batch_size=3))
    assert torch.equal(X, wanted)
    assert torch.equal(X[1], torch.arange(12.0).reshape(3, 4))
    samples = SampleSet(["id-3", "missing", "id-1", "whole", "id-2"], None, data)
    ((X, names),) = list(SampleLoader(samples, batch_size=5, num_workers=1, in_flight=1, on_error="skip"))
    assert torch.equal(X, torch.stack([value(3), *wanted]))
    assert names == ["id-3", "id-1", "whole", "id-2"]
    torch.save(torch.zeros(2), data / "short.pt")
    with pytest.raises(RuntimeError, match="equal size"):
        list(SampleLoader(SampleSet(["id-1", "short"], None, data), batch_size=2, num_workers=1))


def test_a_worker_does_not_reuse_its_parents_threads(data: Path) -> None:
    samples = SampleSet(IDS, LABELS, data, in_flight=1)
    assert len(samples.__getitems__([0, 1])) == 2  # from now on it has its thread
    loader = torch.utils.data.DataLoader(samples, batch_size=8, num_workers=1, timeout=20)
    assert all(is_right(X, y) for X, y in loader)


def test_other_contents_are_deserialised_or_refused(data: Path) -> None:
    torch.save({"x": value(1), "n": 3}, data / "dict.pt")
    X, _ = SampleSet(["dict"], None, data)[0]
    assert torch.equal(X["x"], value(1))
    assert X["n"] == 3
    (data / "bad.pt").write_bytes(b"no tensor at all" * 9)
    with pytest.raises(CorruptDataError, match="sample 'bad': its 144 bytes cannot be decoded"):
        SampleSet(["bad"], None, data)[0]
    (data / "bad.pt").write_bytes(b"short")
    with pytest.raises(
        CorruptDataError, match=r"its 5 bytes cannot be decoded: .+ \(\w+\)\. Rewrite it, or check decode=\."
    ):
        SampleSet(["bad"], None, data)[0]
    decoded = SampleSet(["id-4"], LABELS, data, lambda raw: raw.size, suffix=".pt")[0]
    assert decoded == ((data / "id-4.pt").stat().st_size, 4)
    X, _ = SampleSet(["id-4.npy"], None, data, "bytes")[0]
    assert X.numpy().tobytes() == (data / "id-4.npy").read_bytes()


def test_an_iteration_inherited_by_a_fork_is_refused(data: Path) -> None:
    loader = SampleLoader(SampleSet(IDS, LABELS, data), prefetch=1, in_flight=1)
    batches = iter(loader)
    next(batches)
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            signal.alarm(10)  # instead of a hang
            with pytest.raises(PlanError, match=r"^this iteration began before this process was forked, and its thr"):
                list(batches)
            assert len(list(loader)) == len(loader)
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(list(batches)) == len(loader) - 1


def test_out_of_memory_is_not_blamed_on_a_sample(data: Path) -> None:
    def too_much(raw: Any) -> Any:
        raise MemoryError("no memory")

    samples = SampleSet(IDS, None, data, too_much, suffix=".pt")
    with pytest.raises(MemoryError, match=r"^no memory$"):
        list(SampleLoader(samples, on_error="skip", max_skipped=1.0))


def test_safetensors(data: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    for i in range(N):
        save_file({"x": value(i)}, data / f"id-{i}.safetensors")
    assert all(is_right(X, y) for X, y in SampleLoader(SampleSet(IDS, LABELS, data, "safetensors"), batch_size=8))


@pytest.mark.parametrize("place", [0, 20, 47])
def test_a_damaged_sample_is_reported(data: Path, place: int) -> None:
    """Even if only values are damaged: a zip file has a checksum for each entry."""
    samples = SampleSet(IDS, LABELS, data)
    assert is_right([samples[4][0]], [4])
    damaged = bytearray((data / "id-5.pt").read_bytes())
    damaged[damaged.find(value(5).numpy().tobytes()) + place] ^= 255
    (data / "id-5.pt").write_bytes(damaged)
    with pytest.raises(CorruptDataError, match=r"sample 'id-5': its \d+ bytes cannot be decoded: the sum of its"):
        samples[5]
    with pytest.raises(CorruptDataError, match="sample 'id-5'"):
        list(SampleLoader(samples, batch_size=8))


@pytest.mark.parametrize("decode", ["pt", "npy"])
def test_a_truncated_sample_is_reported_or_skipped(data: Path, decode: str) -> None:
    samples = SampleSet(IDS[:8], LABELS, data, decode)
    assert is_right([samples[4][0]], [4])
    whole = (data / f"id-5.{decode}").read_bytes()
    (data / f"id-5.{decode}").write_bytes(whole[: whole.find(value(5).numpy().tobytes()) + 40])
    with pytest.raises(CorruptDataError, match=r"^sample 'id-5': its \d+ bytes cannot be decoded: .*\. Rewrite it"):
        list(SampleLoader(samples, batch_size=8))
    ((X, y),) = list(SampleLoader(samples, batch_size=8, on_error="skip"))
    assert y.tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert is_right(X, y)


def test_samples_that_require_gradients_are_stacked_as_they_are(data: Path) -> None:
    samples = SampleSet(IDS[:2], LABELS, data, lambda raw: raw.size + torch.ones(3, requires_grad=True), suffix=".pt")
    ((X, _),) = list(SampleLoader(samples, batch_size=2))
    assert X.requires_grad
    assert torch.equal(X, torch.stack([samples[0][0], samples[1][0]]))


def test_safetensors_with_two_tensors_are_refused(data: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"x": value(0), "y": value(1)}, data / "id-0.safetensors")
    with pytest.raises(CorruptDataError, match=r"sample 'id-0'.*it holds 2 tensors, but one is expected; pass a fun"):
        SampleSet(IDS, LABELS, data, "safetensors")[0]


def test_missing_safetensors_library_is_reported(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data / "id-0.safetensors").write_bytes(bytes(100))
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    words = r"^decode='safetensors' needs safetensors, .*pip install 'gpuload\[samples\]'$"
    with pytest.raises(MissingDependencyError, match=words):
        SampleSet(IDS, LABELS, data, "safetensors")[0]


def test_a_file_truncated_during_a_read_is_reported(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, preadv = data / "id-0.npy", os.preadv
    size = path.stat().st_size

    def cut(*args: Any) -> int:
        os.truncate(path, 20)
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", cut)
    with pytest.raises(ReadError, match=rf"^{path}: short read: wanted {size} bytes, got 20\. Was it truncated\?$"):
        SampleSet(IDS, LABELS, data, "npy")[0]


def test_an_unreadable_sample_is_reported_or_skipped(data: Path) -> None:
    (data / "odd.pt").mkdir()
    samples = SampleSet([*IDS, "odd"], None, data)
    with pytest.raises(
        ReadError, match=rf"^{data}/odd\.pt: reading \d+ bytes at byte 0 failed: Is a directory\. Check"
    ):
        samples[N]
    loader = SampleLoader(samples, batch_size=8, on_error="skip", max_skipped=0.1)
    assert sum(len(y) for _, y in loader) == N
    assert set(loader.skipped) == {"odd"}


@pytest.mark.parametrize("decode", ["pt", "npy"])
def test_the_number_of_remembered_shapes_is_limited(data: Path, decode: str) -> None:
    ids = [f"long-{i}" for i in range(1, 81)]
    for i, id_ in enumerate(ids, 1):
        torch.save(torch.arange(i), data / f"{id_}.pt")
        np.save(data / f"{id_}.npy", np.arange(i))
    samples = SampleSet(ids, None, data, decode)
    for _ in range(2):
        assert all(torch.equal(samples[i][0], torch.arange(i + 1)) for i in range(len(ids)))
    assert samples._descriptions is not None
    assert len(samples._descriptions._known) == 64


def test_a_failed_sample_raises_after_the_batches_before_it(data: Path) -> None:
    (data / "id-20.pt").unlink()
    batches = iter(SampleLoader(SampleSet(IDS, LABELS, data), batch_size=8))
    assert [label for _ in range(2) for label in next(batches)[1].tolist()] == list(range(16))
    with pytest.raises(ReadError, match=r"id-20\.pt: cannot be opened: No such file"):
        next(batches)


def test_of_several_failed_samples_the_first_is_named_however_threads_race(data: Path) -> None:
    for most_faults in (0, 2):
        batch = BatchInProgress(SampleSet(IDS, LABELS, data), np.arange(3), BufferPool(1), None, Stats(1), 0)
        for row in (2, 0, 1):
            batch.note_fault(row, ReadError(f"row {row}"))
        with pytest.raises(ReadError, match=f"row {most_faults}"):
            batch.result(most_faults)


@pytest.mark.parametrize("decode", ["pt", "collated"])
def test_failed_samples_are_skipped_up_to_a_limit(data: Path, decode: str, caplog: pytest.LogCaptureFixture) -> None:
    (data / "id-20.pt").unlink()
    (data / "id-3.pt").write_bytes(b"no sample")
    samples, collate = SampleSet(IDS, LABELS, data), list if decode == "collated" else None
    loader = SampleLoader(samples, batch_size=8, on_error="skip", max_skipped=0.04, collate_fn=collate)
    for _ in range(2):
        batches = list(loader)
        if decode == "pt":
            assert torch.cat([y for _, y in batches]).tolist() == [i for i in range(N) if i not in (3, 20)]
            assert all(is_right(X, y) for X, y in batches)
        assert [len(b) if collate else len(b[1]) for b in batches[:3]] == [7, 8, 7]
        assert set(loader.skipped) == {"id-3", "id-20"}
        assert "cannot be opened" in loader.skipped["id-20"]
    assert "sample 'id-3' is skipped" in caplog.text
    strict = SampleLoader(samples, batch_size=8, on_error="skip", max_skipped=0.03)
    got = []
    with pytest.raises(ReadError, match=r"id-20\.pt"):
        got.extend(y for _, y in strict)
    assert sum(len(y) for y in got) == 15
    assert strict.state_dict()["step"] == 2


def test_a_batch_of_missing_samples_is_left_out(data: Path) -> None:
    for i in range(8, 12):
        (data / f"id-{i}.pt").unlink()
    loader = SampleLoader(SampleSet(IDS, LABELS, data), batch_size=4, on_error="skip", max_skipped=0.1)
    assert sum(len(y) for _, y in loader) == N - 4
    assert loader.state_dict()["epoch"] == 1


def test_samples_are_read_from_a_flaky_remote(data: Path) -> None:
    remote = FlakyRemote(data, every=5)
    remote.KINDS = ("busy", "reset", "short", "reset")  # type: ignore[misc]
    samples = SampleSet(IDS, LABELS, remote)
    assert samples.is_remote
    assert all(is_right(X, y) for X, y in SampleLoader(samples, batch_size=8, shuffle=True))
    with pytest.raises(ReadError, match=r"none\.pt: no such object"):
        SampleSet(["none"], None, remote)[0]
    remote.every, remote.KINDS = 2, ("short", "busy") * 2  # type: ignore[misc]
    for id_ in IDS:
        X, _ = SampleSet([id_], None, remote, "bytes", suffix=".pt")[0]
        assert X.numpy().tobytes() == (data / f"{id_}.pt").read_bytes()


def test_a_batch_and_the_next_are_fetched_concurrently(data: Path) -> None:
    remote = FlakyRemote(data, every=10**9)
    remote.wait_s = 0.05
    loader = SampleLoader(SampleSet(IDS, LABELS, remote), batch_size=4, in_flight=16)
    assert sum(len(y) for _, y in loader) == N
    assert 12 <= remote.most_at_once <= 24
    remote.most_at_once = 0
    theirs = torch.utils.data.DataLoader(SampleSet(IDS, LABELS, remote, in_flight=5), batch_size=10)
    assert sum(len(y) for _, y in theirs) == N
    assert remote.most_at_once == 5


@pytest.mark.parametrize("n_threads", [0, 1, 15, 16, 17, 18])
def test_an_epoch_without_enough_threads_can_be_retried(
    data: Path, n_threads: int, allow_threads: Callable[[int], None], no_leaks: None
) -> None:
    loader = SampleLoader(SampleSet(IDS, LABELS, FlakyRemote(data, every=10**9)), num_workers=4, in_flight=16)
    allow_threads(n_threads)
    if n_threads <= 16:  # at least one is needed that decodes what the others fetch
        with pytest.raises(RuntimeError, match="can't start new thread"):
            list(loader)
        allow_threads(100)
    assert sum(len(y) for _, y in loader) == N


def test_many_threads_fetch_and_few_decode(data: Path) -> None:
    """Requests wait for the network, but decoding needs processors, for which many threads would compete."""
    remote = FlakyRemote(data, every=10**9)
    remote.wait_s = 0.02
    lock, now, most = threading.Lock(), [0], [0]

    def decode(raw: Any) -> Any:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.002)
        with lock:
            now[0] -= 1
        return torch.from_numpy(raw[:4].copy())

    samples = SampleSet(IDS, LABELS, remote, decode, suffix=".pt")
    assert len(list(SampleLoader(samples, batch_size=4, num_workers=2, in_flight=16))) == 13
    assert most[0] == 2
    assert remote.most_at_once >= 12


def test_samples_are_read_from_an_object_store(data: Path) -> None:
    pytest.importorskip("obstore")
    from benchmarks.s3server import start
    from gpuload.remote import open_remote

    with start(data.parent, p_503=0.2, p_truncate=0.1, most_in_a_row=3) as server:
        remote = open_remote("s3://data", endpoint=server.url, region="us-east-1", anonymous=True)
        samples = SampleSet(IDS, LABELS, remote)
        assert all(is_right(X, y) for X, y in SampleLoader(samples, batch_size=8))
        assert server.counts().get("HEAD 200", 0) == 0  # one request a sample
        with pytest.raises(ReadError, match=r"none\.pt: no such object\. Check the ID and the suffix\."):
            SampleSet(["none"], None, remote)[0]


def test_invalid_arguments_are_refused(data: Path) -> None:
    for arguments, settings, sentence in (
        ((IDS, {}, data), {}, r"labels: 'id-0' has none \(50 of 50 IDs have none\)"),
        ((iter(IDS), {}, data), {}, r"labels: 'id-0' has none \(50 of 50 IDs have none\)"),
        (({"a"}, None, data), {}, r"ids={'a'}: a set has no order; pass a list of IDs"),
        ((IDS, [0] * len(IDS), data), {}, r"^labels=\[0, 0, .*: expected a dict .*; dict\(zip\(ids, labels\)\) makes"),
        ((IDS, LABELS, data, "jpg"), {}, "decode='jpg': expected one of 'pt', 'npy'"),
        ((IDS, LABELS, data), {"in_flight": 0}, r"in_flight=0: expected a whole number from 1 to 1024\.$"),
        ((IDS, LABELS, data), {"in_flight": 10**9}, r"in_flight=1000000000: expected a whole number from 1 to 1024\.$"),
    ):
        with pytest.raises(PlanError, match=sentence):
            SampleSet(*arguments, **settings)
    with pytest.raises(ReadError, match="no such folder"):
        SampleSet(IDS, LABELS, data / "none")
    with pytest.raises(PlanError, match=r"^source=5: expected an address, a folder, or a remote"):
        SampleSet(IDS, LABELS, 5)
    samples = SampleSet(IDS, LABELS, data)
    for settings, sentence in (
        ({"batch_size": 0}, "batch_size=0: expected a whole number of at least 1"),
        ({"num_workers": 1.5}, r"num_workers=1\.5: expected a whole number of at least 1"),
        ({"prefetch": 0}, "prefetch=0: expected a whole number of at least 1"),
        ({"in_flight": 1025}, r"in_flight=1025: expected a whole number from 1 to 1024\.$"),
        ({"seed": -1}, "seed=-1: "),
        ({"on_error": "ignore"}, "on_error='ignore': expected one of 'raise', 'skip'"),
        ({"max_skipped": 2}, "max_skipped=2: expected a share from 0 to 1"),
        ({"shuffle": "no"}, r"^shuffle='no': expected True or False\.$"),
        ({"drop_last": 1}, r"^drop_last=1: expected True or False\.$"),
    ):
        with pytest.raises(PlanError, match=sentence):
            SampleLoader(samples, **settings)
    with pytest.raises(
        PlanError, match=r"^drop_last=True: the 50 samples are too few for a batch of 51, so there would"
    ):
        SampleLoader(SampleSet(IDS, LABELS, data), 51, drop_last=True)
    with pytest.raises(PlanError, match=r"^SampleLoader: expected a SampleSet, and found 'cells/'; make one with"):
        SampleLoader("cells/")  # type: ignore[arg-type]
    assert SampleSet(iter(IDS), LABELS, data).ids == IDS  # looked through twice
    most = SampleSet([], {}, data, in_flight=1024)
    assert list(SampleLoader(most, batch_size=4, shuffle=True, in_flight=1024)) == []


def test_each_iteration_is_a_whole_epoch_and_only_one_runs(data: Path) -> None:
    """As with PyTorch's loader, looking at the first batch takes none away."""

    def loader() -> SampleLoader:
        return SampleLoader(SampleSet(IDS, LABELS, data), batch_size=8, shuffle=True, seed=3)

    def labels(batches: Any) -> list[int]:
        return [int(label) for _, y in batches for label in y]

    of_epoch = loader()
    first, second, third = (labels(of_epoch) for _ in range(3))
    looked = loader()
    next(iter(looked))
    assert labels(looked) == second
    for _ in looked:
        break
    assert looked.state_dict()["step"] == 1, "where it stopped"
    resumed = loader()
    resumed.load_state_dict(looked.state_dict())
    assert labels(resumed) == third[8:]
    old = loader()
    one = iter(old)
    next(one)
    assert labels(old) == second
    with pytest.raises(PlanError, match="this iteration was ended by a later iter"):
        next(one)
    assert old.state_dict()["epoch"] == 2
    last = loader()
    for number, _ in enumerate(last, 1):
        if number == len(last):
            last.set_epoch(0)
    assert labels(last) == first
    one = iter(last)
    for _ in range(len(last)):
        next(one)
    next(iter(last))
    state = last.state_dict()
    assert next(one, None) is None
    assert last.state_dict() == state, "the end of an earlier iteration is not that of the later one"


@pytest.mark.parametrize("ended_by", ["iter", "set_epoch", "load_state_dict"])
def test_an_iteration_ended_while_it_waits_does_not_move_the_later_one(data: Path, ended_by: str) -> None:
    is_waiting, may_go_on = threading.Event(), threading.Event()

    def decode(values: Any) -> Any:
        if not is_waiting.is_set():
            is_waiting.set()
            may_go_on.wait(60)
        return torch.zeros(1)

    loader = SampleLoader(SampleSet(IDS, LABELS, data, decode, suffix=".npy"), batch_size=4, num_workers=2)
    state, told = loader.state_dict(), list[str]()

    def iterate() -> None:
        try:
            next(iter(loader))
        except PlanError as error:
            told.append(str(error))

    thread = threading.Thread(target=iterate)
    thread.start()
    assert is_waiting.wait(60)
    if ended_by == "iter":
        later = iter(loader)
        next(later)
        wanted = 1, 1
    elif ended_by == "set_epoch":
        loader.set_epoch(5)
        wanted = 5, 0
    else:
        loader.load_state_dict({**state, "step": 3})
        wanted = 0, 3
    may_go_on.set()
    thread.join(60)
    assert len(told) == 1
    assert told[0].startswith("this iteration was ended by a later iter()")
    found = loader.state_dict()
    assert (found["epoch"], found["step"]) == wanted


@pytest.mark.parametrize("is_raised", [False, True])
def test_the_memory_of_a_batch_with_failed_samples_is_freed_at_once(data: Path, is_raised: bool) -> None:
    """Not by the garbage collector, which does not see that it is much."""
    for i in range(0, N, 5):
        (data / f"id-{i}.npy").write_bytes(b"no sample")
    samples = SampleSet(IDS, LABELS, data, "npy")
    settings = {} if is_raised else {"on_error": "skip", "max_skipped": 0.5}
    loader = SampleLoader(samples, batch_size=5, prefetch=1, **settings)  # type: ignore[arg-type]
    gc.collect()
    gc.disable()
    try:
        if is_raised:
            with suppress(CorruptDataError):
                next(iter(loader))
        else:
            assert sum(len(y) for _, y in loader) == N - 10
        left = [found for found in gc.get_objects() if type(found) is BatchInProgress]
    finally:
        gc.enable()
    assert not left


def test_a_second_thread_in_an_iteration_is_refused(data: Path) -> None:
    batches: Any = None
    loader = SampleLoader(SampleSet(IDS, LABELS, data), batch_size=4, collate_fn=lambda _: next(batches))
    batches = iter(loader)
    with pytest.raises(PlanError, match=r"^the loader is .* in another thread; .*: make a second loader\.$"):
        next(batches)


@pytest.mark.usefixtures("no_leaks")
def test_an_early_break_leaves_nothing_behind(data: Path) -> None:
    loader = SampleLoader(SampleSet(IDS, LABELS, data), batch_size=4)
    for _ in loader:
        break


@pytest.mark.parametrize("is_remote", [False, True])
def test_task_spans_carry_their_batch_number(data: Path, is_remote: bool) -> None:
    source: Any = CountingRemote(data) if is_remote else data

    def decode(raw: Any) -> Any:
        return torch.load(io.BytesIO(raw.tobytes()))

    loader = SampleLoader(SampleSet(IDS, LABELS, source, decode, suffix=".pt"), batch_size=8, shuffle=True)
    before_s = time.perf_counter()
    assert all(is_right(X, y) for X, y in loader)
    assert loader.stats.take_spans() == []
    loader.stats.keep_spans()
    start_s = time.perf_counter()
    assert all(is_right(X, y) for X, y in loader)
    stop_s, spans = time.perf_counter(), loader.stats.take_spans()
    assert all(start_s <= span.start <= span.stop <= stop_s for span in spans)
    gets, decodes, waits = ([s for s in spans if s.timer == name] for name in ("read_s", "decode_s", "wait_s"))
    sizes = {**dict.fromkeys(range(7, 13), 8), 13: 2}  # the first epoch had 7
    assert Counter(span.batch for span in gets) == sizes
    assert Counter(span.batch for span in decodes) == sizes
    assert [span.batch for span in waits] == list(sizes)
    assert all(a.stop <= b.start for a, b in pairwise(waits))
    for wait in waits:
        own = [span for span in (*gets, *decodes) if span.batch == wait.batch]
        assert all(span.stop <= wait.stop for span in own)
        assert min(s.start for s in own if s.timer == "read_s") < min(s.start for s in own if s.timer == "decode_s")
    consumer = threading.get_ident()
    assert {span.thread for span in waits} == {consumer}
    assert consumer not in {span.thread for span in (*gets, *decodes)}
    assert loader.stats.n_batches == 14
    assert loader.stats.n_rows == 2 * N
    assert loader.stats.read_nbytes == 2 * sum((data / f"{i}.pt").stat().st_size for i in IDS)
    assert 0 < loader.stats.wait_s < stop_s - before_s


@pytest.mark.parametrize(("slow", "bound"), [("fetch", "store"), ("decode", "decode"), ("consumer", "consumer")])
def test_the_verdict_names_the_bottleneck(data: Path, slow: str, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = SampleSet(IDS[:16], LABELS, data, lambda raw: torch.from_numpy(raw.copy()), suffix=".npy")
    loader = SampleLoader(samples, batch_size=4, num_workers=1, prefetch=1)
    assert loader.verdict() == "nothing was delivered yet"
    if slow != "consumer":
        inner = getattr(samples, slow)

        def slowly(*args: Any) -> Any:
            time.sleep(0.02)
            return inner(*args)

        monkeypatch.setattr(samples, slow, slowly)
    for _ in loader:
        time.sleep(0.4 if slow == "consumer" else 0)
    assert loader.verdict().startswith(f"{bound}-bound: ")


def test_empty_batches_are_not_counted(data: Path) -> None:
    for id_ in ("id-0", "id-1"):
        (data / f"{id_}.pt").unlink()
    loader = SampleLoader(SampleSet(IDS[:7], LABELS, data), batch_size=2, on_error="skip", max_skipped=1)
    assert len(list(loader)) == loader.stats.n_batches == 3
    assert loader.stats.n_rows == 5


LEFT_EARLY = """if True:
    import signal, sys, time
    import torch
    from gpuload.samples import SampleLoader, SampleSet

    def decode(data):
        over_at = time.monotonic() + 0.3
        while time.monotonic() < over_at:
            X = torch.zeros(8).add_(1)
        return X

    samples = SampleSet([f"id-{i}" for i in range(50)], None, sys.argv[1], decode, suffix=".pt")
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(3))
"""


@pytest.mark.parametrize(
    "work",
    [
        "signal.setitimer(signal.ITIMER_REAL, 0.1); samples.__getitems__(list(range(50)))",
        "next(iter(SampleLoader(samples, batch_size=2))); sys.exit(3)",
        pytest.param(
            "batches = iter(SampleLoader(samples, batch_size=2)); next(batches); sys.exit(3)", marks=pytest.mark.slow
        ),
    ],
)
def test_a_process_that_exits_while_samples_are_decoded_is_not_aborted(data: Path, work: str) -> None:
    """PyTorch ends a process with "terminate called" if the interpreter kills a thread that is inside it."""
    program = f"{LEFT_EARLY}\n    {work}"
    ended = subprocess.run([sys.executable, "-c", program, data], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (3, "")


def test_threads_of_an_iteration_left_unfinished_end_at_exit(data: Path) -> None:
    program = f"""{LEFT_EARLY}
    import gpuload.threads
    gpuload.threads.PATIENCE_AT_EXIT_S = 1000
    batches = iter(SampleLoader(samples, batch_size=2))
    next(batches)
    """
    ended = subprocess.run(
        [sys.executable, "-c", program, data], capture_output=True, text=True, check=False, timeout=100
    )
    assert (ended.returncode, ended.stderr) == (0, "")
