"""Dropout whose mask belongs to the sample, not to the batch.

Ordinary dropout draws from a generator that moves on with every call, so the mask of a sample depends
on which samples come before it and on which rank trains it. Here an entry's fate is a hash of (seed,
layer, global sample index, column): the same on any rank, in any order, on a CPU or an accelerator.
The sample index grows over epochs, so a sample gets a new mask each time it is seen.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rowhaul.errors import ConfigError

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: SplitMix64's increment
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB: its finaliser
_MIX_2 = -7723592293110705685


class SampleDropout(nn.Module):
    """Zero each entry with probability ``p`` and scale the rest by 1 / (1 - p), in training only.

    Args:
        p: probability of dropping an entry.
        seed: of the whole model.
        layer: number that tells this layer from the others with the same seed.

    Example::

        dropout = SampleDropout(0.1, seed=0, layer=1)
        hidden = dropout(hidden, batch.index)
    """

    def __init__(self, p: float, seed: int, layer: int) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ConfigError(f"dropout must be at least 0 and below 1, got {p}")
        self.p, self.seed, self.layer = p, seed, layer

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        """Drop entries of ``x`` (samples x columns, of any dimensions) whose samples are ``index``."""
        if not self.training or self.p == 0:
            return x
        columns = x.shape[1:].numel()
        return x * self._scaled_mask(index, columns, x.dtype).view(x.shape)

    def _scaled_mask(self, index: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """Each 64-bit hash decides two neighbouring columns, 32 bits each."""
        pairs = (columns + 1) // 2
        stream = _mixed(_mixed(index.new_tensor([self.seed])).add_(self.layer))
        samples = _mixed(index * _GOLDEN + stream)
        places = _mixed(torch.arange(pairs, device=index.device) * _GOLDEN)
        bits = _mixed(samples.unsqueeze(1) + places)  # samples x pairs
        lowest_kept = round(self.p * 2**32) - 2**31  # the halves are signed
        kept = bits.view(torch.int32)[:, :columns] >= lowest_kept
        return kept.to(dtype).mul_(1 / (1 - self.p))

    def extra_repr(self) -> str:
        """Shown in the model's repr."""
        return f"p={self.p}, seed={self.seed}, layer={self.layer}"


def _mixed(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser, in wrapping int64 arithmetic; overwrites and returns ``bits``."""
    bits ^= _shifted(bits, 30)
    bits *= _MIX_1
    bits ^= _shifted(bits, 27)
    bits *= _MIX_2
    bits ^= _shifted(bits, 31)
    return bits


def _shifted(bits: Tensor, count: int) -> Tensor:
    """A logical right shift: PyTorch's own repeats the sign."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)
