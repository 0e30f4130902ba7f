"""When rows may be pruned: every period, and a few times before the first one has passed.

While training begins, the rows that come first take all the room, whatever they are worth. So ten times in
the first period rows are pruned early, if some are turned away and twice as many are known as at the last
pruning. A cluster reads batches no further ahead than to the next such step.
"""

from __future__ import annotations

from rowhaul.pruning.settings import PruneSettings

EARLY = 10


def next_stop(settings: PruneSettings, iteration: int) -> int:
    """The first iteration after this one before which rows may be pruned."""
    following = (iteration // settings.period + 1) * settings.period
    if iteration >= settings.period:
        return following
    step = max(1, settings.period // EARLY)
    return min((iteration // step + 1) * step, following)


def is_stop(settings: PruneSettings, iteration: int) -> bool:
    """Whether rows may be pruned before this iteration."""
    return next_stop(settings, iteration - 1) == iteration
