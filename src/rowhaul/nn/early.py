"""Batches whose rows were looked up before they are read."""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from rowhaul.nn.jagged import KeyedJaggedTensor

Found = TypeVar("Found")


class EarlyLookups(WeakKeyDictionary[KeyedJaggedTensor, Found]):
    """Rows of batches not read yet, found in the thread that loads them; a copy starts empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __deepcopy__(self, memo: Any) -> EarlyLookups[Found]:
        return type(self)()
