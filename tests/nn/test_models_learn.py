"""Every model learns an interaction that no sum of single effects can express."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from rowhaul.data.samples import Samples
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, RowOptimizer
from rowhaul.nn.batch import Batch
from rowhaul.nn.models import MODELS, build_model
from rowhaul.optim import Adagrad
from slow_cases import mostly_slow

NUM_IDS = 40
POOLED = [name for name, kind in MODELS.items() if kind.is_pooled and kind.least_tasks == 1]
NUM_STEPS = 250
BATCH = 256


def draw(generator: np.random.Generator, count: int) -> Samples:
    """Users and items have a sign each; a click is a pair of equal signs, whatever each alone is."""
    users, items = generator.integers(NUM_IDS, size=(2, count))
    return Samples(
        features=("user", "item"),
        values=np.concatenate([users, items + 10**12]),
        lengths=np.ones((2, count), dtype=np.int32),
        dense=generator.normal(size=(count, 1)).astype(np.float32),
        labels=(users % 2 == items % 2).astype(np.float32),
        index=np.arange(count),
    )


def make_collection(configs: list[EmbeddingBagConfig]) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(configs, optimizer=Adagrad(lr=0.1))


@pytest.mark.parametrize("name", mostly_slow(POOLED, "dlrm"))
def test_models_learn_an_interaction(name: str) -> None:
    model = build_model(
        name,
        tables={"users": ("user",), "items": ("item",)},
        num_dense=1,
        embedding_dim=4,
        make_collection=make_collection,
        seed=0,
    )
    rows, dense = RowOptimizer(model), torch.optim.Adam(model.parameters(), lr=0.003)
    generator = np.random.default_rng(0)
    for _ in range(NUM_STEPS):
        batch = Batch.from_samples(draw(generator, BATCH))
        per_sample = torch.nn.functional.binary_cross_entropy_with_logits(
            model(batch), batch.labels, reduction="none"
        )
        dense.zero_grad()
        batch.loss(per_sample).backward()
        rows.step()
        dense.step()
    test = draw(np.random.default_rng(1), 4000)
    with torch.no_grad():
        scores = model.eval()(Batch.from_samples(test))
    assert roc_auc_score(test.labels, scores.numpy()) > 0.99


def test_a_linear_model_cannot() -> None:
    def one_hot(samples: Samples) -> npt.NDArray[np.float64]:
        users, items = samples.values.reshape(2, -1)
        eye = np.eye(NUM_IDS)
        return np.hstack([eye[users], eye[items - 10**12]])

    train, test = draw(np.random.default_rng(0), NUM_STEPS * BATCH), draw(np.random.default_rng(1), 4000)
    linear = LogisticRegression(max_iter=200).fit(one_hot(train), train.labels)
    assert abs(roc_auc_score(test.labels, linear.predict_proba(one_hot(test))[:, 1]) - 0.5) < 0.05
