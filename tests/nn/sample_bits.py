"""Compares a sample's results within a batch with those of the sample alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def assert_bits_of_samples_alone(
    compute: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], num_threads: int
) -> None:
    """Check that what ``compute`` gives for a sample does not depend on the other samples of its batch."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        whole = compute(*tensors)
    finally:
        torch.set_num_threads(before)
    count = len(tensors[0])
    for sample in (0, count // 3, count - 1):
        one = slice(sample, sample + 1)
        alone = compute(*(tensor[one] for tensor in tensors))
        assert all(torch.equal(found[one], expected) for found, expected in zip(whole, alone, strict=True))
