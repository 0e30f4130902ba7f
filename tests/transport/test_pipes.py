"""Pipes: what is sent arrives, in order, whatever the sizes and whichever end waits first."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Iterator

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.transport.base import LinkError
from rowhaul.transport.pipe_setup import VARIABLE, form_pipes
from rowhaul.transport.pipes import MAX_INLINE, SMALLEST_BLOCK, Arrival, Pipe
from transport_ranks import mapped_bytes

SIZES = (1, MAX_INLINE, MAX_INLINE + 1, SMALLEST_BLOCK, SMALLEST_BLOCK + 1, 3 * SMALLEST_BLOCK)


def pair_of_pipes(timeout: float | None = None) -> tuple[Pipe, Pipe]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    counters = [os.eventfd(0, os.EFD_NONBLOCK) for _ in ends]
    return (
        Pipe(ends[0], 1, counters[0], os.dup(counters[1]), timeout),
        Pipe(ends[1], 0, counters[1], os.dup(counters[0]), timeout),
    )


@pytest.fixture
def pipes() -> Iterator[tuple[Pipe, Pipe]]:
    both = pair_of_pipes()
    yield both
    for pipe in both:
        pipe.close()


def some_bytes(size: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["send", "expect", "wait", "free"]), st.booleans(), st.sampled_from(SIZES)),
        max_size=40,
    )
)
def test_messages_arrive_as_sent_and_in_order(calls: list[tuple[str, bool, int]]) -> None:
    """Against two queues: sends and expectations of both ends in any order, waits for the newest first."""
    ends = pair_of_pipes()
    under_way: tuple[deque[torch.Tensor], ...] = (deque(), deque())  # to the first, to the second end
    awaited: tuple[list[tuple[Arrival, torch.Tensor, torch.Tensor]], ...] = ([], [])
    for number, (call, second, size) in enumerate(calls):
        here, there = int(second), 1 - int(second)
        if call == "send":
            data = some_bytes(size, number)
            under_way[there].append(data.clone())
            ends[here].send(data)
            data.zero_()  # as allowed at once
        elif call == "expect" and under_way[here]:
            sent = under_way[here].popleft()
            destination = torch.zeros_like(sent)
            awaited[here].append((ends[here].expect(destination), destination, sent))
        elif call == "wait" and awaited[here]:
            awaited[here][-1][0].wait()
            for arrival, destination, sent in awaited[here]:  # those before it have come as well
                assert arrival.is_complete
                assert torch.equal(destination, sent)
            awaited[here].clear()
        elif call == "free":  # whatever is under way stays
            for end in ends:
                end.start_freeing()
            for end in ends:
                end.finish_freeing()
    for end in ends:
        end.close()


def test_blocks_are_used_again_and_a_larger_one_takes_the_place_of_a_smaller(
    pipes: tuple[Pipe, Pipe],
) -> None:
    ours, theirs = pipes
    descriptors = []
    for number in range(100):
        size = SMALLEST_BLOCK * (1 + number // 25)
        data = some_bytes(size, number)
        for _ in range(3):  # three under way at a time
            ours.send(data)
        for _ in range(3):
            with theirs.next_in_place(size) as found:
                assert torch.equal(found, data)
        descriptors.append(psutil.Process().num_fds())
    assert descriptors[-1] <= descriptors[0], "as many blocks as were under way at first"


def test_freed_blocks_are_unmapped_at_both_ends(pipes: tuple[Pipe, Pipe]) -> None:
    before = mapped_bytes()
    for pipe in pipes:
        pipe.send(some_bytes(5 * SMALLEST_BLOCK, 1))
    assert mapped_bytes() == before + 2 * 8 * SMALLEST_BLOCK, "mapped by the sender"
    for pipe in pipes:
        with pipe.next_in_place(5 * SMALLEST_BLOCK):
            pass
    assert mapped_bytes() == before + 4 * 8 * SMALLEST_BLOCK, "mapped by both"
    for pipe in pipes:
        pipe.start_freeing()
    for pipe in pipes:
        pipe.finish_freeing()
    assert mapped_bytes() == before


def test_two_ends_that_only_send_do_not_wait_for_each_other_for_ever(pipes: tuple[Pipe, Pipe]) -> None:
    """Far more notices than a socket takes; each end reads what comes while it cannot write."""
    count, size = 3000, MAX_INLINE
    errors: list[BaseException] = []

    def send_all(pipe: Pipe) -> None:
        try:
            for number in range(count):
                pipe.send(some_bytes(size, number % 7))
            for number in range(count):
                with pipe.next_in_place(size) as found:
                    assert torch.equal(found, some_bytes(size, number % 7))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=send_all, args=(pipe,), daemon=True) for pipe in pipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)


def test_a_message_of_another_size_is_refused(pipes: tuple[Pipe, Pipe]) -> None:
    pipes[0].send(some_bytes(10, 0))
    with pytest.raises(LinkError, match="rank 0 sent 10 bytes where 11 were expected: both must follow"):
        pipes[1].expect(torch.zeros(11, dtype=torch.uint8)).wait()


def test_an_end_that_waits_hears_that_the_other_is_closed(pipes: tuple[Pipe, Pipe]) -> None:
    threading.Timer(0.1, pipes[0].close).start()
    with pytest.raises(LinkError, match="receiving from rank 0 failed") as caught:
        pipes[1].expect(torch.zeros(5, dtype=torch.uint8)).wait()
    assert caught.value.peer == 0
    with pytest.raises(LinkError, match="sending to rank 0 failed"):
        pipes[1].send(some_bytes(5, 0))


def test_a_message_that_does_not_come_in_time_is_an_error() -> None:
    ours, theirs = pair_of_pipes(timeout=0.2)
    with pytest.raises(LinkError, match=r"receiving from rank 1 failed \(5 bytes\): nothing moved for 0.2 s"):
        ours.expect(torch.zeros(5, dtype=torch.uint8)).wait()

    def send_more_than_the_socket_takes() -> None:
        for _ in range(3000):
            ours.send(some_bytes(MAX_INLINE, 0))

    with pytest.raises(LinkError, match=r"sending to rank 1 failed .* nothing moved for 0.2 s"):
        send_more_than_the_socket_takes()
    for pipe in (ours, theirs):
        pipe.close()


def test_ranks_find_those_of_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads stand for ranks of two hosts; a fifth forbids shared memory by itself."""
    hosts = ["a", "b", "a", "b", "a"]
    everyone, formed = [b""] * len(hosts), [{}] * len(hosts)
    barrier = threading.Barrier(len(hosts))

    def form(rank: int) -> None:
        def all_gather(mine):
            everyone[rank] = mine.tobytes()
            barrier.wait(30)
            return torch.tensor([list(one) for one in everyone], dtype=torch.uint8).numpy()

        formed[rank] = form_pipes(rank, all_gather, [10 * one for one in range(len(hosts))], hosts[rank])

    threads = [threading.Thread(target=form, args=(rank,)) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [sorted(pipes) for pipes in formed] == [[2, 4], [3], [0, 4], [1], [0, 2]]
    assert formed[4][2].peer == 20
    formed[4][2].send(some_bytes(100_000, 3))
    with formed[2][4].next_in_place(100_000) as found:
        assert torch.equal(found, some_bytes(100_000, 3))
    for pipes in formed:
        for pipe in pipes.values():
            pipe.close()
    monkeypatch.setenv(VARIABLE, "0")
    assert form_pipes(0, lambda mine: mine[None, :].repeat(3, 0), [0, 1, 2]) == {}
