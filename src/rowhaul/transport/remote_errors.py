"""Sends an error to another process, which raises one of the same class.

Without pickle: only Python's own and Rowhaul's classes are looked up, and only the message and plain
attributes are sent.
"""

from __future__ import annotations

import contextlib
import json
from importlib import import_module
from typing import Any


def write_report(error: BaseException, rank: int) -> bytes:
    """Encode an error, so that another process can raise one of the same class and message."""
    plain = str | int | float | bool | None
    args = list(error.args) if all(isinstance(arg, plain) for arg in error.args) else [str(error)]
    attributes = {name: value for name, value in vars(error).items() if isinstance(value, plain)}
    kinds = [(kind.__module__, kind.__qualname__) for kind in type(error).__mro__]
    report = {"rank": rank, "kinds": kinds, "text": str(error), "args": args, "attributes": attributes}
    return json.dumps(report).encode()


def read_report(text: bytes, what: str = "plans for this host") -> Exception:
    """Rebuild an error: of its class, or of the nearest base class that gives the same message.

    Args:
        text: the report.
        what: its rank does, for a note.
    """
    report = json.loads(text)
    error = _rebuilt(report)
    error.add_note(f"(on rank {report['rank']}, which {what})")
    return error


def _rebuilt(report: dict[str, Any]) -> Exception:
    for module, name in report["kinds"]:
        kind = _find(module, name)
        if kind is None:
            continue
        for args in (report["args"], [report["text"]]):
            with contextlib.suppress(Exception):  # some, such as groups of errors, cannot be made so
                # Without its __init__, which may need other arguments than those in ``args``.
                error = kind.__new__(kind)
                error.args = tuple(args)
                vars(error).update(report["attributes"])
                if str(error) == report["text"]:
                    return error
    return RuntimeError(f"{report['kinds'][0][1]}: {report['text']}")


def _find(module: str, name: str) -> type[Exception] | None:
    if module != "builtins" and module.split(".")[0] != "rowhaul":
        return None
    kind = getattr(import_module(module), name, None)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else None
