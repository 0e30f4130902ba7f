"""Models, and their dense part, under `torch.compile`: the same logits and gradients, rows read outside."""

import numpy as np
import pytest
import torch
from torch import nn

from embedding_cases import jagged
from rowhaul.data.samples import Samples
from rowhaul.nn import (
    Batch,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    RowOptimizer,
)
from rowhaul.nn.models import build_model


def make():
    return build_model(
        "dcnv2",
        tables={"users": ("user",), "items": ("item",)},
        num_dense=1,
        embedding_dim=4,
        make_collection=EmbeddingBagCollection,
        seed=0,
    )


def draw(count):
    random = np.random.default_rng(count)
    ids, lengths = random.integers(0, 9, 2 * count), np.ones((2, count), np.int32)
    numbers = random.normal(size=(count, 1)).astype(np.float32)
    return Batch.from_samples(Samples(("user", "item"), ids, lengths, numbers, None, np.arange(count)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PyTorch warns of its own deprecations while it compiles
def test_a_compiled_dense_part_learns_the_same():
    plain, compiled = make(), make()
    compiled.logits = torch.compile(compiled.logits, backend="aot_eager", dynamic=True)
    for count in (8, 8, 5):
        batch = draw(count)
        logits = [model(batch) for model in (plain, compiled)]
        torch.testing.assert_close(*logits)
        for model, one in zip((plain, compiled), logits, strict=True):
            batch.loss(one).backward()
            RowOptimizer(model).step()
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Whole(nn.Module):
    def __init__(self, unpooled):
        super().__init__()
        config, kind = (
            (EmbeddingConfig, EmbeddingCollection)
            if unpooled
            else (EmbeddingBagConfig, EmbeddingBagCollection)
        )
        self.rows = kind([config(embedding_dim=2, name="t", feature_names=["f"])])
        self.top = nn.Linear(2, 1)

    def forward(self, ids):
        found = self.rows(ids)
        return self.top(found["f"].values() if isinstance(found, dict) else found.values())


@pytest.mark.parametrize("unpooled", [False, True])
@pytest.mark.filterwarnings("ignore")  # PyTorch warns of its own deprecations while it compiles
def test_graphs_of_a_compiled_model_break_where_rows_are_read(unpooled):
    model = Whole(unpooled)
    compiled = torch.compile(model, backend="eager")
    for key in range(3):  # new rows in every batch
        ids = jagged({"f": [[key], [key + 1]]})
        found = compiled(ids)
        torch.testing.assert_close(found, model(ids))
        found.sum().backward()
        RowOptimizer(model).step()
    assert model.rows.num_rows("t") == 4
