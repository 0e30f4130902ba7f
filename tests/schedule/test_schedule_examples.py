"""Every example in a docstring of the scheduler and the simulator runs and prints what it says."""

import doctest
import importlib
from pathlib import Path

import pytest

import rowhaul

SOURCE = Path(rowhaul.__file__).parent
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
    for package in ("schedule", "simulate")
    for path in (SOURCE / package).rglob("*.py")
    if ">>>" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_print_what_they_say(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted
    assert not results.failed
