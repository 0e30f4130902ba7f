"""`python -m testbed chaos`: faults thrown at a small cluster that trains."""

from __future__ import annotations

import tempfile
from pathlib import Path

import typer

from rowhaul.errors import ConfigError
from testbed.chaos.campaign import Campaign
from testbed.chaos.faults import ALL
from testbed.chaos.table import table


def chaos(
    faults: int = typer.Option(100, min=1, help="How many faults to throw."),
    seed: int = typer.Option(0, help="Of everything that is drawn: which faults, when, at whom."),
    only: list[str] = typer.Option([], help="Only faults whose name contains this; repeatable."),
    folder: Path | None = typer.Option(None, help="Keep data and output here; temporary otherwise."),
) -> None:
    """Train on a small cluster and throw faults at it; every run must end as an undisturbed one does."""
    kinds = [kind for kind in ALL if not only or any(text in kind.name for text in only)]
    if not kinds:
        known = ", ".join(kind.name for kind in ALL)
        raise ConfigError(f"--only {' '.join(only)} names no fault; there are: {known}")
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        campaign = Campaign(folder or Path(temporary), seed, kinds, typer.echo)
        campaign.go(faults)
    typer.echo(f"\n{table(campaign.outcomes)}\n")
    same = sum(run.apart <= run.allowed for run in campaign.runs)
    typer.echo(f"{campaign.num_kept} of {len(campaign.outcomes)} faults as promised, seed {seed}")
    typer.echo(f"{same} of {len(campaign.runs)} runs ended as undisturbed ones do")
    if campaign.num_kept < len(campaign.outcomes) or same < len(campaign.runs):
        raise typer.Exit(1)
