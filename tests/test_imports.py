"""The import table: which package may know which. Nothing imports to its left except as it says."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rowhaul

SOURCE = Path(rowhaul.__file__).parent
# Known to all; know nothing themselves.
SHARED = {"errors", "__version__", *(path.stem for path in SOURCE.glob("_[a-z]*.py"))}

ARRAYS = {"numpy", "numba", "xxhash"}
# What each room may import: other rooms, then third parties. The core comes first, features after it.
TABLE = {
    "data": (set(), {*ARRAYS, "pyarrow", "yaml", "redis"}),
    "optim": (set(), ARRAYS),
    "schedule": (set(), ARRAYS),
    "simulate": ({"schedule"}, {"numpy", "matplotlib"}),
    "store": ({"optim"}, ARRAYS),
    "checkpoint": ({"store"}, {*ARRAYS, "torch", "fsspec"}),
    "nn": ({"data", "optim", "store"}, {"numpy", "torch"}),
    "device": ({"nn", "optim", "store", "schedule", "runtime"}, {"numpy", "torch", "triton"}),
    "transport": ({"schedule"}, {"numpy", "torch"}),
    "planning": ({"schedule", "transport", "data"}, ARRAYS),
    "runtime": (
        {"planning", "transport", "schedule", "store", "optim", "nn", "data"},
        {*ARRAYS, "torch"},
    ),
    "cluster": ({"transport", "schedule"}, {"numpy", "torch", "psutil"}),
    "database": ({"store", "optim", "transport", "checkpoint", "data"}, {*ARRAYS, "torch"}),
    "pruning": (
        {"budget", "store", "optim", "schedule", "nn", "runtime", "transport", "checkpoint", "train"},
        {*ARRAYS, "torch", "safetensors"},
    ),
    "budget": (
        {"store", "optim", "schedule", "nn", "runtime", "transport", "checkpoint", "train"},
        {*ARRAYS, "torch", "safetensors"},
    ),
    "tuning": (
        {
            "schedule",
            "simulate",
            "runtime",
            "transport",
            "cluster",
            "data",
            "nn",
            "store",
            "train",
            "pruning",
        },
        {"numpy", "torch"},
    ),
    "explain": ({"schedule", "transport", "runtime"}, ARRAYS),
    "report": ({"explain"}, {"matplotlib", "yaml"}),
    "monitoring": ({"schedule"}, {"numpy", "prometheus_client"}),
    "train": (
        {
            *("data", "nn", "optim", "store", "checkpoint", "schedule", "planning", "runtime", "transport"),
            *("cluster", "tuning", "pruning", "budget", "export", "simulate", "monitoring", "explain"),
            "publishing",
        },
        {*ARRAYS, "torch", "pyarrow", "yaml", "psutil"},
    ),
    "advising": (
        {"cluster", "data", "runtime", "schedule", "simulate", "train"},
        {"numpy", "torch", "matplotlib"},
    ),
    "export": (
        {"checkpoint", "store", "data", "train", "nn", "serve"},
        {*ARRAYS, "torch", "pyarrow", "safetensors", "redis"},
    ),
    "publishing": (
        {"checkpoint", "store", "data", "train", "nn", "export", "serve"},
        {*ARRAYS, "torch", "onnx", "safetensors"},
    ),
    "retrieval": ({"data", "nn", "store", "train"}, {"numpy", "torch", "pyarrow", "faiss"}),
    "serve": (
        {"data", "store"},
        {
            *(*ARRAYS, "torch", "pyarrow", "safetensors", "prometheus_client"),
            *("fastapi", "starlette", "uvicorn", "onnxruntime"),
        },
    ),
    "sizing": (
        {
            "data",
            "nn",
            "optim",
            "store",
            "schedule",
            "runtime",
            "checkpoint",
            "tuning",
            "train",
            "pruning",
            "budget",
        },
        {"numpy", "torch", "matplotlib"},
    ),
    "verify": (
        {"checkpoint", "cluster", "data", "nn", "runtime", "schedule", "store", "train", "tuning"},
        {"numpy", "torch"},
    ),
    "cli": (
        {
            *("data", "nn", "optim", "store", "checkpoint", "train", "schedule", "simulate", "cluster"),
            *(
                "transport",
                "runtime",
                "pruning",
                "budget",
                "export",
                "serve",
                "sizing",
                "verify",
                "monitoring",
                "advising",
                "tuning",
                "explain",
                "report",
                "retrieval",
            ),
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
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=200
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
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=200
    )
    assert done.stdout.splitlines()[-1] == "0 False"


def test_every_public_name_exists():
    assert all(getattr(rowhaul, name) is not None for name in rowhaul.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        rowhaul.nonsense  # noqa: B018  # raises
