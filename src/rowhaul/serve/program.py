"""`load_program`: a graph of PyTorch, from an archive without pickled objects.

`torch.export.load` unpickles what an archive says it should, which runs whatever its writer wanted. Graphs of
Rowhaul need none of that: weights are plain bytes, and the inputs that a graph was traced with are tensors,
which PyTorch also reads without running anything.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rowhaul.errors import CheckpointError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

# Objects of other classes, and compiled libraries, by where an archive has them.
_NEVER = ("data/constants/custom_obj", "data/constants/opaque_obj", "data/aotinductor/")


class _PickleError(Exception):
    """A file of an archive that would run code."""


def load_program(path: Path) -> ExportedProgram:
    """Load a graph.

    Raises:
        CheckpointError: it is no archive, or has pickled objects.
    """
    import torch

    return torch.export.load(_plain_archive(path))


def _plain_archive(path: Path) -> io.BytesIO:
    """Check all files of an archive, and put what was checked, and nothing else, into another one.

    PyTorch reads archives in two ways, neither of which is Python's: what one of them finds in a file, the
    others may not.
    """
    found = io.BytesIO()
    try:
        with zipfile.ZipFile(path) as given, zipfile.ZipFile(found, "w") as plain:
            for name in dict.fromkeys(given.namelist()):
                content = given.read(name)
                _check(name.lower(), content)  # PyTorch takes capitals for small letters
                plain.writestr(name, content)
    except _PickleError as error:
        raise CheckpointError(
            f"{path} is not opened: {error}, which can run any code; export the model again (--dense pt2)"
        ) from None
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(f"{path} is no archive of a graph: {error}; export again") from None
    found.seek(0)
    return found


def _check(name: str, content: bytes) -> None:
    if any(part in name for part in _NEVER):
        raise _PickleError(f"its {name} is an object or a library")
    if name.endswith(".json"):
        _check_json(name, content)
    elif name.endswith(".pt") and content:
        _check_tensors(name, content)


def _check_json(name: str, content: bytes) -> None:
    """Refuse a list of weights that has one to unpickle."""

    def look(entry: dict[str, Any]) -> dict[str, Any]:
        if entry.get("use_pickle", False) is not False:
            raise _PickleError(f"its {name} names a pickled object")
        return entry

    try:
        is_list = isinstance(json.loads(content, object_hook=look), dict)
    except (ValueError, RecursionError):
        is_list = False
    if not is_list:
        raise _PickleError(f"its {name} is no JSON, but may be a pickled object")


def _check_tensors(name: str, content: bytes) -> None:
    """Refuse what PyTorch would unpickle because it cannot read it otherwise."""
    import torch

    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # whatever it is, PyTorch would go on to unpickle
        raise _PickleError(f"its {name} has more than tensors ({type(error).__name__})") from None
