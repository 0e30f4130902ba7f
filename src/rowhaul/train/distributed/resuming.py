"""A run that resumes, maybe on another cluster: from where, what no longer fits, and what has changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rowhaul._activity import Activity, doing
from rowhaul.checkpoint import Place
from rowhaul.cluster.cluster import Cluster
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.distributed import checkpointing
from rowhaul.train.run_folder import NOTHING_SAVED, check_same_run, is_empty
from rowhaul.train.trainer import Trainer


def find_saved(
    cluster: Cluster, trainer: Trainer, checkpoints: Place | None, folder: Path | None
) -> tuple[checkpointing.Saved | None, list[str]]:
    """Return what a run resumes from, if it has saved anything, and what is to be noted; collective.

    Raises:
        ConfigError: the folder holds another run, or the checkpoints of this one are elsewhere.
    """
    saved = None
    if checkpoints is not None:
        with doing(Activity.LOADING):
            saved = checkpointing.find(cluster, checkpoints, trainer)
    if saved is not None:
        trainer.recall_evaluations(saved.reader.facts)
    # torchrun repeats one command when it restarts ranks: --resume may find nothing yet.
    elif folder is None or is_empty(folder):
        return None, []
    if cluster.rank == 0:
        path = saved.chosen.path if saved is not None else None
        check_same_run(folder, path, trainer.config, trainer.schema)
    return saved, [NOTHING_SAVED] if saved is None else saved.chosen.notes


def fit_to_workers(settings: ClusterConfig, num_workers: int) -> tuple[ClusterConfig, list[str]]:
    """Drop settings that name each worker where there are more or fewer workers now; say which.

    torchrun repeats one command when it goes on with fewer machines: nobody is there to correct it.
    """
    given = {"shares": settings.shares, "links": settings.links}
    unfit = [name for name, text in given.items() if num_named(text) not in (None, num_workers)]
    changes: dict[str, Any] = dict.fromkeys(unfit, "equal")
    return replace(settings, **changes), [
        f"cluster.{name} {given[name]} is not for {num_workers} workers: equal from now on" for name in unfit
    ]


def num_named(given: str) -> int | None:
    """Count the workers that a list such as ``2,1,1`` or ``50mbit*4,5mbit*4`` names; None: it is for all."""
    if "," not in given and "*" not in given:
        return None
    times = (item.partition("*")[2].strip() for item in given.split(","))
    return sum(int(one) if one.isdecimal() else 1 for one in times)


def what_changed(differences: Sequence[str]) -> str:
    """Say that the run goes on with the same model, but not with the same bits."""
    return (
        "resumed under other conditions than it was saved under, so rows were spread anew; the model is the "
        "same but for rounding. What differs: " + "; ".join(differences)
    )
