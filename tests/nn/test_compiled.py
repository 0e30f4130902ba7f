"""The dense part of a model under `torch.compile`: the same logits and gradients; rows are read outside."""

import numpy as np
import pytest
import torch

from rowhaul.data.samples import Samples
from rowhaul.nn import Batch, EmbeddingBagCollection, RowOptimizer
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
