"""The planner: as far as it is allowed, in order, with its control records in the right iteration."""

import dataclasses
import threading
import time

import numpy as np
import pytest
from planned_cases import all_plans, assert_same, planner, samples, settings

from rowhaul._threads import Failure
from rowhaul.errors import ClusterError, ConfigError, DataError
from rowhaul.planning.planner import samples_digest
from rowhaul.schedule import ControlRecord, IdBatch, Scheduler


def batches(count):
    return [samples(number) for number in range(count)]


def without_clock(planned):
    return dataclasses.replace(planned, decision_seconds=0.0, ready_at=0.0, reading_seconds=0.0)


@pytest.mark.parametrize("look_ahead", [0, 1, 3])
def test_plans_are_the_schedulers_each_with_its_samples(look_ahead):
    chosen = settings(look_ahead=look_ahead)
    data = batches(6)
    made = all_plans(planner(data, chosen=chosen, ahead=100))
    alone = Scheduler(chosen, [IdBatch.from_features([0, 1, 2], one.values, one.lengths) for one in data])
    for planned, given in zip(made, data, strict=True):
        assert alone.fill()
        plan = alone.plan()
        assert plan.digest() == planned.plan.digest()
        assert planned.plan_digest == dataclasses.replace(plan, ids=None).digest()
        assert planned.samples is given
        assert planned.samples_digest == samples_digest(given)
    assert not alone.fill()


def test_features_may_share_tables():
    made = all_plans(planner(batches(2), tables_of_features=[0, 0, 1], ahead=100))
    assert set(np.concatenate([one.plan.tables for one in made]).tolist()) == {0, 1}


def test_never_plans_or_reads_beyond_what_is_allowed():
    read = []

    def source():
        for number in range(20):
            read.append(number)
            yield samples(number)

    made = planner(source(), chosen=settings(look_ahead=2), ahead=1)
    allowed = [0, 3, 2, 4]  # an allowance is never taken back
    farthest = 0
    given = 0
    for iteration in allowed:
        made.allow(iteration)
        farthest = max(farthest, iteration)
        while given <= farthest:
            assert made.next().plan.iteration == given
            given += 1
        assert made.at_rest(lambda scheduler: scheduler.iteration) == farthest + 1
        assert len(read) == farthest + 1 + 2
    made.close()


def test_nothing_is_read_before_anything_is_allowed():
    read = []
    made = planner(read.append(number) or samples(number) for number in range(3))
    assert made.at_rest(lambda scheduler: scheduler.iteration) == 0
    assert read == []
    made.close()


def test_next_waits_for_permission_given_by_another_thread():
    made = planner(batches(3))
    got = []
    waiting = threading.Thread(target=lambda: got.append(made.next()))
    waiting.start()
    made.allow(0)
    waiting.join(60)
    assert got[0].plan.iteration == 0
    made.close()


def test_the_end_of_the_data_is_told_again_and_again_and_the_scheduler_stays():
    made = planner(batches(2), ahead=100)
    assert [made.next().plan.iteration for _ in range(2)] == [0, 1]
    assert made.next() is None
    assert made.next() is None
    assert made.at_rest(lambda scheduler: scheduler.iteration) == 2
    made.close()


def test_received_records_are_in_force_in_their_iteration():
    """With everything up to k + 1 planned when a record of iteration k comes: the latest it may come."""
    made = planner(batches(6), ahead=2)
    seen = []
    for iteration in range(6):
        plan = made.next().plan
        seen.append((plan.controls, np.bincount(plan.worker, minlength=2).tolist()))
        if iteration == 1:
            made.receive(ControlRecord(0, iteration + 2, "shares", (3, 1)))
        made.allow(iteration + 2)
    made.close()
    assert [shares for _, shares in seen] == [[4, 4]] * 3 + [[6, 2]] * 3
    assert [len(controls) for controls, _ in seen] == [0, 0, 0, 1, 0, 0]


def test_posted_records_are_in_force_after_the_delay():
    made = planner(batches(5), ahead=2)
    assert [made.next().plan.iteration for _ in range(2)] == [0, 1]
    record = made.at_rest(lambda scheduler: scheduler.post("shares", (8, 0)))
    assert (record.number, record.active) == (0, 3)
    made.allow(4)
    loads = [np.bincount(one.plan.worker, minlength=2).tolist() for one in all_plans_of(made, 3)]
    assert loads == [[4, 4], [8, 0], [8, 0]]


def all_plans_of(made, count):
    try:
        return [made.next() for _ in range(count)]
    finally:
        made.close()


def test_a_refused_post_is_the_posters_error_alone():
    failure = Failure()
    made = planner(batches(3), failure, ahead=3)
    with pytest.raises(ConfigError, match="3 shares were given for 2 workers"):
        made.at_rest(lambda scheduler: scheduler.post("shares", (1, 1, 1)))
    assert failure.error is None
    assert len(all_plans_of(made, 3)) == 3


