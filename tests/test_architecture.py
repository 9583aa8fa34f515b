"""Who may import whom, one home per package, a light import, and every public name documented."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import gpuload

PACKAGE = Path(gpuload.__file__).parent
MODULES = {
    ".".join(("gpuload", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

CONTRACT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]

LAYERS = [{name.removeprefix("gpuload.") for name in layer.split(" | ")} for layer in CONTRACT["layers"]]
"""From the top down; a module imports from lower layers, or from its own part; others are for the command line only."""

CALLERS = {"cli", "lightning", "perturbation"}
"""Parts that call `open_loader`, as users do."""

APART = {"plan", "store", "backends"}
"""Parts that never import one another."""

HOMES = {
    "h5py": {"formats/hdf5.py"},
    "anndata": {"formats/obs.py"},
    "zarr": set(),  # its files are read by formats/zarr.py, which needs no library
    "pyarrow": {"formats/parquet.py"},
    "numba": {"backends/native/"},
    "llvmlite": {"backends/native/"},
    "imagecodecs": {"backends/codecs.py"},
    "torch": {"torch.py", "cli/training.py", "estimators/arrays.py", "samples/"},  # estimators calculate
    "nvidia": {"dali.py"},
    "lightning": {"lightning.py"},
    "cupy": {"backends/cuda/device.py", "estimators/arrays.py"},
    "cupyx": {"backends/cuda/device.py", "estimators/arrays.py"},
    "kvikio": {"backends/cuda/kvikio.py"},
    "obstore": {"remote/object_store.py"},
    "huggingface_hub": {"remote/hub.py"},
    "prometheus_client": {"prometheus.py"},
    "pynvml": {"cli/utilisation.py"},
    "dask": {"packing/cluster.py"},
    "distributed": {"packing/cluster.py"},
    "sqlite3": {"cache/database.py"},
    "tqdm": {"cli/"},
    "argparse": {"program.py", "cli/"},
}

HEAVY = (
    "torch",
    "cupy",
    "kvikio",
    "nvidia",
    "zarr",
    "h5py",
    "anndata",
    "numba",
    "scipy",
    "pandas",
    "imagecodecs",
    "matplotlib",
    "lightning",
    "prometheus_client",
    "pynvml",
)


@cache
def tree_of(path: Path) -> ast.Module:
    """Return a file's syntax tree; nothing changes it."""
    return ast.parse(path.read_text())


@cache
def imports(path: Path, *, with_type_checking: bool) -> set[str]:
    """Return the full names of what a file imports, at any depth of its code."""
    tree = tree_of(path)
    hidden: set[ast.AST] = set()
    if not with_type_checking:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                hidden.update(child for statement in node.body for child in ast.walk(statement))
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def part_of(module: str) -> str:
    """Return the part of the package that a full name belongs to, "" for the package itself."""
    names = module.split(".")
    is_part = len(names) > 1 and any(
        m == f"gpuload.{names[1]}" or m.startswith(f"gpuload.{names[1]}.") for m in MODULES
    )
    return names[1] if is_part else ""


def depth(part: str) -> int | None:
    return next((i for i, layer in enumerate(LAYERS) if part in layer), None)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    part = part_of(module)
    level = depth(part)
    if level is None:
        return
    for name in imports(MODULES[module], with_type_checking=False):
        other = part_of(name) if name.startswith("gpuload") else part
        if other == part:
            continue
        if not other:
            assert part in CALLERS, f"{module} imports the package's front door"
            continue
        below = depth(other)
        assert below is None or below > level, f"{module} imports {name}, which is not below it"
        assert below is not None or level == 0, f"{module} imports {name}, which only the command line may"
        assert not {part, other} <= APART or part == other, f"{module} imports {name}: they must not import each other"


@pytest.mark.parametrize("package", HOMES)
def test_each_package_has_one_home(package: str) -> None:
    for path in MODULES.values():
        if any(name.split(".")[0] == package for name in imports(path, with_type_checking=False)):
            place = path.relative_to(PACKAGE).as_posix()
            assert any(place == home or (home.endswith("/") and place.startswith(home)) for home in HOMES[package]), (
                place
            )


def test_types_and_errors_import_no_other_part() -> None:
    for name in ("errors", "types"):
        for found in imports(PACKAGE / f"{name}.py", with_type_checking=False):
            package = found.split(".")[0]
            is_error = f"{found}.".startswith("gpuload.errors.")
            assert is_error or package == "numpy" or package in sys.stdlib_module_names, found


def loaded_by(code: str) -> set[str]:
    """Return the top-level packages that some code loads in a fresh interpreter."""
    code += "\nimport sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


def test_import_is_light() -> None:
    assert not loaded_by("import gpuload") & set(HEAVY)


