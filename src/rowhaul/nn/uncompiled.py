"""Methods that `torch.compile` leaves alone: they look rows up outside PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def uncompiled(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Break graphs at a method, as `torch.compiler.disable` does, which imports the compiler at once.

    That takes a second, so it waits until something else has imported it.
    """
    disabled: list[Callable[Parameters, Result]] = []

    @wraps(method)
    def call(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        if "torch._dynamo" not in sys.modules:
            return method(*args, **options)
        if not disabled:
            disabled.append(_disabled(method))
        return disabled[0](*args, **options)

    return call


def _disabled(method: Any) -> Any:
    from torch import compiler

    return compiler.disable(method)
