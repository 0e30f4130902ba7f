"""Rows forgotten by event time: against every row's own time, and the same after a restart."""

import numpy as np
import pytest

from rowhaul.errors import ConfigError
from rowhaul.schedule import Lifetimes, RowPolicy
from rowhaul.schedule.arrays import Saved
from rowhaul.schedule.lifetimes.event_clock import EventClock


def rows_of(numbers):
    tables, keys = np.divmod(np.unique(numbers), 100)
    return tables.astype(np.int32), keys.astype(np.int64), np.ones(len(keys), np.int32)


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_forgotten_when_events_are_that_much_newer(seed):
    """Tables with a ttl of 40 seconds, of 3 iterations, and of 90 seconds."""
    random = np.random.default_rng(seed)
    policies = [RowPolicy(ttl="40s"), RowPolicy(ttl=3), RowPolicy(ttl="90s")]
    lifetimes, ages = Lifetimes(policies), {0: 40, 2: 90}
    last, newest = {}, 0  # by row: the iteration and the time it was named at
    gaps = 0  # seconds without any event, so far
    for iteration in range(200):
        if random.random() < 0.05:  # a checkpoint, and a run that resumes
            saved, lifetimes = lifetimes.export(), Lifetimes(policies)
            lifetimes.restore(Saved(saved))
        named = rows_of(random.integers(0, 300, random.integers(0, 12)))
        lifetimes.see(iteration, *named)
        gaps += int(random.integers(20, 1000)) if random.random() < 0.05 else 0
        time = int(1_700_000_000 + gaps + iteration * 5 + random.integers(-30, 30))  # they come out of order
        newest = max(newest, time)
        for table, key in zip(named[0].tolist(), named[1].tolist(), strict=True):
            last[table, key] = iteration, newest
        gone = lifetimes.forget(iteration, time)
        expected = {
            row
            for row, (named_in, named_at) in last.items()
            if (newest - named_at >= ages[row[0]] if row[0] in ages else iteration - named_in >= 3)
        }
        assert set(zip(gone.tables.tolist(), gone.keys.tolist(), strict=True)) == expected
        for row in expected:
            del last[row]


def test_long_ages_are_kept_in_steps():
    age = 30 * 86_400
    clock, times, random = EventClock([age, 0]), [], np.random.default_rng(1)
    for iteration in range(3000):
        times.append((times[-1] if times else 1_700_000_000) + int(random.integers(0, 5000)))
        found = clock.reach(iteration, times[-1])
        assert found[1] == 0
        exact = np.searchsorted(times, times[-1] - age, "right")  # iterations that are old enough
        late = np.searchsorted(times, times[-1] - age - age // 1000 - 1, "right")
        kept = iteration - int(found[0]) + 1 if found[0] else 0
        assert late <= kept <= exact
    assert len(clock.export()["clock.steps"]) < 2100


def test_rows_of_unknown_times_are_not_old_once_times_are_known():
    clock = EventClock([40])
    for iteration, time in enumerate([0, 1_700_000_000, 1_700_000_039]):
        assert clock.reach(iteration, time).tolist() == [0]
    assert clock.reach(3, 1_700_000_040).tolist() == [2]


def test_nothing_is_forgotten_while_no_time_is_known():
    assert EventClock([40]).reach(1000, 0).tolist() == [0]


def test_bad_times_are_refused():
    for ttl in ("0s", "200000d"):
        with pytest.raises(ConfigError, match="ttl must be from 1s"):
            RowPolicy(ttl=ttl)
    with pytest.raises(ConfigError, match="ttl"):
        RowPolicy(ttl="soon")
    assert RowPolicy(ttl="12").ttl == 12
