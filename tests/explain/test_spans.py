"""What training waited for, from what the threads of a rank did meanwhile."""

import threading

import numpy as np
import pytest

from rowhaul import _activity
from rowhaul._activity import Activity, doing
from rowhaul.explain.links import MeasuredLinks
from rowhaul.explain.spans import Recorder, Span
from rowhaul.schedule.phases import Phase
from rowhaul.transport.in_process import InProcessNetwork


def in_thread(name, call):
    thread = threading.Thread(target=call, name=name)
    thread.start()
    thread.join()


def test_a_wait_is_divided_by_what_the_moves_thread_did():
    recorder = Recorder()
    for span in (
        Span("rows", "wait for the plan", 0.0, 2.0),
        Span("rows", "wait for rows", 2.0, 5.0, 3, 1),
        Span("rows", "wait for rows", 5.5, 7.0, 3, 2),
        Span("rows", "wait for rows", 20.0, 30.0, 4, 2),
    ):
        recorder._move(span)
    recorder._reads.append(Span("plans", "read data", 1.5, 1.75))
    waits = recorder.explain_wait(1.0, 7.5)
    assert waits.rows == {1: 3.0, 2: 1.5}
    assert (waits.plan, waits.data) == (0.75, 0.25)
    assert waits.moving == pytest.approx(1.0)  # the rest: 5 to 5.5, and 7 to 7.5


def test_parts_of_a_wait_add_up_to_it():
    recorder, generator = Recorder(), np.random.default_rng(3)
    at = 0.0
    for _ in range(100):
        length = generator.random()
        peer = int(generator.integers(-1, 3))
        name = "wait for rows" if peer >= 0 else "wait for the plan"
        recorder._move(Span("rows", name, at, at + length, 0, peer))
        recorder._reads.append(Span("plans", "read data", at, at + generator.random() * length))
        at += length + generator.random()
        began, ended = at - 3 * generator.random(), at + generator.random()
        waits = recorder.explain_wait(began, ended)
        assert sum(waits.rows.values()) + waits.plan + waits.data + waits.moving == pytest.approx(
            ended - began
        )
        assert min(waits.plan, waits.data, waits.moving) >= 0


def test_activities_become_spans_of_their_threads():
    recorder = Recorder()
    recorder.iteration = 8
    _activity.watch(recorder.ended)
    try:
        with doing(Activity.AWAITING_ROWS), doing(Activity.WAITING):
            pass
        with doing(Activity.COMPUTING):
            recorder.iteration = 9
            with doing(Activity.WAITING):
                pass

        def plan():
            with doing(Activity.PLANNING), doing(Activity.READING):
                pass

        def move():
            with doing(Activity.MOVING):
                with doing(Activity.AWAITING_PLAN), doing(Activity.WAITING):
                    pass
                with doing(Activity.WAITING):
                    pass

        in_thread("rowhaul-planner", plan)
        in_thread("rowhaul-moves", move)
        in_thread("somebody-else", plan)
    finally:
        _activity.watch(None)
    with doing(Activity.COMPUTING):
        pass  # nobody watches any more
    assert not recorder.seconds  # until the iteration is over
    recorder.settle(8, counts=True)
    assert recorder.seconds["step"] > recorder.seconds["dense"] > 0
    assert recorder.seconds["moving"] > 0  # nothing else was going on while rows were awaited
    assert [span.name for span in recorder._moves] == ["wait for the plan"]
    assert [span.name for span in recorder._reads] == ["read data"]


def test_iterations_without_a_share_do_not_count():
    recorder = Recorder()
    _activity.watch(recorder.ended)
    try:
        for recorder.iteration in range(3):
            recorder._move(Span("rows", "wait for rows", 0.0, 1e12, recorder.iteration, 1))
            with doing(Activity.AWAITING_ROWS):
                pass
            recorder._moves.clear()
            with doing(Activity.COMPUTING):
                pass
    finally:
        _activity.watch(None)
    recorder.settle(1, counts=False)
    assert not recorder.seconds
    assert not recorder.waited
    recorder.settle(0, counts=True)
    once = dict(recorder.seconds), dict(recorder.waited)
    assert once[0]["step"] > 0
    assert once[1][1] > 0
    recorder.settle(0, counts=True)
    recorder.settle(1, counts=True)
    assert (dict(recorder.seconds), dict(recorder.waited)) == once


def test_waits_outside_of_phases_belong_to_no_iteration():
    recorder = Recorder()
    recorder.waited_for(1, 0.0, 5.0)  # a flush, long before
    began = 6.0
    recorder.waited_for(2, 6.5, 7.5)
    recorder.phase_ended(4, Phase.LATE_FIRST, began)
    assert dict(recorder.received) == {2: 1.0}
    recorder.counts = False
    recorder.waited_for(2, 8.0, 9.0)
    recorder.phase_ended(4, Phase.LATE_SECOND, 7.9)
    assert dict(recorder.received) == {2: 1.0}


def test_measured_links_carry_the_same_messages():
    network, waits = InProcessNetwork(3), {rank: [] for rank in range(3)}
    received = {}

    def run(rank):
        def on_wait(peer, began, ended):
            assert ended >= began
            waits[rank].append(peer)

        links = MeasuredLinks(network.links(rank), on_wait)
        others = [one for one in range(3) if one != rank]
        for number in range(4):
            buffers = {peer: np.zeros(3, np.uint8) for peer in others}
            data = np.full(3, 10 * rank + number, np.uint8)
            transfer = links.post(buffers, dict.fromkeys(others, data))
            transfer.wait_received()
            transfer.wait_sent()
            received[rank, number] = {peer: int(buffer[0]) for peer, buffer in buffers.items()}

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (rank, number), found in received.items():
        assert found == {peer: 10 * peer + number for peer in range(3) if peer != rank}
    for rank, peers in waits.items():
        others = [one for one in range(3) if one != rank]
        assert sorted(peers) == sorted(4 * others)
        assert {peers[0], peers[2]} == set(others)  # another one first every time