def test_a_record_that_comes_too_late_ends_the_planner():
    failure = Failure()
    made = planner(batches(5), failure, ahead=3)
    assert [made.next().plan.iteration for _ in range(3)] == [0, 1, 2]
    made.receive(ControlRecord(0, 2, "shares", (1, 2)))
    made.allow(4)
    with pytest.raises(ConfigError, match="came too late"):
        made.next()
    assert isinstance(failure.error, ConfigError)
    with pytest.raises(ConfigError, match="came too late"):
        made.at_rest(lambda scheduler: scheduler.iteration)
    made.close()


def test_records_from_many_threads_all_arrive():
    made = planner(batches(1))
    numbers = []
    posting = [
        threading.Thread(
            target=lambda: numbers.append(
                made.at_rest(lambda scheduler: scheduler.post("prices", (1, 2))).number
            )
        )
        for _ in range(8)
    ]
    for thread in posting:
        thread.start()
    for thread in posting:
        thread.join(60)
    made.close()
    assert sorted(numbers) == list(range(8))


def test_an_error_of_the_data_comes_after_the_plans_before_it():
    def source():
        yield from batches(4)
        raise DataError("part-7.parquet is damaged")

    failure = Failure()
    made = planner(source(), failure, ahead=100)
    with pytest.raises(DataError, match="part-7"):
        list(iter(made.next, None))
    assert isinstance(failure.error, DataError)
    made.close()


def test_waiting_ends_when_something_else_fails():
    failure = Failure()
    made = planner(batches(1), failure)
    failure.set(ConnectionError("rank 3 was lost"))
    with pytest.raises(ConnectionError, match="rank 3"):
        made.next()
    made.close()


def test_batches_whose_parts_differ_in_length_are_refused():
    short = dataclasses.replace(samples(0), labels=np.zeros(3, np.float32))
    with pytest.raises(DataError, match=r"lengths of 8, dense of 8, index of 8, labels of 3"):
        planner([short], ahead=1).next()
    with pytest.raises(DataError, match="rowhaul Samples; got a dict"):
        planner([{}], ahead=1).next()


def test_closing_ends_the_thread_and_closes_the_source():
    closed = threading.Event()

    def source():
        try:
            yield from batches(10)
        finally:
            closed.set()

    made = planner(source(), ahead=1)
    assert made.next() is not None
    made.close()
    assert closed.wait(200)
    with pytest.raises(ClusterError, match="closed"):
        made.next()
    with pytest.raises(ClusterError, match="closed"):
        made.at_rest(lambda scheduler: scheduler.iteration)


def test_an_error_at_rest_goes_to_who_asked_and_planning_goes_on():
    made = planner(batches(2), ahead=3)
    with pytest.raises(TimeoutError, match="mine"):
        made.at_rest(_fail_with_timeout)
    assert len(all_plans(made)) == 2


def _fail_with_timeout(scheduler):
    raise TimeoutError("mine")


def test_times_are_of_this_hosts_clock():
    began = time.monotonic()
    (planned,) = all_plans(planner(batches(1), ahead=2))
    assert began <= planned.ready_at <= time.monotonic()
    assert 0 < planned.decision_seconds <= planned.ready_at - began


def test_the_time_that_planning_waits_for_data_is_told_with_the_next_plan():
    """The first plan waits for its own batch and for those of its window, here all of them."""

    def slowly():
        for one in batches(4):
            time.sleep(0.05)
            yield one

    first, *others = all_plans(planner(slowly(), ahead=6))
    waited = first.reading_seconds + sum(one.reading_seconds for one in others)
    assert first.reading_seconds >= 0.05
    assert waited >= 4 * 0.05


@pytest.mark.parametrize("part", ["values", "lengths", "dense", "labels", "index", "features"])
def test_the_digest_of_samples_covers_every_part(part):
    one = samples(1)
    assert samples_digest(samples(1)) == samples_digest(one)
    if part == "features":
        changed = dataclasses.replace(one, features=("user", "item", "words"))
    else:
        array = getattr(one, part).copy()
        array.flat[-1] += 1
        changed = dataclasses.replace(one, **{part: array})
    assert samples_digest(changed) != samples_digest(one)


def test_the_digest_of_samples_knows_no_labels_and_other_shapes():
    one = samples(1)
    digests = {
        samples_digest(one),
        samples_digest(dataclasses.replace(one, labels=None)),
        samples_digest(dataclasses.replace(one, labels=np.zeros(0, np.float32))),
        samples_digest(dataclasses.replace(one, lengths=one.lengths.reshape(8, 3))),
    }
    assert len(digests) == 4


def test_two_planners_of_the_same_data_agree():
    one, other = (all_plans(planner(batches(4), ahead=10)) for _ in range(2))
    for first, second in zip(one, other, strict=True):
        assert_same(without_clock(first), without_clock(second))
