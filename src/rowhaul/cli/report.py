"""`rowhaul report`: a page about a run, and a trace of some of its iterations."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from rowhaul.cli.checks import PAGE, TRACE, check_replaceable
from rowhaul.cli.console import bytes_text, say
from rowhaul.cli.json_output import AS_JSON, print_json
from rowhaul.errors import ConfigError


def report(
    run: Path = typer.Argument(..., help="Folder of the run: the --out of `rowhaul train`."),
    out: Path | None = typer.Option(
        None, "--out", help="The page to write, or an earlier one; default: report.html in the run."
    ),
    trace: Path | None = typer.Option(
        None, "--trace", help="Also write some iterations as a trace for ui.perfetto.dev."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Write one self-contained page about a run: summary, plots, a timeline, what moved and why."""
    from rowhaul.report.page import render
    from rowhaul.report.reading import read_run
    from rowhaul.report.trace import trace_events
    from rowhaul.report.words import missing, sentences

    record, page = read_run(run), out or run / "report.html"
    _check(page)
    check_replaceable(page, PAGE, "--out")
    files = {page: render(record)}
    if trace is not None:
        if record.timeline is None:
            raise ConfigError(
                f"{run} has no timeline to write to {trace}: train on several workers with --explain, for "
                "more than a few steps, or leave out --trace"
            )
        _check(trace)
        check_replaceable(trace, TRACE, "--trace")
        if os.path.realpath(trace) == os.path.realpath(page):
            raise ConfigError(f"--out and --trace name the same file, {trace}; name one file for each")
        files[trace] = trace_events(record.timeline)
    for path, text in files.items():
        _write(path, text)
    lines = [*sentences(record)[:2], *missing(record)]
    if as_json:
        sizes = {str(path): len(text.encode()) for path, text in files.items()}
        print_json({"files": sizes, "summary": lines})
        return
    for line in lines:
        say(line)
    for path, text in files.items():
        say(f"{path}: {bytes_text(len(text.encode()))}")


def _check(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(
            f"{path} is a folder; give the name of a file in it, such as {path / 'report.html'}"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}; make it first")


def _write(path: Path, text: str) -> None:
    from rowhaul._files import write_text

    try:
        write_text(path, text)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror or error}; choose another place"
        ) from None
