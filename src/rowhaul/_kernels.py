"""Compiles all kernels the same way: numba, cached on disk, without the GIL.

Numba raises when it finds no writable place for its cache, and again when the disk fills up while
it saves. A read-only installation should still train, only with a slower start, so here the cache
is dropped with a warning instead.

Numba reuses a cached kernel while the kernel's own file is unchanged. But kernels inline functions and
constants of other files, so here a cached kernel is valid only while no file of this package that its module
imports, directly or not, has changed.

Numba also numbers the files of a kernel's cache, so processes that start together may save under the same
number: code for one type, labelled as another, which then reads and writes past the end of arrays, in every
later process too. Here a file is named after its contents.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import glob
import hashlib
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import IndexDataCacheFile
from numba.core.compiler_lock import global_compiler_lock

_BEGAN = time.time()  # modules with kernels are imported from now on
_num_not_cached = 0


def num_not_cached() -> int:
    """Count what this process could not save, and other processes will compile again."""
    return _num_not_cached


def kernel(function: Callable[..., Any]) -> Any:
    """Compile ``function`` on first call; callable from Python and from other kernels."""
    try:
        compiled = numba.njit(function, cache=True, nogil=True, error_model="numpy")
    except RuntimeError as error:  # "cannot cache function ...: no locator available"
        _warn_without_cache(error)
        return _without_cache(function)
    stamp, cache = _fingerprint(function.__code__.co_filename), compiled._cache
    if not stamp:
        return _without_cache(function)
    cache._cache_file = _CacheFiles(cache.cache_path, cache._impl.filename_base, stamp)
    _tolerate_failing_saves(compiled)
    _compile_once(compiled, f"{os.path.join(cache.cache_path, cache._impl.filename_base)}.lock")
    return compiled


def _without_cache(function: Callable[..., Any]) -> Any:
    global _num_not_cached
    _num_not_cached += 1
    return numba.njit(function, nogil=True, error_model="numpy")


def _compile_once(compiled: Any, lock_file: str) -> None:
    """Compile in one process at a time: the others wait, then load what it saved.

    Numba's own lock comes first, so that a process holds the file locks of one thread only; kernels call each
    other in one direction, so no two processes wait for each other.
    """
    compile_now = compiled.compile

    def compile_or_load(signature: Any) -> Any:
        with global_compiler_lock, _locked(lock_file):
            return compile_now(signature)

    compiled.compile = compile_or_load


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold a lock file; do without where the folder cannot be written."""
    try:
        lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
    except OSError:
        yield
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


class _CacheFiles(IndexDataCacheFile):  # type: ignore[misc]  # Numba's classes have no types
    """The cached files of one kernel: one per signature, without an index."""

    def __init__(self, folder: str, base: str, stamp: str) -> None:
        super().__init__(folder, base, stamp)
        self._base = os.path.join(folder, base)

    def save(self, key: Any, data: Any) -> None:
        self._save_data(self._name_of(key), data)
        for path in glob.glob(f"{glob.escape(self._base)}.*.nb[ci]"):
            if not path.startswith(f"{self._base}.{self._source_stamp}."):  # of an older source
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def load(self, key: Any) -> Any:
        try:
            return self._load_data(self._name_of(key))
        except OSError:
            return None

    def flush(self) -> None:
        for path in glob.glob(f"{glob.escape(self._base)}.*.nb[ci]"):
            os.unlink(path)

    def _name_of(self, key: Any) -> str:
        """The file name: by source, signature, machine and Numba's version."""
        digest = hashlib.blake2b(repr((self._version, key)).encode(), digest_size=16).hexdigest()
        return f"{self._base}.{self._source_stamp}.{digest}.nbc"


_PACKAGE = Path(__file__).parent
_IMPORT = re.compile(r"^\s*(?:from|import) rowhaul\.?([\w.]*)(?: import (?:\(([^)]*)\)|(.*)))?", re.MULTILINE)


@functools.cache
def _fingerprint(path: str) -> str:
    """Hash a file and all files of this package that it imports.

    Empty if one of them has changed since this process began: it may have imported an older text.
    """
    files = {Path(path)}
    unread = set(files)
    while unread:
        found = set().union(*map(_imported_files, unread))
        unread = found - files
        files |= found
    if any(file.stat().st_mtime > _BEGAN for file in files):
        return ""
    contents = b"".join(hashlib.blake2b(file.read_bytes()).digest() for file in sorted(files))
    return hashlib.blake2b(contents, digest_size=16).hexdigest()


@functools.cache
def _imported_files(path: Path) -> frozenset[Path]:
    """The modules of this package that a file imports; a name may be a module of the package it is from."""
    files = []
    for module, several, one in _IMPORT.findall(path.read_text(encoding="utf-8")):
        base = _PACKAGE.joinpath(*filter(None, module.split(".")))
        files.append(base.with_suffix(".py"))
        for name in (several or one).split(","):
            files.append(base / f"{name.split()[0] if name.split() else '__init__'}.py")
    return frozenset(file for file in files if file.is_file())


def _tolerate_failing_saves(compiled: Any) -> None:
    cache = compiled._cache
    save = cache.save_overload

    def save_if_possible(signature: Any, result: Any) -> None:
        try:
            save(signature, result)
        except OSError as error:
            global _num_not_cached
            _num_not_cached += 1
            _warn_without_cache(error)

    cache.save_overload = save_if_possible


def _warn_without_cache(error: Exception) -> None:
    warnings.warn(
        f"the kernel cache cannot be written ({error}); every process compiles its kernels again. "
        "Set NUMBA_CACHE_DIR to a folder you can write to.",
        RuntimeWarning,
        stacklevel=3,
    )
