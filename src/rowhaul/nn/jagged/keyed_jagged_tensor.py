"""The ids of a batch: one jagged tensor per feature, stored as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from rowhaul.errors import DataError
from rowhaul.nn.jagged.jagged_tensor import JaggedTensor


class KeyedJaggedTensor:
    """A jagged tensor per key (id feature), all over the same samples: the input of a collection.

    ``values`` holds all ids of the first key, sample by sample, then all of the second;
    ``lengths`` likewise, ``stride`` (the number of samples) of them per key.

    Example::

        #          sample 0   sample 1
        # "user"   [7]        [9]
        # "items"  [1, 2]     []
        KeyedJaggedTensor(["user", "items"], torch.tensor([7, 9, 1, 2]), lengths=torch.tensor([1, 1, 2, 0]))
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
    ) -> None:
        self._keys = _distinct(keys)
        self._jagged = JaggedTensor(values, weights, lengths, offsets)
        rows = len(self._jagged.lengths())
        self._stride = stride if stride is not None else rows // max(len(self._keys), 1)
        if rows != self._stride * len(self._keys):
            raise DataError(
                f"needs one length per key and sample: {rows:,} lengths for {len(self._keys):,} keys"
                + (f" and {stride:,} samples" if stride is not None else " do not divide evenly")
            )
        self._offset_per_key: list[int] | None = None

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
    ) -> KeyedJaggedTensor:
        """Build from lengths, with the sizes per key at hand at once."""
        return KeyedJaggedTensor(keys, values, weights, lengths=lengths, stride=stride).sync()

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
    ) -> KeyedJaggedTensor:
        """Build from offsets, with the sizes per key at hand at once."""
        return KeyedJaggedTensor(keys, values, weights, offsets=offsets, stride=stride).sync()

    @staticmethod
    def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """One key per entry, in order; all over the same number of samples."""
        if not jt_dict:
            raise DataError("from_jt_dict needs at least one jagged tensor, got an empty mapping")
        samples = {key: len(jagged.lengths()) for key, jagged in jt_dict.items()}
        if len(set(samples.values())) > 1:
            raise DataError(f"all keys must have the same number of samples, got {samples}")
        joined = _end_to_end(list(jt_dict.values()))
        return KeyedJaggedTensor(list(jt_dict), joined.values(), joined.weights_or_none(), joined.lengths())

    @staticmethod
    def concat(kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """The keys of all, one after another, over the same samples."""
        if not kjt_list:
            raise DataError("concat needs at least one KeyedJaggedTensor, got an empty list")
        strides = [one._stride for one in kjt_list]
        if len(set(strides)) > 1:
            raise DataError(f"all inputs of concat must have the same number of samples, got {strides}")
        keys = _distinct([key for one in kjt_list for key in one._keys])
        return kjt_list[0]._wrap(keys, _end_to_end([one._jagged for one in kjt_list]))

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        """No keys, no samples."""
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        values = torch.empty(0, dtype=values_dtype, device=device)
        return KeyedJaggedTensor([], values, weights, torch.empty(0, dtype=lengths_dtype, device=device))

    def sync(self) -> KeyedJaggedTensor:
        """Fetch the sizes per key to the host; returns itself."""
        self.offset_per_key()
        return self

    def keys(self) -> list[str]:
        """Names of the features."""
        return self._keys

    def values(self) -> Tensor:
        """All ids: key by key, sample by sample."""
        return self._jagged.values()

    def weights(self) -> Tensor:
        """One weight per id; an error if there are none."""
        return self._jagged.weights()

    def weights_or_none(self) -> Tensor | None:
        """One weight per id, or None."""
        return self._jagged.weights_or_none()

    def lengths(self) -> Tensor:
        """Number of ids of each key and sample, flat."""
        return self._jagged.lengths()

    def offsets(self) -> Tensor:
        """Where each key and sample begins in ``values``, and the end."""
        return self._jagged.offsets()

    def stride(self) -> int:
        """Number of samples."""
        return self._stride

    def length_per_key(self) -> list[int]:
        """Number of ids of each key."""
        return [end - begin for begin, end in pairwise(self.offset_per_key())]

    def offset_per_key(self) -> list[int]:
        """Where each key begins in ``values``, and the end."""
        if self._offset_per_key is None:
            rows = torch.arange(len(self._keys) + 1, device=self.device()) * self._stride
            ends: list[int] = self.offsets()[rows].tolist()
            if ends[-1] != len(self.values()):
                raise DataError(
                    f"lengths add up to {ends[-1]:,}, but there are {len(self.values()):,} values"
                )
            self._offset_per_key = ends
        return self._offset_per_key

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Cut into groups of that many keys each; no copy."""
        if sum(segments) != len(self._keys) or min(segments, default=0) < 0:
            raise DataError(f"split: {list(segments)} must add up to the {len(self._keys)} keys")
        bounds = pairwise(accumulate(segments, initial=0))
        return [self._wrap(self._keys[a:b], self._of_keys(a, b)) for a, b in bounds]

    def permute(self, indices: Sequence[int]) -> KeyedJaggedTensor:
        """The keys at ``indices``, in that order; one may come twice or not at all."""
        wrong = [index for index in indices if not 0 <= index < len(self._keys)]
        if wrong:
            raise DataError(f"permute: there are {len(self._keys)} keys, so no index {wrong[0]}")
        keys = [self._keys[index] for index in indices]
        parts = [self._of_keys(index, index + 1) for index in indices]
        return self._wrap(keys, _end_to_end(parts) if parts else self._of_keys(0, 0))

    def __getitem__(self, key: str) -> JaggedTensor:
        if key not in self._keys:
            raise DataError(f"unknown key {key!r}; known are {', '.join(self._keys)}")
        index = self._keys.index(key)
        return self._of_keys(index, index + 1)

    def to_dict(self) -> dict[str, JaggedTensor]:
        """A jagged tensor per key; no copy."""
        return {key: self._of_keys(index, index + 1) for index, key in enumerate(self._keys)}

    def device(self) -> torch.device:
        """Where the ids are."""
        return self._jagged.device()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedJaggedTensor:
        """The same ids on another device."""
        return self._wrap(self._keys, self._jagged.to(device, non_blocking), self._offset_per_key)

    def pin_memory(self) -> KeyedJaggedTensor:
        """The same ids in page-locked memory, from where copies to an accelerator can overlap work."""
        return self._wrap(self._keys, self._jagged.pin_memory(), self._offset_per_key)

    def _of_keys(self, begin: int, end: int) -> JaggedTensor:
        ends = self.offset_per_key()
        return self._jagged._rows(begin * self._stride, end * self._stride, ends[begin], ends[end])

    def _wrap(
        self, keys: list[str], jagged: JaggedTensor, offset_per_key: list[int] | None = None
    ) -> KeyedJaggedTensor:
        wrapped = object.__new__(KeyedJaggedTensor)
        wrapped._keys, wrapped._jagged, wrapped._stride = keys, jagged, self._stride
        wrapped._offset_per_key = offset_per_key
        return wrapped

    def __repr__(self) -> str:
        weighted = "" if self.weights_or_none() is None else ", weighted"
        head = f"KeyedJaggedTensor(samples={self._stride:,}, values={len(self.values()):,}{weighted})"
        return "\n".join([head, *(f"  {key}: {part._shown()}" for key, part in self.to_dict().items())])


def as_keyed_jagged(features: Any) -> KeyedJaggedTensor:
    """Take TorchRec's own KeyedJaggedTensor for ours, sharing its tensors; ours is returned as it is."""
    if isinstance(features, KeyedJaggedTensor):
        return features
    needed = ("keys", "values", "weights_or_none", "lengths", "stride")
    if not all(callable(getattr(features, name, None)) for name in needed):
        raise DataError(
            f"expected a KeyedJaggedTensor, got {type(features).__name__}; "
            "KeyedJaggedTensor.from_lengths_sync(keys, values, lengths) builds one"
        )
    if getattr(features, "variable_stride_per_key", bool)():
        raise DataError(
            "this KeyedJaggedTensor has another number of samples per key; all keys need the same"
        )
    return KeyedJaggedTensor(
        features.keys(),
        features.values(),
        features.weights_or_none(),
        lengths=features.lengths(),
        stride=features.stride(),
    )


def _distinct(keys: Sequence[str]) -> list[str]:
    keys = list(keys)
    if len(set(keys)) < len(keys):
        twice = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise DataError(f"keys must differ, but {twice!r} is given twice; give its other ids another name")
    return keys


def _end_to_end(parts: Sequence[JaggedTensor]) -> JaggedTensor:
    weights = [part.weights_or_none() for part in parts]
    given = [weight for weight in weights if weight is not None]
    if given and len(given) < len(parts):
        raise DataError("some inputs have weights and some have none; give weights to all or to none")
    return JaggedTensor(
        torch.cat([part.values() for part in parts]),
        torch.cat(given) if given else None,
        torch.cat([part.lengths() for part in parts]),
    )
