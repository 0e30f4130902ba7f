"""Databases of tables as training configures them, ours or TorchRec's."""

from dataclasses import dataclass
from enum import Enum

import numpy as np
import pytest
import torch

from rowhaul.database import EmbeddingDatabase
from rowhaul.errors import ConfigError
from rowhaul.nn import EmbeddingBagConfig


def test_tables_of_training_are_taken_as_they_are():
    config = EmbeddingBagConfig(
        num_embeddings=100, embedding_dim=2, name="t", data_type=torch.float64, feature_names=["f"]
    )
    with EmbeddingDatabase([config]) as db:
        rows = db.pull(db.prefetch(range(1000)))
        assert rows.dtype == torch.float64
        assert 0.08 < rows.abs().max() <= 0.1


@pytest.mark.parametrize("asked", [{}, {"pooling": "sum"}, {"pooling": {"t": "mean"}}])
def test_bags_are_pooled_as_the_tables_of_training_say_unless_asked_otherwise(asked):
    configs = [
        EmbeddingBagConfig(embedding_dim=2, name="t", feature_names=["f"], pooling="MEAN"),
        EmbeddingBagConfig(embedding_dim=2, name="u", feature_names=["g"]),
    ]
    with EmbeddingDatabase(configs) as db:
        keys, lengths = {"t": [1, 2, 3], "u": [1, 2, 3]}, {"t": [2, 1], "u": [2, 1]}
        rows = db.pull(db.prefetch(keys))
        sums = {name: torch.stack([some[0] + some[1], some[2]]) for name, some in rows.items()}
        if asked.get("pooling") != "sum":
            sums["t"][0] /= 2
        pulled = db.pull(db.prefetch(keys, lengths=lengths, **asked))
        assert all(torch.equal(pulled[name], sums[name]) for name in keys)
        assert torch.equal(db.snapshot().pull(keys, lengths=lengths, **asked)["t"], sums["t"])


class TorchrecType(Enum):
    """As TorchRec names types."""

    FP32, FP64, BF16 = "FP32", "FP64", "BF16"


@dataclass
class TorchrecTable:
    """The fields of TorchRec's ``EmbeddingBagConfig``."""

    num_embeddings: int
    embedding_dim: int
    name: str = "t"
    data_type: TorchrecType = TorchrecType.FP32
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: object = None  # fills a whole table there


@pytest.mark.parametrize(
    "given",
    [
        {"num_embeddings": 100},
        {"num_embeddings": 100, "data_type": TorchrecType.FP64},
        {"num_embeddings": 100, "weight_init_max": 3.0, "weight_init_min": 2.0},
    ],
)
def test_tables_of_torchrec_begin_as_those_of_training_do(given):
    ours = EmbeddingBagConfig(embedding_dim=2, name="t", feature_names=["f"], **given)
    with EmbeddingDatabase(TorchrecTable(embedding_dim=2, **given)) as one, EmbeddingDatabase(ours) as other:
        assert torch.equal(one.pull(one.prefetch(range(100))), other.pull(other.prefetch(range(100))))
    with pytest.raises(ConfigError, match="dtype must be float32 or float64, got 'BF16'"):
        EmbeddingDatabase(TorchrecTable(100, 2, data_type=TorchrecType.BF16))


def test_rows_begin_as_the_tables_of_training_say():
    def first_values(seed, keys):
        return np.repeat(keys[:, None] + seed, 2, axis=1)

    config = EmbeddingBagConfig(embedding_dim=2, name="t", feature_names=["f"], init_fn=first_values)
    with EmbeddingDatabase([config], seed=5) as db:
        assert db.pull(db.prefetch([1, -3])).tolist() == [[6, 6], [2, 2]]
        assert db.snapshot().pull([9]).tolist() == [[14, 14]]
