"""What a run with a memory budget is given that its user did not decide: a row size, and how often rows move.

Within a budget smaller rows are more rows. The ids of the data are counted before the run begins, and the
embedding_dim is halved while that lets noticeably more reads find a row of their own. The choice is written
into the run's configuration, from which a resumed run has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.budget.id_counts import IdCounts
from rowhaul.budget.maps import record_bytes
from rowhaul.budget.room import room_for
from rowhaul.budget.settings import PERIOD, BudgetSettings
from rowhaul.data.schema import Schema
from rowhaul.data.stream import SampleStream
from rowhaul.pruning.config import parse_share
from rowhaul.store.footprint import index_bytes
from rowhaul.store.packing import PLAIN
from rowhaul.train.config import TrainConfig

LEAST_DIM = 4
WORTH_HALVING = 0.015  # of the reads of repeated ids that find a row of their own
MOST_SAMPLES = 10_000_000  # read to count ids, from the first
STOPS = 50  # in a short run, at least
_AT_A_TIME = 1 << 16

Fit = Callable[[TrainConfig], TrainConfig]
Progress = Callable[[int, int], None]
_DECIDED = ("ratio", "budget", "period", "narrowed_from")  # of prune, besides the model's embedding_dim


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
        return float(served.sum() / max(repeated.sum(), 1))


def fitted(
    config: TrainConfig,
    schema: Schema,
    data: Any,
    *,
    choose_dim: bool = False,
    progress: Progress = lambda done, total: None,
) -> Fitted:
    """Decide what a budget leaves open: its bytes where it is a ratio, the row size, the period.

    Args:
        config: with a budget whose tail is shared; any other stays as it is.
        schema: whose id columns are read.
        data: files as `SampleStream` takes them.
        choose_dim: whether the embedding_dim may become smaller.
        progress: called with the samples read and all that are.
    """
    if not config.prune.is_shared:
        return Fitted(config)
    if parse_share(config.prune.ratio) or choose_dim:
        return fitted_to(config, schema, _count(config, schema, data, progress), choose_dim=choose_dim)
    return Fitted(_paced(config, _samples(schema, data)))


def fitted_to(config: TrainConfig, schema: Schema, reads: Reads, *, choose_dim: bool) -> Fitted:
    """The same, given how often ids are read."""
    notes = []
    if ratio := parse_share(config.prune.ratio):
        num_bytes = round((1 - ratio) * _unpruned_bytes(config, reads.num_ids))
        config = replace(config, prune=replace(config.prune, ratio="0", budget=f"{num_bytes}b"))
        notes.append(f"{ratio:.0%} less than {reads.num_ids:,} whole rows are {num_bytes:,} bytes")
    if choose_dim:
        config, note = _narrowed(config, schema, reads)
        notes.append(note)
    return Fitted(_paced(config, reads.samples), "; ".join(notes))


def _paced(config: TrainConfig, samples: int) -> TrainConfig:
    """Decide how often rows change hands, if that is open."""
    steps = config.epochs * (-(-samples // config.batch_size))
    steps = min(steps, config.max_steps or steps)
    period = config.prune.period or max(1, min(PERIOD, steps // STOPS))
    return replace(config, prune=replace(config.prune, period=period))


def decisions(config: TrainConfig) -> dict[str, Any]:
    """Return what `fitted` may have decided, in plain types, for `with_decisions`."""
    prune = {name: getattr(config.prune, name) for name in _DECIDED}
    return {"prune": prune, "embedding_dim": config.model.embedding_dim}


def with_decisions(config: TrainConfig, decided: Mapping[str, Any]) -> TrainConfig:
    """Return a configuration with what was decided for another of the same run."""
    model = replace(config.model, embedding_dim=decided["embedding_dim"])
    return replace(config, model=model, prune=replace(config.prune, **decided["prune"]))


def as_fitted(config: TrainConfig, before: TrainConfig) -> TrainConfig:
    """Return a configuration with what was decided when its run began, where it leaves that open."""
    if not (config.prune.is_shared and before.prune.is_shared):
        return config
    mine, theirs = config.prune, before.prune
    prune = replace(mine, period=mine.period or theirs.period, narrowed_from=theirs.narrowed_from)
    if parse_share(mine.ratio):
        prune = replace(prune, ratio=theirs.ratio, budget=theirs.budget)
    model = config.model
    if theirs.narrowed_from == model.embedding_dim:
        model = replace(model, embedding_dim=before.model.embedding_dim)
    return replace(config, prune=prune, model=model)


def _samples(schema: Schema, data: Any) -> int:
    ids_only = Schema(label=None, dense=(), ids=schema.ids)
    return SampleStream(data, ids_only, 1, require_label=False).num_samples


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
    """Halve the embedding_dim while that is worth it; also what to say of it."""
    first, served = config.model.embedding_dim, _served(config, schema, reads)
    before = served
    while config.model.embedding_dim % 2 == 0 and config.model.embedding_dim // 2 >= LEAST_DIM:
        model = replace(config.model, embedding_dim=config.model.embedding_dim // 2)
        smaller = replace(config, model=model)
        if _served(smaller, schema, reads) < served + WORTH_HALVING:
            break
        config, served = smaller, _served(smaller, schema, reads)
    dim = config.model.embedding_dim
    of_ids = f"of the reads of ids that come more than once, of {reads.num_ids:,} ids"
    if dim == first:
        return config, f"embedding_dim stays {dim}: {served:.1%} {of_ids}, find a row of their own"
    config = replace(config, prune=replace(config.prune, narrowed_from=first))
    return config, (
        f"embedding_dim {dim} instead of {first}: so {served:.1%} {of_ids}, find a row of their own instead "
        f"of {before:.1%}"
    )


def _served(config: TrainConfig, schema: Schema, reads: Reads) -> float:
    settings = config.row_settings()
    assert isinstance(settings, BudgetSettings)
    size = record_bytes(config.model.embedding_dim, config.row_rule(), config.precision, settings.row_dtype)
    return reads.served(room_for(settings, settings.bytes, size, len(schema.tables)).num_slots)


def _unpruned_bytes(config: TrainConfig, num_ids: int) -> int:
    """Bytes of whole rows in the precision of training, with their index."""
    size = record_bytes(config.model.embedding_dim, config.row_rule(), config.precision, PLAIN)
    return num_ids * size + index_bytes(num_ids)
