"""One block of columns per feature in one dense tensor: what a collection returns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from rowhaul.errors import DataError


class KeyedTensor:
    """Tensors by key, concatenated along ``key_dim`` in the order of ``keys``.

    Example::

        #          "user"      "items"
        # sample 0 [1., 2.]    [3.]
        pooled = KeyedTensor(["user", "items"], [2, 1], torch.tensor([[1.0, 2.0, 3.0]]))
        pooled["items"]  # tensor([[3.]])
    """

    def __init__(
        self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor, key_dim: int = 1
    ) -> None:
        self._keys, self._length_per_key = list(keys), list(length_per_key)
        self._values, self._key_dim = values, key_dim
        if len(self._keys) != len(self._length_per_key):
            counts = f"{len(self._keys)} keys and {len(self._length_per_key)} lengths"
            raise DataError(f"a keyed tensor needs one length per key, got {counts}")
        if sum(self._length_per_key) != values.shape[key_dim]:
            raise DataError(
                f"lengths per key add up to {sum(self._length_per_key):,}, but the values have "
                f"{values.shape[key_dim]:,} in dimension {key_dim} (their shape is {tuple(values.shape)})"
            )

    @staticmethod
    def from_tensor_list(
        keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> KeyedTensor:
        """Concatenate ``tensors`` along ``cat_dim``, one per key."""
        if not tensors:
            raise DataError("from_tensor_list needs at least one tensor, got an empty list")
        lengths = [tensor.shape[key_dim] for tensor in tensors]
        return KeyedTensor(keys, lengths, torch.cat(list(tensors), dim=cat_dim), key_dim)

    @staticmethod
    def regroup(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """Concatenate the keys of each group, found in whichever of ``keyed_tensors`` holds them."""
        parts: dict[str, Tensor] = {}
        for keyed in keyed_tensors:
            twice = parts.keys() & set(keyed._keys)
            if twice:
                raise DataError(f"regroup: key {min(twice)!r} is in more than one of the tensors")
            parts.update(keyed.to_dict())
        for key in (key for group in groups for key in group if key not in parts):
            raise DataError(f"regroup: unknown key {key!r}; known are {', '.join(parts)}")
        key_dim = keyed_tensors[0]._key_dim if keyed_tensors else 1
        return [torch.cat([parts[key] for key in group], dim=key_dim) for group in groups]

    def keys(self) -> list[str]:
        """Names, in the order of ``values``."""
        return self._keys

    def values(self) -> Tensor:
        """All tensors as one."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Size of each key's tensor along ``key_dim``."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Where each key begins along ``key_dim``, and the end."""
        return list(accumulate(self._length_per_key, initial=0))

    def key_dim(self) -> int:
        """The dimension along which the keys lie."""
        return self._key_dim

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._keys:
            raise DataError(f"unknown key {key!r}; known are {', '.join(self._keys)}")
        index = self._keys.index(key)
        begin = sum(self._length_per_key[:index])
        return self._values.narrow(self._key_dim, begin, self._length_per_key[index])

    def to_dict(self) -> dict[str, Tensor]:
        """A view per key; cheaper than several lookups, above all in the backward pass."""
        parts = torch.split_with_sizes(self._values, self._length_per_key, dim=self._key_dim)
        return dict(zip(self._keys, parts, strict=True))

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedTensor:
        """The same on another device."""
        moved = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._length_per_key, moved, self._key_dim)

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{key}: {size}" for key, size in zip(self._keys, self._length_per_key, strict=True)
        )
        return f"KeyedTensor(shape={tuple(self._values.shape)}, key_dim={self._key_dim}; {sizes})"
