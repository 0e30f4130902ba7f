"""`rowhaul demo`: the first minute with a generated click log, a trained model, and what to try next."""

from __future__ import annotations

from pathlib import Path

import typer

from rowhaul.cli.console import say
from rowhaul.cli.generate import generate_with_progress
from rowhaul.cli.progress import EXIT_INTERRUPTED
from rowhaul.cli.train import held_out_beside, print_result, train_with_progress


def demo(
    rows: int = typer.Option(400_000, help="Samples to generate."),
    out: Path = typer.Option(Path("demo-run"), "--out", help="Folder for the log and the run; replaced."),
    seed: int = typer.Option(0, help="Another seed makes another log."),
) -> None:
    """Generate a Criteo-like click log, train DLRM on it, print how good it is."""
    import shutil

    from rowhaul.data.schema import SCHEMA_FILE, Schema
    from rowhaul.errors import ConfigError
    from rowhaul.train import TrainConfig

    marker = out / ".rowhaul-demo"
    if out.exists() and any(out.iterdir()) and not marker.exists():
        raise ConfigError(f"{out} exists and is not from an earlier demo; choose another --out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    marker.touch()
    say(
        f"A Criteo-like click log of {rows:,} samples, 26 id features and 13 numbers each, "
        "then DLRM in one pass over it.\n"
    )
    data, run = out / "logs", out / "run"
    bayes = generate_with_progress("criteo", rows, seed, data, test_share=0.1)
    config = TrainConfig(seed=seed)
    schema = Schema.read(data / SCHEMA_FILE)
    result = train_with_progress(config, schema, data, run, held_out_beside([str(data)]))
    say("")
    print_result(result, bayes["auc"])
    if result.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    say(
        f"\nWhat to try next (after `make demo` the program is in .venv/bin):\n"
        f"  rowhaul evaluate {run} --data '{data}/test/*.parquet'\n"
        f"  rowhaul predict  {run} --data '{data}/test/*.parquet' --out scores.parquet\n"
        f"  rowhaul export   {run} --out {out}/served --dense pt2 && rowhaul serve {out}/served\n"
        f"  rowhaul train    --data '{data}/*.parquet' --model deepfm --out {out}/deepfm\n"
        f"  rowhaul simulate '{data}/*.parquet' --workers 4 --links '1gbit*2,100mbit*2'   # on a cluster?\n"
        f"  rowhaul prepare  --format criteo train.txt.gz --out data/     # your own log: docs/data.md\n"
        f"  tensorboard --logdir {run}/tensorboard"
    )
