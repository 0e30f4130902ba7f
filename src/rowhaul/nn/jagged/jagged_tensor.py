"""Rows of different lengths in one flat tensor."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from rowhaul.errors import DataError

_SHOWN = 8  # rows, and values of a row, that a repr lists


class JaggedTensor:
    """Rows of different lengths, laid end to end in ``values``.

    Give ``lengths`` or ``offsets``; the other is derived. ``weights`` has one number per value.
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        parts = {"values": values, "weights": weights, "lengths": lengths, "offsets": offsets}
        for name, part in parts.items():
            if not isinstance(part, Tensor) and (part is not None or name == "values"):
                raise DataError(
                    f"{name} must be a tensor, got {type(part).__name__}; make one with torch.as_tensor()"
                )
        for name, given in (("lengths", lengths), ("offsets", offsets)):
            if given is None:
                continue
            if given.dim() != 1 or (given.dtype not in (torch.int32, torch.int64) and given.numel()):
                form = f"shape {tuple(given.shape)} of {given.dtype}"
                raise DataError(f"{name} must be a flat tensor of int32 or int64, got {form}")
        if weights is not None and weights.shape[:1] != values.shape[:1]:
            raise DataError(
                f"weights must have one entry per value: {len(weights):,} weights for {len(values):,} values"
            )
        both = lengths is not None and offsets is not None
        if offsets is not None and not len(offsets):
            raise DataError("offsets must start with 0 and so have at least one entry, got none")
        if lengths is None:
            if offsets is None:
                raise DataError("a jagged tensor needs lengths or offsets; neither was given")
            lengths = offsets.diff()
        if lengths.is_floating_point():  # as torch.tensor([]) is
            lengths = lengths.to(torch.int32)
        self._values, self._weights, self._lengths, self._known_offsets = values, weights, lengths, offsets
        if values.device.type == "cpu":
            self._check(both)

    @property
    def _offsets(self) -> Tensor:
        """Where rows begin, and the end; made when first asked for: a batch of one id each never is."""
        if self._known_offsets is None:
            lengths = self._lengths
            self._known_offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=lengths.dtype)])
        return self._known_offsets

    def _check(self, both: bool) -> None:
        if both and not torch.equal(self._lengths, self._offsets.diff().to(self._lengths.dtype)):
            raise DataError("lengths and offsets were both given and disagree; give only one of them")
        lengths = self._lengths.numpy()  # by NumPy: to wake threads, as PyTorch does, takes longer
        if len(lengths) and lengths.min() < 0:
            raise DataError("lengths must not be negative and offsets must not decrease")
        if len(lengths) and lengths.max() > len(self._values):  # the sum of such could be any number
            raise DataError(
                f"lengths do not add up: one is {lengths.max():,}, but there are {len(self._values):,} values"
            )
        if self._known_offsets is None:
            first, last = 0, int(lengths.sum())
        else:
            first, last = int(self._known_offsets[0]), int(self._known_offsets[-1])
        if first != 0 or last != len(self._values):
            raise DataError(
                f"lengths do not add up: they span {first:,} to {last:,}, "
                f"but there are {len(self._values):,} values"
            )

    @staticmethod
    def from_dense(values: list[Tensor], weights: list[Tensor] | None = None) -> JaggedTensor:
        """One row per tensor of the list."""
        if not values:
            raise DataError("from_dense needs at least one tensor, got an empty list")
        lengths = torch.tensor([len(row) for row in values], dtype=torch.int32, device=values[0].device)
        if weights is not None and [len(row) for row in weights] != [len(row) for row in values]:
            raise DataError("from_dense: weights must have the lengths of values, row by row")
        return JaggedTensor(torch.cat(values), torch.cat(weights) if weights else None, lengths)

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> JaggedTensor:
        """The first ``lengths[i]`` entries of every row of a padded tensor."""
        if len(lengths) != len(values) or (len(lengths) and int(lengths.max()) > values.shape[1]):
            raise DataError(
                f"from_dense_lengths: needs one length per row, none above the width; got {len(lengths):,} "
                f"lengths for values of shape {tuple(values.shape)}"
            )
        real = torch.arange(values.shape[1], device=values.device) < lengths.unsqueeze(1)
        return JaggedTensor(values[real], None if weights is None else weights[real], lengths)

    def values(self) -> Tensor:
        """All values, row after row."""
        return self._values

    def weights(self) -> Tensor:
        """One weight per value; an error if there are none."""
        if self._weights is None:
            raise DataError("this jagged tensor has no weights; see weights_or_none()")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """One weight per value, or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """Number of values of each row."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Where each row begins in ``values``, and the end."""
        return self._offsets

    def to_dense(self) -> list[Tensor]:
        """One tensor per row."""
        return list(torch.split_with_sizes(self._values, self._lengths.tolist()))

    def to_padded_dense(
        self, desired_length: int | None = None, padding_value: float = 0.0, *, keep: str = "first"
    ) -> Tensor:
        """All rows at one length: longer ones are cut, shorter ones padded at the end.

        Args:
            desired_length: of every row; by default that of the longest.
            padding_value: what is put after the last value of a row.
            keep: which values of a longer row stay, the ``"first"`` or the ``"last"``, such as the newest of
                a history.

        Returns:
            rows × length, then the dimensions of a value; see `padding_mask` for which are values.
        """
        length, kept, skipped = self._kept(desired_length, keep)
        places, chosen = self._padded_places(length, kept, skipped)
        shape = len(kept) * length, *self._values.shape[1:]
        padded = self._values.new_full(shape, padding_value)
        values = self._values if chosen is None else self._values.index_select(0, chosen)
        return padded.index_copy(0, places, values).view(len(kept), length, *shape[1:])

    def padding_mask(self, desired_length: int | None = None) -> Tensor:
        """Which places of `to_padded_dense` hold a value: rows × length, True where one does."""
        length, kept, _ = self._kept(desired_length, "first")
        return torch.arange(length, device=kept.device) < kept.unsqueeze(1)

    def _kept(self, desired_length: int | None, keep: str) -> tuple[int, Tensor, Tensor | None]:
        """The common length, how many values of each row stay and, if any are cut, how many are skipped."""
        if keep not in ("first", "last"):
            raise DataError(f"keep must be first or last, got {keep!r}")
        lengths = self._lengths.to(torch.int64)
        longest = int(lengths.max()) if len(lengths) else 0
        length = longest if desired_length is None else desired_length
        if length < 0:
            raise DataError(f"desired_length must be 0 or more, got {desired_length}")
        kept = lengths.clamp(max=length)
        if longest <= length:
            return length, kept, None
        return length, kept, lengths - kept if keep == "last" else torch.zeros_like(kept)

    def _padded_places(
        self, length: int, kept: Tensor, skipped: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Where values go in the padded tensor, flat, and which values these are; None: all."""
        rows = torch.arange(len(kept), device=kept.device).repeat_interleave(kept)
        within = torch.arange(len(rows), device=kept.device) - (kept.cumsum(0) - kept)[rows]
        places = rows * length + within
        if skipped is None:
            return places, None
        return places, (self._offsets[:-1].to(torch.int64) + skipped)[rows] + within

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedTensor:
        """The same rows on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> JaggedTensor:
        """The same rows in page-locked memory, from where copies to an accelerator can overlap work."""
        return self._map(Tensor.pin_memory)

    def with_values(self, values: Tensor, weights: Tensor | None = None) -> JaggedTensor:
        """Rows of the same lengths with other values, on the device of these."""
        if len(values) != len(self._values):
            raise DataError(
                f"{len(self._values):,} values are needed, as many as before; got {len(values):,}"
            )
        there = values.device
        return _trusted(values, weights, self._lengths.to(there), self._offsets.to(there))

    def _map(self, function: Callable[[Tensor], Tensor]) -> JaggedTensor:
        weights = None if self._weights is None else function(self._weights)
        offsets = None if self._known_offsets is None else function(self._known_offsets)
        return _trusted(function(self._values), weights, function(self._lengths), offsets)

    def _rows(self, begin: int, end: int, first_value: int, last_value: int) -> JaggedTensor:
        """Rows ``begin`` to ``end``, which hold the values ``first_value`` to ``last_value``; no copy."""
        weights = None if self._weights is None else self._weights[first_value:last_value]
        offsets = self._offsets[begin : end + 1] - first_value
        return _trusted(self._values[first_value:last_value], weights, self._lengths[begin:end], offsets)

    def __repr__(self) -> str:
        weighted = "" if self._weights is None else ", weighted"
        sizes = f"rows={len(self._lengths):,}, values={len(self._values):,}{weighted}"
        return f"JaggedTensor({sizes}): {self._shown()}"

    def _shown(self) -> str:
        ends = self._offsets[: _SHOWN + 1].tolist()
        rows = [_preview(self._values[begin:end]) for begin, end in pairwise(ends)]
        return f"[{', '.join(rows)}{', …' if len(self._lengths) > _SHOWN else ''}]"


def _trusted(values: Tensor, weights: Tensor | None, lengths: Tensor, offsets: Tensor | None) -> JaggedTensor:
    """Put together what is known to fit, without looking again."""
    jagged = object.__new__(JaggedTensor)
    jagged._values, jagged._weights = values, weights
    jagged._lengths, jagged._known_offsets = lengths, offsets
    return jagged


def _preview(row: Tensor) -> str:
    shown = [str(value) for value in row[:_SHOWN].tolist()]
    return f"[{', '.join(shown)}{', …' if len(row) > _SHOWN else ''}]"
