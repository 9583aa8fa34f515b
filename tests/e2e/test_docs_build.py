"""The documentation builds without a warning, and the benchmarks page matches the records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import generated_pages  # noqa: E402 - it lies beside the documentation's sources

sys.path.remove(str(ROOT / "docs"))


PRINTED = {
    "quickstart": "epoch 1: loss ",
    "concepts/diversity": "true random order: 3.",
    "notebooks/in-memory": "47 minibatches",
    "notebooks/settings": "block_size=16  ",
    "notebooks/samplers": "controls: drug_01",
    "notebooks/matrices": "outer 500",
    "notebooks/origins": "[400 380 380 380 400]",
    "notebooks/labels": "without features: drug_6",
    "notebooks/statistics": "minibatch: 200",
    "notebooks/tokens": "(63, 58)",
    "notebooks/predict": "(1000, 2000)",
}
"""What a cell of each notebook prints when it runs, and what does not occur in its code."""


def record(arm: str, **figures: Any) -> dict[str, Any]:
    machine = {"cpu": "abacus", "cores": 1}
    return {"arm": arm, "commit": "0123456789ab+changes", "machine": machine, "time": "2026-01-02T03:04:05", **figures}


def test_benchmarks_page_has_the_medians_of_the_records(tmp_path: Path) -> None:
    records = [record("ours", seconds=s, round=i, io_mode="posix", is_warm=True) for i, s in enumerate((3.0, 1.0, 2.0))]
    records.append(record("theirs", seconds=9.0, peak_mib=10.5, loss=float("nan")))
    records[0]["codecs"] = [{"codec": "zstd", "ratio": 2.0}, {"codec": "none", "ratio": 1.0}]
    (tmp_path / "weighing.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    page = generated_pages.benchmarks_page(tmp_path)
    section = page.partition("## Weighing\n\n")[2].splitlines()
    assert section[0] == "| arm | runs | seconds | peak_mib |"
    assert section[2:4] == ["| ours | 3 | 2 |  |", "| theirs | 1 | 9 | 10.5 |"]
    assert section[5] == "### Codecs"
    assert section[9:11] == ["| zstd | 1 | 2 |", "| none | 1 | 1 |"]
    assert section[12] == (
        "*4 records in `benchmarks/results/weighing.jsonl`; commits 0123456; 1 core of abacus; 2026-01-02.*"
    )


def test_benchmarks_page_separates_cold_runs_and_names_the_gpu(tmp_path: Path) -> None:
    card = {"gpu": {"card": "abacus 200"}}
    records = [record("ours", rate=rate, cache="warm", **card) for rate in (30.0, 10.0, 20.0)]
    records += [record("ours", rate=4.0, cache="cold", **card), record("theirs", batch=8, error="none is here", **card)]
    (tmp_path / "weighing.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    section = generated_pages.benchmarks_page(tmp_path).partition("## Weighing\n\n")[2].splitlines()
    assert section[0] == "| arm | runs | rate |"
    assert section[2:5] == ["| ours | 3 | 20 |", "| ours cold | 1 | 4 |", "| theirs | 0 |  |"]
    assert "; 1 core of abacus; abacus 200; 2026-01-02.*" in section[6]


@pytest.mark.parametrize("name", generated_pages.TIMED)
def test_page_shows_times_only_if_recorded(name: str, tmp_path: Path) -> None:
    assert generated_pages.times(tmp_path, name, "times it") == f"`python -m benchmarks.run_{name}` times it.\n"
    about = {"reader": "gpuload", "nbytes": 1_000_000} if name == "codecs" else {}
    found = [record("ours", cells_per_s=c, round=i, **about) for i, c in enumerate((30.0, 10.0, 20.0))]
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in found))
    row = "| ours | 1 | 20 | 10-30 |" if name == "codecs" else "| ours | 3 | 20 |"
    assert row in generated_pages.times(tmp_path, name, "times it")


def training(model: str, order: str, drug: float, **more: Any) -> dict[str, Any]:
    figures = {"seconds": 4.0, "waited_s": 0.5, "n_train": 600, "loader_cells_per_s": 400.0}
    settings = {"model": model, "order": order, "block_size": 4, "fetch_factor": 64, "values": "log1p", "lr": 0.001}
    return record("", **figures, **settings, macro_f1={"drug": drug}, **more)


def test_a_page_has_the_scores_of_the_orders(tmp_path: Path) -> None:
    assert generated_pages.scores_of_orders(tmp_path) == "`python -m benchmarks.run_classify FOLDER` measures it.\n"
    found = [training("linear", "block", drug) for drug in (0.1, 0.3)]
    found += [training("linear", "random", 0.25), training("mlp", "block", 0.5)]
    found += [training("linear", "random", 0.9) | {"n_train": 6_000}]
    (tmp_path / "classify.jsonl").write_text("".join(json.dumps(r) + "\n" for r in found))
    text = generated_pages.scores_of_orders(tmp_path)
    assert (
        "| model | values | rate | cells | blocks of | minibatches to a fetch | order | seeds | drug | epoch, s |"
        in text
    )
    assert "| linear | log1p | 0.001 | 600 | 4 | 64 | block | 2 | 0.200 ± 0.141 | 4 | 0.5 | 1.5 |" in text
    assert "| mlp | log1p | 0.001 | 600 | 4 | 64 | block | 1 | 0.500 | 4 | 0.5 | 1.5 |" in text
    assert "| linear | log1p | 0.001 | 6,000 | 4 | 64 | random | 1 | 0.900 | 4 | 0.5 | 15 |" in text
    assert text.endswith(
        ":\n\n- linear, log1p at 0.001, 600 cells, blocks of 4, 64 minibatches to a fetch: drug -0.050\n"
    )


def test_a_page_has_the_speeds_of_the_orders(tmp_path: Path) -> None:
    rates = {"1": (100.0, 300.0, 200.0), "chunk": (1100.0, 900.0, 1000.0)}
    found = [
        {"arm": {"name": f"gpuload/dense/{order}"}, "cells_per_s": rate, "file": {"n_vars": 1234}}
        for order, measured in rates.items()
        for rate in measured
    ]
    (tmp_path / "rivals.jsonl").write_text("".join(json.dumps(r) + "\n" for r in found[:3]))
    assert generated_pages.speeds_of_orders(tmp_path).startswith("`python -m benchmarks.run_rivals --file cells.h5ad` ")
    (tmp_path / "rivals.jsonl").write_text("".join(json.dumps(r) + "\n" for r in found))
    assert generated_pages.speeds_of_orders(tmp_path).startswith(
        "Beside true random order (200 cells/s), the loader alone makes dense minibatches of 1,234 genes so many times "
        "as fast: blocks of a chunk 5.0 times (1,000); "
    )


def test_a_page_has_the_speeds_on_a_gpu(tmp_path: Path) -> None:
    assert generated_pages.speeds_on_a_gpu(tmp_path).startswith("`python -m benchmarks.run_gpu --file cells.h5ad` ")
    setting = {"gpu": {"card": "NVIDIA Abacus"}, "machine": {"cores": 3, "cpu": "abacus"}, "commit": "0" * 12}
    setting |= {"batch_size": 16, "fetch_factor": 4, "file": {"name": "cells.h5ad", "nbytes": 1000}, "time": "2026"}
    found = [
        {"arm": "ceiling/nvcomp-deflate", "bytes_per_s": 2e9, "by_n_chunks": {"128": 1.25e9, "4096": 2e9}},
        {"arm": "gpuload/dense/pinned", "cells_per_s": 2000.0, "epochs_cells_per_s": [1000.0, 2000.0, 3000.0]},
        {"arm": "gpuload/step/pinned", "cells_per_s": 500.0, "waited_share": 0.01, "step_share": 0.5},
        {"arm": "gpuload/dense/kvikio", "cells_per_s": 300.0, "cache": "cold"},
    ]
    memory = {"cache": 0}
    lines = [json.dumps({"cache": "warm", "memory_nbytes": memory, **setting, **record}) + "\n" for record in found]
    (tmp_path / "gpu.jsonl").write_text("".join(lines))
    page = generated_pages.speeds_on_a_gpu(tmp_path)
    assert "| from the `.h5ad` file (gzip) in the page cache | 2,000 | 1,000-3,000 |\n" in page
    assert "| the same through KvikIO | 300 |  |\n" in page
    assert "at so many GB/s of decoded bytes: 128 at 1.2, 4,096 at 2.0.\n" in page
    assert "it waited for 1.0% of the time and trained for 50%." in page
    assert "*NVIDIA Abacus; 3 cores of abacus; cells.h5ad, " in page


def test_records_support_the_claims_about_a_gpu() -> None:
    """docs/howto: what gpu.md, pack.md and programs.md say in words or by hand."""
    results = ROOT / "benchmarks" / "results"
    records = [json.loads(line) for line in (results / "gpu.jsonl").read_text().splitlines()]
    arms = {r["arm"]: r for r in records if r["cache"] == "warm"}
    guide, pack, programs = (
        (ROOT / "docs" / "howto" / f"{name}.md").read_text() for name in ("gpu", "pack", "programs")
    )

    assert f"{arms['gpuload/dali/pinned']['cells_per_s']:,.0f} cells/s at commit 4fd7810" in guide
    assert arms["gpuload/dali/pinned"]["commit"].startswith("4fd7810"), "say how fast whole minibatches are"
    file = arms["gpuload/dense/pinned"]
    assert (file["batch_size"], file["fetch_factor"]) == (1024, 64)
    assert round(file["file"]["chunk_values"] * file["file"]["n_obs"] / file["file"]["nnz"]) == 24
    assert 5.5e9 < sum(nbytes for what, nbytes in file["memory_nbytes"].items() if what != "host") < 6.5e9
    assert 1.15 < arms["gpuload/dense/cached"]["memory_nbytes"]["cache"] / file["file"]["nbytes"] < 1.25
    assert abs(arms["gpuload/step/urgent"]["cells_per_s"] / arms["gpuload/step/pinned"]["cells_per_s"] - 1) < 0.02
    takes = {int(n): int(n) / rate for n, rate in arms["ceiling/nvcomp-deflate"]["by_n_chunks"].items()}
    assert takes[1024] < 1.4 * takes[128]
    assert takes[4096] < 3.1 * takes[128]

    codecs = {(row["codec"], row["cells_per_chunk"]): row for row in arms["codecs"]["codecs"]}
    rates = [codecs[codec, n]["bytes_per_s"] / 1e9 for codec in ("lz4", "zstd-1", "zstd-3") for n in (64, 256)]
    assert f"at {min(rates):.0f} to {max(rates):.0f} GB/s, some nine million cells/s" in pack
    assert all(8.5e6 < codecs[codec, 64]["cells_per_s"] < 9.5e6 for codec in ("lz4", "zstd-1", "zstd-3"))
    packing = json.loads((results / "pack.jsonl").read_text().splitlines()[-1])
    on_cpu = {row["codec"]: row for row in packing["codecs"] if row["cells_per_chunk"] == 64}
    of_floats = {row["codec"]: row for row in packing["codecs_of_floats"] if row["cells_per_chunk"] == 64}
    lz4, zstd = on_cpu["blosc-lz4-5-shuffle"], on_cpu["blosc-zstd-2-shuffle"]
    assert 2.7 < lz4["decode_cells_per_s"] / zstd["decode_cells_per_s"] < 3, "almost three times as many cells"

    def nbytes(row: dict[str, Any]) -> float:
        return sum(n for name, n in row.items() if name.endswith("per_cell"))

    assert 0.78 < nbytes(zstd) / nbytes(lz4) < 0.82, "smaller by a fifth"
    assert 0.68 < nbytes(lz4) / nbytes(on_cpu["blosc-lz4-5"]) < 0.72, "about 30 % off"
    assert nbytes(of_floats["blosc-lz4-5"]) < 0.6 * nbytes(of_floats["blosc-lz4-5-shuffle"])
    (store_nbytes,) = {turn["store_nbytes"] for turn in packing["turns"] if turn["packer"] == "gpuload"}
    assert f"take {100 * (1 - store_nbytes / packing['file']['nbytes']):.0f} % less" in pack.replace("\n  ", " ")
    assert not [r for r in records if r["arm"].startswith("gpuload-packed-")], "other codecs are timed: say so"

    rows = {r["arm"]: r for r in map(json.loads, (results / "modality.jsonl").read_text().splitlines())}
    for arm in ("ours", "ours, GPU", "ours, GPU, exact", "sklearn, all"):
        r = rows[arm]
        assert f" | {r['svd_s']:.2f} | {r['regression_s']:.2f} | {r['rmse']:.4f} |\n" in programs
    assert "cuml" not in rows, "docs/howto/programs.md says that it was not run"


def test_records_support_the_claims_about_orders() -> None:
    """docs/howto/programs.md says in words what the table beside it shows in numbers."""
    lines = (ROOT / "benchmarks" / "results" / "classify.jsonl").read_text().splitlines()
    found: dict[tuple[Any, ...], list[dict[str, float]]] = {}
    for r in map(json.loads, lines):
        setting = (r["model"], r["values"], r["lr"], round(r["n_train"], -3), r["block_size"], r["fetch_factor"])
        found.setdefault((*setting, r["order"]), []).append(r["macro_f1"])
        assert r["waited_s"] < 0.1 * r["seconds"]
        assert r["n_train"] / r["loader_cells_per_s"] < 0.3 * r["seconds"]

    def means(*setting: Any, n: int) -> list[dict[str, float]]:
        kinds = [found[(*setting, order)] for order in ("block", "random")]
        assert [len(kind) for kind in kinds] == [n, n]
        return [{name: sum(r[name] for r in kind) / n for name in kind[0]} for kind in kinds]

    block, random = means("linear", "counts", 1e-5, 371_000, 16, 256, n=3)
    streaming = found["linear", "counts", 1e-5, 371_000, 16, 256, "streaming"]
    assert all(abs(block[name] - random[name]) < 0.002 for name in block)
    for name in ("moa_broad", "moa_fine"):
        assert max(r[name] for r in streaming) < 0.85 * block[name]
    block, random = means("linear", "log1p", 1e-3, 371_000, 16, 256, n=5)
    gaps = {name: round(random[name] - block[name], 3) for name in block}
    assert (gaps["drug"], gaps["moa_fine"]) == (0.015, 0.007)
    assert all(abs(gaps[name]) < 0.003 for name in ("cell_line", "moa_broad"))
    for sizes in ((4, 64), (16, 256)):
        block, random = means("linear", "log1p", 1e-3, 74_000, *sizes, n=3)
        assert all(abs(block[name] - random[name]) < 0.005 for name in ("cell_line", "moa_broad"))
        assert all(block[name] < random[name] for name in ("drug", "moa_fine"))
    block, _ = means("mlp", "log1p", 1e-3, 74_000, 4, 64, n=2)
    streaming = found["mlp", "log1p", 1e-3, 74_000, 4, 64, "streaming"]
    assert max(r["cell_line"] for r in streaming) < 0.1 < 0.8 < block["cell_line"]


def test_documented_loader_versions_match_the_records() -> None:
    lines = (ROOT / "benchmarks" / "results" / "rivals_epyc.jsonl").read_text().splitlines()
    known: dict[str, str] = {}

    def plain(name: str) -> str:
        return name.lower().replace("-", "")

    for r in map(json.loads, lines):
        known |= {plain(name): version for name, version in r.get("versions", {}).items() if version != "none"}
    page = (ROOT / "docs" / "migration" / "index.md").read_text()
    listed = page.partition("These are the versions that the")[2].partition("An empty field")[0]
    versions = (ROOT / "docs" / "versions.md").read_text().partition("## Other libraries")[2]
    for name in ("annbatch", "BioNeMo-SCDL", "cell-load", "lamindb", "scDataset", "TileDB-SOMA-ML"):
        assert f"{name} {known[plain(name)]}" in listed.replace("\n", " "), name
        (row,) = (line for line in versions.splitlines() if line.startswith("|") and name in line)
        names, numbers, _ = (cell.strip().split(", ") for cell in row.strip("| ").split(" | "))
        assert numbers[names.index(name)].partition(" (")[0] == known[plain(name)]


def test_every_record_file_is_on_the_page() -> None:
    page = generated_pages.benchmarks_page(generated_pages.RESULTS)
    for path in generated_pages.RESULTS.glob("*.jsonl"):
        assert f"`benchmarks/results/{path.name}`" in page


def test_pages_are_rewritten_only_if_changed(tmp_path: Path) -> None:
    generated_pages.write(tmp_path)
    pages = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert {path.name for path in pages} == {
        "benchmarks.md",
        "classify_scores.txt",
        "classify_speeds.txt",
        "codecs_times.txt",
        "commands.md",
        "gpu_speeds.txt",
        "messages.md",
        "migration_times.txt",
        "readers_times.txt",
    }
    generated_pages.write(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == pages
    assert "## gpuload inspect" in (tmp_path / "commands.md").read_text()
    assert "| `…: no such file` | Check the path |" in (tmp_path / "messages.md").read_text()


def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_nb", "numpydoc", "pydata_sphinx_theme", "sphinx_design", "ipykernel", "torch"):
        pytest.importorskip(package, reason="pip install '.[docs]' installs what the documentation is built with")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "docs", str(tmp_path / "html")]
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    for page in ("index", "quickstart", "errors", "generated/benchmarks", "reference/generated/gpuload.open_loader"):
        assert (tmp_path / "html" / f"{page}.html").stat().st_size > 5000, page
    for name, printed in PRINTED.items():
        assert printed in (tmp_path / "html" / f"{name}.html").read_text(), name
