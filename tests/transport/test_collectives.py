"""Messages between real processes, over Gloo and through shared memory, are those between threads."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rowhaul.schedule.sizes import apportion
from rowhaul.schedule.sum_plan import SCALE, SumPlan
from rowhaul.transport.base import Collective, LinkError, Links, Wire
from rowhaul.transport.collectives import PairwiseCollective
from rowhaul.transport.gloo import connect_group
from transport_ranks import mapped_bytes, run_processes, run_threads

LARGE = 6_000_000  # bytes: no socket buffer holds it


def exchange_at_random(links: Links, seed: int, num_posts: int) -> list[bytes]:
    """Posts of random sizes to random peers; sends are waited for some posts later."""
    pattern = np.random.default_rng(seed)  # the same on all ranks, as a plan is
    sizes = pattern.integers(0, 3, (num_posts, links.num_ranks, links.num_ranks)) * pattern.integers(0, 3000)
    sizes[num_posts // 2] = LARGE  # everyone to everyone, both ways at once
    own = np.random.default_rng((seed, links.rank))
    peers = [peer for peer in range(links.num_ranks) if peer != links.rank]
    arrived, under_way = [], []
    for post in range(num_posts):
        receives = {peer: np.zeros(sizes[post, peer, links.rank], np.uint8) for peer in peers}
        sends = {
            peer: own.integers(0, 256, sizes[post, links.rank, peer], np.uint8, endpoint=False)
            for peer in peers
        }
        under_way.append(links.post(receives, sends))
        under_way[-1].wait_received()
        arrived += [receives[peer].tobytes() for peer in peers]
        if len(under_way) > 3:
            under_way.pop(0).wait_sent()
    for transfer in under_way:
        transfer.wait_sent()
    return arrived


def sum_everything(collective: Collective, num_ranks: int) -> list[bytes]:
    """Sums of every length around the number of ranks, and of lengths that go each of the two ways."""
    sums = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for length in [*range(num_ranks + 2), 777, 50_003]:
            generator = torch.Generator().manual_seed(1000 * collective.rank + length)
            values = torch.randn(length, generator=generator).to(dtype)
            collective.sum_in_rank_order(values)
            sums.append(values.view(torch.uint8).numpy().tobytes())
    return sums


def sum_in_buckets(collective: Collective) -> list[bytes]:
    """Sums that are sent bucket by bucket, some of them before others are known, over parts of any size."""
    sums, num_ranks = [], collective.num_ranks
    for number, buckets in enumerate((1, 2, 4, 8)):
        for wire in (None, Wire(torch.bfloat16, 40_000)):
            if isinstance(collective, PairwiseCollective):
                shares = [(3 * rank + number) % 4 for rank in range(num_ranks)]
                plan = SumPlan(tuple(apportion(SCALE, shares).tolist()), buckets)
                for size in range(30):
                    collective._plans[size] = plan
            generator = torch.Generator().manual_seed(collective.rank)
            own, total = torch.randn(50_000, generator=generator), torch.empty(50_000)
            running = collective.start_sum(own, total, wire)
            for _ in range(collective.rank % len(running.ends)):
                running.send_next()
            running.finish()
            sums.append(total.numpy().tobytes())
    return sums


def everything(links: Links, collective: Collective, seed: int) -> dict[str, Any]:
    read_only = np.frombuffer(bytes([links.rank, 7]), np.uint8)
    apart = torch.full((6,), float(links.rank), requires_grad=True)
    collective.sum_in_rank_order(apart[::2])  # not contiguous, and a part of a parameter
    return {
        "messages": exchange_at_random(links, seed, 12),
        "gathered": collective.all_gather(read_only).tolist(),
        "nothing": collective.all_gather(np.zeros(0, np.uint8)).shape,
        "sums": sum_everything(collective, links.num_ranks),
        "apart": apart.tolist(),
        "buckets": sum_in_buckets(collective),
        "subsets": in_subsets(collective),
    }


def in_subsets(collective: Collective) -> list[bytes]:
    """Sums, gathers and broadcasts of some ranks, between those of all; in another order, too."""
    results, last = [], collective.num_ranks - 1
    for ranks in ((0, last), (0,), (last, 0), tuple(range(1, last + 1)), (0, last), tuple(range(last + 1))):
        if collective.rank in ranks:
            some = collective.among(ranks)
            assert (some.num_ranks, some.rank) == (len(ranks), ranks.index(collective.rank))
            for length in (1, 777, 50_003):
                values = torch.arange(length, dtype=torch.float32) / (collective.rank + 3)
                some.sum_in_rank_order(values)
                sent = np.full(length, collective.rank + 1, np.uint8)
                gathered = some.all_gather(sent)
                some.broadcast(sent)
                assert sent.tolist() == [ranks[0] + 1] * length
                results += [values.numpy().tobytes(), gathered.tobytes()]
        results.append(collective.all_gather(np.array([collective.rank], np.uint8)).tobytes())
    return results


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["ab", "aaa", "aba"])
def test_processes_get_the_same_as_threads(hosts: str) -> None:
    num_ranks = len(hosts)
    between_processes = run_processes(num_ranks, everything, 5, hosts=hosts)
    between_threads = run_threads(num_ranks, everything, 5)
    for rank in range(num_ranks):
        for what in between_threads[rank]:
            assert between_processes[rank][what] == between_threads[rank][what], (rank, what)
    assert between_processes[0]["sums"] == between_processes[-1]["sums"]


def lose_the_last_rank(links: Links, collective: Collective, host: str | None) -> tuple[int | None, str]:
    last = links.num_ranks - 1
    group = dist.new_group([0, last])
    pair = connect_group(group, host or str(links.rank)) if links.rank != 1 else None
    collective.all_gather(np.zeros(1, np.uint8))
    if links.rank == last:
        os.kill(os.getpid(), 9)
    large = {last: np.zeros(LARGE, np.uint8)}

    def talk_to_it() -> None:
        if pair is not None:
            PairwiseCollective(pair).sum_in_rank_order(
                torch.ones(5)
            )  # rank 1 of the group, the last one of all
        else:
            links.post(large, {}).wait_received()

    with pytest.raises(LinkError) as caught:
        talk_to_it()
    return caught.value.peer, str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["abc", "aaa"])
def test_a_lost_rank_is_an_error_that_names_it(hosts: str) -> None:
    results = run_processes(3, lose_the_last_rank, "a" if hosts == "aaa" else None, hosts=hosts)
    for peer, message in results[:2]:
        assert peer == 2
        assert "from rank 2 failed" in message or "to rank 2 failed" in message


def memory_of_sums(links: Links, collective: Collective, lengths: list[int]) -> list[int]:
    """Bytes of messages' memory that this rank has mapped after sums of each length."""
    mapped = []
    for length in lengths:
        for _ in range(3):
            collective.sum_in_rank_order(torch.ones(length))
        collective.all_gather(np.zeros(1, np.uint8))  # all have summed
        mapped.append(mapped_bytes())
        collective.all_gather(np.zeros(1, np.uint8))  # none has begun the next
    return mapped


@pytest.mark.slow
def test_sums_keep_memory_of_a_few_times_their_size_on_each_rank() -> None:
    num_ranks, size = 6, 8 << 20
    lengths = [size // 4, size // 16, 100_000]
    before, large, medium, small = np.sum(
        run_processes(num_ranks, memory_of_sums, [0, *lengths], hosts="a" * num_ranks), axis=0
    ).tolist()
    assert before == 0
    # Each block is mapped by both ends. Sums of all to all would keep 30 blocks of the whole size.
    assert large <= 2 * 3 * num_ranks * size
    # Another size is tried anew, and frees what the first one used.
    assert medium <= 2 * 3 * num_ranks * size // 4
    assert small <= 2 * 2 * num_ranks * num_ranks * (1 << 19)
