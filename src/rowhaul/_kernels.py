"""The one way integer and row kernels are compiled: numba, cached on disk, without the GIL.

Numba raises when it finds no writable place for its cache, and again when the disk fills up while
it saves. A read-only installation should still train, only with a slower start, so here the cache
is dropped with a warning instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numba


def kernel(function: Callable[..., Any]) -> Any:
    """Compile ``function`` on first call; callable from Python and from other kernels."""
    try:
        compiled = numba.njit(function, cache=True, nogil=True, error_model="numpy")
    except RuntimeError as error:  # "cannot cache function ...: no locator available"
        _warn_without_cache(error)
        return numba.njit(function, nogil=True, error_model="numpy")
    _tolerate_failing_saves(compiled)
    return compiled


def _tolerate_failing_saves(compiled: Any) -> None:
    cache = compiled._cache
    save = cache.save_overload

    def save_if_possible(signature: Any, result: Any) -> None:
        try:
            save(signature, result)
        except OSError as error:
            _warn_without_cache(error)

    cache.save_overload = save_if_possible


def _warn_without_cache(error: Exception) -> None:
    warnings.warn(
        f"the kernel cache cannot be written ({error}); kernels are compiled anew in every process. "
        "Set NUMBA_CACHE_DIR to a folder you can write to.",
        RuntimeWarning,
        stacklevel=3,
    )
