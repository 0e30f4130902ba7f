"""A run that resumes on another cluster than it was saved by: what no longer fits, and what has changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rowhaul.train.cluster_config import ClusterConfig


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
