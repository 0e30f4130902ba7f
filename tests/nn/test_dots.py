"""Dot products by a kernel are those of matrix products, forward and backward."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_bits import assert_bits_of_samples_alone

from rowhaul.nn.layers import PairwiseDots


def made(num_samples, num_vectors, dim, has_first, dtype=torch.float64):
    torch.manual_seed(num_samples + 10 * num_vectors + 100 * dim)
    first = torch.randn(num_samples, dim, dtype=dtype) if has_first else None
    others = torch.randn(num_samples, (num_vectors - has_first) * dim, dtype=dtype)
    return first, others


def joined_and_gradients(layer, first, others, weights):
    given = [None if one is None else one.clone().requires_grad_() for one in (first, others)]
    joined = layer.joined(*given)
    (joined * weights).sum().backward()
    return [joined.detach(), *(one.grad for one in given if one is not None)]


@settings(max_examples=60, deadline=None)
@given(
    num_samples=st.integers(0, 5),
    num_vectors=st.integers(1, 22),
    dim=st.integers(1, 37),
    has_first=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_products_and_gradients_are_those_of_matrix_products(num_samples, num_vectors, dim, has_first, dtype):
    if num_vectors == has_first:  # no others
        num_vectors += 1
    first, others = made(num_samples, num_vectors, dim, has_first, dtype)
    layer, plain = PairwiseDots(num_vectors), PairwiseDots(num_vectors)
    plain.fuses = False
    weights = torch.randn(num_samples, dim * has_first + layer.num_pairs, dtype=dtype)
    found = joined_and_gradients(layer, first, others, weights)
    expected = joined_and_gradients(plain, first, others, weights)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("has_first", [True, False])
def test_gradients_are_those_of_small_differences(has_first: bool) -> None:
    first, others = made(2, 5, 3, has_first)
    given = [one.requires_grad_() for one in (first, others) if one is not None]
    layer = PairwiseDots(5)
    assert torch.autograd.gradcheck(
        lambda *vectors: layer.joined(*vectors) if has_first else layer.joined(None, *vectors), given
    )


@pytest.mark.parametrize("num_threads", [1, 3])
def test_bits_of_a_sample_do_not_depend_on_its_batch(num_threads: int) -> None:
    first, others = made(700, 9, 24, True, torch.float32)  # enough for threads
    layer = PairwiseDots(9)
    weights = torch.randn(700, 24 + layer.num_pairs)
    compute = partial(joined_and_gradients, layer)
    assert_bits_of_samples_alone(compute, [first, others, weights], num_threads)


def test_views_are_taken_as_they_are_meant() -> None:
    first, others = made(4, 6, 5, True)
    layer = PairwiseDots(6)
    weights = torch.randn(layer.num_pairs + 5, 4, dtype=torch.float64).T
    turned = [one.T.contiguous().T for one in (first, others)]
    for found, expected in zip(
        joined_and_gradients(layer, *turned, weights),
        joined_and_gradients(layer, first, others, weights.contiguous()),
        strict=True,
    ):
        assert torch.equal(found, expected)


def test_gradients_under_autocast_are_those_without_but_for_rounding() -> None:
    layer = PairwiseDots(4)
    first, others = made(3, 4, 2, True, torch.float32)
    weights = torch.ones(3, 2 + layer.num_pairs)
    expected = joined_and_gradients(layer, first, others, weights)
    with torch.autocast("cpu", torch.bfloat16):
        found = joined_and_gradients(layer, first, others, weights)
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.1)
    given = [one.requires_grad_() for one in (first, others)]
    with torch.autocast("cpu", torch.bfloat16):
        joined = layer.joined(*given)
    joined.sum().backward()  # outside, where PyTorch wants it
    torch.testing.assert_close([one.grad for one in given], expected[1:], atol=0.1, rtol=0.1)


def test_what_the_kernel_does_not_take_goes_through_matrix_products() -> None:
    first, others = made(3, 4, 2, True)
    layer = PairwiseDots(4)
    expected = layer.joined(first, others)
    torch.testing.assert_close(layer.joined(first.float(), others), expected, atol=1e-6, rtol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer.joined(first.float(), others.float())
    torch.testing.assert_close(found.double(), expected, atol=0.1, rtol=0.1)
