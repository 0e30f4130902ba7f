"""The generator: a preset, a number of rows and a seed become a log, block by block.

Every row is a function of (preset, seed, row number), so a log can be continued in the middle, cut
into parts made by different processes, or made longer, and it never needs more memory than a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rowhaul.data.generate.attributes import Attributes, Columns
from rowhaul.data.generate.bayes import BayesFacts, BayesMeter
from rowhaul.data.generate.labels import LabelModel
from rowhaul.data.generate.population import Population
from rowhaul.data.generate.presets import preset_named
from rowhaul.data.generate.spec import IdField, Preset
from rowhaul.data.schema import DenseColumn, IdColumn, LabelColumn, Schema
from rowhaul.errors import ConfigError

CONVERSION = "conversion"
BATCH_ROWS = 65_536
PILOT_ROWS = 32_768  # the first rows of every log set its base rate and strength of signal


@dataclass(frozen=True)
class LabelledColumns:
    """Some consecutive samples with their labels and the true probabilities of these."""

    columns: Columns
    probabilities: npt.NDArray[np.float64]
    labels: npt.NDArray[np.bool_]
    conversions: npt.NDArray[np.bool_] | None = None  # as they would be after a click


class LogGenerator:
    """A skewed click log whose labels can be learned.

    Args:
        preset: The name of a preset (`preset_names` lists them) or your own.
        rows: Samples in the log. A shorter log is the beginning of a longer one.
        seed: Another seed is another population with other tastes.
        rare_signal: Whether rare ids say as much about the label as popular ones.
        conversions: Whether there is a second label, ``conversion``, which is null without a click.

    Example:
        >>> generator = LogGenerator("criteo", rows=1000)
        >>> sum(batch.num_rows for batch in generator.batches())
        1000
    """

    def __init__(
        self,
        preset: str | Preset,
        rows: int,
        seed: int = 0,
        *,
        rare_signal: bool = False,
        conversions: bool = False,
    ) -> None:
        if rows < 1:
            raise ConfigError(f"rows must be at least 1, got {rows}")
        self.preset = preset_named(preset) if isinstance(preset, str) else preset
        self.rows = rows
        self.seed = seed
        self._has_conversions = conversions
        self.population = Population(self.preset, seed)
        self.attributes = Attributes(self.preset, seed)
        self._labels = LabelModel(self.preset, seed, rare_signal=rare_signal)
        self._labels.calibrate(self._labels.scores(self._columns(0, PILOT_ROWS)))
        self._bayes: BayesFacts | None = None

    @property
    def schema(self) -> Schema:
        """What the columns of `batches` mean."""
        click = LabelColumn(self.preset.label)
        both = (click, LabelColumn(CONVERSION, after=click.name)) if self._has_conversions else ()
        return Schema(
            label=None if both else click,
            labels=both,
            dense=tuple(DenseColumn(dense.name, dense.transform) for dense in self.preset.dense),
            ids=tuple(IdColumn(field.name, type=field.naming.type) for field in self.preset.ids),
        )

    @property
    def bayes(self) -> BayesFacts:
        """The best that any model can reach on exactly these rows; makes the log once if none was made."""
        if self._bayes is None:
            for _ in self.samples():
                pass
        assert self._bayes is not None
        return self._bayes

    def batches(self, start: int = 0) -> Iterator[pa.RecordBatch]:
        """The log from row ``start`` on, 65,536 rows at a time, the last batch shorter."""
        return map(self._named, self.samples(start))

    def samples(self, start: int = 0) -> Iterator[LabelledColumns]:
        """The same rows as ranks, for writers that name them otherwise."""
        if not 0 <= start <= self.rows:
            raise ConfigError(f"start must be from 0 to rows ({self.rows:,}), got {start:,}")
        return self._samples(start)

    def _samples(self, start: int) -> Iterator[LabelledColumns]:
        meter = BayesMeter()
        for first in range(start, self.rows, BATCH_ROWS):
            columns = self._columns(first, min(first + BATCH_ROWS, self.rows))
            probabilities = self._labels.probabilities(self._labels.scores(columns))
            labels = self._labels.draw(probabilities, columns.visits.rows)
            meter.add(probabilities, labels)
            conversions = None
            if self._has_conversions:
                chances = self._labels.conversions(columns)
                conversions = self._labels.draw_conversions(chances, columns.visits.rows)
            yield LabelledColumns(columns, probabilities, labels, conversions)
        if start == 0:
            self._bayes = meter.facts()

    def _columns(self, first: int, last: int) -> Columns:
        return self.attributes.columns(self.population.visits(first, last))

    def _named(self, samples: LabelledColumns) -> pa.RecordBatch:
        columns = samples.columns
        arrays = {self.preset.label: pa.array(samples.labels.view(np.int8))}
        if samples.conversions is not None:
            arrays[CONVERSION] = pa.array(samples.conversions.view(np.int8), mask=~samples.labels)
        for dense, numbers, missing in zip(
            self.preset.dense, columns.numbers, columns.missing_numbers, strict=True
        ):
            arrays[dense.name] = pa.array(numbers, mask=missing if dense.missing else None)
        for field, ranks, missing in zip(self.preset.ids, columns.ranks, columns.missing_ids, strict=True):
            if field.values > 1:
                arrays[field.name] = self._lists(field, ranks, columns)
            else:
                arrays[field.name] = pa.array(
                    field.naming.keys(ranks), mask=missing if field.missing else None
                )
        return pa.RecordBatch.from_pydict(arrays)

    def _lists(self, field: IdField, ranks: npt.NDArray[np.int64], columns: Columns) -> pa.Array:
        members = columns.visits.members[field.entity].ranks
        offsets, values = self.attributes.more_values(field, ranks, members)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(field.naming.keys(values)))
