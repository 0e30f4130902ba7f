"""Arrays that kernels make and then follow by address are not freed before the last use of the address."""

import ast
from pathlib import Path

import numba
import numpy as np

import rowhaul
from rowhaul._memory import data_address, keep_alive

SOURCE = Path(rowhaul.__file__).parent


@numba.njit
def two_addresses(length: int) -> tuple[int, int]:
    first = np.empty(length, np.float32)
    first_at = data_address(first)
    second = np.empty(length, np.float32)  # would take the place of the first
    second_at = data_address(second)
    keep_alive(first)
    keep_alive(second)
    return first_at, second_at


def test_an_array_that_is_kept_alive_keeps_its_place() -> None:
    first, second = two_addresses(33)
    assert abs(first - second) >= 33 * 4


def calls(function: ast.FunctionDef, name: str) -> set[str]:
    """The variables that a function passes to ``name``."""
    return {
        node.args[0].id
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        if isinstance(node.args[0], ast.Name)
    }


def test_every_kernel_keeps_the_arrays_it_follows_by_address() -> None:
    followed, forgotten = 0, []
    for path in SOURCE.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            arguments = {argument.arg for argument in function.args.args}
            own = calls(function, "data_address") - arguments
            followed += len(own)
            forgotten += [
                f"{path.relative_to(SOURCE)}: {function.name} frees {name} while it follows its address"
                for name in sorted(own - calls(function, "keep_alive"))
            ]
    assert not forgotten
    assert followed
