"""The code in the README and in the documentation runs: block after block, page by page, on small files.

What a page takes for granted (a model, a list of genes) stands in `GIVEN`; what a small machine cannot have (a GPU, a
place outside the test's folder, a hundred epochs) is replaced as `INSTEAD` says, with the reason.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anndata
import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix

import gpuload
from benchmarks.s3server import start
from gpuload import cli
from gpuload.synthetic import tahoe_shaped
from tests.other_forms import write_scdl
from tests.soma_writers import write_experiment

torch = pytest.importorskip("torch", reason="the pages train with PyTorch")

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
GENES = ["CD3E", "CD4", "CD8A"]
NO_GPU = "the test run has no GPU"
OUTSIDE = "a test writes into its own folder only"
SHORT = "the test must finish quickly"

GIVEN = {
    "README.md": "def train_step(X, labels): assert X.shape == (len(labels), 120)",
    "docs/concepts/formats.md": "import anndata\nadata = anndata.read_h5ad('cells.h5ad')\n"
    "adata.obs.to_csv('obs.csv')\nadata.X.data.astype('float32').tofile('values.bin')\n"
    "adata.X.indices.astype('int64').tofile('columns.bin')\nadata.X.indptr.astype('int64').tofile('row_starts.bin')",
    "docs/howto/ddp.md": "import torch\nfrom gpuload.torch import CellDataset\n"
    "model = torch.nn.Linear(120, 2)\nn_epochs = 2",
    "docs/howto/object-storage.md": "labels = {f'id-{i}': i % 2 for i in range(20)}\n"
    "partition = {'train': list(labels)}",
    "docs/howto/programs.md": "import anndata, sys\n"
    f"sys.path.append({str(ROOT / 'pipelines')!r})\n"
    "loader = gpuload.open_loader('cells.h5ad', obs=['cell_line'])\n"
    "genes, proteins = anndata.read_h5ad('cells.h5ad'), anndata.read_h5ad('prot.h5ad')\n"
    "new_genes, new_proteins = genes[:50].copy(), proteins[:50].copy()\n"
    "from gpuload.torch import CellDataset\nheld_out, model, args = loader, None, None",
    "docs/howto/resume.md": "import torch\nmodel = torch.nn.Linear(120, 2)\n"
    "loader = gpuload.open_loader('atlas.h5ad', batch_size=64, block_size='chunk', seed=0)\nnext(iter(loader))",
    "docs/howto/where-and-genes.md": "import numpy as np\nwanted = gpuload.obs_names('atlas.h5ad')[[7, 3]]",
    "docs/howto/slow-file.md": "from types import SimpleNamespace\nlogged = {}\n"
    "writer = SimpleNamespace(add_scalar=lambda *given: logged.setdefault(given[::2], given[1]))",
    "docs/sampling.md": "import anndata\n",
    "docs/howto/several-matrices.md": "import anndata\nadata = anndata.read_h5ad('cells.h5ad')",
    "docs/migration/index.md": "import numpy\nfrom gpuload.torch import CellDataset\ntrain_rows = numpy.arange(300)\n"
    "from pathlib import Path\nPath('split.toml').write_text('[datasets]\\nmine = \"screen\"\\n[training]\\n"
    'mine = "train"\\n[zeroshot]\\n"mine.line_1" = "test"\')',
}
"""What precedes the first block of a page; `gpuload` is imported everywhere, as the README shows."""

INSTEAD = {
    "README.md": [
        ("range(3)", "range(2)", SHORT),
        ('device="cuda:0"', 'device="cpu"', NO_GPU),
        (', device_cache="40GiB"', "", NO_GPU),
    ],
    "docs/concepts/gpu.md": [('device="cuda:0"', 'device="cpu"', NO_GPU), (', device_cache="40GiB"', "", NO_GPU)],
    "docs/growing-data.md": [
        ('"/local/samples"', '"samples"', OUTSIDE),
        ('budget="200GiB"', 'budget="1MiB"', OUTSIDE),
        ("range(100)", "range(2)", SHORT),
        ("min_samples=1_000", "min_samples=20", "there are twenty samples"),
        ('.to("cuda", non_blocking=True)', '.to("cpu", non_blocking=True)', NO_GPU),
    ],
    "docs/howto/ddp.md": [('device="cuda"', 'device="cpu"', NO_GPU), ('"20GiB"', '"64MiB"', SHORT)],
    "docs/howto/object-storage.md": [
        ('"/local/blocks"', '"blocks"', OUTSIDE),
        ('budget="200GiB"', 'budget="64MiB"', OUTSIDE),
        ("port=9100", "port=0", "another may have it"),
        (
            '"s3://bucket/Tahoe-100M/data/train-*.parquet", obs=["drug"]',
            '"s3://bucket/atlas.h5ad", obs=["cell_type"]',
            "it needs pyarrow; tests/golden/test_addresses.py reads Parquet at addresses",
        ),
        (
            '"hf://datasets/ORGANISATION/NAME/data/train-*.parquet", obs=["drug"]',
            '"s3://bucket/atlas.h5ad", obs=["cell_type"]',
            "a test contacts no outside server; tests/golden/test_hub.py reads addresses of the Hub",
        ),
    ],
    "docs/howto/where-and-genes.md": [('"20GiB"', '"64MiB"', SHORT)],
    "docs/howto/slow-file.md": [("--out settings.json", "--out settings.json --seconds 0.5 --quiet", SHORT)],
}
"""Per page: what is replaced, by what, and why. All of it must occur in the page."""


@dataclass(frozen=True)
class Block:
    """A block of code: the line of the page at which it begins, its language and its text."""

    line: int
    language: str
    code: str


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of Python, and commands of ours, in the order of the page."""
    text = (ROOT / page).read_text()
    found = []
    for match in re.finditer(r"^```(python|text)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        language, code = match.groups()
        if language == "text":
            code = "".join(line for line in code.splitlines(keepends=True) if line.startswith("gpuload "))
        if code:
            found.append(Block(text.count("\n", 0, match.start(2)) + 1, language, code))
    return found


def pages() -> list[str]:
    """Return the pages that have such blocks; notebooks are run when the documentation is built."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = [path.relative_to(ROOT).as_posix() for path in found if "generated" not in path.parts]
    return [name for name in names if blocks_of(name)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the pages name."""
    with warnings.catch_warnings(action="ignore"):  # those of the libraries that write the files
        return written(tmp_path_factory.mktemp("pages"))


def written(folder: Path) -> Path:
    """Write the files into a folder, and return it."""
    mudata = pytest.importorskip("mudata", reason="a page reads its files")
    pytest.importorskip("pyarrow", reason="SCDL's tables are Parquet")
    X, obs, var = tahoe_shaped(600, n_vars=120, mean_counts_per_cell=20, n_plates=4, n_cell_lines=5, n_drugs=8)
    var.index = [*GENES, *(f"gene_{i}" for i in range(len(GENES), 120))]
    var["highly_variable"] = np.arange(120) % 3 == 0
    rng = np.random.default_rng(0)
    obs["cell_type"] = pd.Categorical(rng.choice(["T cell", "NK cell", "B cell"], 600))
    obs["donor"] = pd.Categorical(rng.choice([f"donor_{i}" for i in range(10)], 600))
    obs["pct_mito"] = rng.random(600) * 0.2
    obs["sample"] = obs["donor"]
    adata = anndata.AnnData(X, obs, var)
    for name in ("counts", "spliced", "unspliced"):
        adata.layers[name] = X.copy()
    adata.obsm["X_pca"] = rng.normal(size=(600, 10)).astype(np.float32)
    adata.obsm["image"] = rng.integers(0, 256, (600, 3, 6, 6)).astype(np.uint8)
    np.save(folder / "images.npy", adata.obsm["image"])
    for name in ("cells", "atlas"):
        adata.write_h5ad(folder / f"{name}.h5ad", compression="gzip")
    adata.write_zarr(folder / "cells.annbatch.zarr")
    (folder / "cells.scdl").mkdir()
    write_scdl(folder / "cells.scdl", X, genes=list(var.index), obs=obs[["plate"]])
    write_experiment(folder / "cells.soma", {"data": X}, obs=obs[["plate"]], var=var)
    (folder / "plates").mkdir()
    for i in range(3):
        part = adata[200 * i : 200 * (i + 1)].copy()
        part.write_h5ad(folder / f"plate{i + 1}.h5ad")
        part.write_h5ad(folder / "plates" / f"plate{i + 1}.h5ad")
    (folder / "screen").mkdir()
    for i, name in enumerate(("k562", "rpe1")):
        part = adata[300 * i : 300 * (i + 1)].copy()
        part.obs["gene"] = rng.permutation(np.resize(["non-targeting", *var.index[:8]], 300))
        part.obs["cell_line"] = f"line_{i}"
        part.var["gene_name"] = part.var.index
        counts = part.X.toarray()
        counts[:, :8] = part.obs["gene"].to_numpy()[:, None] != var.index[:8].to_numpy()  # each has 1, if not targeted
        part.X = csr_matrix(counts)
        part.write_h5ad(folder / "screen" / f"{name}.h5ad")
    proteins = anndata.AnnData(rng.normal(size=(600, 12)).astype(np.float32), obs=obs[[]])
    proteins.obs["n_tags"] = rng.integers(0, 9, 600)
    proteins.write_h5ad(folder / "prot.h5ad")
    for name in ("cells", "cite"):
        mudata.MuData({"rna": adata.copy(), "prot": proteins.copy()}).write(folder / f"{name}.h5mu")
    return folder


@pytest.fixture
def place(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a copy of these files the current folder, and undo what a page's code leaves behind."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPULOAD_INDEX", "off")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def buckets(place: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve the buckets that the pages name: the same files, and samples in a form, of which each is an object."""
    root = place / "buckets"
    for bucket in ("bucket/train", "public"):
        (root / bucket).mkdir(parents=True)
    shutil.copy(place / "atlas.h5ad", root / "bucket")
    shutil.copytree(place / "cells.annbatch.zarr", root / "public" / "atlas.zarr")
    for i in range(20):
        sample = np.full((2, 3), i, np.float32)
        if form == "npy":
            np.save(root / "bucket" / "train" / f"id-{i}.npy", sample)
        else:
            torch.save(torch.from_numpy(sample), root / "bucket" / "train" / f"id-{i}.pt")
    with start(root) as server:
        for name, value in {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        yield


def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what torchrun sets for the one process of a run."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0, "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))


class Trainer:
    """What transformers' Trainer asks of its DataLoaders when it resumes at step 12; the library is not installed."""

    def __init__(self, model: Any, args: Any, callbacks: list[Any], **datasets: Any) -> None:
        self.callbacks = callbacks
        self.__dict__.update(datasets)

    def train(self, *, resume_from_checkpoint: bool) -> None:
        dataloader, state = self.get_train_dataloader(), SimpleNamespace(global_step=12)
        self.callbacks[0].on_train_begin(None, state, None, model=None, train_dataloader=dataloader)
        assert dataloader.dataset.state_dict()["epoch"] == 12 // len(dataloader) > 0
        for minibatches in (dataloader, self.get_eval_dataloader(), self.get_test_dataloader(self.eval_dataset)):
            assert sum(len(batch["X"]) for batch in minibatches) == 600


@pytest.mark.parametrize("page", pages())
def test_the_code_of_a_page_runs(page: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "\n".join(block.code for block in blocks_of(page))
    names: dict[str, Any] = {"gpuload": gpuload}
    with contextlib.ExitStack() as stack:
        if "s3://" in code:
            pytest.importorskip("obstore", reason="it reads object stores")
            stack.enter_context(buckets(place, "npy" if page == "docs/growing-data.md" else "pt", monkeypatch))
        if "init_process_group" in code:
            under_torchrun(monkeypatch)
        if "nvidia.dali" in code:
            pytest.importorskip("nvidia.dali", reason="the page is about DALI")
        if "transformers" in code:
            library = SimpleNamespace(Trainer=Trainer, TrainerCallback=object)
            monkeypatch.setitem(sys.modules, "transformers", library)
        exec(GIVEN.get(page, ""), names)
        for block in blocks_of(page):
            run(page, block, names)


def test_perturbations_held_out_as_the_guide_says_have_their_controls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dealt like a perturbation, the controls of this screen are the whole test part."""
    page, rng = "docs/sampling.md", np.random.default_rng(3)
    (tmp_path / "screen").mkdir()
    genes = np.repeat(["non-targeting", *(f"KO{k}" for k in range(4))], 20)
    for i in range(2):
        obs = pd.DataFrame(
            {"gene": rng.permutation(genes), "cell_line": rng.choice(["K562", "RPE1"], genes.size)},
            index=[f"{i}-{row}" for row in range(genes.size)],
        )
        anndata.AnnData(np.ones((genes.size, 3), np.float32), obs=obs).write_h5ad(tmp_path / "screen" / f"{i}.h5ad")
    monkeypatch.chdir(tmp_path)
    assert gpuload.split("screen/", {"train": 0.8, "test": 0.2}, by="gene").groups["test"] == ("non-targeting",)
    names: dict[str, Any] = {"gpuload": gpuload}
    (block,) = (block for block in blocks_of(page) if "parts" in block.code and "PairedControl" in block.code)
    run(page, block, names)
    with gpuload.open_loader("screen/", obs=["gene", "cell_line", "source_file"]) as loader, names["test"] as test:
        obs = loader.obs
        seen, partners = [], []
        for batch in test:
            n = batch.rows.size // 2
            seen.append(batch.rows[:n])
            partners.append(batch.rows[n:])
    perturbed, controls = obs.loc[np.concatenate(seen)], obs.loc[np.concatenate(partners)]
    assert set(controls["gene"]) == {"non-targeting"}
    held_out = set(perturbed["gene"])
    assert len(held_out) == 1
    assert "non-targeting" not in held_out
    assert sorted(perturbed.index) == sorted(obs.index[obs["gene"].isin(held_out)])
    assert held_out.isdisjoint(obs.loc[names["parts"]["train"], "gene"])
    for column in ("cell_line", "source_file"):
        assert perturbed[column].tolist() == controls[column].tolist()


def test_figures_of_an_epoch_are_those_of_that_epoch(place: Path) -> None:
    page = "docs/howto/slow-file.md"
    (block,) = (block for block in blocks_of(page) if "add_scalar" in block.code)
    names: dict[str, Any] = {"gpuload": gpuload}
    exec(GIVEN[page], names)
    with gpuload.open_loader("atlas.h5ad", obs=["plate"]) as loader:
        run(page, block, {**names, "loader": loader})
        assert loader.stats.n_rows == 0
    logged = names["logged"]
    assert {name for name, _ in logged} == {
        f"input/{name}" for name in ("waiting", "cells_per_s", "read_MB_per_s", "p50_s", "p95_s", "p99_s")
    }
    for epoch in range(3):
        assert 0 < logged["input/waiting", epoch] < 1
        assert logged["input/p50_s", epoch] <= logged["input/p99_s", epoch]


def test_arrays_in_plain_files_are_read_from_there(place: Path) -> None:
    page = "docs/concepts/formats.md"
    names: dict[str, Any] = {"gpuload": gpuload}
    exec(GIVEN[page], names)
    counts = names["adata"].X.toarray()
    (block,) = (block for block in blocks_of(page) if "memmap" in block.code)
    run(page, block, names)
    with names["loader"] as loader:
        for batch in loader:
            assert np.array_equal(batch.X, counts[batch.rows])
    for name in ("data", "indices", "indptr"):
        assert np.shares_memory(getattr(names["X"], name), names[name])


def test_counts_are_read_from_different_places(place: Path) -> None:
    page = "docs/howto/many-files.md"
    first, second = (anndata.read_h5ad(f"plate{number}.h5ad") for number in (1, 2))
    assert first.raw is None
    first.X.data[:] = 0.5  # not the counts
    first.write_h5ad("plate1.h5ad")
    before = Path("plate1.h5ad").read_bytes()
    (block,) = (block for block in blocks_of(page) if "sparse_dataset" in block.code)
    names: dict[str, Any] = {"gpuload": gpuload}
    run(page, block, names)
    counts = np.vstack([first.layers["counts"].toarray(), second.X.toarray()])
    with names["loader"] as loader:
        for batch in loader:
            assert np.array_equal(batch.X, counts[batch.rows])
    assert Path("plate1.h5ad").read_bytes() == before


@pytest.fixture
def screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pd.DataFrame:
    """Return obs of the two files of a screen in the current folder, of three cell lines each, with `source_file`."""
    rng = np.random.default_rng(5)
    genes = np.repeat(["non-targeting", "AARS", "NUP107", "RPUSD4", "GATA1"], 24)
    (tmp_path / "screen").mkdir()
    (tmp_path / "other").mkdir()
    found = []
    for name in ("screen/a.h5ad", "other/b.h5"):
        obs = pd.DataFrame({"gene": rng.permutation(genes), "plate": rng.choice(["p1", "p2"], genes.size)})
        obs["cell_line"] = np.resize(["jurkat", "rpe1", "k562"], genes.size)
        obs.index = [f"{name}-{row}" for row in range(genes.size)]
        anndata.AnnData(np.ones((genes.size, 3), np.float32), obs=obs).write_h5ad(tmp_path / name)
        found.append(obs.assign(source_file=name))
    monkeypatch.chdir(tmp_path)
    return pd.concat(found, ignore_index=True)


def test_parts_of_a_toml_of_cell_load_hold_what_it_says(screen: pd.DataFrame) -> None:
    page = "docs/migration/index.md"
    (toml,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    two = toml.replace('"screen"', '"{screen, none}/*.h5ad"').replace("[training]", 'mine = "other"\n[training]')
    two = two.replace("[fewshot", '"mine.k562" = "val"\n[fewshot')
    Path("split.toml").write_text(two.replace('replogle = "train"', 'replogle = "train"\nmine = "train"'))
    pairs = gpuload.PairedControl("gene", control="non-targeting", match=["cell_line", "source_file"])
    names: dict[str, Any] = {"gpuload": gpuload, "pairs": pairs}
    (block,) = (block for block in blocks_of(page) if "tomllib" in block.code)
    run(page, block, names)
    is_control, is_first = screen["gene"] == "non-targeting", screen["source_file"] == "screen/a.h5ad"
    line = screen["cell_line"]
    few = is_first & (line == "rpe1")
    tested = (is_first & (line == "jurkat")) | (few & screen["gene"].isin(["NUP107", "RPUSD4"]))
    validated = (~is_first & (line == "k562")) | (few & (screen["gene"] == "AARS"))
    expected = {"train": ~tested & ~validated, "val": validated, "test": tested}
    for part, wanted in expected.items():
        with gpuload.open_loader(names["paths"], where=names["where"][part], shuffle=False) as loader:
            rows = np.concatenate([batch.rows for batch in loader])
        its_lines = screen[["source_file", "cell_line"]].apply(tuple, axis=1)
        of_controls = is_control & its_lines.isin(set(its_lines[wanted & ~is_control]))
        assert rows.tolist() == np.flatnonzero((wanted & ~is_control) | of_controls).tolist(), part
    with names["train"] as train, names["test"] as test:
        for loader, part in ((train, "train"), (test, "test")):
            first = [batch.rows[: batch.rows.size // 2] for batch in loader]
            assert sorted(np.concatenate(first)) == np.flatnonzero(expected[part] & ~is_control).tolist()
        assert test.categories["gene"].tolist() == train.categories["gene"].tolist()


def run(page: str, block: Block, names: dict[str, Any]) -> None:
    """Run a block; a failure names its line in the page."""
    code = block.code
    for old, new, _ in INSTEAD.get(page, []):
        code = code.replace(old, new)
    if block.language == "text":
        for line in code.splitlines():
            assert cli.main(shlex.split(line)[1:]) == 0, f"{page}: {line}"
        return
    exec(compile("\n" * (block.line - 1) + code, str(ROOT / page), "exec"), names)


def test_replaced_code_occurs_in_the_pages() -> None:
    for page, replaced in INSTEAD.items():
        code = "\n".join(block.code for block in blocks_of(page))
        for old, _, _ in replaced:
            assert old in code, f"{page} has no {old}"
    assert GIVEN.keys() <= set(pages())
