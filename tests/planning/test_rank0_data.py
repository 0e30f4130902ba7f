"""Data that rank 0 alone can read: every host plans the same from it, and trains on the same numbers."""

import dataclasses
import random
import threading
import time
from itertools import islice

import numpy as np
import pytest
from planned_cases import all_plans, assert_same, planner, samples, settings

from rowhaul._threads import Failure
from rowhaul.errors import BadLineError, ClusterError, DataError
from rowhaul.planning.rank0_data.evaluation import ReceivedBatches, SentBatches
from rowhaul.planning.rank0_data.inbox import Inbox
from rowhaul.planning.rank0_data.messages import (
    pack_ids,
    without_dense,
)
from rowhaul.planning.rank0_data.sharing import AHEAD, DataReceiver, DataSource
from rowhaul.transport.in_process import InProcessNetwork

NUM_WORKERS = 3  # rank 3 is a store
HOSTS = {
    "every rank its own host": ((0,), (1,), (2,), (3,)),
    "one host": ((0, 1, 2, 3),),
    "rank 0 with the store": ((0, 3), (1, 2)),
    "rank 0 leads": ((0,), (1, 3), (2,)),
    "a host of stores": ((0, 1, 2), (3,)),
}


def chosen_settings(**others):
    return settings(NUM_WORKERS, **others)


def batches(count, num_samples=8):
    return [samples(number, num_samples) for number in range(count)]


class Ranks:
    """All ends of the data, with a planner on every leader; driven from one thread."""

    def __init__(self, source, hosts, delay=None, end_waiting=lambda: None, **chosen):
        self.settings = chosen_settings(**chosen)
        self.network = InProcessNetwork(NUM_WORKERS + 1, delay=delay)
        self.failures = [Failure() for _ in range(NUM_WORKERS + 1)]
        self.workers = {max(host): [rank for rank in host if rank < NUM_WORKERS] for host in hosts}
        own_leader = next(max(host) for host in hosts if 0 in host)
        look_ahead = self.settings.look_ahead
        links = [self.network.links(rank) for rank in range(NUM_WORKERS + 1)]
        self.ends = [
            DataSource(
                links[0], source, self.workers, own_leader, look_ahead, self.failures[0], AHEAD, end_waiting
            )
        ]
        self.ends += [
            DataReceiver(
                links[rank],
                self.workers.get(rank),
                look_ahead,
                self.failures[rank],
                shares_reader=rank == own_leader,
            )
            for rank in range(1, NUM_WORKERS + 1)
        ]
        self.planners = {
            rank: planner(
                self.ends[rank].inbox.batches(),
                self.failures[rank],
                self.settings,
                complete=self.ends[rank].inbox.complete,
            )
            for rank in self.workers
        }
        self.allowed = 0

    def allow(self):
        """One more iteration, on all ranks."""
        for end in self.ends:
            end.serve()
        for one in self.planners.values():
            one.allow(self.allowed)
        self.allowed += 1

    def next(self):
        """What every leader has planned; None at the end."""
        return {rank: one.next() for rank, one in self.planners.items()}

    def close(self):
        for end in self.ends:
            end.close()
        for one in self.planners.values():
            one.close()


def expected_plans(data, **chosen):
    return all_plans(planner(data, chosen=chosen_settings(**chosen), ahead=len(data) + 1))


def check_planned(ranks, planned, alone, given):
    """Of one iteration: plans are those of a rank that has the files, and so is what is trained on a host."""
    assert len({one.samples_digest for one in planned.values()}) == 1
    for rank, one in planned.items():
        assert one.plan_digest == alone.plan_digest == dataclasses.replace(one.plan, ids=None).digest()
        here = np.isin(one.plan.worker, ranks.workers[rank])
        assert_same(one.samples.take(np.flatnonzero(here)), given.take(np.flatnonzero(here)))
        assert np.isnan(one.samples.dense[~here]).all()
        assert given.labels is None or np.isnan(one.samples.labels[~here]).all()
        for part in ("features", "values", "lengths", "index"):
            assert_same(getattr(one.samples, part), getattr(given, part))


