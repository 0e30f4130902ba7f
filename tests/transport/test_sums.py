"""Sums over ranks, whichever way they take, against NumPy's in rank order: bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowhaul.schedule.sizes import apportion
from rowhaul.schedule.sum_plan import SCALE, SumPlan
from rowhaul.transport import collectives
from rowhaul.transport.base import Bytes, Wire, complete
from rowhaul.transport.calibration import LinkMeasurements
from rowhaul.transport.collectives import PairwiseCollective
from rowhaul.transport.in_process import InProcessLinks, InProcessNetwork, InProcessTransfer
from rowhaul.transport.sums import choice
from rowhaul.transport.sums.choice import settled
from rowhaul.transport.sums.exchange import Exchange

TYPES = {torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16}


class ThreadLinks:
    """Messages of tensors between threads, which copy a payload as late as they may; counts bytes."""

    pipes: Mapping[int, Any] = {}

    def __init__(self, links: InProcessLinks) -> None:
        self.rank, self.num_ranks, self._links = links.rank, links.num_ranks, links
        self.num_bytes = np.zeros(links.num_ranks, np.int64)  # sent to each
        self.num_messages = 0

    def post(self, receives: Mapping[int, Bytes], sends: Mapping[int, Bytes]) -> InProcessTransfer:
        return self._links.post(receives, sends)

    def start(self, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor]) -> InProcessTransfer:
        for peer, one in sends.items():
            self.num_bytes[peer] += one.nbytes
            self.num_messages += one.numel() > 0
        return self._links.post(
            *(
                {peer: one.view(-1).view(torch.uint8).numpy() for peer, one in some.items() if one.numel()}
                for some in (receives, sends)
            )
        )

    @contextlib.contextmanager
    def swap(self, peer: int, own: Tensor, buffer: Callable[[], Tensor]) -> Iterator[Tensor]:
        theirs = buffer()
        complete(self.start({peer: theirs}, {peer: own}))
        yield theirs

    def free_memory(self) -> None:
        pass


def over(links: ThreadLinks) -> PairwiseCollective:
    """A collective over links between threads, which have all that it calls."""
    return PairwiseCollective(links)  # type: ignore[arg-type]  # it names Gloo's, the only ones of the package


def on_all_ranks(num_ranks: int, body: Callable[[ThreadLinks], Any]) -> list[Any]:
    network = InProcessNetwork(num_ranks)

    def run(rank: int) -> Any:
        try:
            return body(ThreadLinks(network.links(rank)))
        except BaseException as error:
            network.fail(error)
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(num_ranks)]]


def values_of(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Values whose sum depends on the order."""
    random = np.random.default_rng((rank, size))
    return torch.from_numpy(random.standard_normal(size) * 10.0 ** random.integers(-4, 4, size)).to(dtype)


def expected_sum(values: Sequence[Tensor], wire: Wire | None) -> np.ndarray:
    """The sum in rank order; the first values rounded before it and after."""
    dtype = TYPES[values[0].dtype]
    total = np.zeros(values[0].numel(), dtype)
    rounded = wire.count if wire is not None else 0
    for number, one in enumerate(values):
        own = one.numpy().copy()
        if wire is not None:
            own[:rounded] = one[:rounded].to(wire.dtype).to(one.dtype).numpy()
        total = own if number == 0 else total + own
    if wire is not None:
        total[:rounded] = torch.from_numpy(total[:rounded]).to(wire.dtype).to(values[0].dtype).numpy()
    return total


@st.composite
def sums(draw: st.DrawFn) -> tuple[SumPlan, int, torch.dtype, Wire | None]:
    num_ranks = draw(st.integers(2, 5))
    shares = draw(st.lists(st.sampled_from([0, 1, 2, 7]), min_size=num_ranks, max_size=num_ranks).filter(any))
    parts = tuple(apportion(SCALE, shares).tolist()) if draw(st.integers(0, 3)) else ()
    size, dtype = draw(st.integers(0, 200)), draw(st.sampled_from(list(TYPES)))
    wire = Wire(torch.bfloat16, draw(st.integers(0, size))) if draw(st.booleans()) else None
    return SumPlan(parts, draw(st.sampled_from([1, 2, 3, 8]))), num_ranks, size, dtype, wire


