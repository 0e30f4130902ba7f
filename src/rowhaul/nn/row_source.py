"""`RowSource`: the one thing a collection asks for rows, wherever they are.

A collection pools vectors and knows nothing of indexes, caches or networks. The rows of this process, a
worker's cache, evaluation's copies and pruned rows are sources; so is any other place that can read rows,
take their gradients and step them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.nn.jagged import KeyedJaggedTensor
from rowhaul.optim import RowOptimizerRule

if TYPE_CHECKING:
    from rowhaul.nn.features import FeatureGroup
    from rowhaul.store import TableGroup

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[Any]
Arrays = dict[str, npt.NDArray[Any]]


class RowRead(Protocol):
    """One batch's use of some tables: what forward and backward share.

    Vectors and their gradients are arrays of NumPy where rows are in host memory, and tensors on a card.
    """

    device: torch.device  # where the rows are
    entries: slice | Any  # which ids of the batch it reads

    def pool(self, weights: Tensor | None, out: Any) -> None:
        """Write the pooled vectors of its features to their columns of ``out``."""

    def keep_gradients(self, weights: Tensor | None, pooled_gradients: Any) -> None:
        """Keep gradients for the step."""

    def weight_gradients(self, pooled_gradients: Any) -> Any:
        """Return the gradient of each id's weight."""


@dataclass(frozen=True)
class RowGradients:
    """Gradients of distinct rows that await a step."""

    keys: Int64s
    values: Any  # rows x dim; a tensor on a card
    table: Callable[[int], str]  # names the table of a row, given its place


class RowReader(Protocol):
    """Anything that rows can be read from."""

    def read(self, features: KeyedJaggedTensor, *, training: bool, on_unknown: str) -> Sequence[RowRead]:
        """Find the rows of a batch; in training, create those that are new."""


class RowSource(RowReader, Protocol):
    """Reads rows for a batch, takes their gradients, steps them."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes held by rows, optimizer state and index."""

    def step(self, lr: float, number: int) -> None:
        """Step every row that has gradients, once, by their sum; ``number`` counts steps from 1."""

    def gradients(self) -> Sequence[RowGradients]:
        """Return the gradients that await a step, to be looked at."""

    def drop_gradients(self) -> None:
        """Drop gradients that no step has used."""

    def locate_early(self, features: KeyedJaggedTensor) -> None:
        """Look up a batch that is read later, from any thread, where that saves time."""

    def announce(self, features: KeyedJaggedTensor) -> None:
        """Prepare for a batch that is read in parts before the next step, where that makes a difference."""

    def num_rows(self, table: str) -> int:
        """Count the rows of a table."""

    def rows(self, table: str) -> Iterator[tuple[Int64s, Floats]]:
        """Yield all rows of a table as blocks of (keys, records)."""

    def load_rows(self, table: str, keys: Int64s, records: Floats) -> None:
        """Set rows of a table, creating those it lacks."""

    def clear(self) -> None:
        """Drop every row and every gradient."""

    def state_names(self) -> list[str]:
        """Name the arrays of `state` without making them."""

    def state(self) -> Arrays:
        """Return everything as named arrays, for a ``state_dict``."""

    def load_state(self, arrays: Arrays) -> None:
        """Replace everything by what `state` returned; wrong arrays are refused before anything changes."""

    def report(self) -> Any:
        """Describe what is held, where that is not simply all rows; None otherwise."""

    def notes(self) -> list[RowNote]:
        """Return what is worth logging since the last call."""


@runtime_checkable
class MovableRows(Protocol):
    """A source whose rows can be on another device."""

    device: torch.device

    def moved_to(
        self,
        device: torch.device,
        groups: Sequence[FeatureGroup],
        optimizer: RowOptimizerRule,
        seed: int,
        device_memory: int = 0,
    ) -> RowSource:
        """Return a source with these rows on another device; itself where they cannot be there.

        ``device_memory`` bounds the bytes that rows take on a card, the others stay in host memory; 0: all
        are there.
        """


@runtime_checkable
class CachedOverHost(Protocol):
    """A source whose rows are in host memory, those used last on a card."""

    def settled_tables(self) -> list[TableGroup]:
        """Write the card's rows to host memory, and return the tables there."""

    def take_counts(self) -> dict[str, float]:
        """Return what the cache did since the last call, for a log."""


@runtime_checkable
class GraphableRows(Protocol):
    """A source on a card, all of whose work in a step can be recorded as a graph."""

    @property
    def memory_version(self) -> Any:
        """Something that changes when a recorded step must not be replayed any more."""

    def can_record(self, features: KeyedJaggedTensor) -> bool:
        """Whether the step of a batch waits for nothing; makes room for its rows."""

    def static_copy(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return ids of the same shape that stay where they are."""

    def recording(self, features: KeyedJaggedTensor) -> AbstractContextManager[None]:
        """Record what is done for these ids."""

    def put(self, features: KeyedJaggedTensor, static: KeyedJaggedTensor) -> None:
        """Copy the ids of a batch to where a recorded step reads them."""

    def replayed(self, features: KeyedJaggedTensor) -> None:
        """Note that a recorded step was replayed."""

    def set_rates(self, lr: float, number: int) -> None:
        """Set what depends on the step."""

    def step(self, lr: float, number: int) -> None:
        """Step every row that has gradients."""


@dataclass(frozen=True)
class RowNote:
    """Something a source did that a log should have."""

    kind: str
    text: str  # one line for people
    values: Mapping[str, float]  # for plots
    counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # histograms


class RowSettings(Protocol):
    """Settings that decide how a collection holds its rows, when not simply whole and all of them."""

    def make_rows(
        self, groups: Sequence[FeatureGroup], optimizer: RowOptimizerRule, seed: int, on_unknown: str
    ) -> RowSource:
        """Make the rows of a collection in this process."""

    def layout(self, whole: Any) -> Any:
        """Turn the layout of whole rows (`rowhaul.runtime.layout`) into that of a cluster's rows."""