def run_through(data, hosts, **chosen):
    ranks = Ranks(iter(data), hosts, **chosen)
    chosen.pop("delay", None)
    try:
        for given, alone in zip(data, expected_plans(data, **chosen), strict=True):
            ranks.allow()
            check_planned(ranks, ranks.next(), alone, given)
        ranks.allow()
        assert set(ranks.next().values()) == {None}
    finally:
        ranks.close()
    assert [failure.error for failure in ranks.failures] == [None] * len(ranks.failures)
    return ranks


@pytest.mark.parametrize("look_ahead", [0, 2])
@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
def test_every_host_plans_the_same_and_has_what_it_trains(hosts, look_ahead):
    run_through(batches(12), hosts, look_ahead=look_ahead)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
def test_fewer_batches_than_are_looked_at(hosts, count):
    run_through(batches(count), hosts)


def test_batches_of_any_size_without_labels_or_dense_values():
    sizes = [5, 0, 1, 9, 2, 3, 0, 0, 4]
    data = [samples(number, size, labelled=False) for number, size in enumerate(sizes)]
    run_through([dataclasses.replace(one, dense=one.dense[:, :0]) for one in data], HOSTS["rank 0 leads"])


@pytest.mark.parametrize("seed", range(3))
def test_delays_anywhere_change_nothing(seed):
    pauses = random.Random(seed)
    hosts = list(HOSTS.values())[2 + seed]
    run_through(batches(10), hosts, delay=lambda: time.sleep(pauses.choice([0, 0, 0.001, 0.01])))


def test_rank_0_reads_a_few_batches_ahead_and_no_more():
    read = []
    ranks = Ranks((read.append(number) or samples(number) for number in range(100)), HOSTS["one host"])
    window = ranks.settings.look_ahead + AHEAD
    for iteration in range(5):
        _eventually(lambda want=window + iteration: len(read) == want)
        ranks.allow()
        ranks.next()
    time.sleep(0.05)
    assert len(read) == window + 5
    ranks.close()


def test_a_planner_never_waits_for_ids_that_were_not_sent():
    """Everything allowed can be planned, and between two segments no thread is in the network."""
    ranks = Ranks(iter(batches(40)), HOSTS["rank 0 with the store"])
    for segment in (1, 7, 3):
        for _ in range(segment):
            ranks.allow()
            ranks.next()
        for end in ranks.ends:
            end.executor.submit(lambda: None).wait()
    ranks.close()
    assert not any(end.executor._thread.is_alive() for end in ranks.ends)


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
def test_closing_ends_a_wait_for_samples_on_all_ranks(hosts):
    """As of a stream, when the run has made all the steps that it was to make."""
    unwanted = threading.Event()

    def source():
        yield from batches(ranks_window + 1)
        unwanted.wait(60)

    ranks_window = chosen_settings().look_ahead + AHEAD
    ranks = Ranks(source(), hosts, end_waiting=unwanted.set)
    for _ in range(2):
        ranks.allow()
        ranks.next()
    ranks.close()
    assert not any(end.executor._thread.is_alive() for end in ranks.ends)
    assert [failure.error for failure in ranks.failures] == [None] * len(ranks.failures)


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("good", [0, 1, 9])
def test_an_error_of_reading_comes_after_the_batches_before_it(hosts, good):
    def source():
        yield from batches(good)
        raise BadLineError("part-7.csv", 4, "is damaged")

    ranks = Ranks(source(), hosts)
    for _ in range(good):
        ranks.allow()
        assert None not in ranks.next().values()
    ranks.allow()
    assert set(ranks.next().values()) == {None}
    ranks.close()
    assert ranks.ends[0].error.line == 4
    assert not any(end.executor._thread.is_alive() for end in ranks.ends), (
        "a thread waits for a message that nobody sends"
    )


@pytest.mark.parametrize("good", [0, 1])
def test_batches_that_are_not_alike_are_refused(good):
    odd = dataclasses.replace(samples(5), features=("user", "item", "words"))
    broken = dataclasses.replace(samples(5), labels=np.zeros(3, np.float32))
    for bad, words in ((odd, "same columns"), (broken, "labels of 3"), ({}, "got a dict"))[not good :]:
        ranks = Ranks(iter([*batches(good), bad]), HOSTS["rank 0 leads"])
        for _ in range(good + 1):
            ranks.allow()
            planned = ranks.next()
        assert set(planned.values()) == {None}
        assert words in str(ranks.ends[0].error)
        ranks.close()