@settings(max_examples=150)
@given(sums(), st.randoms(use_true_random=False))
def test_every_way_gives_the_sum_in_rank_order(case: Any, random: Any) -> None:
    plan, num_ranks, size, dtype, wire = case
    values = [values_of(rank, size, dtype) for rank in range(num_ranks)]
    ahead = [random.randint(0, 9) for _ in range(num_ranks)]  # buckets sent before finish()

    def body(links: ThreadLinks) -> tuple[bytes, bytes]:
        own, total = values[links.rank].clone(), torch.full((size,), torch.nan, dtype=dtype)

        def allocate(name: str, kind: torch.dtype, length: int) -> Tensor:
            return torch.full((length,), torch.nan, dtype=kind)

        running = Exchange(links, plan, own, total, allocate, wire)
        for _ in range(min(ahead[links.rank], len(running.ends))):
            running.send_next()
        running.finish()
        return total.numpy().tobytes(), own.numpy().tobytes()

    wanted = expected_sum(values, wire).tobytes()
    for rank, (total, own) in enumerate(on_all_ranks(num_ranks, body)):
        assert total == wanted
        assert own == values[rank].numpy().tobytes()  # untouched


@pytest.mark.parametrize("shares", [(1, 1, 1, 1), (2, 2, 0, 0), (1, 0, 0, 0)])
def test_links_carry_what_the_plan_says(shares: tuple[int, ...]) -> None:
    plan, size = SumPlan(tuple(apportion(SCALE, shares).tolist()), 4), 8192

    def body(links: ThreadLinks) -> np.ndarray:
        own, total = values_of(links.rank, size, torch.float32), torch.empty(size)
        Exchange(links, plan, own, total, lambda name, kind, length: torch.empty(length, dtype=kind)).finish()
        assert links.num_messages <= plan.num_messages(4)
        return links.num_bytes.copy()

    between = np.stack(on_all_ranks(4, body))  # from x to
    planned = sum(plan.loads(4)) * 4 * size
    np.testing.assert_array_equal(between.sum(axis=1), planned)
    np.testing.assert_array_equal(between.sum(axis=0), planned)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_a_collective_chooses_one_way_on_all_ranks(num_ranks: int) -> None:
    sizes = (0, 1, 5, 777, 20_011)

    def body(links: ThreadLinks) -> tuple[list[bytes], dict[int, SumPlan], list[list[int]]]:
        collective, found, ends = over(links), [], []
        for size in sizes * 2:
            values = values_of(links.rank, size, torch.float32)
            collective.sum_in_rank_order(values)
            found.append(values.numpy().tobytes())
            ends.append(collective.bucket_ends(size, torch.float32))
        return found, collective._plans, ends

    results = on_all_ranks(num_ranks, body)
    for (found, plans, ends), size in zip([results[0]] * len(sizes), sizes, strict=True):
        wanted = expected_sum([values_of(rank, size, torch.float32) for rank in range(num_ranks)], None)
        assert found[sizes.index(size)] == found[sizes.index(size) + len(sizes)] == wanted.tobytes()
        assert ends[sizes.index(size)][-1] == size
        assert plans == results[-1][1]
    assert all(one == results[0] for one in results)


def test_some_members_sum_among_themselves() -> None:
    members = (0, 2, 3)

    def body(links: ThreadLinks) -> list[bytes]:
        collective, found = over(links), []
        for size in (40, 9000):
            everyone = values_of(links.rank, size, torch.float32)
            collective.sum_in_rank_order(everyone)
            found.append(everyone.numpy().tobytes())
            if links.rank in members:
                some = collective.among(members)
                assert some is collective.among(list(members))
                values = values_of(links.rank, size, torch.float32)
                some.sum_in_rank_order(values)
                found.append(values.numpy().tobytes())
                assert some.all_gather(np.array([links.rank], np.uint8))[:, 0].tolist() == list(members)
        return found

    results = on_all_ranks(5, body)
    for number, size in enumerate((40, 9000)):
        values = [values_of(rank, size, torch.float32) for rank in range(5)]
        whole, part = expected_sum(values, None), expected_sum([values[one] for one in members], None)
        for rank, found in enumerate(results):
            wanted = [whole, part] if rank in members else [whole]
            count = len(wanted)
            assert found[count * number : count * (number + 1)] == [one.tobytes() for one in wanted]
    with pytest.raises(ValueError, match=r"rank 1 is not among the members \[0, 2\]"):
        over(ThreadLinks(InProcessNetwork(3).links(1))).among((0, 2))


