"""What a run with a memory budget is given that its user did not decide: rows' size, precision, and more.

Within a budget smaller rows are more rows. The ids of the data are counted before the run begins, and of all
sizes and precisions of rows the one is taken that is expected to lose least: by rows that are smaller, and by
reads that find no row of their own. What Adagrad's sums begin with is tried, see `rowhaul.train.first_sums`.
Choices are written into the run's configuration, from which a resumed run has them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rowhaul.budget.id_counts import IdCounts
from rowhaul.budget.maps import record_bytes
from rowhaul.budget.room import room_for
from rowhaul.budget.settings import MOST_SHARED, PERIOD, BudgetSettings
from rowhaul.data.schema import Schema
from rowhaul.data.stream import SampleStream
from rowhaul.errors import ConfigError
from rowhaul.pruning.config import parse_share
from rowhaul.store.footprint import index_bytes
from rowhaul.store.packing import PLAIN
from rowhaul.train.config import AUTO, TrainConfig
from rowhaul.train.first_sums import NAME, STEPS, as_tried, with_first_sums

if TYPE_CHECKING:
    from rowhaul.nn import Batch

LEAST_DIM = 2
# What is lost, in points of AUC: as measured on MovieLens-1M and a log whose rare ids carry signal.
_HALVING = 0.2  # by rows of half the values
_PRECISION = {PLAIN: 0.0, "bfloat16": 0.03, "int8": 0.1}
_READS = 30.0  # if all reads of repeated ids shared rows; of ids that have few reads, or come late, ...
_IDS = 0.05  # ... so much more, of the share of the ids
# The same where most ids are read so rarely that not much can be learned of them, as measured on logs shaped
# like Criteo's and Avazu's: reads without a row of their own cost little there, and rounding adds to noise.
_RARE = 10  # reads
_NARROW = 1.2  # by rows of so few values: in parts of one value
_RARE_PRECISION = {PLAIN: 0.0, "bfloat16": 0.1, "int8": 0.15}
_RARE_READS = 1.0
# More rows are shared where more than a few reads do: of the budget, by their share.
_FEW_READS, _SHARED_BY_READS, _MOST_SHARED = 0.04, 6.0, 0.5
MOST_SAMPLES = 10_000_000  # read to count ids, from the first
STOPS = 50  # in a short run, at least
_AT_A_TIME = 1 << 16

Fit = Callable[[TrainConfig], TrainConfig]
Progress = Callable[[int, int], None]
_DECIDED = ("tail", "ratio", "budget", "period", "cold_start", "shared", "narrowed_from")


@dataclass(frozen=True)
class Fitted:
    """A configuration that suits its data, and what was decided, in a line; empty: nothing."""

    config: TrainConfig
    note: str = ""


@dataclass(frozen=True)
class Reads:
    """How often ids are read; of a sample of them, most first."""

    counts: npt.NDArray[np.int64]
    share: float  # of all ids in the sample
    samples: int  # to train on in an epoch

    @property
    def num_ids(self) -> int:
        """Different ids."""
        return round(len(self.counts) / self.share)

    def served(self, num_slots: int) -> float:
        """The share of the reads of repeated ids that find a row of their own, if those read most do."""
        repeated = self.counts[self.counts > 1]
        served = repeated[: int(num_slots * self.share)]
        return float(served.sum() / max(repeated.sum(), 1)) if len(repeated) else 1.0

    @property
    def is_rare(self) -> bool:
        """Whether most ids are read too rarely for anything to be learned of them."""
        return len(self.counts) > 0 and float(np.median(self.counts)) < _RARE

    def without(self, num_slots: int) -> float:
        """The share of the repeated ids that have no row of their own then."""
        num_repeated = int(np.count_nonzero(self.counts > 1))
        return max(0.0, 1 - int(num_slots * self.share) / max(num_repeated, 1))


def fitted(
    config: TrainConfig,
    schema: Schema,
    data: Any,
    *,
    choose_dim: bool = False,
    progress: Progress = lambda done, total: None,
) -> Fitted:
    """Decide what a budget leaves open: its bytes where it is a ratio, how rows are held, the period.

    Of rows that are pruned in chunks, decide the period and the cold start.

    Args:
        config: without pruning or a budget it stays as it is.
        schema: whose id columns are read.
        data: files as `SampleStream` takes them. None: a stream, of which nothing is known beforehand. Then
            rows stay as configured (`row_dtype: auto` is int8), and a period is short only with `max_steps`.
        choose_dim: whether the embedding_dim may become smaller; then `row_dtype` and `prune.shared` are
            chosen as well, where they are as by default, and what Adagrad's sums begin with.
        progress: called with the samples read and all that are.
    """
    if not config.prune.is_used:
        return Fitted(config)
    if not config.prune.is_shared:
        return Fitted(_paced(config, None if data is None else _samples(schema, data)))
    if data is None:
        dim = config.model.embedding_dim
        note = f"embedding_dim stays {dim}, in {config.held_in}: the ids of a stream cannot be counted first"
        return Fitted(_paced(config), note)
    if parse_share(config.prune.ratio) or choose_dim:
        reads = _count(config, schema, data, progress)
        return fitted_to(config, schema, reads, choose_dim=choose_dim, first=_first(config, schema, data))
    return Fitted(_paced(config, _samples(schema, data)))


def fitted_to(
    config: TrainConfig, schema: Schema, reads: Reads, *, choose_dim: bool, first: Iterable[Batch]
) -> Fitted:
    """The same, given how often ids are read, and the first batches."""
    notes = []
    if ratio := parse_share(config.prune.ratio):
        num_bytes = round((1 - ratio) * _unpruned_bytes(config, reads.num_ids))
        config = replace(config, prune=replace(config.prune, ratio="0", budget=f"{num_bytes}b"))
        notes.append(f"{ratio:.0%} less than {reads.num_ids:,} whole rows are {num_bytes:,} bytes")
    if choose_dim:
        config, note = _narrowed(config, schema, reads)
        notes.append(note)
        if reads.is_rare:
            tried = with_first_sums(config, schema, first)
            if tried != config:
                notes.append(f"most ids are rare, so {NAME} is {tried.rows.options[NAME]:g}")
            config = tried
    return Fitted(_paced(config, reads.samples), "; ".join(notes))


def _paced(config: TrainConfig, samples: int | None = None) -> TrainConfig:
    """Decide how often rows change hands or are pruned, if that is open; None: any number of samples."""
    steps = config.max_steps or sys.maxsize
    if samples is not None:
        steps = config.epochs * (-(-samples // config.batch_size))
        steps = min(steps, config.max_steps or steps)
    if not config.prune.is_shared:
        return replace(config, prune=config.prune.paced(steps))
    period = config.prune.period or max(1, min(PERIOD, steps // STOPS))
    return replace(config, prune=replace(config.prune, period=period))


def decisions(config: TrainConfig) -> dict[str, Any]:
    """Return what `fitted` may have decided, in plain types, for `with_decisions`."""
    prune = {name: getattr(config.prune, name) for name in _DECIDED}
    return {
        "prune": prune,
        "embedding_dim": config.model.embedding_dim,
        "row_dtype": config.row_dtype,
        "row_options": config.rows.options,
    }


def with_decisions(config: TrainConfig, decided: Mapping[str, Any]) -> TrainConfig:
    """Return a configuration with what was decided for another of the same run."""
    model = replace(config.model, embedding_dim=decided["embedding_dim"])
    prune = replace(config.prune, **decided["prune"])
    rows = replace(config.rows, options=decided["row_options"])
    return replace(config, model=model, prune=prune, rows=rows, row_dtype=decided["row_dtype"])


def as_fitted(config: TrainConfig, before: TrainConfig) -> TrainConfig:
    """Return a configuration with what was decided when its run began, where it leaves that open."""
    mine, theirs = config.prune, before.prune
    if mine.is_shared != theirs.is_shared or not mine.is_used:
        return config
    if not mine.is_shared:
        open_ones = {name: getattr(mine, name) or getattr(theirs, name) for name in ("period", "cold_start")}
        return replace(config, prune=replace(mine, **open_ones))
    prune = replace(mine, period=mine.period or theirs.period, narrowed_from=theirs.narrowed_from)
    if parse_share(mine.ratio):
        prune = replace(prune, ratio=theirs.ratio, budget=theirs.budget)
    model = config.model
    if theirs.narrowed_from == model.embedding_dim:
        model = replace(model, embedding_dim=before.model.embedding_dim)
    if mine.shared == BudgetSettings.shared:
        prune = replace(prune, shared=theirs.shared)
    row_dtype = before.row_dtype if config.row_dtype == AUTO else config.row_dtype
    found = replace(config, prune=prune, model=model, row_dtype=row_dtype)
    return as_tried(found, before)


def _samples(schema: Schema, data: Any) -> int:
    ids_only = Schema(label=None, dense=(), ids=schema.ids)
    return SampleStream(data, ids_only, 1, require_label=False).num_samples


def _first(config: TrainConfig, schema: Schema, data: Any) -> Iterator[Batch]:
    """Yield the batches on which sums are tried."""
    from rowhaul.nn import Batch  # it takes a while to import

    for samples in SampleStream(data, schema, config.batch_size, limit=STEPS * config.batch_size):
        yield Batch.from_samples(samples)


def _count(config: TrainConfig, schema: Schema, data: Any, progress: Progress) -> Reads:
    ids_only, samples = Schema(label=None, dense=(), ids=schema.ids), _samples(schema, data)
    trained = min(samples, config.max_steps * config.batch_size or samples)
    to_read = min(trained, MOST_SAMPLES)
    found, numbers = IdCounts(), {name: number for number, name in enumerate(ids_only.tables)}
    stream = SampleStream(data, ids_only, min(_AT_A_TIME, to_read), limit=to_read, require_label=False)
    for some in stream:
        for column, keys in zip(ids_only.ids, some.ids_of_features(), strict=True):
            found.add(numbers[column.table], np.ascontiguousarray(keys))
        progress(stream.position, to_read)
    return Reads(found.counts(), found.share, samples)


def _narrowed(config: TrainConfig, schema: Schema, reads: Reads) -> tuple[TrainConfig, str]:
    """Choose how rows are held, and how many are shared; also what to say of it."""
    first = config.model.embedding_dim
    best = min(_ways(config), key=lambda one: _expected_loss(one, first, schema, reads))
    slots, dim = _num_slots(best, schema), best.model.embedding_dim
    if best.prune.shared == BudgetSettings.shared:
        more = _SHARED_BY_READS * (1 - reads.served(slots) - _FEW_READS)
        shared = round(min(_MOST_SHARED, best.prune.shared + max(0.0, more)), 2)
        if reads.is_rare:  # what rare ids share is noise, which new ids would read, too
            shared = _share_of_one_a_table(best, schema)
        best = replace(best, prune=replace(best.prune, shared=shared))
        slots = _num_slots(best, schema)
    found = (
        f"in {best.held_in}: so {reads.served(slots):.1%} of the reads of ids that come more than once, of "
        f"{reads.num_ids:,} ids, find a row of their own; {best.prune.shared:.1%} of the budget is shared"
    )
    if dim == first:
        return best, f"embedding_dim stays {dim}, {found}"
    best = replace(best, prune=replace(best.prune, narrowed_from=first))
    before = reads.served(_num_slots(config, schema))
    return best, f"embedding_dim {dim} instead of {first}, {found} (instead of {before:.1%})"


def _ways(config: TrainConfig) -> list[TrainConfig]:
    """All ways to hold rows: with no more values than configured, in each precision unless that is, too."""
    dims, dim = [config.model.embedding_dim], config.model.embedding_dim
    while dim % 2 == 0 and dim // 2 >= LEAST_DIM:
        dim //= 2
        dims.append(dim)
    is_open = config.row_dtype == AUTO and config.precision == "float32"
    return [
        replace(config, model=replace(config.model, embedding_dim=one), row_dtype=held_in)
        for one in dims
        for held_in in (_PRECISION if is_open else [config.row_dtype])
        if not (held_in == "int8" and one == 1)
    ]


def _expected_loss(config: TrainConfig, first_dim: int, schema: Schema, reads: Reads) -> float:
    """Points of AUC against whole rows of ``first_dim``; infinite where the budget is too small for any."""
    try:
        slots = _num_slots(config, schema)
    except ConfigError:
        return math.inf
    dim = config.model.embedding_dim
    unserved = 1 - reads.served(slots) + _IDS * reads.without(slots)
    if reads.is_rare:
        narrow, precision = _NARROW / dim - _NARROW / first_dim, _RARE_PRECISION
        return narrow + precision.get(config.held_in, 0.0) + _RARE_READS * unserved
    narrow = _HALVING * math.log2(first_dim / dim)
    return narrow + _PRECISION.get(config.held_in, 0.0) + _READS * unserved


def _num_slots(config: TrainConfig, schema: Schema) -> int:
    settings, size = _settings_and_size(config)
    return room_for(settings, settings.bytes, size, len(schema.tables)).num_slots


def _share_of_one_a_table(config: TrainConfig, schema: Schema) -> float:
    """The share of the budget that a shared row for each table takes, rounded up."""
    settings, size = _settings_and_size(config)
    share = len(schema.tables) * size / settings.bytes
    return min(MOST_SHARED, math.ceil(share * 1e4) / 1e4)


def _settings_and_size(config: TrainConfig) -> tuple[BudgetSettings, int]:
    """The budget, and the bytes of a row with its state."""
    settings = config.row_settings()
    assert isinstance(settings, BudgetSettings)
    dim = config.model.embedding_dim
    return settings, record_bytes(dim, config.row_rule(), config.precision, settings.row_dtype)


def _unpruned_bytes(config: TrainConfig, num_ids: int) -> int:
    """Bytes of whole rows in the precision of training, with their index."""
    size = record_bytes(config.model.embedding_dim, config.row_rule(), config.precision, PLAIN)
    return num_ids * size + index_bytes(num_ids)
