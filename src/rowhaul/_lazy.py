"""Names that a package exports but imports only when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(package: str, exports: Mapping[str, str]) -> tuple[list[str], Callable[[str], Any]]:
    """Make the ``__all__`` and the ``__getattr__`` of a package.

    ``exports`` lists names, separated by spaces, by the module below ``package`` that defines them. Modules
    listed under the empty string are exported themselves.
    """
    module_of = {name: module for module, names in exports.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not module_of[name]:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)

    return sorted(module_of), load
