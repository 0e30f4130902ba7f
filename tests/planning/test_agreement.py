"""Ranks compare notes: they go on together, or all of them raise the same error."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from planned_cases import all_plans, planner, samples

from rowhaul.errors import ConfigError, RowhaulError
from rowhaul.planning.agreement import Agreement, Postbox, agree
from rowhaul.planning.disagreement import DisagreementError
from rowhaul.planning.feed import NO_DIGEST
from rowhaul.planning.replicas import ReplicaDigests
from rowhaul.schedule import ControlRecord
from rowhaul.transport.in_process import InProcessNetwork


@pytest.fixture(scope="module")
def plans():
    return all_plans(planner([samples(number) for number in range(3)], ahead=10))


def together(calls):
    """What `agree` gives, or raises, on each rank."""
    network = InProcessNetwork(len(calls))

    def one_rank(rank):
        collective = network.collective(rank)
        try:
            return agree(collective, *calls[rank])
        except RowhaulError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(one_rank, range(len(calls))))


def text_of(calls, kind=DisagreementError):
    """The one text that all ranks raise."""
    errors = together(calls)
    assert all(type(error) is kind for error in errors), errors
    (text,) = {str(error) for error in errors}
    return text


def call(planned, **changes):
    """One rank's arguments."""
    given = {"planned": planned, "own": planned.samples_digest if planned else NO_DIGEST, "stop": False}
    return (*(given | changes).values(),)


def other(digest):
    return bytes([digest[0] ^ 1]) + digest[1:]


def test_ranks_with_the_same_plan_go_on(plans):
    assert together([call(plans[1])] * 4) == [Agreement(stop=False)] * 4


@pytest.mark.parametrize("rank", range(3))
def test_any_rank_can_ask_to_stop(plans, rank):
    calls = [call(plans[0], stop=number == rank) for number in range(3)]
    assert together(calls) == [Agreement(stop=True)] * 3


def test_ranks_that_read_other_samples_are_named(plans):
    elsewhere = call(plans[0], own=other(plans[0].samples_digest))
    assert text_of([call(plans[0])] * 2 + [elsewhere] * 2) == (
        "ranks 2, 3 read different samples at batch 0: Rowhaul needs the same global batch on every rank "
        "(no DistributedSampler, a seeded shuffle, the same files)"
    )
    assert text_of([elsewhere, call(plans[0]), call(plans[0])]).startswith("rank 0 read different samples")


def test_where_all_ranks_read_other_samples_rank_0_is_taken_to_be_right(plans):
    calls = [call(plans[2], own=bytes([rank]) * 16) for rank in range(3)]
    assert text_of(calls).startswith("ranks 1, 2 read different samples at batch 2: ")


def test_other_samples_explain_other_plans(plans):
    elsewhere = dataclasses.replace(plans[0], plan_digest=other(plans[0].plan_digest))
    calls = [call(plans[0]), call(elsewhere, own=other(plans[0].samples_digest))]
    assert "rank 1 read different samples at batch 0" in text_of(calls)


def test_other_plans_of_the_same_samples_are_named_with_the_likely_cause(plans):
    elsewhere = dataclasses.replace(plans[1], plan_digest=other(plans[1].plan_digest))
    text = text_of([call(plans[1]), call(elsewhere), call(plans[1])])
    assert text.startswith("rank 1 planned batch 1 differently, from the same samples")
    assert "versions" in text
    assert "settings" in text


def test_ranks_at_other_iterations_are_told_apart(plans):
    text = text_of([call(plans[1]), call(plans[2]), call(plans[1])])
    assert text.startswith("ranks are at different iterations: ranks 0, 2 at batch 1; rank 1 at batch 2.")


def test_the_end_of_the_data_is_agreed_on(plans):
    assert together([call(None)] * 3) == [Agreement(stop=True, ended=True)] * 3


def test_ranks_without_more_data_are_named(plans):
    text = text_of([call(plans[2]), call(None), call(plans[2])])
    assert text.startswith("rank 1 found no more samples at batch 2, where the other ranks have some")
    assert text_of([call(None)] * 2 + [call(None, own=b"x" * 16)]).startswith(
        "rank 2 read different samples at the end of the data"
    )


def test_a_rank_that_gathers_something_else_is_named(plans):
    network = InProcessNetwork(2)
    elsewhere = network.collective(1)
    with ThreadPoolExecutor(1) as threads:
        gathered = threads.submit(elsewhere.all_gather, np.zeros(80, np.uint8))
        with pytest.raises(DisagreementError, match="rank 1 did something else"):
            agree(network.collective(0), *call(plans[0]))
        assert gathered.result(30).shape == (2, 80)


