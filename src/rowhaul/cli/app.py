"""All commands, and the one place where an error becomes a message and an exit code."""

from __future__ import annotations

import errno
import os
import sys

import typer
from rich.console import Console
from rich.markup import escape

from rowhaul import __version__, _environment
from rowhaul.cli.ckpt import ckpt
from rowhaul.cli.demo import demo
from rowhaul.cli.doctor.command import doctor
from rowhaul.cli.evaluate import evaluate, predict
from rowhaul.cli.export import export
from rowhaul.cli.generate import generate
from rowhaul.cli.netcheck import netcheck
from rowhaul.cli.plan.command import plan
from rowhaul.cli.prepare import prepare
from rowhaul.cli.progress import EXIT_INTERRUPTED, is_interruption
from rowhaul.cli.report import report
from rowhaul.cli.serve import serve
from rowhaul.cli.simulate.command import simulate
from rowhaul.cli.size.command import size
from rowhaul.cli.train import train
from rowhaul.cli.verify.command import verify
from rowhaul.cluster import is_launched
from rowhaul.errors import RowhaulError

EXIT_ERROR = 2

app = typer.Typer(
    no_args_is_help=True, invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False
)
_RUNS = (demo, generate, prepare, train, report, evaluate, predict, export, serve)
_ALL = (*_RUNS, size, plan, simulate, verify, doctor, netcheck)
for command in _ALL:
    epilog = "Every option is explained in docs/simulate.md." if command is simulate else None
    app.command(epilog=epilog)(command)
app.add_typer(ckpt, name="ckpt")


@app.callback()
def options(
    show_version: bool = typer.Option(False, "--version", is_eager=True, help="Print the version and exit."),
) -> None:
    """Train recommendation models whose embedding tables outgrow one worker, exactly."""
    if show_version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; user errors, full disks and Ctrl-C end in one clear line, no traceback."""
    _environment.set_passive_waiting()
    try:
        app()
    except RowhaulError as error:
        _fail(str(error), EXIT_ERROR)
    except (KeyboardInterrupt, SystemError) as error:
        if not is_interruption(error):
            raise
        _fail("interrupted", EXIT_INTERRUPTED)
    except OSError as error:
        reason = _explained(error)
        if reason is None:
            raise
        _fail(reason, EXIT_ERROR)


def _explained(error: OSError) -> str | None:
    """Explain a failure of the operating system that the user can fix; None for others."""
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}no space left on the disk; free some, or write elsewhere"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{where}permission denied; choose a place you can read and write"
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
        return f"{where}{(error.strerror or str(error)).lower()}"
    return None


def _fail(message: str, code: int) -> None:
    console = Console(stderr=True, soft_wrap=True, emoji=False)
    console.print(f"[bold red]error:[/] {escape(message)}", highlight=False)
    if is_launched():  # threads may be stuck in the network, and would abort an orderly exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
