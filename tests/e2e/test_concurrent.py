"""The concurrent loading of pictures: every loader gives the same, and ours has none of the faults of the others."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("obstore")
pytest.importorskip("boto3")

from benchmarks.s3server import start  # noqa: E402
from gpuload.errors import CorruptDataError, ReadError  # noqa: E402
from gpuload.samples import SampleLoader, SampleSet  # noqa: E402
from pipelines import concurrent_loading as program  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.s3server import Running

N = 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("s3")
    program.write_pictures(root / "data" / "pictures", N, 0)
    with start(root, latency_ms=5) as running:
        settings = {
            "AWS_ENDPOINT_URL": running.url,
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        yield running
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def settings_of(server: Running, place: str, **changed: Any) -> Namespace:
    places = {"store": "s3://data/pictures", "disk": str(server.root / "data" / "pictures")}
    settings = {"place": places[place], "batch_size": 8, "workers": 0, "in_flight": 4, "threads": 2, **changed}
    return Namespace(**settings)


@pytest.mark.parametrize("place", ["store", "disk"])
@pytest.mark.parametrize("loader", ["vanilla", "threads", "asyncio", "ours", "dali"])
def test_every_loader_gives_every_picture_once(server: Running, loader: str, place: str) -> None:
    if loader == "dali":
        pytest.importorskip("nvidia.dali")
    args = settings_of(server, place)
    names = program.names_in(args.place)
    assert len(names) == N
    batches = list(islice(program.LOADERS[loader](names, args, None), N // 8))
    found = torch.cat([pictures for pictures, _ in batches]).to(torch.int32)
    assert found.shape == (N, 3, 224, 224)
    folder = server.root / "data" / "pictures"
    wanted = torch.stack([program.decode((folder / name).read_bytes()) for name in names]).to(torch.int32)
    labels = torch.cat([labels for _, labels in batches])
    for picture, label in zip(found, labels, strict=True):
        distance = (wanted - picture).abs().float().mean(dim=(1, 2, 3))
        nearest = int(distance.argmin())
        assert distance[nearest] < 2  # two decoders of JPEG differ in the last digit
        assert label == program.label_of(names[nearest])
        wanted[nearest] = 10_000  # once only


def test_sample_loader_keeps_order_and_reports_faults(server: Running) -> None:
    place = "s3://data/pictures"
    ids = [f"{i:06d}" for i in (3, 3, 1, 3, 0, 7, 1, 1)]
    labels = {**{i: int(i) for i in ids}, "gone": 0, "broken": 0}

    def loader(chosen: list[str]) -> SampleLoader:
        samples = SampleSet(chosen, labels, place, program.decode, suffix=".jpg")
        return SampleLoader(samples, 4, in_flight=8)

    batches = list(loader(ids))
    assert torch.cat([y for _, y in batches]).tolist() == [3, 3, 1, 3, 0, 7, 1, 1]
    pictures = torch.cat([x for x, _ in batches])
    for row, id_ in enumerate(ids):
        data = (server.root / "data" / "pictures" / f"{id_}.jpg").read_bytes()
        np.testing.assert_array_equal(pictures[row].numpy(), program.decode(data).numpy())
    with pytest.raises(ReadError, match=r"gone\.jpg: no such object"):
        list(loader([*ids, "gone"]))
    (server.root / "data" / "pictures" / "broken.jpg").write_bytes(b"\xff\xd8 no picture")
    with pytest.raises(CorruptDataError, match="sample 'broken': its 13 bytes cannot be decoded"):
        list(loader([*ids, "broken"]))
    (server.root / "data" / "pictures" / "broken.jpg").unlink()


def test_the_program_trains(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(server.root / "data" / "pictures")
    options = ["--loader", "ours", "--batch-size", "8", "--batches", "3", "--train", "--width", "4", "--every", "8"]
    assert program.main([folder, *options]) == 0
    assert "pictures/s" in capsys.readouterr().out
    assert program.main([folder, "--loader", "ours"]) == 2
    assert f"it has {N} pictures (.jpg), fewer than --batch-size 256" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--batch-size", "--batches", "--in-flight", "--every", "--width"])
def test_zero_counts_are_usage_errors(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.main(["pictures", option, "0"])
    assert f"argument {option}: '0' is not a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--warm-up", "--workers"])
def test_negative_counts_are_usage_errors(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.main(["pictures", f"{option}=-1"])
    assert f"argument {option}: '-1' is not a whole number of at least 0" in capsys.readouterr().err


def test_make_writes_only_into_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert program.main(["s3://bucket/pictures", "--make", "1"]) == 2
    assert "--make: it writes into a folder, but s3://bucket/pictures is an address" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert program.main(["file", "--make", "1"]) == 1
    assert "File exists: 'file'" in capsys.readouterr().err


@pytest.mark.parametrize("loader", ["ours", "vanilla"])
def test_unsuitable_pictures_are_refused(loader: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--loader", loader, "--batch-size", "1", "--batches", "1", "--workers", "0"]
    picture = tmp_path / "07.jpg"
    picture.write_bytes(program.imagecodecs.jpeg8_encode(np.zeros((300, 223, 3), dtype=np.uint8)))
    assert program.main([str(tmp_path), *options]) == 1
    assert "a picture has 223 x 300 pixels; expected at least 224 x 224" in capsys.readouterr().err
    picture.unlink()
    program.write_pictures(tmp_path, 1, 0)
    (tmp_path / "000000.jpg").rename(tmp_path / "cat.jpg")
    assert program.main([str(tmp_path), *options]) == 1
    assert "cat.jpg: its name must be a number, which says its class" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("loader", "workers"), [("ours", 0), ("vanilla", 0), ("vanilla", 2), ("threads", 1), ("asyncio", 0), ("dali", 0)]
)
def test_timeline_records_every_step_in_order(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: str, workers: int
) -> None:
    pytest.importorskip("matplotlib")
    if loader == "dali":
        pytest.importorskip("nvidia.dali")
    seen: list[Any] = []
    spans_of = program.Profile.spans
    monkeypatch.setattr(program.Profile, "spans", lambda self: seen.append(spans_of(self)) or seen[-1])
    picture = tmp_path / "out.png"
    options = ["--loader", loader, "--batch-size", "8", "--batches", "3", "--warm-up", "1", "--workers", str(workers)]
    options += ["--train", "--width", "4", "--every", "16", "--timeline", str(picture)]
    start_s = time.perf_counter()
    assert program.main([str(server.root / "data" / "pictures"), *options]) == 0
    stop_s = time.perf_counter()
    assert picture.read_bytes().startswith(b"\x89PNG")
    (spans,) = seen
    assert all(start_s < span.start <= span.stop < stop_s for span in spans)
    waits, moves, steps = ([s for s in spans if s.timer == name] for name in ("wait_s", "to_device_s", "step_s"))
    assert [s.batch for s in waits] == [s.batch for s in moves] == [s.batch for s in steps] == [0, 1, 2, 3]
    for wait, move, step in zip(waits, moves, steps, strict=True):
        assert wait.stop <= move.start <= move.stop <= step.start
    for name in ("read_s", "decode_s"):
        assert len([s for s in spans if s.timer == name]) >= 4 * 8
    if loader == "ours":
        for wait in waits:
            own = [s for s in spans if s.timer == "read_s" and s.batch == wait.batch]
            assert len(own) == 8
            assert all(s.stop < wait.stop for s in own)


def test_collate_fn_makes_the_batches(server: Running) -> None:
    samples = SampleSet(["000000", "000001"], None, str(server.root / "data" / "pictures"), "bytes", suffix=".jpg")
    ((first, second),) = list(SampleLoader(samples, 2, collate_fn=list))
    assert first[1] == "000000"
    assert first[0].numel() != second[0].numel()