def test_sums_among_many_subsets_take_the_memory_of_one() -> None:
    subsets, size = [(0, 1), (0, 2), (0, 1, 2), (0, 1, 3), (0, 2, 3)], 20_000

    def body(links: ThreadLinks) -> tuple[int, int]:
        collective, held = over(links), []
        for members in [tuple(range(4)), *subsets]:
            if links.rank in members:
                collective.among(members).sum_in_rank_order(values_of(links.rank, size, torch.float32))
            groups = [collective, *collective._among.values()]
            buffers = {one.data_ptr(): one.nbytes for group in groups for one in group._memory.values()}
            held.append(sum(buffers.values()))
        return held[0], held[-1]

    held = on_all_ranks(4, body)
    assert sum(first for first, _ in held) >= 4 * size  # a leaf of the sum needs none
    assert all(last <= 5 * 4 * size for _, last in held)  # the sum, and everybody's values at most


def test_ways_to_sum_are_chosen_again_over_links_that_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds, size, bits = [1e9] * 4, 20_000, []
    tried: list[tuple[tuple[float, ...], int]] = []  # the speeds of each choice

    def measured(links: Any, collective: Any, **given: Any) -> LinkMeasurements:
        collective.all_gather(np.zeros(1, np.uint8))
        members = getattr(links, "_members", range(4))
        own = np.array([speeds[one] for one in members])
        pairs = np.minimum(own[:, None], own[None, :])
        return LinkMeasurements(0 * pairs, pairs, pairs)

    def candidates(known: Any, num_ranks: int, num_bytes: int) -> list[SumPlan]:
        tried.append((tuple(known), num_bytes))
        return choice.candidates(known, num_ranks, num_bytes)

    monkeypatch.setattr(collectives, "measure_links", measured)
    monkeypatch.setattr(collectives, "candidates", candidates)

    def body(links: ThreadLinks) -> list[bytes]:
        collective, found = over(links), []

        def add(group: PairwiseCollective) -> None:
            values = values_of(links.rank, size, torch.float32)
            group.sum_in_rank_order(values)
            found.append(values.numpy().tobytes())

        add(collective)
        add(collective)
        collective.all_gather(np.zeros(1, np.uint8))  # all have chosen
        speeds[3] = 1e6
        collective.choose_again()
        add(collective)
        add(collective.among(range(4)))
        if links.rank in (0, 1, 3):
            add(collective.among((0, 1, 3)))
        collective.choose_again([1e9, 1e9, 1e7, 1e7])
        add(collective)
        collective.choose_again([1e9, 1e9, 1e7, 1e7])
        add(collective)
        return found

    for rank, found in enumerate(on_all_ranks(4, body)):
        wanted = expected_sum([values_of(one, size, torch.float32) for one in range(4)], None).tobytes()
        assert [one == wanted for one in found] == [True] * 4 + [False] * (rank != 2) + [True] * 2
        bits += found[4 : len(found) - 2]
    assert len(set(bits)) == 1
    chosen = [known for known, _ in tried]
    assert sorted(set(chosen)) == [
        (1e9, 1e9, 1e6),
        (1e9, 1e9, 1e7, 1e7),
        (1e9, 1e9, 1e9, 1e6),
        (1e9, 1e9, 1e9, 1e9),
    ]
    assert len(chosen) == 3 * 4 + 3  # once each, on each rank


def test_the_choice_of_rank_0_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = [SumPlan(), SumPlan((SCALE, 0))]
    network = InProcessNetwork(2)
    monkeypatch.setattr(choice, "TRIALS", 1)

    def body(links: ThreadLinks) -> SumPlan:
        def run(way: SumPlan) -> None:
            pass

        gather = network.collective(links.rank).all_gather
        return choice.try_ways(ways, run, gather)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: body(ThreadLinks(network.links(rank))), range(2))
    assert first == second


def test_speeds_that_are_alike_count_as_equal() -> None:
    assert settled([10.0, 1.0, 9.0, 1.1]) == [9.5, 1.05, 9.5, 1.05]
    assert settled([5.0]) == [5.0]
