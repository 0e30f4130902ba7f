"""Checks of options before the work begins, for several commands."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rowhaul.errors import ConfigError

PAGE, TRACE = b"<!doctype html", b'{"traceEvents"'  # what pages and traces begin with
REDIS = ("redis://", "rediss://", "unix://")
_OUTPUTS = ("--out", "--to", "--trace", "--plot")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
# Of these commands `ckpt` writes to URLs, and `train` says which option takes them.
_KNOW_URLS = ("ckpt", "train")


def options_in(arguments: Sequence[str], names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the options of some names on a command line, with their values."""
    found = []
    for one, following in pairwise([*arguments, "--"]):
        name, is_given, value = one.partition("=")
        if name in names:
            found.append((name, value if is_given else following))
    return found


def refuse_urls(arguments: Sequence[str]) -> None:
    """Refuse a URL where a command line names what to write here: as a path, it would be a folder ``s3:``."""
    command = next((one for one in arguments if not one.startswith("-")), "")
    if command in _KNOW_URLS:
        return
    for name, value in options_in(arguments, _OUTPUTS):
        if _URL.match(value) and not (command == "export" and value.startswith(REDIS)):
            raise ConfigError(
                f"{name} {value} is a URL, but {command} writes to this machine: name a path, and copy what "
                "is written there"
            )


def feature_names(given: str) -> list[str]:
    """Return the id columns that a comma-separated ``--features`` names."""
    names = [name.strip() for name in given.split(",")]
    if not all(names):
        raise ConfigError(
            f"--features {given!r} has an empty name; name the id columns, as in --features user,item"
        )
    return names


def refuse_unused(given: Mapping[str, Any], why: str) -> None:
    """Refuse options that were given (not None, not empty) though the command would not look at them."""
    for name, value in given.items():
        if value is not None and value != []:
            raise ConfigError(f"{name} {why}")


def check_replaceable(path: Path, begins: bytes, option: str) -> None:
    """Refuse to replace what is not an earlier result: a file that begins otherwise, or no file at all."""
    if not path.exists():
        return
    if not path.is_file():
        raise ConfigError(f"{option} {path} is not a regular file, so it is not replaced; name another file")
    with path.open("rb") as file:
        start = file.read(len(begins))
    if start and start.lower() != begins.lower():
        raise ConfigError(
            f"{option} {path} exists and is something else than this command writes; name another file, or "
            "remove that one"
        )
