"""Mixtures of experts by a kernel are those of PyTorch's own operations, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_bits import assert_bits_of_samples_alone

from rowhaul.nn.models.multi_task import Mixtures


def made(num_samples, members, dim, dtype=torch.float64):
    torch.manual_seed(num_samples + 10 * dim)
    num_experts = max(max(some) for some in members) + 1
    gates = [torch.randn(num_samples, len(some), dtype=dtype) for some in members]
    return gates, [torch.randn(num_samples, dim, dtype=dtype) for _ in range(num_experts)]


def sums_and_gradients(layer, gates, experts, weights):
    gates, experts = ([one.clone().requires_grad_() for one in some] for some in (gates, experts))
    sums = layer(gates, experts)
    sum((one * weight).sum() for one, weight in zip(sums, weights, strict=True)).backward()
    return [*(one.detach() for one in sums), *(one.grad for one in (*gates, *experts))]


@settings(max_examples=60, deadline=None)
@given(
    num_samples=st.integers(0, 5),
    members=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=3),
    dim=st.integers(1, 37),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_sums_and_gradients_are_those_of_plain_operations(num_samples, members, dim, dtype):
    every = [*range(max(max(some) for some in members) + 1)]
    members = [*members, every]  # PyTorch has no gradient, instead of zeros, for an expert that nobody reads
    gates, experts = made(num_samples, members, dim, dtype)
    layer, plain = Mixtures(members), Mixtures(members)
    plain.fuses = False
    weights = [torch.randn(num_samples, dim, dtype=dtype) for _ in members]
    found = sums_and_gradients(layer, gates, experts, weights)
    expected = sums_and_gradients(plain, gates, experts, weights)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_are_those_of_small_differences():
    layer = Mixtures([[0, 2], [1, 2], [0, 1, 2]])
    gates, experts = made(2, layer.members, 5)
    given = [one.requires_grad_() for one in (*gates, *experts)]
    assert torch.autograd.gradcheck(lambda *some: layer(some[:3], some[3:]), given)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_bits_of_a_sample_do_not_depend_on_its_batch(num_threads):
    layer = Mixtures([[0, 2], [1, 2]])
    gates, experts = made(700, layer.members, 50, torch.float32)  # enough for threads
    weights = [torch.randn(700, 50) for _ in layer.members]

    def compute(*some):
        return sums_and_gradients(layer, some[:2], some[2:5], some[5:])

    assert_bits_of_samples_alone(compute, [*gates, *experts, *weights], num_threads)


def test_views_and_sums_that_nobody_reads():
    layer = Mixtures([[0, 1], [1, 0]])
    gates, experts = made(4, layer.members, 6)
    turned = [one.T.contiguous().T.requires_grad_() for one in experts]
    first, _ = layer(gates, turned)
    torch.testing.assert_close(first, layer(gates, experts)[0])
    first.T.contiguous().T.sum().backward()
    weights = torch.softmax(gates[0], dim=1)
    for number, one in enumerate(turned):
        torch.testing.assert_close(one.grad, weights[:, [number]].expand(4, 6))


def test_other_types_take_plain_operations():
    layer = Mixtures([[0, 1]])
    gates, experts = made(3, layer.members, 4)
    (expected,) = layer(gates, experts)
    (found,) = layer([one.half() for one in gates], [one.half() for one in experts])
    torch.testing.assert_close(found.double(), expected, atol=0.01, rtol=0.01)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = layer([one.float() for one in gates], [one.float() for one in experts])
    torch.testing.assert_close(found.double(), expected, atol=0.1, rtol=0.1)
