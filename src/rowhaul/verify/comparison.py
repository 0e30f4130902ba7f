"""How far apart two trained models are, and where: rows, optimizer state, dense weights and losses.

A row that one side lacks counts as one that was just made, with its first values: that is what anybody
would read there. So a hot row that was never trained is no difference, and a lost one is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.runtime.layout import TableLayout
from rowhaul.runtime.row_memory import RowMemory

Keys = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]

# What summing in another order may change. A double rounds at 1e-16, and training amplifies that a little.
# With floats there is no such bound: among millions of activations some are within 1e-8 of 0, where a ReLU
# opens on one side and not on the other; rows that such a sample alone has trained then differ by whole
# steps. The model has learned the same for all that, and has the same losses, by and large.
FLOAT64_TOLERANCE = 1e-9
FLOAT32_LOSS_TOLERANCE = 0.05  # of the largest loss


@dataclass(frozen=True)
class TableRows:
    """The rows of one table, ordered by key; a record is values, then optimizer state."""

    keys: Keys
    records: Numbers  # rows x elements of a record

    @classmethod
    def join(cls, layout: TableLayout, table: int, blocks: Sequence[tuple[Keys, Numbers]]) -> TableRows:
        """Put blocks of (keys, records) together."""
        dim = layout.specs[table].dim
        nothing = np.empty((0, dim + layout.optimizer.state_width(dim)), layout.dtype)
        keys = np.concatenate([np.empty(0, np.int64), *(keys for keys, _ in blocks)])
        records = np.concatenate([nothing, *(records for _, records in blocks)])
        order = np.argsort(keys, kind="stable")
        return cls(keys[order], records[order])


@dataclass(frozen=True)
class Trained:
    """What training has left."""

    rows: list[TableRows]  # by table
    dense: dict[str, Numbers]
    losses: npt.NDArray[np.float64]  # by step


@dataclass
class Difference:
    """How far numbers of one kind are apart at most."""

    largest: float = 0.0  # difference
    where: str = ""  # it is; empty if there is none
    magnitude: float = 0.0  # of the largest number
    count: int = 0  # of things compared

    def add(self, found: Numbers, expected: Numbers, name: Callable[[int], str]) -> None:
        """Compare some more things, one a line of both; ``name`` says what a line is."""
        self.count += len(found)
        if not found.size:
            return
        apart = _apart(found, expected).reshape(len(found), -1).max(axis=1)
        most = int(apart.argmax())
        if apart[most] > self.largest:
            self.largest, self.where = float(apart[most]), name(most)
        finite = np.abs(expected[np.isfinite(expected)])
        self.magnitude = max(self.magnitude, float(finite.max(initial=0.0)))

    @property
    def is_none(self) -> bool:
        """Whether all numbers are the same."""
        return self.largest == 0


@dataclass
class Comparison:
    """The differences between what was found and what was expected."""

    rows: Difference = field(default_factory=Difference)  # values of rows
    state: Difference = field(default_factory=Difference)  # of the row optimizer
    dense: Difference = field(default_factory=Difference)
    losses: Difference = field(default_factory=Difference)
    only_found: int = 0  # rows that only one side has, and that were trained
    only_expected: int = 0

    def kinds(self) -> dict[str, Difference]:
        """All differences, by what they are of."""
        return {
            "rows": self.rows,
            "optimizer state": self.state,
            "dense weights": self.dense,
            "losses": self.losses,
        }

    @property
    def is_equal(self) -> bool:
        """Whether not a number differs."""
        return all(one.is_none for one in self.kinds().values())

    def tolerances(self, precision: str) -> dict[str, float]:
        """What rounding explains, by what it is of; not all can be judged in single precision."""
        if precision == "float64":
            return dict.fromkeys(self.kinds(), FLOAT64_TOLERANCE)
        return {"losses": FLOAT32_LOSS_TOLERANCE * self.losses.magnitude}

    def beyond(self, precision: str) -> dict[str, Difference]:
        """The differences that rounding does not explain."""
        kinds = self.kinds()
        return {
            name: kinds[name]
            for name, allowed in self.tolerances(precision).items()
            if kinds[name].largest > allowed
        }


def compare(layout: TableLayout, found: Trained, expected: Trained) -> Comparison:
    """Compare two trainings of one model, number by number."""
    comparison = Comparison()
    fresh = RowMemory(layout)
    for table, spec in enumerate(layout.specs):
        one, other = found.rows[table], expected.rows[table]
        keys = np.union1d(one.keys, other.keys)
        records, found_lacks = _filled(one, keys, fresh, table)
        reference, expected_lacks = _filled(other, keys, fresh, table)
        different = _apart(records, reference).max(axis=1) > 0
        comparison.only_found += int(different[expected_lacks].sum())
        comparison.only_expected += int(different[found_lacks].sum())
        name = partial(_name_of_row, spec.name, keys)
        comparison.rows.add(records[:, : spec.dim], reference[:, : spec.dim], name)
        comparison.state.add(records[:, spec.dim :], reference[:, spec.dim :], name)
    compare_rest(comparison, found, expected)
    return comparison


def compare_rest(comparison: Comparison, found: Trained, expected: Trained) -> None:
    """Compare dense weights and losses."""
    for parameter, numbers in expected.dense.items():
        comparison.dense.add(
            found.dense[parameter].reshape(-1), numbers.reshape(-1), partial(_name_of_weight, parameter)
        )
    steps = max(len(found.losses), len(expected.losses))
    comparison.losses.add(
        _lengthened(found.losses, steps), _lengthened(expected.losses, steps), _name_of_step
    )


def _filled(
    rows: TableRows, keys: Keys, fresh: RowMemory, table: int
) -> tuple[Numbers, npt.NDArray[np.bool_]]:
    """Records of all keys, those that are lacking as they would be made; and which those are."""
    lacking = np.ones(len(keys), np.bool_)
    lacking[np.searchsorted(keys, rows.keys)] = False
    records = np.empty((len(keys), rows.records.shape[1]), rows.records.dtype)
    records[~lacking] = rows.records
    number, position = fresh.place_of(table)
    made = fresh.groups[number].make_fresh(np.full(int(lacking.sum()), position), keys[lacking])
    records[lacking] = fresh.groups[number].arena.read(made)
    return records, lacking


def _apart(found: Numbers, expected: Numbers) -> npt.NDArray[np.float64]:
    """Absolute differences; what is no number is infinitely far from all else, but not from its like."""
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        apart = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    apart[np.isnan(apart)] = np.inf
    apart[same] = 0
    return apart


def _lengthened(losses: npt.NDArray[np.float64], steps: int) -> npt.NDArray[np.float64]:
    """A loss for every step, no number where there is none."""
    return np.pad(losses, (0, steps - len(losses)), constant_values=np.nan)


def _name_of_row(table: str, keys: Keys, place: int) -> str:
    return f"key {int(keys[place])} of table {table}"


def _name_of_weight(parameter: str, place: int) -> str:
    return f"element {place} of {parameter}"


def _name_of_step(place: int) -> str:
    return f"step {place + 1}"
