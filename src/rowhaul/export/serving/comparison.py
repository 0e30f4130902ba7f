"""Whether a served folder gives the logits that the run itself gives, on real samples and unseen ids."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from rowhaul.checkpoint import CheckpointReader
from rowhaul.checkpoint.opening import run_of
from rowhaul.data.columns import offsets_of
from rowhaul.data.samples import Samples
from rowhaul.data.stream import SampleStream
from rowhaul.errors import CheckpointError, DataError
from rowhaul.nn import Batch
from rowhaul.serve import requests
from rowhaul.serve.rows import IdBags
from rowhaul.serve.scorer import Scorer
from rowhaul.train.run_data import remembered_data
from rowhaul.train.trainer import Trainer

NUM_SAMPLES = 2048  # as they are, and once more with unseen ids among them
TOLERANCE = 1e-5  # of logits, or of their size where that is above 1
_UNSEEN = 0.1  # the share of ids that are replaced


@dataclass(frozen=True)
class Comparison:
    """What a comparison found."""

    num_samples: int
    is_real: bool  # whether the samples are of the run's data
    num_unseen: int  # ids that were replaced by unseen ones
    differences: dict[str, float]  # the largest, by kind of graph


def compare(scorers: dict[str, Scorer], trainer: Trainer, reader: CheckpointReader) -> Comparison:
    """Compare the logits of scorers with the model's own.

    Raises:
        CheckpointError: they differ.
    """
    real = _samples_of_run(reader, trainer)
    samples = real if real is not None else _made_samples(reader, trainer)
    parts, num_unseen = [samples], 0
    if trainer.config.on_unknown != "error":
        mixed, num_unseen = _with_unseen(samples)
        parts.append(mixed)
    differences = dict.fromkeys(scorers, 0.0)
    was_training = trainer.model.training
    trainer.model.eval()
    for part in parts:
        with torch.no_grad():
            expected = trainer.model(Batch.from_samples(part)).numpy()
        for kind, scorer in scorers.items():
            found, _ = scorer.logits(_request(part))
            away = np.abs(found.astype(np.float64) - expected)
            if not (away <= TOLERANCE * np.maximum(1, np.abs(expected))).all():
                place = int(np.argmax(np.nan_to_num(away, nan=np.inf)) // max(1, away[0].size))
                raise CheckpointError(
                    f"the exported model ({kind}) does not give the logits of {reader.path}: "
                    f"{found[place]!r} instead of {expected[place]!r} for sample {place}; nothing was kept"
                )
            differences[kind] = max(differences[kind], float(away.max(initial=0.0)))
    trainer.model.train(was_training)
    return Comparison(len(samples) * len(parts), real is not None, num_unseen, differences)


def _samples_of_run(reader: CheckpointReader, trainer: Trainer) -> Samples | None:
    """Return the first samples of a run's data; None where it is no longer there."""
    folder = run_of(reader)
    remembered = remembered_data(folder) if folder is not None else None
    for files in (remembered.eval_data, remembered.data) if remembered is not None else ():
        try:
            stream = SampleStream(files, trainer.schema, NUM_SAMPLES, limit=NUM_SAMPLES, require_label=False)
            return next(iter(stream))
        except (DataError, OSError):
            continue
    return None


def _made_samples(reader: CheckpointReader, trainer: Trainer) -> Samples:
    """Make samples of trained keys, one a feature, and of numbers around 0."""
    random, schema = np.random.default_rng(0), trainer.schema
    values = []
    for column in schema.ids:
        known = next((keys for keys in reader.keys(column.table) if len(keys)), np.zeros(1, np.int64))
        if not reader.format(column.table).keyed_by_id:
            known = np.arange(NUM_SAMPLES)
        values.append(random.choice(known, NUM_SAMPLES))
    dense = random.normal(size=(NUM_SAMPLES, len(schema.dense))).astype(np.float32)
    lengths = np.ones((len(values), NUM_SAMPLES), np.int32)
    return Samples(schema.features, np.concatenate(values), lengths, dense, None, np.arange(NUM_SAMPLES))


def _with_unseen(samples: Samples) -> tuple[Samples, int]:
    """Replace some ids by random ones, which no log of this size has."""
    random = np.random.default_rng(1)
    chosen = random.random(len(samples.values)) < _UNSEEN
    unseen = random.integers(-(2**63), 2**63 - 1, len(samples.values))
    return replace(samples, values=np.where(chosen, unseen, samples.values)), int(chosen.sum())


def _request(samples: Samples) -> requests.Samples:
    num_features, num_samples = samples.lengths.shape
    first_bags = np.arange(num_features + 1) * num_samples
    bags = IdBags(samples.values, offsets_of(samples.lengths.reshape(-1)), first_bags, num_samples)
    return requests.Samples(bags, samples.dense)
