"""Links and collectives between threads: order, waiting, errors on both sides."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.transport.base import LinkError
from rowhaul.transport.in_process import InProcessNetwork


def on_all_ranks(network: InProcessNetwork, body: Callable[[int], Any]) -> list[Future[Any]]:
    with ThreadPoolExecutor(network.num_ranks) as pool:
        return [pool.submit(body, rank) for rank in range(network.num_ranks)]


def bytes_of(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


@settings(max_examples=25)
@given(
    num_ranks=st.integers(2, 5),
    num_posts=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
    delayed=st.booleans(),
)
def test_every_message_arrives_in_order_whatever_the_delays(
    num_ranks: int, num_posts: int, seed: int, delayed: bool
) -> None:
    sizes = np.random.default_rng(seed).integers(0, 4, (num_posts, num_ranks, num_ranks)) * 7
    chance = random.Random(seed)
    delay = (lambda: time.sleep(chance.random() * 1e-3)) if delayed else None
    network = InProcessNetwork(num_ranks, delay=delay, timeout_seconds=20)

    def payload(post: int, source: int, destination: int) -> np.ndarray:
        return np.full(sizes[post, source, destination], 36 * post + 6 * source + destination, np.uint8)

    def body(rank: int) -> None:
        links = network.links(rank)
        sent = []
        peers = [peer for peer in range(num_ranks) if peer != rank]
        for post in range(num_posts):
            received = {peer: np.zeros(sizes[post, peer, rank], np.uint8) for peer in peers}
            transfer = links.post(received, {peer: payload(post, rank, peer) for peer in peers})
            sent.append(transfer)
            transfer.wait_received()
            for peer in peers:
                np.testing.assert_array_equal(received[peer], payload(post, peer, rank))
        for transfer in sent:
            transfer.wait_sent()

    for future in on_all_ranks(network, body):
        future.result()


def test_a_receive_and_a_send_wait_for_the_other_end() -> None:
    network = InProcessNetwork(2)
    first, second = network.links(0), network.links(1)
    done = threading.Event()

    def send() -> None:
        first.post({}, {1: bytes_of(1, 2, 3)}).wait_sent()
        done.set()

    sender = threading.Thread(target=send)
    sender.start()
    assert not done.wait(0.05)
    received = bytes_of(0, 0, 0)
    second.post({0: received}, {}).wait_received()
    assert done.wait(10)
    sender.join()
    assert received.tolist() == [1, 2, 3]


def test_a_buffer_is_read_only_when_somebody_waits() -> None:
    network = InProcessNetwork(2)
    source, destination = bytes_of(1), bytes_of(0)
    sending = network.links(0).post({}, {1: source})
    receiving = network.links(1).post({0: destination}, {})
    assert destination[0] == 0  # nobody has waited: as late as the interface allows
    sending.wait_sent()
    source[0] = 9
    receiving.wait_received()
    assert destination[0] == 1


def test_sizes_that_differ_are_an_error_at_both_ends() -> None:
    network = InProcessNetwork(2)
    sending = network.links(0).post({}, {1: bytes_of(1, 2, 3)})
    receiving = network.links(1).post({0: bytes_of(0, 0)}, {})
    for wait in (sending.wait_sent, receiving.wait_received):
        with pytest.raises(LinkError, match="rank 0 sent 3 bytes to rank 1, which expected 2"):
            wait()


def test_a_wait_that_nobody_answers_says_what_is_missing() -> None:
    network = InProcessNetwork(2, timeout_seconds=0.05)
    with pytest.raises(LinkError, match="rank 1: the message from rank 0 did not arrive"):
        network.links(1).post({0: bytes_of(0)}, {}).wait_received()
    with pytest.raises(LinkError, match=r"ranks \[1\] of the members \[0, 1\] did not arrive"):
        network.collective(0).all_gather(bytes_of(1))


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_a_peer_that_does_not_exist_is_refused(peer: int) -> None:
    with pytest.raises(ValueError, match=f"got rank {peer}"):
        InProcessNetwork(2).links(0).post({}, {peer: bytes_of(1)})


def test_a_failure_wakes_everybody_and_stays() -> None:
    network = InProcessNetwork(3)
    waiting = threading.Barrier(3)

    def body(rank: int) -> None:
        waiting.wait()
        if rank == 0:
            network.collective(0).all_gather(bytes_of(1))
        elif rank == 1:
            network.links(1).post({0: bytes_of(0)}, {}).wait_received()
        else:
            network.fail(KeyError("lost"))
            network.fail(KeyError("later"))

    failed = on_all_ranks(network, body)[:2]
    assert all(str(future.exception()) == "'lost'" for future in failed)
    with pytest.raises(KeyError, match="lost"):
        network.links(2).post({}, {})


def test_groups_of_the_same_members_do_not_mix() -> None:
    network = InProcessNetwork(2)

    def body(rank: int) -> tuple[Any, Any]:
        control, dense = network.collective(rank), network.collective(rank)
        results: dict[str, Any] = {}

        def gather() -> None:
            results["gathered"] = control.all_gather(bytes_of(rank)).tolist()

        thread = threading.Thread(target=gather)
        values = torch.tensor([float(rank + 1)])
        if rank == 0:  # rank 0 starts with the one, rank 1 with the other
            thread.start()
            dense.sum_in_rank_order(values)
        else:
            dense.sum_in_rank_order(values)
            thread.start()
        thread.join()
        return results["gathered"], values.tolist()

    for future in on_all_ranks(network, body):
        assert future.result() == ([[0], [1]], [3.0])


@pytest.mark.parametrize("length", [0, 1, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sum_is_added_up_from_rank_0_on(length: int, dtype: torch.dtype) -> None:
    members = [3, 0, 2]
    parts = [
        torch.randn(length, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(3)
    ]
    network = InProcessNetwork(4)

    def body(rank: int) -> torch.Tensor | None:
        if rank not in members:
            return None
        group = network.collective(rank, members)
        values = parts[group.rank].clone()
        group.sum_in_rank_order(values)
        return values

    results = [future.result() for future in on_all_ranks(network, body)]
    assert results[1] is None
    for member in members:
        assert torch.equal(results[member], (parts[0] + parts[1]) + parts[2])


def test_members_that_call_a_collective_differently_all_get_an_error() -> None:
    network = InProcessNetwork(2)
    futures = on_all_ranks(
        network, lambda rank: network.collective(rank).all_gather(np.zeros(rank + 1, np.uint8))
    )
    for future in futures:
        assert isinstance(future.exception(), LinkError)
        assert "rank 1: all_gather of 2 bytes" in str(future.exception())
