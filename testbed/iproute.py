"""Runs ``ip`` and ``tc``, many lines in one process: a network of nine ranks comes up in a moment."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

from testbed.errors import TestbedError

COMMAND_TIMEOUT_SECONDS = 60


def ip_batch(lines: Iterable[str], namespace: str | None = None) -> None:
    """Run lines of ``ip`` in a namespace (without one: in the caller's) until one fails."""
    _run(_tool("ip", namespace, "-batch", "-"), "\n".join(lines))


def tc_batch(lines: Iterable[str], namespace: str) -> None:
    """Run lines of ``tc`` in a namespace until one fails."""
    _run(_tool("tc", namespace, "-batch", "-"), "\n".join(lines))


def ip_json(namespace: str, *arguments: str) -> Any:
    """What ``ip -json`` says in a namespace."""
    return json.loads(_run(_tool("ip", namespace, "-json", *arguments)) or "[]")


def inside(namespace: str, command: Sequence[str]) -> list[str]:
    """The command line that runs a command in a namespace."""
    return ["ip", "netns", "exec", namespace, *command]


def run_inside(namespace: str, command: Sequence[str]) -> str:
    """Run a short command in a namespace; returns what it prints."""
    return _run(inside(namespace, command))


def _tool(tool: str, namespace: str | None, *arguments: str) -> list[str]:
    return [tool, *(["-netns", namespace] if namespace else []), *arguments]


def _run(command: Sequence[str], given: str = "") -> str:
    done = subprocess.run(
        command,
        input=given,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_SECONDS,
        start_new_session=True,  # Ctrl-C is for us: it must not cut the cleaning up short
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise TestbedError(f"`{' '.join(command)}` failed: {said}{_failed_line(said, given)}")
    return done.stdout


def _failed_line(said: str, given: str) -> str:
    """The line of a batch that an error names by its number ("Command failed -:3")."""
    number = said.rpartition("-:")[2].split()[0] if "-:" in said else ""
    lines = given.splitlines()
    return f" ({lines[int(number) - 1]})" if number.isdecimal() and int(number) <= len(lines) else ""
