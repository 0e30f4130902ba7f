"""`--json`, the same for all commands: one object on standard output, everything else on standard error."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import typer

from rowhaul.cli.console import console


def talk_on_stderr(as_json: bool) -> bool:
    """Leave standard output to the JSON: bars, notes and advice go to standard error."""
    console.stderr = as_json
    return as_json


AS_JSON = typer.Option(False, "--json", help="Print JSON.", callback=talk_on_stderr)


def print_json(found: Any) -> None:
    """Print dataclasses, dictionaries, lists and numbers as one line of JSON."""
    typer.echo(json.dumps(_plain(found), allow_nan=False, default=_number_or_name))


def _plain(found: Any) -> Any:
    """What JSON has a form for; a number that is none (an AUC of one class) is null."""
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        return {one.name: _plain(getattr(found, one.name)) for one in dataclasses.fields(found)}
    if isinstance(found, dict):
        return {str(name): _plain(value) for name, value in found.items()}
    if isinstance(found, list | tuple):
        return [_plain(one) for one in found]
    if isinstance(found, float) and not math.isfinite(found):
        return None
    return found


def _number_or_name(found: Any) -> Any:
    """NumPy's numbers as Python's; paths and URLs as text."""
    return found.item() if hasattr(found, "item") else str(found)
