"""`rowhaul doctor`: is this machine ready to train, and if not, what to type?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rowhaul.cli.console import counted
from rowhaul.cli.doctor import machine
from rowhaul.cli.doctor import network as net
from rowhaul.cli.doctor.machine import Check
from rowhaul.cli.json_output import AS_JSON, print_json

_MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]FAIL[/]"}


def checks() -> list[Check]:
    """Check this machine and this installation; takes a few seconds."""
    network = functools.cache(net.Network.here)
    return [
        _run("Python", machine.check_python),
        _run("packages", machine.check_packages),
        _run("CPU", machine.check_cpu),
        _run("GPU", machine.check_gpu),
        _run("memory", machine.check_memory),
        _run("disk", lambda: machine.check_folder(Path.cwd())),
        _run("shared memory", machine.check_shared_memory),
        _run("kernel cache", machine.check_kernel_cache),
        _run("kernels", machine.check_kernel),
        _run("interfaces", lambda: net.check_interfaces(network())),
        _run("host name", lambda: net.check_hostname(network())),
        _run("Gloo", net.check_gloo),
    ]


def render(found: Sequence[Check], console: Console) -> None:
    """Show the checks as a table, each fix below its finding, and the verdict."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for check in found:
        fix = f"\n[bold]fix:[/] {escape(check.fix)}" if check.fix else ""
        table.add_row(_MARKS[check.status], check.name, escape(check.detail) + fix)
    console.print(table)
    num_failed = sum(check.status == "fail" for check in found)
    num_warned = sum(check.status == "warn" for check in found)
    if num_failed:
        console.print(f"\n[bold red]{num_failed} of {len(found)} checks failed.[/] Apply the fixes above.")
    elif num_warned:
        console.print(f"\n[green]Ready to train[/], with {counted(num_warned, 'warning')}.")
    else:
        console.print("\n[green]Ready to train.[/]")


def doctor(as_json: bool = AS_JSON) -> None:
    """Check versions, cores, memory, disk, kernels and network, and print fixes for what is wrong."""
    found = checks()
    if as_json:
        print_json(found)
    else:
        render(found, Console(emoji=False))
    if any(check.status == "fail" for check in found):
        raise typer.Exit(1)


def _run(name: str, check: Callable[[], Check]) -> Check:
    """Run a check; one that breaks, for instance because an import fails, is itself a finding."""
    try:
        return check()
    except Exception as error:
        fix = "run `pip install --force-reinstall rowhaul`, or report this line"
        return Check(name, "fail", f"{type(error).__name__}: {error}", fix)
