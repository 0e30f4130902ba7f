"""When rows may be pruned: every period, and a few times before the first one has passed.

While training begins, the rows that come first take all the room, whatever they are worth. One process prunes
early when it turns rows away and twice as many are known as at the last pruning
(`rowhaul.pruning.pool.pruner`). Ranks of a cluster look at that together, ten times in the first period:
batches are read no further ahead than to where they look, so that all of them see the same.
"""

from __future__ import annotations

from rowhaul.pruning.pool import PruneSettings
from rowhaul.pruning.pool.pruner import EARLY


def next_stop(settings: PruneSettings, iteration: int) -> int:
    """The first iteration after this one before which rows may be pruned."""
    following = (iteration // settings.period + 1) * settings.period
    if iteration >= settings.period:
        return following
    step = max(1, settings.period // EARLY)
    return min((iteration // step + 1) * step, following)
