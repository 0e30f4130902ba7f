"""The visible columns of hidden members: which value each field has, where none, and the numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul.data.generate.counters import bits, stream, uniforms
from rowhaul.data.generate.population import Members, Visits, slices
from rowhaul.data.generate.spec import DenseField, IdField, Preset

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Float32s = npt.NDArray[np.float32]

LARGEST_NUMBER = 1e6  # float32 holds every integer and two decimals up to here


@dataclass(frozen=True)
class Columns:
    """The columns of some consecutive samples, ids still as ranks, in the preset's order."""

    visits: Visits
    ranks: tuple[Int64s, ...]
    missing_ids: tuple[Bools, ...]
    numbers: tuple[Float32s, ...]
    missing_numbers: tuple[Bools, ...]


class Attributes:
    """Computes columns; a column of an entity depends on the member alone."""

    def __init__(self, preset: Preset, seed: int) -> None:
        self._preset = preset
        self._entities = {entity.name: entity for entity in preset.entities}
        self._slices = {
            field.name: slices(preset, seed, field.name) for field in preset.ids if field.link == "market"
        }
        self._seed = seed

    def columns(self, visits: Visits) -> Columns:
        """All columns of these samples."""
        ids, dense = self._preset.ids, self._preset.dense
        return Columns(
            visits=visits,
            ranks=tuple(self.ranks(field, visits) for field in ids),
            missing_ids=tuple(self.missing(field, self._counters(field, visits)) for field in ids),
            numbers=tuple(self.numbers(field, self._counters(field, visits)) for field in dense),
            missing_numbers=tuple(self.missing(field, self._counters(field, visits)) for field in dense),
        )

    def ranks(self, field: IdField, visits: Visits) -> Int64s:
        """The rank of each sample's value among the values of the field (its first, if it has several)."""
        if field.link == "clock":
            return visits.rows // field.clock_rows % field.law.support
        if field.link == "row":
            return field.law.ranks(uniforms(stream(self._seed, field.name), visits.rows))
        return self.ranks_of(field, visits.members[field.entity])

    def ranks_of(self, field: IdField, members: Members) -> Int64s:
        """The same for members of the field's entity."""
        law = self._entities[field.entity].law
        if field.link == "popularity":
            if field.law == law:
                return members.ranks
            return field.law.ranks(law.cumulative(members.ranks + 0.5))
        any_value = uniforms(stream(self._seed, field.name), members.ranks)
        if field.link == "taste":
            any_value = (members.tastes + any_value) / self._preset.tastes
        elif field.link == "market":
            any_value = (self._slices[field.name][members.markets] + any_value) / self._preset.markets
        return field.law.ranks(any_value)

    def missing(self, field: IdField | DenseField, counters: Int64s) -> Bools:
        """Where the column has no value, for members by rank or for samples by row."""
        if not field.missing:
            return np.zeros(len(counters), np.bool_)
        return uniforms(stream(self._seed, field.name, "missing"), counters) < field.missing

    def numbers(self, field: DenseField, counters: Int64s) -> Float32s:
        """The numbers of a dense column, for members by rank or for samples by row."""
        at = uniforms(stream(self._seed, field.name), counters)
        spread = (at / (1.0 - at)) ** field.shape
        numbers = np.minimum(np.round(field.median * spread, field.decimals), LARGEST_NUMBER) - field.lowest
        return numbers.astype(np.float32)

    def more_values(self, field: IdField, ranks: Int64s, counters: Int64s) -> tuple[Int32s, Int64s]:
        """All values of a multi-valued field: where those of each sample begin and end, and their ranks."""
        widest = (field.law.support - 1) // (field.values - 1)  # up to here a sample's values all differ
        lengths = 1 + self._below(field.values, field, "length", counters)
        strides = 1 + self._below(widest, field, "stride", counters)
        place = np.arange(field.values)
        values = (ranks[:, None] + place * strides[:, None]) % field.law.support
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        return offsets, values[place < lengths[:, None]]

    def _below(self, limit: int, field: IdField, what: str, counters: Int64s) -> Int64s:
        return (bits(stream(self._seed, field.name, what), counters) % np.uint64(limit)).astype(np.int64)

    def _counters(self, field: IdField | DenseField, visits: Visits) -> Int64s:
        return visits.members[field.entity].ranks if field.entity else visits.rows
