"""Dense gradients that are summed while backward() runs: the bits of a sum after it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rowhaul.errors import ConfigError
from rowhaul.transport.base import Collective
from rowhaul.transport.dense.gradients import DenseGradients
from rowhaul.transport.dense.overlapping import OverlappingSum, wire_type
from rowhaul.transport.in_process import InProcessNetwork

NUM_RANKS, STEPS = 3, 4


class Inline:
    """Makes calls at once, in the calling thread, and counts them."""

    def __init__(self, collective: Collective) -> None:
        self.collective, self.num_calls = collective, 0

    def __call__(self, call: Callable[[Collective], None]) -> Inline:
        self.num_calls += 1
        call(self.collective)
        return self

    def wait(self) -> None:
        pass


torch.manual_seed(3)
MODEL = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 4), nn.ReLU(), nn.Linear(4, 1)).double()


def make_model() -> nn.Sequential:
    return copy.deepcopy(MODEL)


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


Backward = Callable[[nn.Module, Tensor, int], None]


def once(model: nn.Module, values: Tensor, rank: int) -> None:
    model(values).square().sum().backward()


def twice(model: nn.Module, values: Tensor, rank: int) -> None:
    """On one rank only, so that the others learn of it by the sum."""
    once(model, values, rank)
    if rank == 1:
        once(model, 2 * values, rank)


def changed(model: nn.Module, values: Tensor, rank: int) -> None:
    once(model, values, rank)
    if rank == 2:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.clamp_(-1, 1)


def replaced(model: nn.Module, values: Tensor, rank: int) -> None:
    once(model, values, rank)
    first = next(iter(model.parameters()))
    assert first.grad is not None
    first.grad = first.grad * 3


def parts(model: nn.Module, values: Tensor, rank: int) -> None:
    """Some ranks have no sample, or no gradient of some layers."""
    if rank == 1:
        model[0](values).square().sum().backward()
    elif rank == 2:
        once(model, values, rank)


def expected(backward: Backward, step: int, keep: bool, before: list[Tensor]) -> list[np.ndarray | None]:
    """The sum of what each rank computes alone, in rank order."""
    sums: list[np.ndarray | None] = [None] * 6
    for rank in range(NUM_RANKS):
        model = make_model()
        if keep and before:
            for parameter, one in zip(model.parameters(), before, strict=True):
                parameter.grad = torch.zeros_like(one)
        backward(model, inputs(rank, step), rank)
        for number, parameter in enumerate(model.parameters()):
            if parameter.grad is not None:
                own, so_far = parameter.grad.numpy(), sums[number]
                sums[number] = own if so_far is None else so_far + own
    return sums


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("backward", [once, twice, changed, replaced, parts])
def test_the_gradients_are_the_sums_in_rank_order(backward: Backward, keep: bool) -> None:
    """``keep``: gradients are set to zero between steps, not to None."""
    network = InProcessNetwork(NUM_RANKS)

    def body(rank: int) -> list[list[np.ndarray | None]]:
        collective = network.collective(rank)
        model, in_dense = make_model(), Inline(collective)
        sums = OverlappingSum(DenseGradients(model.parameters()), in_dense, collective.bucket_ends)
        found = []
        for step in range(STEPS):
            sums.begin(4, torch.float64)
            backward(model, inputs(rank, step), rank)
            shared = sums.complete(torch.tensor(1.5))
            shared.replicated[:] = rank
            sums.send_rest()
            sums.wait()
            assert shared.loss == 1.5 * NUM_RANKS
            assert shared.summed_replicated.tolist() == [3.0] * 4
            sums.spread()
            found.append([None if p.grad is None else p.grad.numpy().copy() for p in model.parameters()])
            for parameter in model.parameters():
                if keep and parameter.grad is not None:
                    parameter.grad.zero_()
                else:
                    parameter.grad = None
        if backward is once:
            assert in_dense.num_calls > STEPS  # buckets were sent before backward() was over
        return found

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        results = list(pool.map(body, range(NUM_RANKS)))
    for step in range(STEPS):
        wanted = expected(backward, step, keep and step > 0, list(make_model().parameters()))
        for found in results:
            for one, other in zip(found[step], wanted, strict=True):
                assert (one is None) == (other is None)
                assert one is None or other is None or one.tobytes() == other.tobytes()


def test_a_worker_that_flags_a_gradient_is_heard_by_all() -> None:
    network = InProcessNetwork(2)

    def body(rank: int) -> Any:
        collective, model = network.collective(rank), make_model()
        sums = OverlappingSum(DenseGradients(model.parameters()), Inline(collective), collective.bucket_ends)
        sums.begin(0, torch.float64)
        once(model, inputs(rank, 0), rank)
        shared = sums.complete(torch.tensor(1.0))
        if rank:
            shared.flag()
        sums.send_rest()
        sums.wait()
        return shared.loss

    with ThreadPoolExecutor(2) as pool:
        assert all(np.isnan(loss) for loss in pool.map(body, range(2)))


def test_rounded_gradients_are_the_same_on_all_ranks_and_leave_the_loss_exact() -> None:
    network = InProcessNetwork(NUM_RANKS)

    def body(rank: int) -> tuple[list[bytes], float | None]:
        collective, model = network.collective(rank), make_model()
        sums = OverlappingSum(
            DenseGradients(model.parameters()), Inline(collective), collective.bucket_ends,
            wire=wire_type("bfloat16"),
        )  # fmt: skip
        sums.begin(1, torch.float64)
        once(model, inputs(rank, 0), rank)
        shared = sums.complete(torch.tensor(1 / 3, dtype=torch.float64))
        shared.replicated[:] = 0.1
        sums.send_rest()
        sums.wait()
        sums.spread()
        assert shared.summed_replicated.tolist() == [0.1 + 0.1 + 0.1]
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(one is not None and torch.equal(one, one.bfloat16().double()) for one in gradients)
        return [one.numpy().tobytes() for one in gradients if one is not None], shared.loss

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        results = list(pool.map(body, range(NUM_RANKS)))
    assert all(one == results[0] for one in results)
    assert results[0][1] == 1 / 3 + 1 / 3 + 1 / 3


def test_hooks_are_removed() -> None:
    model, collective = make_model(), InProcessNetwork(1).collective(0)
    sums = OverlappingSum(DenseGradients(model.parameters()), Inline(collective), collective.bucket_ends)
    sums.stop_overlapping()
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())
    with pytest.raises(ConfigError, match="dense_wire must be float32 or bfloat16, got 'int8'"):
        wire_type("int8")


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ((torch.float32, torch.float64), "convert the model to one type"),
        (
            (torch.bfloat16, torch.bfloat16),
            "keep them in float32, and compute in bfloat16 under torch.autocast",
        ),
    ],
)
def test_types_that_cannot_be_summed_are_refused(dtypes, message):
    with pytest.raises(ConfigError, match=message):
        DenseGradients([torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in dtypes])


def test_what_users_do_to_a_gradient_does_not_reach_the_next_ones() -> None:
    """Such as clipping by ``grad.data``, an idiom of old: a tensor's memory is another one then."""
    parameter = nn.Parameter(torch.zeros(3))
    gradients = DenseGradients([parameter])
    found = []
    for step in range(1, 6):
        parameter.grad = torch.full((3,), float(step))
        shared = gradients.begin()
        gradients.complete(shared)
        shared.total.copy_(shared.own)
        gradients.spread(shared)
        assert parameter.grad is not None
        found.append(parameter.grad[0].item())
        parameter.grad.data = parameter.grad.data * 0.5
    assert found == [1, 2, 3, 4, 5]
