"""How far apart two trained models are, and where: rows by their format, dense weights and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.runtime.layout import TableLayout
from rowhaul.store.row_format import format_of
from rowhaul.store.row_parts import Arrays, Lines

Numbers = npt.NDArray[Any]

# What summing in another order may change. A double rounds at 1e-16, and training amplifies that a little.
# With floats there is no such bound: among millions of activations some are within 1e-8 of 0, where a ReLU
# opens on one side and not on the other; rows that such a sample alone has trained then differ by whole
# steps. The model has learned the same for all that, and has the same losses, by and large.
DENSE, LOSSES = "dense weights", "losses"

FLOAT64_TOLERANCE = 1e-9
FLOAT32_LOSS_TOLERANCE = 0.05  # of the largest loss


@dataclass(frozen=True)
class Trained:
    """What training has left."""

    rows: dict[str, Arrays]  # by table, as the rows' format has them
    dense: dict[str, Numbers]
    losses: npt.NDArray[np.float64]  # by step


@dataclass
class Difference:
    """How far numbers of one kind are apart at most."""

    largest: float = 0.0  # difference
    where: str = ""  # it is; empty if there is none
    magnitude: float = 0.0  # of the largest number
    count: int = 0  # of lines compared
    num_nonzero: int = 0  # numbers that are not 0 on both sides
    num_different: int = 0

    def add(self, found: Numbers, expected: Numbers, name: Callable[[int], str]) -> npt.NDArray[np.bool_]:
        """Compare more lines, which ``name`` names; returns which differ."""
        self.count += len(found)
        if not found.size:
            return np.zeros(len(found), np.bool_)
        each = _apart(found, expected).reshape(len(found), -1)
        self.num_nonzero += int(((found != 0) | (expected != 0)).sum())
        self.num_different += int((each > 0).sum())
        apart: npt.NDArray[np.float64] = each.max(axis=1)
        most = int(apart.argmax())
        if apart[most] > self.largest:
            self.largest, self.where = float(apart[most]), name(most)
        finite = np.abs(expected[np.isfinite(expected)])
        self.magnitude = max(self.magnitude, float(finite.max(initial=0)))
        differs: npt.NDArray[np.bool_] = apart > 0
        return differs

    @property
    def is_none(self) -> bool:
        """Whether all numbers are the same."""
        return self.largest == 0


@dataclass
class Comparison:
    """The differences between what was found and what was expected, by what they are of."""

    kinds: dict[str, Difference] = field(default_factory=dict)
    only_found: int = 0  # rows that only one side has, and that were trained
    only_expected: int = 0
    inexact: str = ""  # why the two may differ by design, see `RowFormat.why_inexact`
    replays: bool = True  # whether a replay has to be equal all the same

    def add(self, lines: Lines) -> npt.NDArray[np.bool_]:
        """Compare more lines; returns which differ."""
        return self.kinds.setdefault(lines.kind, Difference()).add(lines.found, lines.expected, lines.name)

    @property
    def is_equal(self) -> bool:
        """Whether not a number differs."""
        return all(one.is_none for one in self.kinds.values())

    def tolerances(self, precision: str) -> dict[str, float]:
        """What rounding explains, by what it is of; not all can be judged in single precision."""
        if precision == "float64":
            return dict.fromkeys(self.kinds, FLOAT64_TOLERANCE)
        return {LOSSES: FLOAT32_LOSS_TOLERANCE * self.kinds[LOSSES].magnitude}

    def beyond(self, precision: str) -> dict[str, Difference]:
        """The differences that rounding does not explain."""
        tolerances = self.tolerances(precision)
        return {
            name: self.kinds[name] for name, most in tolerances.items() if self.kinds[name].largest > most
        }


def compare(layout: TableLayout, found: Trained, expected: Trained) -> Comparison:
    """Compare two trainings of one model, number by number."""
    format = format_of(layout)
    inexact = format.why_inexact(layout)
    comparison = Comparison(inexact=inexact, replays=format.replays or not inexact)
    for table in found.rows:
        lost: Any = False  # by row
        added: Any = False
        for lines in format.align(layout, table, found.rows[table], expected.rows[table]):
            differs = comparison.add(lines)
            if lines.lacking is not None:
                lost |= lines.lacking[0] & differs
                added |= lines.lacking[1] & differs
        comparison.only_expected += int(np.sum(lost))
        comparison.only_found += int(np.sum(added))
    for parameter, numbers in expected.dense.items():
        name = partial(_name_of_weight, parameter)
        comparison.add(Lines(DENSE, found.dense[parameter].reshape(-1), numbers.reshape(-1), name))
    steps = max(len(found.losses), len(expected.losses))
    mine, theirs = (_lengthened(one.losses, steps) for one in (found, expected))
    comparison.add(Lines(LOSSES, mine, theirs, _name_of_step))
    return comparison


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


def _name_of_weight(parameter: str, place: int) -> str:
    return f"element {place} of {parameter}"


def _name_of_step(place: int) -> str:
    return f"step {place + 1}"
