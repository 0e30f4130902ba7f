"""`rowhaul generate`: a synthetic log shaped like a real data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from rowhaul.cli.console import console, say, typed
from rowhaul.cli.json_output import AS_JSON, print_json
from rowhaul.cli.progress import exit_when_interrupted, progress_bar
from rowhaul.errors import ConfigError

_MOST_ROWS = 1 << 40


def generate(
    preset: str = typer.Option(
        "criteo", help="criteo, criteo-tb, criteo-search, avazu, movielens or taobao."
    ),
    rows: str = typer.Option("1_000_000", help="Samples to generate, e.g. 1_000_000."),
    out: Path = typer.Option(..., "--out", help="Data folder to write; with --raw, the raw log."),
    seed: int = typer.Option(0, help="Another seed makes another log."),
    test_share: float | None = typer.Option(
        None, help="Share of the rows, the last ones, to put into test/; default 0.1."
    ),
    rare_signal: bool = typer.Option(
        False, "--rare-signal", help="Rare ids say as much about the label as popular ones."
    ),
    conversions: bool = typer.Option(
        False, "--conversions", help="A second label, conversion, known only after a click."
    ),
    raw: bool = typer.Option(False, "--raw", help="Write the data set's own text format (.gz to compress)."),
    overwrite: bool = typer.Option(False, help="Replace --out if it is complete."),
    as_json: bool = AS_JSON,
) -> None:
    """Generate a click log: skewed ids that co-occur, labels that can be learned."""
    try:
        num_rows = int(rows)
    except ValueError:
        raise ConfigError(f"--rows must be a whole number such as 1_000_000, got {rows!r}") from None
    check_rows(num_rows)
    if raw:
        if conversions:
            raise ConfigError(
                "--raw writes the data set's own format, which has no conversions; leave out one"
            )
        if test_share is not None or overwrite:
            raise ConfigError("--raw writes one new log: it takes neither --test-share nor --overwrite")
        from rowhaul.data.generate import LogGenerator, write_raw

        with exit_when_interrupted("nothing was kept"), console.status(f"generating {num_rows:,} rows"):
            write_raw(LogGenerator(preset, num_rows, seed, rare_signal=rare_signal), out)
        if as_json:
            print_json({"out": out, "rows": num_rows})
        else:
            say(f"{num_rows:,} rows in {out}")
        return
    share = 0.1 if test_share is None else test_share
    facts = generate_with_progress(
        preset, num_rows, seed, out, share, overwrite, rare_signal=rare_signal, conversions=conversions
    )
    if as_json:
        print_json({"out": out, "rows": num_rows, **facts})
        return
    say(
        f"{num_rows:,} rows in {out}: base rate {facts['base_rate']:.3f}, "
        f"best possible AUC {facts['auc']:.4f}\n"
        f"Next: rowhaul train --data {typed(out / '*.parquet')} --out run/"
    )


def check_rows(rows: int) -> None:
    """Refuse to generate nothing, or more than any disk holds."""
    if not 1 <= rows <= _MOST_ROWS:
        raise ConfigError(f"--rows must be from 1 to {_MOST_ROWS:,}, got {rows:,}")


def generate_with_progress(
    preset: str,
    rows: int,
    seed: int,
    out: Path,
    test_share: float,
    overwrite: bool = False,
    *,
    rare_signal: bool = False,
    conversions: bool = False,
) -> dict[str, Any]:
    """Write a generated data folder under a progress bar; returns what is known of its labels."""
    from rowhaul.data.generate.folder import generate_folder

    with progress_bar("generating", "run the same command again to continue", total=rows) as progress:
        return generate_folder(
            preset,
            rows,
            out,
            seed=seed,
            rare_signal=rare_signal,
            conversions=conversions,
            test_share=test_share,
            overwrite=overwrite,
            progress=lambda done, share: progress(done, rows),
        )