def test_opening_a_loader_imports_no_front(store_variant: object, plain: object) -> None:
    path = plain.path  # type: ignore[attr-defined]
    loaded = loaded_by(f"import gpuload\nwith gpuload.open_loader({str(path)!r}) as loader: list(loader)")
    unwanted = loaded & {"torch", "nvidia", "cupy", "kvikio", "matplotlib", "tqdm"}
    assert unwanted <= loaded_by("import anndata"), unwanted  # which looks for CuPy itself


def public_objects() -> dict[str, object]:
    """Return every public name of the package and the public members of its public classes."""
    found: dict[str, object] = {}
    for name in gpuload.__all__:
        value = getattr(gpuload, name)
        if name == "__version__":
            continue
        found[name] = value
        if inspect.isclass(value):
            members = {k: v for k, v in vars(value).items() if not k.startswith("_")}
            found |= {f"{name}.{k}": v for k, v in members.items() if callable(v) or isinstance(v, property)}
    return found


@pytest.mark.parametrize("name", public_objects())
def test_public_names_are_documented(name: str) -> None:
    doc = inspect.getdoc(public_objects()[name])
    assert doc, f"{name} has no docstring"
    assert doc.splitlines()[0].rstrip().endswith((".", ":"))


def test_only_public_names_are_listed() -> None:
    """As a prompt completes them; of the modules, those on the reference page that are imported."""
    page = (PACKAGE.parent / "docs" / "reference" / "index.md").read_text()
    public = set(re.findall(r"^   (\w+)\.\w+$", page, re.MULTILINE))
    assert public == set(gpuload._MODULES)
    code = "import gpuload\n{}assert all(hasattr(gpuload, name) for name in dir(gpuload))\nprint(*dir(gpuload))"
    for more, modules in (("", {"remote"}), ("import gpuload.diversity\n", {"diversity", "remote"})):
        done = subprocess.run(
            [sys.executable, "-c", code.format(more)], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == sorted({*gpuload.__all__, *modules})


@pytest.mark.parametrize("module", MODULES)
def test_modules_functions_and_classes_are_documented(module: str) -> None:
    tree = tree_of(MODULES[module])
    assert ast.get_docstring(tree), f"{module} has no docstring"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            is_signature = any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list)
            assert is_signature or ast.get_docstring(node), f"{module}.{node.name} has no docstring"


@pytest.mark.parametrize("module", MODULES)
def test_no_todos_or_bare_exceptions(module: str) -> None:
    for number, line in enumerate(MODULES[module].read_text().splitlines(), 1):
        words = ("TO" + "DO", "FIX" + "ME", "raise Exception(")
        assert not any(word in line for word in words), f"{module}:{number}: {line}"


@pytest.mark.parametrize("module", MODULES)
def test_cached_properties_are_our_own(module: str) -> None:
    """Those of functools, in Python 3.11, make threads wait for each other; see `gpuload.threads.cached_property`."""
    for node in ast.walk(tree_of(MODULES[module])):
        if isinstance(node, ast.ImportFrom) and node.module == "functools":
            assert "cached_property" not in [alias.name for alias in node.names], module


def test_errors_subclass_their_builtin_kinds() -> None:
    kinds = {
        "PlanError": ValueError,
        "StoreError": ValueError,
        "ReadError": OSError,
        "CorruptDataError": ValueError,
        "DeviceError": RuntimeError,
        "MissingDependencyError": ImportError,
    }
    for name, kind in kinds.items():
        assert issubclass(getattr(gpuload, name), kind)
        assert issubclass(getattr(gpuload, name), gpuload.GpuloadError)


@pytest.mark.parametrize(
    ("front", "package"),
    [
        ("gpuload.torch", "torch"),
        ("gpuload.samples", "torch"),
        ("gpuload.dali", "nvidia.dali"),
        ("gpuload.lightning", "lightning"),
    ],
)
def test_missing_package_of_a_front_names_the_pip_command(front: str, package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "import gpuload\n"
        f"try:\n    import {front}\n"
        "except gpuload.MissingDependencyError as error:\n    assert 'pip install' in str(error), error\n"
        "else:\n    raise SystemExit('no error')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=True, timeout=60)


def rows_of_the_map() -> list[list[str]]:
    """Return the parts of the package by row of the contributors' table."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text().partition("## Where is what?")[2].partition("\n## ")[0]
    columns = [line.split("|") for line in text.splitlines() if line.startswith("|")]
    return [re.findall(r"`(\w+)(?:\.py|/)`", where) for *_, where, _ in columns[2:]]


def test_the_map_for_contributors_is_complete() -> None:
    there = [path.stem for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "__init__.py", "py.typed")]
    assert sorted(part for row in rows_of_the_map() for part in row) == sorted(there)


def test_imports_go_down_the_map_for_contributors() -> None:
    row_of = {part: i for i, row in enumerate(rows_of_the_map()) for part in row}
    upwards = [
        (module, name)
        for module, path in MODULES.items()
        if part_of(module)
        for name in imports(path, with_type_checking=False)
        if name.startswith("gpuload.") and part_of(name) and row_of[part_of(name)] < row_of[part_of(module)]
    ]
    assert not upwards