def test_records_of_rank_0_reach_all_numbered_and_in_force_two_iterations_later(plans):
    box = Postbox(next_number=5)
    box.post("shares", (3, 1))
    box.post("dispatcher", "esd:0.5")
    box.post("tables_scored", 7)
    records = box.take(1)
    assert records == [
        ControlRecord(5, 3, "shares", (3, 1)),
        ControlRecord(6, 3, "dispatcher", "esd:0.5"),
        ControlRecord(7, 3, "tables_scored", 7),
    ]
    calls = [(*call(plans[1], stop=True), records)] + [call(plans[1])] * 2
    assert together(calls) == [Agreement(stop=True, records=tuple(records))] * 3
    assert box.take(2) == []
    box.post("prices", (2, 2))
    assert box.take(3) == [ControlRecord(8, 5, "prices", (2, 2))]


def test_agreed_records_are_in_force_in_the_iteration_they_say():
    """Two hosts with a planner each, paced as training paces them: planned to k + 1 when k is agreed on."""
    network = InProcessNetwork(2)
    box = Postbox()

    def host(rank):
        collective = network.collective(rank)
        made = planner([samples(number) for number in range(6)], ahead=2)
        loads = []
        for iteration in range(6):
            planned = made.next()
            if rank == 0 and iteration == 2:
                box.post("shares", (7, 1))
            records = box.take(iteration) if rank == 0 else []
            for record in agree(collective, planned, planned.samples_digest, False, records).records:
                made.receive(record)
            made.allow(iteration + 2)
            loads.append(np.bincount(planned.plan.worker, minlength=2).tolist())
        made.close()
        return loads

    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(host, range(2))
    assert one == two == [[4, 4]] * 4 + [[7, 1]] * 2


def test_records_of_other_ranks_are_refused_everywhere(plans):
    record = ControlRecord(0, 2, "shares", (1, 1))
    text = text_of([call(plans[0]), (*call(plans[0]), [record])])
    assert text == "rank 1 posted control records; only rank 0 decides them: post them there"


def test_a_record_for_the_wrong_iteration_is_refused_everywhere(plans):
    record = ControlRecord(0, 1, "shares", (1, 1))
    text = text_of([(*call(plans[0]), [record]), call(plans[0])], ConfigError)
    assert "in force from 2 on; it says 1" in text


def test_an_unknown_name_is_refused_when_it_is_posted():
    box = Postbox()
    with pytest.raises(ConfigError, match="unknown control record 'speed'"):
        box.post("speed", 1)
    assert box.take(0) == []


def test_measures_of_every_rank_reach_all_beside_records(plans):
    record = ControlRecord(0, 2, "shares", (1, 1))
    calls = [
        (*call(plans[0]), [record] if rank == 0 else [], np.array([rank, np.nan, -1.5])) for rank in range(3)
    ]
    for agreement in together(calls):
        assert agreement.records == (record,)
        np.testing.assert_array_equal(agreement.measures, [[rank, np.nan, -1.5] for rank in range(3)])


def digests(iteration=300, machine="", **by_name):
    return ReplicaDigests(iteration, {"first": "a", "last": "b", **by_name}, machine)


def replica_calls(plans, replicas):
    return [(*call(plans[0]), [], None, one) for one in replicas]


def test_ranks_with_the_same_replicas_go_on_and_stores_have_none(plans):
    calls = replica_calls(plans, [digests(), digests(), None])
    assert together(calls) == [Agreement(stop=False)] * 3


@pytest.mark.parametrize(
    ("replicas", "text"),
    [
        ([digests(), digests(last="x"), digests(), None], "rank 1 differs from ranks 0, 2 in last"),
        ([digests(last="x"), digests(), digests(last="x")], "rank 1 differs from ranks 0, 2 in last"),
        ([digests(), digests(last="x")], "ranks 0, 1 differ from each other in last"),
        (
            [digests(first="x"), digests(last="x", first="y"), digests(), digests()],
            "ranks 0, 1 differ from ranks 2, 3 in first, last",
        ),
        ([digests(), digests(more="z"), digests()], "rank 1 differs from ranks 0, 2 in more"),
        (
            [digests(), digests(), digests(**dict.fromkeys("fghijk", "x"))],
            "rank 2 differs from ranks 0, 1 in f, g, h, i and 2 more",
        ),
    ],
)
def test_a_difference_of_replicas_names_ranks_iteration_and_tensor(plans, replicas, text):
    assert text_of(replica_calls(plans, replicas)).startswith(f"{text} at iteration 300, where all must")


def test_different_machines_are_named_with_a_difference(plans):
    text = text_of(replica_calls(plans, [digests(machine="one"), digests(machine="two", last="x")]))
    assert "same bits. rank 0: one; rank 1: two. Likely causes" in text
