"""`rowhaul size --budgets`: what several memory budgets would cost in quality, by short trainings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rowhaul.cli.checks import check_replaceable
from rowhaul.cli.console import bytes_text, console, plain_table, say
from rowhaul.cli.json_output import print_json
from rowhaul.cli.progress import StopOnSignal, counting_bar
from rowhaul.errors import ConfigError

if TYPE_CHECKING:
    from rowhaul.cli.run import RunOptions
    from rowhaul.sizing.trade import Probe

EXIT_INTERRUPTED = 130
PROBE_STEPS = 300
_PICTURES = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}  # and what they begin with


def try_budgets(
    options: RunOptions,
    budgets: str,
    steps: int,
    eval_data: Sequence[str],
    plot: Path | None,
    *,
    as_json: bool,
) -> None:
    """Train short probes, print what each reaches, and draw it if asked to."""
    from rowhaul._environment import keep_freed_memory
    from rowhaul._quantities import parse_bytes
    from rowhaul.cli.train import held_out_beside
    from rowhaul.sizing.trade import draw, probes

    sizes = [parse_bytes(one, "--budgets") for one in budgets.split(",")]
    if min(sizes) < 1 or steps < 1:
        raise ConfigError(
            f"--budgets {budgets} and --probe-steps {steps}: give sizes such as 4MiB,16MiB, and at least one "
            "step"
        )
    if plot is not None and plot.suffix not in _PICTURES:
        raise ConfigError(f"--plot {plot}: give a .png, .pdf or .svg file")
    if plot is not None and plot.is_dir():
        raise ConfigError(f"--plot {plot} is a folder; give the name of a file in it")
    if plot is not None and not plot.parent.is_dir():
        raise ConfigError(f"--plot {plot}: there is no folder {plot.parent}; make it first")
    if plot is not None:
        check_replaceable(plot, _PICTURES[plot.suffix], "--plot")
    config, schema = options.read_config(), options.find_schema()
    held_out = list(eval_data) or held_out_beside(options.data)
    if not held_out:
        raise ConfigError(
            "--budgets compares models on samples that they were not trained on, and there is no test/ "
            "beside the data; name some with --eval-data"
        )
    keep_freed_memory()
    choose_dim = not options.gives("model.embedding_dim")
    with StopOnSignal() as should_stop, counting_bar() as bar:
        task = bar.add_task("trying", total=1 + len(sizes), completed=-1, note="")
        found = probes(
            config, schema, options.data, held_out, sizes, steps,
            choose_dim=choose_dim, should_stop=should_stop,
            started=lambda text: bar.update(task, advance=1, note=text),
        )  # fmt: skip
        bar.update(task, advance=1, note="")
    if len(found) < 1 + len(sizes):
        say("stopped: not all budgets were tried")
        raise typer.Exit(EXIT_INTERRUPTED)
    if as_json:
        print_json({"steps": steps, "probes": list(found)})
    else:
        _print(found, steps)
    if plot is not None:  # last, for it may fail
        draw(found, plot)


def _print(found: Sequence[Probe], steps: int) -> None:
    name, best = found[0].quality
    is_auc = name == "AUC"
    table = plain_table("budget", "a row", "rows take", name, "against all", *["log loss"][:is_auc])
    for one in found:
        value = one.quality[1]
        against = f"{100 * (value - best):+.2f} points" if is_auc else f"{value / best - 1:+.2%}"
        table.add_row(
            bytes_text(one.budget) if one.budget else "all rows",
            f"{one.dim} × {one.row_dtype}",
            bytes_text(one.row_bytes),
            f"{value:.4f}",
            against if one.budget else "",
            *[f"{one.log_loss:.4f}"][:is_auc],
        )
    console.print(table)
    noise = "differences below half a point are noise" if is_auc else "small differences are noise"
    say(
        f"\nAfter {steps:,} steps each. So short a training scatters: {noise}. More steps bring more ids, "
        "and budgets fall behind a little."
    )
