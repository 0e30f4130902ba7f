"""`rowhaul demo`: the first minute with a generated click log, a trained model, and what to try next."""

from __future__ import annotations

from pathlib import Path

import typer

from rowhaul.cli.checks import refuse_unused
from rowhaul.cli.console import say, typed
from rowhaul.cli.generate import check_rows, generate_with_progress
from rowhaul.cli.json_output import AS_JSON, print_json
from rowhaul.cli.progress import EXIT_INTERRUPTED
from rowhaul.cli.train import held_out_beside, numbers_of, print_result, train_with_progress
from rowhaul.errors import ConfigError


def demo(
    rows: int | None = typer.Option(None, help="Samples to generate (default 400,000); not with --live."),
    out: Path | None = typer.Option(
        None, "--out", help="Folder for the log and the run; replaced. Default: demo-run; with --live, none."
    ),
    seed: int = typer.Option(0, help="Another seed makes another log."),
    live: bool = typer.Option(
        False, "--live", help="Learn from a stream of events, serve what is learned, and show it on a page."
    ),
    seconds: float | None = typer.Option(None, help="With --live: end after so long; default: at Ctrl-C."),
    events: int | None = typer.Option(None, help="With --live: click events a second (default 5,000)."),
    port: int | None = typer.Option(
        None, min=0, max=65535, help="With --live: of the server; default: a free one."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Generate a Criteo-like click log, train DLRM on it, print how good it is; with --live, online."""
    from rowhaul.data.schema import SCHEMA_FILE, Schema
    from rowhaul.train import TrainConfig

    if live and as_json:
        raise ConfigError(
            "--json prints how the demo ended; with --live the page shows how it goes: leave out one"
        )
    config = TrainConfig(seed=seed)  # complains before an earlier demo is removed
    if live:
        refuse_unused({"--rows": rows}, "is not for --live, which goes on until it is ended; leave out one")
        _demo_live(out, seconds or 0.0, 5_000 if events is None else events, port or 0, seed)
        return
    of_live = {"--seconds": seconds, "--events": events, "--port": port}
    refuse_unused(of_live, "is for --live; add that, or leave it out")
    rows = 400_000 if rows is None else rows
    check_rows(rows)
    out = out or Path("demo-run")
    _begin_folder(out)
    say(
        f"A Criteo-like click log of {rows:,} samples, 26 id features and 13 numbers each, "
        "then DLRM in one pass over it.\n"
    )
    data, run = out / "logs", out / "run"
    bayes = generate_with_progress("criteo", rows, seed, data, test_share=0.1)
    schema = Schema.read(data / SCHEMA_FILE)
    result = train_with_progress(config, schema, data, run, held_out_beside([str(data)]))
    if as_json:
        print_json({"out": run, "best_possible_auc": bayes["auc"], **numbers_of(result)})
    else:
        say("")
        print_result(result, bayes["auc"])
    if result.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if as_json:
        return
    run_typed, files = typed(run), typed(data / "*.parquet")
    held_out, served = typed(data / "test" / "*.parquet"), typed(out / "served")
    say(
        f"\nWhat to try next (after `make demo` the program is in .venv/bin):\n"
        f"  rowhaul evaluate {run_typed} --data {held_out}\n"
        f"  rowhaul predict  {run_typed} --data {held_out} --out scores.parquet\n"
        f"  rowhaul export   {run_typed} --out {served} --dense pt2 && rowhaul serve {served}\n"
        f"  rowhaul demo     --live                       # learn from a stream and serve it, on a page\n"
        f"  rowhaul train    --data {files} --model deepfm --out {typed(out / 'deepfm')}\n"
        f"  rowhaul simulate {files} --workers 4 --links '1gbit*2,100mbit*2'   # on a cluster?\n"
        f"  rowhaul prepare  --format criteo train.txt.gz --out data/     # your own log: docs/data.md\n"
        f"  tensorboard --logdir {typed(run / 'tensorboard')}"
    )


def _begin_folder(out: Path) -> None:
    """Empty a folder of an earlier demo, or make one."""
    import shutil

    marker = out / ".rowhaul-demo"
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; choose another --out")
    if out.exists() and any(out.iterdir()) and not marker.exists():
        raise ConfigError(f"{out} exists and is not from an earlier demo; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    marker.touch()  # before anything goes: what a removal that breaks off leaves is an earlier demo's, too
    for one in list(out.iterdir()):  # the folder itself may be the working directory, a link or a mount
        if one.is_dir() and not one.is_symlink():
            shutil.rmtree(one)
        elif one != marker:
            one.unlink()


def _demo_live(out: Path | None, seconds: float, events: int, port: int, seed: int) -> None:
    from rowhaul.cli.live.demo import LiveSettings, run_live
    from rowhaul.cli.serve import check_installed

    if seconds < 0 or events < 1:
        raise ConfigError(f"--seconds must be at least 0 and --events at least 1, got {seconds:g}, {events}")
    check_installed()
    if out is not None:
        _begin_folder(out)
    run_live(LiveSettings(seconds=seconds, events_per_second=events, port=port, seed=seed), out)
    if out is not None:
        say(f"Everything is left in {out}.")
