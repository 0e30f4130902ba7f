"""All commands, and the one place where an error becomes a message and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from rowhaul import __version__, _environment
from rowhaul.cli.checks import options_in, refuse_urls
from rowhaul.cli.ckpt import ckpt
from rowhaul.cli.demo import demo
from rowhaul.cli.doctor.command import doctor
from rowhaul.cli.evaluate import evaluate, predict
from rowhaul.cli.export import export
from rowhaul.cli.generate import generate
from rowhaul.cli.index import index
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
from rowhaul.cluster.place import EXIT_PEER_ENDED, launcher_tells
from rowhaul.errors import ConfigError, RankLostError, RowhaulError

EXIT_ERROR = 2
_SHOWN = 60  # characters of a name that is too long
_PATHS = (
    *("--data", "--eval-data", "--schema", "--out", "--to"),
    *("--checkpoints", "--publish", "--log-folder", "--secret-file"),
)

# What people want to do, and the commands for it.
_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Data": (generate, prepare),
    "Train": (demo, train, evaluate, predict),
    "Cluster": (plan, simulate, size, verify, netcheck),
    "Look inside": (report, doctor),
    "Serve": (export, serve, index),
}
_EPILOGS: dict[Callable[..., None], str] = {simulate: "Every option is explained in docs/simulate.md."}

app = typer.Typer(no_args_is_help=True, invoke_without_command=True, pretty_exceptions_enable=False)
for panel, commands in _PANELS.items():
    for command in commands:
        app.command(epilog=_EPILOGS.get(command), rich_help_panel=panel)(command)
    if panel == "Look inside":
        app.add_typer(ckpt, name="ckpt", rich_help_panel=panel)

_ClickError: type[Exception] = typer.BadParameter.__mro__[2]  # of click, or of the copy that typer brings


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
    _environment.collect_garbage_less_often()
    sys.argv[1:] = map(_with_home, sys.argv[1:])
    try:
        _refuse_empty(sys.argv[1:])
        refuse_urls(sys.argv[1:])
        code = app(prog_name="rowhaul", standalone_mode=False)  # so that all errors look the same
    except _ClickError as error:
        _fail_usage(error)
    except RowhaulError as error:
        if isinstance(error, RankLostError) and launcher_tells(error):
            _exit(EXIT_PEER_ENDED)
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
    else:
        sys.exit(code or 0)


def _with_home(argument: str) -> str:
    """Expand ``--out=~/run``, which shells leave as it is, where they expand ``--out ~/run``."""
    name, _, value = argument.partition("=")
    is_home = name.startswith("--") and value.startswith("~")
    return f"{name}={os.path.expanduser(value)}" if is_home else argument


def _refuse_empty(arguments: Sequence[str]) -> None:
    """Refuse an empty path, the current folder or none at all: a variable of the shell is not set."""
    for name, value in options_in(arguments, _PATHS):
        if value == "":
            raise ConfigError(
                f"{name} is empty; name a path (the current folder is .), or leave it out; perhaps a "
                "variable of the shell is not set"
            )


def _fail_usage(error: Any) -> None:
    """Say what is wrong with the options; without any, the help has been asked for."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(error.exit_code)
    context = getattr(error, "ctx", None)
    hint = f" (see `{context.command_path} --help`)" if context is not None else ""
    message = error.format_message().rstrip(".")
    if "unexpected extra argument" in message and options_in(sys.argv[1:], ("--data",)):
        message += (
            "; a pattern needs quotes, --data 'logs/*.parquet', and each of several files its own --data"
        )
    _fail(f"{message}{hint}", error.exit_code)


def _explained(error: OSError) -> str | None:
    """Explain a failure of the operating system that the user can fix; None for others."""
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}no space left on the disk; free some, or write elsewhere"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{where}permission denied; choose a place you can read and write"
    if error.errno == errno.ENOTDIR and error.filename:
        above = [Path(error.filename), *Path(error.filename).parents]
        file = next((one for one in above if one.is_file()), above[0])
        return f"{where}{file} is a file, not a folder; choose another place"
    if error.errno == errno.EISDIR and error.filename:
        return f"{error.filename} is a folder, but a file is needed here"
    if error.errno == errno.ENAMETOOLONG:
        return (
            f"{where[:_SHOWN]}… is too long for a name; if these are several files, give each its own --data"
        )
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
        return f"{where}{(error.strerror or str(error)).lower()}"
    return None


def _fail(message: str, code: int) -> None:
    console = Console(stderr=True, soft_wrap=True, emoji=False)
    console.print(f"[bold red]error:[/] {escape(message)}", highlight=False)
    _exit(code)


def _exit(code: int) -> None:
    if is_launched():  # threads may be stuck in the network, and would abort an orderly exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
