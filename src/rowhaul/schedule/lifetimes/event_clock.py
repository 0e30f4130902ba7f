"""How many iterations ago the events happened that are now older than some age.

Rows of a table with a time to live of days are forgotten by event time: when events are so much newer than
the last batch that named the row. The time of an iteration is that of the newest event up to it, so it never
goes back, and a row's last iteration tells how old it is. Times are kept in steps of a thousandth of the
shortest age: rows may stay that much longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.arrays import Arrays, Saved

_STEPS = 1000
_NAMES = ("clock.steps", "clock.last")


class EventClock:
    """Remembers the last iteration of each step of event time.

    Args:
        ages: of tables in seconds; 0: a table's rows are not forgotten by time.
    """

    def __init__(self, ages: Sequence[int]) -> None:
        self._ages = np.array(ages, np.int64)
        given = self._ages[self._ages > 0]
        self._step_seconds = max(1, int(given.min()) // _STEPS) if len(given) else 1
        self._newest = 0
        # Ascending: steps of time, and the last iteration of each.
        self._steps: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._last: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def reach(self, iteration: int, time: int) -> npt.NDArray[np.int64]:
        """Note the newest event of an iteration, in seconds; 0: it has none that is known.

        Returns for each table after how many iterations rows are forgotten now; 0: none are.
        """
        self._newest = max(self._newest, time)
        step = self._newest // self._step_seconds
        if len(self._steps) and self._steps[-1] == step:
            self._last[-1] = iteration
        else:
            since = self._newest - 2 * int(self._ages.max(initial=0))
            first = int(np.searchsorted(self._steps * self._step_seconds, since))
            # After a gap the last step before that says which rows are old; step 0 is of unknown times.
            first -= int(first > 0 and self._steps[first - 1] > 0)
            self._steps = np.append(self._steps[first:], step)
            self._last = np.append(self._last[first:], iteration)
        # A step is over for an age when all of its seconds are.
        ends = (self._steps + 1) * self._step_seconds - 1
        over = np.searchsorted(ends, self._newest - self._ages, "right")
        found = np.where(over > 0, iteration - self._last[np.maximum(over - 1, 0)], 0)
        return np.where((self._ages > 0) & (self._newest > 0), found, 0)

    def export(self) -> Arrays:
        """Export as arrays."""
        steps = np.append(self._steps, self._newest)  # the exact time of the newest event is the last one
        return dict(zip(_NAMES, (steps, np.append(self._last, self._step_seconds)), strict=True))

    def restore(self, saved: Saved) -> None:
        """Restore what was exported, also with other ages; nothing where it was saved without times."""
        if _NAMES[0] not in saved:
            return
        steps = saved.array(_NAMES[0], np.int64)
        last = saved.array(_NAMES[1], np.int64, len(steps))
        self._newest, before = int(steps[-1]), int(last[-1])
        # The end of a step of then is in a step of now.
        now = ((steps[:-1] + 1) * before - 1) // self._step_seconds
        ends = np.append(np.diff(now) > 0, True)[: len(now)]
        self._steps, self._last = now[ends], last[:-1][ends]
