"""What `rowhaul` exports, and that it runs from a source tree that is not installed."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rowhaul
import rowhaul.data
from test_docs import ROOT, blocks_of

# Runs `python -m rowhaul` as if nothing were installed under that name.
UNINSTALLED = """
import importlib.metadata, runpy
found = importlib.metadata.Distribution.from_name.__func__
def hidden(cls, name):
    if name == "rowhaul":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(cls, name)
importlib.metadata.Distribution.from_name = classmethod(hidden)
runpy.run_module("rowhaul", run_name="__main__")
"""


def run_uninstalled(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", UNINSTALLED, *map(str, arguments)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", [rowhaul, rowhaul.data], ids=lambda package: package.__name__)
def test_lazy_exports_exist_and_have_types(package):
    for name in package.__all__:
        assert getattr(package, name) is not None
    (typed,) = [
        node
        for node in ast.parse(Path(package.__file__).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    assert sorted(alias.asname for node in typed.body for alias in node.names) == package.__all__


def test_the_reference_has_what_can_be_imported():
    named = re.findall(r'"(rowhaul[.][\w.]+)"', (ROOT / "release" / "site.py").read_text())
    listed = {one.rpartition(".")[2]: one for one in named}
    public = {name: getattr(rowhaul, name) for name in rowhaul.__all__}
    for name, value in public.items():
        if not inspect.ismodule(value) and name != "RowhaulError":
            assert listed.get(name) == f"{value.__module__}.{name}"


def pages():
    return ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


def test_snippets_import_public_names_only():
    for page in pages():
        for language, text, *_ in blocks_of(page):
            for node in ast.walk(ast.parse(text)) if language == "python" else ():
                if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "rowhaul":
                    assert node.module.count(".") <= 1, f"{page} imports from {node.module}"
                    package = __import__(node.module, fromlist=["x"])
                    for alias in node.names:
                        assert alias.name in package.__all__, f"{page}: {node.module}.{alias.name}"
                if isinstance(node, ast.Import):
                    assert all(not alias.name.startswith("rowhaul.") for alias in node.names), page


def test_the_version_is_the_same_without_an_installation():
    assert run_uninstalled("--version").strip() == rowhaul.__version__
    assert "Train recommendation models" in run_uninstalled("--help")


def test_data_are_written_without_an_installation(tmp_path):
    run_uninstalled("generate", "--rows", "100", "--out", tmp_path / "logs")
    manifest = json.loads((tmp_path / "logs" / "manifest.json").read_text())
    assert manifest["rowhaul"] == rowhaul.__version__


@pytest.mark.slow
def test_the_doctor_needs_no_installation():
    found = {check["name"]: check for check in json.loads(run_uninstalled("doctor", "--json"))}
    assert found["Python"]["status"] == found["packages"]["status"] == "ok"
    assert f"rowhaul {rowhaul.__version__}" in found["packages"]["detail"]
    assert "torch" in found["packages"]["detail"]
