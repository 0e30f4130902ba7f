"""Kernels of a card run on it where there is one, and through Triton's interpreter elsewhere."""

import os
import threading
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def one_kernel_at_a_time(monkeypatch):
    """Threads take turns: Triton's interpreter knows of one grid, and parsing is not safe in several."""
    from triton.runtime import interpreter

    turn = threading.RLock()

    def in_turn(call):
        def wait(*arguments, **options):
            with turn:
                return call(*arguments, **options)

        return wait

    for owner, name in ((interpreter.GridExecutor, "__call__"), (interpreter.InterpretedFunction, "rewrite")):
        monkeypatch.setattr(owner, name, in_turn(getattr(owner, name)))
