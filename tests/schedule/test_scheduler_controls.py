"""Control records: what they change, from which iteration on, on all ranks alike."""

import numpy as np
import pytest
from scheduler_runs import NUM_WORKERS, plans_of, settings, trace

from rowhaul.errors import CacheTooSmallError, ConfigError
from rowhaul.schedule import CacheSettings, IdBatch, Scheduler


def test_a_control_record_changes_the_iteration_after_the_next():
    scheduler = Scheduler(settings(), trace())
    samples = []
    while scheduler.fill():
        plan = scheduler.plan()
        samples.append(np.bincount(plan.worker, minlength=NUM_WORKERS).tolist())
        if plan.iteration == 3:
            record = scheduler.post("shares", (1, 1, 0, 0))
        assert plan.controls == ((record,) if plan.iteration == 5 else ())
    assert samples[:5] == [[4, 4, 4, 4]] * 5
    assert samples[5:] == [[8, 8, 0, 0]] * 7


@pytest.mark.parametrize("unit", ["rows", "bytes"])
@pytest.mark.parametrize("dispatcher", ["joint", "round-robin", "two-batch:laia"])
def test_posted_shares_that_no_longer_fit_are_given_up(unit, dispatcher):
    """A run that equal shares would finish does not end: the batch is divided as the settings say."""
    distinct = np.arange(32).reshape(2, 16)
    wide = IdBatch.from_features([0, 1], distinct.ravel(), np.ones((2, 16), np.int32))
    narrow = IdBatch.from_features([0, 1], distinct.ravel() % 3, np.ones((2, 16), np.int32))
    batches = [narrow, narrow, narrow, wide, narrow]
    cache = CacheSettings(31) if unit == "rows" else CacheSettings(16 * 8 + 16 * 20 - 1, "bytes")
    chosen = settings(cache=cache, dispatcher=dispatcher)
    scheduler, samples, plans = Scheduler(chosen, batches), [], []
    scheduler.post("shares", (16, 0, 0, 0))
    while scheduler.fill():
        plans.append(scheduler.plan())
        samples.append(np.bincount(plans[-1].worker, minlength=NUM_WORKERS).tolist())
    assert samples == [[4] * 4, [16, 0, 0, 0], [16, 0, 0, 0], [4] * 4, [4] * 4]
    assert [plan.given_up_shares for plan in plans] == [(), (), (), (16, 0, 0, 0), ()]
    assert [plan.summing_workers for plan in plans[2:4]] == [(0,), (0, 1, 2, 3)]


def test_given_shares_that_do_not_fit_are_an_error():
    wide = IdBatch.from_features([0, 1], np.arange(32), np.ones((2, 16), np.int32))
    with pytest.raises(CacheTooSmallError, match="worker 0 needs 32 rows"):
        list(plans_of(settings(cache=CacheSettings(31), shares=(1, 0, 0, 0)), [wide]))
    with pytest.raises(CacheTooSmallError, match="needs 8 rows"):
        list(plans_of(settings(cache=CacheSettings(7)), [wide]))


def test_prices_and_the_dispatcher_can_be_changed_under_way():
    scheduler = Scheduler(settings(dispatcher="random"), trace())
    scheduler.post("prices", (1, 1, 1, 1))
    scheduler.post("dispatcher", "round-robin")
    workers = []
    while scheduler.fill():
        workers.append(scheduler.plan().worker)
    assert workers[0].tolist() != workers[1].tolist() == (np.arange(16) % NUM_WORKERS).tolist()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("shares", (1, 1), "2 shares were given for 4 workers"),
        ("prices", (0, 1, 1, 1), "positive whole numbers"),
        ("prices", "cheap", "one number per worker; got 'cheap'"),
        ("dispatcher", "best", "unknown dispatcher 'best'"),
        ("tables_scored", 3, "esd has no setting tables_scored"),
    ],
)
def test_impossible_control_records_are_refused_when_posted(name, value, message):
    with pytest.raises(ConfigError, match=message):
        Scheduler(settings(), trace()).post(name, value)


def test_another_rank_that_receives_the_records_makes_the_same_plans():
    here, there = Scheduler(settings(), trace()), Scheduler(settings(), trace())
    while here.fill() and there.fill():
        if here.iteration == 2:
            there.receive(here.post("shares", (3, 1, 0, 0)))
        assert here.plan().digest() == there.plan().digest()


def test_plans_differ_when_a_control_record_does():
    first, second = Scheduler(settings(), trace()), Scheduler(settings(), trace())
    second.post("prices", (1, 1, 10, 10))
    digests = []
    for scheduler in (first, second):
        digests.append([])
        while scheduler.fill():
            digests[-1].append(scheduler.plan().digest())
    assert [a == b for a, b in zip(*digests, strict=True)] == [True, False] + [True] * 10


def test_a_refused_control_record_leaves_no_trace():
    scheduler, untouched = Scheduler(settings(), trace()), Scheduler(settings(), trace())
    with pytest.raises(ConfigError, match="2 shares"):
        scheduler.post("shares", (1, 1))
    while scheduler.fill() and untouched.fill():
        assert scheduler.plan().digest() == untouched.plan().digest()
    assert scheduler.post("prices", (1, 1, 1, 1)).number == 0


def test_a_record_is_checked_against_the_dispatcher_it_will_meet():
    scheduler = Scheduler(settings(), trace())
    scheduler.post("dispatcher", "laia-adaptive")
    scheduler.post("tables_scored", 1)
    scheduler.post("dispatcher", "laia")
    with pytest.raises(ConfigError, match="laia has no setting tables_scored"):
        scheduler.post("tables_scored", 2)
    assert len(list(iterate(scheduler))) == 12


def iterate(scheduler):
    while scheduler.fill():
        yield scheduler.plan()
