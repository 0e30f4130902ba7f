"""An error as text for another process, and an error of the same kind made from it there.

Not pickled: only classes that every process has, Python's own and Rowhaul's, are looked up, and nothing
but their message and plain attributes travels.
"""

from __future__ import annotations

import contextlib
import json
from importlib import import_module
from typing import Any


def write_report(error: BaseException, rank: int) -> bytes:
    """What another process needs to raise the same kind of error, with the same message."""
    plain = str | int | float | bool | None
    args = list(error.args) if all(isinstance(arg, plain) for arg in error.args) else [str(error)]
    attributes = {name: value for name, value in vars(error).items() if isinstance(value, plain)}
    kinds = [(kind.__module__, kind.__qualname__) for kind in type(error).__mro__]
    report = {"rank": rank, "kinds": kinds, "text": str(error), "args": args, "attributes": attributes}
    return json.dumps(report).encode()


def read_report(text: bytes) -> Exception:
    """The error of a report: of its class, or of the nearest of its bases that can say the same."""
    report = json.loads(text)
    error = _rebuilt(report)
    error.add_note(f"(on rank {report['rank']}, which plans for this host)")
    return error


def _rebuilt(report: dict[str, Any]) -> Exception:
    for module, name in report["kinds"]:
        kind = _find(module, name)
        if kind is None:
            continue
        for args in (report["args"], [report["text"]]):
            # Past its own __init__, which may ask for other things than those it keeps as ``args``.
            error = kind.__new__(kind)
            error.args = tuple(args)
            vars(error).update(report["attributes"])
            with contextlib.suppress(Exception):
                if str(error) == report["text"]:
                    return error
    return RuntimeError(f"{report['kinds'][0][1]}: {report['text']}")


def _find(module: str, name: str) -> type[Exception] | None:
    if module != "builtins" and module.split(".")[0] != "rowhaul":
        return None
    kind = getattr(import_module(module), name, None)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else None