def test_bytes_are_counted_by_kind():
    data = batches(6)
    ranks = run_through(data, HOSTS["rank 0 with the store"])
    sent = ranks.ends[0].sent
    away = [np.isin(plan.plan.worker, [1, 2]).sum() for plan in expected_plans(data)]
    here = [np.isin(plan.plan.worker, [0]).sum() for plan in expected_plans(data)]
    assert sent["ids"] == 2 * sum(len(pack_ids(one)) for one in data)  # to both hosts' leaders
    assert sent["dense"] == (sum(away) + sum(here)) * 3 * 4  # two numbers and a label, each to one host
    plain = sum(one.values.nbytes + one.lengths.nbytes + one.index.nbytes for one in data)
    assert sent["ids"] < plain  # for two, in less than it takes one


def test_plans_that_differ_are_left_to_the_comparison_of_ranks():
    """A host that assigned other samples gets the wrong number of them: what it publishes has none."""
    ranks = Ranks(iter(batches(8)), HOSTS["rank 0 leads"])
    inbox, plan = ranks.ends[3].inbox, expected_plans(batches(1))[0].plan
    inbox.dense.put(np.zeros(3, np.uint8))
    completed = inbox.complete(without_dense(samples(0)), plan)
    assert np.isnan(completed.dense).all()
    ranks.close()


@pytest.mark.parametrize("fails", [False, True])
def test_waiting_for_data_ends_when_something_fails_or_is_closed(fails):
    failure, caught = Failure(), []
    inbox = Inbox([1], failure, plans_for_reader=False)

    def wait():
        try:
            next(inbox.batches())
        except (ClusterError, ConnectionError) as error:
            caught.append(type(error))

    thread = threading.Thread(target=wait)
    thread.start()
    failure.set(ConnectionError("rank 0 was lost")) if fails else inbox.close()
    thread.join(30)
    assert caught == [ConnectionError if fails else ClusterError]


class Evaluation:
    """Three workers that take evaluation batches in turn, each in a thread."""

    def __init__(self, source, take=lambda worker, batches: list(batches)):
        ranks = Ranks(iter([]), HOSTS["one host"])
        self.got, self.errors = {}, {}
        ends = {0: SentBatches(ranks.ends[0], source, NUM_WORKERS, 0)}
        ends |= {rank: ReceivedBatches(ranks.ends[rank], rank, 0) for rank in (1, 2)}

        def run(worker):
            try:
                self.got[worker] = take(worker, ends[worker])
            except DataError as error:
                self.errors[worker] = error
            finally:
                ends[worker].close()

        threads = [threading.Thread(target=run, args=[worker], daemon=True) for worker in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads), "workers hang"
        ranks.close()
        self.sent = ranks.ends[0].sent


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 9])
def test_each_batch_is_evaluated_by_one_worker_and_counted_by_all(count):
    data = [samples(number, 3 + number) for number in range(count)]
    got = Evaluation(data).got
    for worker in range(NUM_WORKERS):
        assert [len(one) for one in got[worker]] == [len(one) for one in data]
        for number in range(worker, count, NUM_WORKERS):
            assert_same(got[worker][number], data[number])


def test_evaluation_that_rank_0_cannot_read_ends_on_all():
    def source():
        yield from batches(7)
        raise DataError("part-3.parquet is damaged")

    evaluation = Evaluation(source())
    assert str(evaluation.errors[0]) == "part-3.parquet is damaged"
    assert len(evaluation.got[1]) == len(evaluation.got[2]) == 6


def test_a_worker_that_has_had_enough_leaves_nothing_behind():
    got = Evaluation(batches(20), lambda worker, given: list(islice(given, 1 if worker == 1 else None))).got
    assert [len(got[worker]) for worker in range(NUM_WORKERS)] == [20, 1, 20]


def test_when_rank_0_stops_the_others_have_what_they_need_for_one_more_round():
    got = Evaluation(batches(20), lambda worker, given: list(islice(given, None if worker else 1))).got
    assert [len(got[worker]) for worker in range(NUM_WORKERS)] == [1, 2 * NUM_WORKERS, 2 * NUM_WORKERS]


def _eventually(condition, seconds=200):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
