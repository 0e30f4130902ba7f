"""Ctrl-C in its disguises."""

from __future__ import annotations


def is_interruption(error: BaseException | None) -> bool:
    """Whether an error is Ctrl-C, or what a compiled kernel makes of it.

    A signal that arrives while a kernel runs comes out as ``SystemError: ... returned a result with an
    exception set``, caused by the `KeyboardInterrupt`.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        if not isinstance(error, SystemError):
            return False
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False
