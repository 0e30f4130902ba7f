"""What a log of any size will look like, computed instead of generated.

The laws of a preset have closed forms, so the number of distinct ids in 41 million rows, or the share
of accesses that the most popular rows take, follows from sums over ranks; ranks of nearly equal
probability are summed together. What a session keeps is counted once per session.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import comb

import numpy as np
import numpy.typing as npt

from rowhaul.data.generate.laws import SkewLaw
from rowhaul.data.generate.population import longest_session
from rowhaul.data.generate.spec import Entity, IdField, Preset

Floats = npt.NDArray[np.float64]

_EXACT_RANKS = 4_096
_BINS = 8_192


@dataclass(frozen=True)
class Popularity:
    """Ids in groups of about equal probability, the most popular first.

    A session keeps the ids of some fields: ``repeats`` says how many samples in a row have an id once
    it comes up, so that what is seen, as opposed to how often, depends on ``rows / repeats`` draws.
    """

    probability: Floats  # that a sample has a given id of the group
    ids: Floats  # how many the group has
    repeats: Floats
    frequent: float = 0.0  # accesses of a sample to further ids, few and sure to be popular

    @classmethod
    def of(cls, preset: Preset, fields: Iterable[IdField] | None = None) -> Popularity:
        """Of all ids of these fields together, by default of all; of lists, only the first ids."""
        of_entity = {entity.name: repeats(preset, entity) for entity in preset.entities}
        parts = []
        for field in preset.ids if fields is None else fields:
            probability, ids = _groups(field.law)
            again = np.full(len(ids), of_entity.get(field.entity, 1.0))
            parts.append(np.stack((probability * (1.0 - field.missing), ids, again)))
        groups = np.concatenate(parts, axis=1)
        return cls(*groups[:, np.argsort(-groups[0], kind="stable")])

    @property
    def accesses(self) -> float:
        """Ids of a sample, on average."""
        return self.frequent + float((self.probability * self.ids).sum())

    def distinct(self, rows: float) -> float:
        """Distinct ids among this many rows."""
        return float((self.ids * self._seen(rows)).sum())

    def share_of_top(self, num_ids: float) -> float:
        """The share of accesses that the most popular ids take."""
        before = np.cumsum(self.ids) - self.ids
        inside = np.clip(num_ids - before, 0.0, self.ids)
        return (self.frequent + float((self.probability * inside).sum())) / self.accesses

    def folded(self, items: int, rows: float, numbers: int) -> Popularity:
        """As HugeCTR prepares a log of this many rows, leaving at most ``items`` ids.

        Ids that occur too rarely in the log become one per field, and ``numbers`` dense columns become
        ids of a few values; both are always frequent.
        """
        mean = self.probability * rows
        term = np.exp(-mean)
        kept = 1.0 - term
        occurrences = 1
        while (self.ids * kept).sum() > items:
            term = term * mean / occurrences
            kept = kept - term
            occurrences += 1
        folded = float((self.probability * self.ids * (1.0 - kept)).sum())
        return replace(self, ids=self.ids * kept, frequent=self.frequent + folded + numbers)

    def seen_in_batches(self, more_than: int, of: int, batch_rows: int) -> Popularity:
        """Only the ids that occur in more than ``more_than`` of ``of`` batches."""
        seen = self._seen(batch_rows)
        chance = np.zeros_like(seen)
        for batches in range(more_than + 1, of + 1):
            chance += comb(of, batches) * seen**batches * (1.0 - seen) ** (of - batches)
        return replace(self, ids=self.ids * chance)

    def _seen(self, rows: float) -> Floats:
        """The probability that an id of each group is seen among this many rows."""
        return -np.expm1(-self.probability * rows / self.repeats)


def expected_ids(preset: Preset, rows: int) -> dict[str, float]:
    """Distinct ids of every column among the first ``rows`` rows."""
    return {field.name: _expected_ids(preset, field, rows) for field in preset.ids}


def _expected_ids(preset: Preset, field: IdField, rows: int) -> float:
    if field.link == "clock":
        return float(min(field.law.support, -(-rows // field.clock_rows)))
    if field.link in ("independent", "taste", "market"):  # one draw for every member that appears
        entity = next(entity for entity in preset.entities if entity.name == field.entity)
        as_field = replace(field, law=entity.law, missing=0.0)
        members = Popularity.of(preset, [as_field]).distinct(rows)
        probability, ids = _groups(field.law)
        return float((ids * -np.expm1(-probability * (1.0 - field.missing) * members)).sum())
    return Popularity.of(preset, [field]).distinct(rows)


def repeats(preset: Preset, entity: Entity) -> float:
    """Samples for every draw of an entity's member, on average."""
    if entity.per == "session":
        return mean_session_length(preset)
    kept = sum(
        # Sessions with a kept sample: those of 1, 2, ... samples, each of which is kept or not.
        rate * entity.kept / (entity.kept + (1.0 - entity.kept) * end) if entity.kept else 0.0
        for rate, end in _sessions(preset)
    )
    return 1.0 / (1.0 - entity.kept + kept)


def mean_session_length(preset: Preset) -> float:
    """Samples of a session on average, the cut of long ones included."""
    return 1.0 / sum(rate for rate, _ in _sessions(preset))


def _sessions(preset: Preset) -> list[tuple[float, float]]:
    """Of lanes of short and of long sessions: sessions a sample of the log, and the chance that one ends."""
    found = []
    for share, length in (
        (1.0 - preset.long_lanes, preset.session_length),
        (preset.long_lanes, preset.long_session),
    ):
        ends = 1.0 / length
        ends += (1.0 - ends) / longest_session(preset)
        found.append((share * ends, ends))
    return found


def _groups(law: SkewLaw) -> tuple[Floats, Floats]:
    edges = np.arange(min(law.support, _EXACT_RANKS) + 1, dtype=np.float64)
    if law.support > _EXACT_RANKS:
        coarse = np.unique(np.floor(np.geomspace(_EXACT_RANKS, law.support, _BINS)))[1:]
        edges = np.concatenate((edges, coarse))
    ids = np.diff(edges)
    return np.diff(law.cumulative(edges)) / ids, ids
