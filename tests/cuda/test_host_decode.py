"""The share of chunks that CPU cores decode in place of the GPU, over the fake device."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuload
from tests.cuda.test_backend import SMALL, damage_a_chunk, open_fake

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import StoreVariant
    from tests.cuda.test_backend import Opened
    from tests.variants import Stored

__all__ = ["open_fake"]  # the fixture


@pytest.fixture
def small(store_variant: StoreVariant) -> Stored:
    """A file of many chunks."""
    return store_variant("csr-gzip4")


WHOLE = {"batch_size": 1000, "fetch_factor": 1}
"""All cells of a file in a fetch."""


def assert_cells(opened: Opened, dense: Any) -> None:
    """Read an epoch, and compare it with the file."""
    rows = []
    for batch in opened.epoch():
        np.testing.assert_array_equal(batch.X, dense[batch.rows])
        rows.append(batch.rows)
    np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(len(dense)))


@pytest.mark.parametrize("share", [0.3, 0.5, 1])
@pytest.mark.parametrize(
    "kind",
    [
        "csr-gzip4",
        "csr-zstd",
        "csr-gzip4-shuffle",
        "csr-contiguous",
        "csr-absent-chunks-3",
        "csr-all-empty",
        "dense-gzip4",
    ],
)
def test_the_same_cells_whoever_decodes_them(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, kind: str, share: float
) -> None:
    stored = store_variant(kind)
    opened = open_fake(stored.path, layer=stored.layer, host_decode=share, block_size=5, seed=3, **SMALL)
    for _ in range(2):
        assert_cells(opened, stored.dense)
    if share < 1:
        assert opened.loader.io_mode == "pinned"


@pytest.mark.parametrize("share", [0, 0.25, 0.5, 0.75, 1])
def test_a_share_of_the_stored_bytes(
    open_fake: Callable[..., Opened], small: Stored, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Rounded up to whole chunks, for each array; each chunk counts once in the statistics."""
    opened = open_fake(small.path, host_decode=share, **WHOLE)
    loads: Any = opened.loader._backend._loads  # type: ignore[attr-defined]
    start, reads = loads._host.start, []
    loads._host.start = lambda read, *args: reads.append(read) or start(read, *args)
    assert_cells(opened, small.dense)
    layouts = [layout for matrix in opened.loader.store.matrices for layout in matrix.layouts]
    n_chunks, of_host = sum(layout.chunk_offset.size for layout in layouts), {id(read.layout): read for read in reads}
    for layout in layouts:
        read = of_host.get(id(layout))
        total, most = int(layout.chunk_nbytes.sum()), int(layout.chunk_nbytes.max())
        nbytes = 0 if read is None else int(read.chunk_nbytes.sum())
        assert share * total <= nbytes < share * total + most * (share > 0) + (share == 0)
        if read is not None:
            np.testing.assert_array_equal(read.chunk_id, np.arange(layout.chunk_offset.size)[-read.chunk_id.size :])
    assert n_chunks > 20
    assert opened.nvcomp.n_decoded == n_chunks - sum(read.chunk_id.size for read in reads)
    assert opened.loader.stats.n_chunks == n_chunks
    assert opened.loader.stats.read_nbytes >= sum(int(layout.chunk_nbytes.sum()) for layout in layouts)


@pytest.mark.parametrize("seed", range(6))
def test_kept_minibatches_are_never_overwritten(open_fake: Callable[..., Opened], small: Stored, seed: int) -> None:
    opened = open_fake(small.path, seed_of_streams=seed, host_decode=0.5, num_threads=3, batch_size=5, fetch_factor=3)
    kept = [batch for i, batch in enumerate(opened.loader) if i % 3]
    opened.device.synchronize()
    for batch in kept:
        np.testing.assert_array_equal(batch.X, small.dense[batch.rows])


def test_cores_do_not_wait_for_what_the_gpu_decodes(open_fake: Callable[..., Opened], small: Stored) -> None:
    """All that they decode can be in place before anybody waits for the device."""
    opened = open_fake(small.path, host_decode=0.5, num_threads=1, prefetch=1, **WHOLE)
    loads: Any = opened.loader._backend._loads  # type: ignore[attr-defined]
    start, decode, wait = loads._host.start, opened.nvcomp.decode, opened.device.wait
    done: list[threading.Event] = []
    of_device: set[int] = set()
    late: list[threading.Event] = []

    def started(*args: Any) -> Any:
        tasks = start(*args)
        for task in tasks:
            done.append(threading.Event())
            task.add_done_callback(lambda _, ended=done[-1]: ended.set())
        return tasks

    def decoded(algorithm: str, *, stream: int, **options: Any) -> None:
        of_device.add(stream)
        decode(algorithm, stream=stream, **options)

    def waited(event: Any) -> None:
        if isinstance(event, tuple) and event[0].number in of_device:
            late.extend(ended for ended in done if not ended.wait(10))
        wait(event)

    loads._host.start, opened.nvcomp.decode, opened.device.wait = started, decoded, waited  # type: ignore[method-assign]
    assert_cells(opened, small.dense)
    assert done
    assert opened.nvcomp.n_decoded > 5
    assert not late


@pytest.mark.parametrize(
    ("caches", "helps"),
    [
        ({"device_cache": "1MiB"}, False),
        ({"device_cache": 2500}, True),
        ({"device_cache": 2500, "memory_cache": "1MiB"}, False),
    ],
)
def test_the_caches_are_filled_by_the_gpu_first(
    open_fake: Callable[..., Opened], small: Stored, caches: dict[str, Any], helps: bool
) -> None:
    opened = open_fake(small.path, host_decode=1.0, **caches, **SMALL)
    loads: Any = opened.loader._backend._loads  # type: ignore[attr-defined]
    start, n_reads = loads._host.start, [0]

    def started(*args: Any) -> Any:
        n_reads[0] += 1
        return start(*args)

    loads._host.start = started
    for _ in range(3):
        assert_cells(opened, small.dense)
    assert (n_reads[0] > 0) == helps
    assert opened.loader.stats.n_chunks_cached > 0


def test_damage_is_named(open_fake: Callable[..., Opened], copy_of: Callable[..., Any]) -> None:
    path = copy_of()
    at = damage_a_chunk(path)
    opened = open_fake(path, host_decode=1.0, **SMALL)
    with pytest.raises(gpuload.CorruptDataError, match=rf"chunk 0 of /X/data at byte {at} is damaged"):
        list(opened.epoch())


@pytest.mark.parametrize("share", [-0.1, 1.5, "half", None, float("nan"), True])
def test_other_shares_are_refused(tmp_path: Path, share: object) -> None:
    with pytest.raises(gpuload.PlanError, match=r"^host_decode=.*: expected a share from 0 to 1\.$"):
        gpuload.open_loader(tmp_path / "none.h5ad", device="cpu", host_decode=share)  # type: ignore[arg-type]


def test_without_a_gpu_there_is_nothing_to_share(plain: Stored, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(gpuload.PlanError, match=r"^host_decode=0\.5: needs a GPU; leave it out"):
        gpuload.open_loader(plain.path, device="cpu", host_decode=0.5)
    gpuload.open_loader(plain.path, device="cpu", host_decode=0).close()
    caplog.set_level("INFO", "gpuload")
    gpuload.open_loader(plain.path, host_decode=0.5).close()
    assert "host_decode=0.5 has no effect on the CPU" in caplog.text
