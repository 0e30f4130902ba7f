"""Kernels of a card run on it where there is one, and through Triton's interpreter elsewhere."""

import os
import threading

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined


@pytest.fixture
def one_kernel_at_a_time(monkeypatch):
    """Threads take turns: Triton's interpreter knows of one grid."""
    from triton.runtime import interpreter

    turn, call = threading.RLock(), interpreter.GridExecutor.__call__

    def in_turn(self, *arguments, **options):
        with turn:
            return call(self, *arguments, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", in_turn)
