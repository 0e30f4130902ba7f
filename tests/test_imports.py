"""The import table: which package may know which. Nothing imports to its left except as it says."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rowhaul

SOURCE = Path(rowhaul.__file__).parent
# Known to all; know nothing themselves.
SHARED = {"errors", "_distinct", "_environment", "_files", "_kernels", "_memory", "_quantities", "_vectors"}

# What each package may import: other packages of ours, then third parties.
TABLE = {
    "data": (set(), {"numpy", "pyarrow", "numba", "yaml", "xxhash"}),
    "optim": (set(), {"numpy", "numba"}),
    "schedule": (set(), {"numpy", "numba", "xxhash"}),
    "simulate": ({"schedule"}, {"numpy", "matplotlib"}),
    # checkpoint, data (its keys) and torch are for the database that is used on its own
    "store": ({"optim", "checkpoint", "data"}, {"numpy", "numba", "xxhash", "torch"}),
    "nn": ({"data", "optim", "store"}, {"numpy", "torch"}),
    "checkpoint": (set(), {"numpy", "torch", "safetensors", "xxhash"}),
    "exchange": (
        {"schedule", "store", "optim", "data", "nn", "checkpoint"},
        {"numpy", "torch", "numba", "xxhash"},
    ),
    "cluster": ({"schedule", "exchange"}, {"numpy", "torch", "psutil"}),
    "train": (
        {
            *("checkpoint", "data", "nn", "optim", "store", "cluster", "exchange", "schedule", "simulate"),
        },
        {"numpy", "torch", "pyarrow", "safetensors", "yaml", "xxhash"},
    ),
    "cli": (
        {
            *("data", "nn", "optim", "store", "checkpoint", "train", "schedule", "simulate"),
            *("cluster", "exchange"),
        },
        {"numpy", "torch", "numba", "psutil", "rich", "typer", "yaml"},
    ),
}


def imports_of(path):
    """Top-level names of everything a file imports, ours as ("rowhaul", package)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports are not used here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield tuple(name.split(".")[:2])


@pytest.mark.parametrize("package", sorted(TABLE))
def test_a_package_imports_only_what_the_table_allows(package):
    ours, others = TABLE[package]
    allowed = ours | SHARED | {package}
    for path in sorted((SOURCE / package).rglob("*.py")):
        for top, *rest in imports_of(path):
            if top == "rowhaul":
                assert rest[0] in allowed, f"{path} imports rowhaul.{rest[0]}"
            elif top not in sys.stdlib_module_names:
                assert top in others, f"{path} imports {top}"


def test_every_package_is_in_the_table():
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages == set(TABLE)


def test_importing_rowhaul_imports_nothing_heavy():
    program = (
        "import rowhaul, sys; print([m for m in ('torch', 'numba', 'pyarrow', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_preparing_data_does_without_torch(tmp_path):
    program = (
        "import sys; from rowhaul.cli import main\n"
        f"sys.argv = ['rowhaul', 'generate', '--rows', '10', '--out', '{tmp_path}/x']\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "0 False"


def test_every_public_name_exists():
    assert all(getattr(rowhaul, name) is not None for name in rowhaul.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        rowhaul.nonsense  # noqa: B018
