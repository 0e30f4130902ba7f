"""A DLRM in parts gives the logits of the whole graph, whatever the candidates of a request share."""

import gc
import weakref
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from served_models import serve

from rowhaul.data.schema import Schema
from rowhaul.serve import Scorer
from rowhaul.serve.requests import Samples
from rowhaul.serve.rows import IdBags, PooledApart
from rowhaul.serve.shared_dots import SharedDots
from rowhaul.train import TrainConfig, train_run

NAMES = ("user", "item", "tags", "price")
VALUES = {
    "user": st.one_of(st.none(), st.integers(0, 200), st.integers(-(2**63), 2**63 - 1)),
    "item": st.one_of(st.none(), st.text("abc", max_size=3), st.integers(0, 99).map("item-{}".format)),
    "tags": st.one_of(st.none(), st.lists(st.integers(0, 30), max_size=4)),
    "price": st.one_of(st.none(), st.floats(-3, 3, width=32)),
}


@pytest.fixture(scope="module")
def scorers(served_run):
    return [Scorer(served_run[1], backend=kind) for kind in ("dots", "onnx")]


def check_same_logits(scorers, names, data):
    shared = data.draw(st.sets(st.sampled_from(names)), label="shared")
    num_candidates = data.draw(st.integers(1, 6), label="candidates")

    def drawn(name):
        return data.draw(VALUES[name], label=name)

    common = {name: drawn(name) for name in names if name in shared}
    own = [{name: drawn(name) for name in names if name not in shared} for _ in range(num_candidates)]
    (found, unknown), (expected, also) = (one.logits(one.read(common, own)) for one in scorers)
    assert found.shape == expected.shape == (num_candidates,)
    assert np.abs(found - expected).max() <= 1e-5
    assert unknown == also


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_logits_are_those_of_the_whole_graph(scorers, data):
    check_same_logits(scorers, NAMES, data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ids", "options"),
    [
        (["user", "item", "tags"], {"bottom": [8], "top": [16]}),
        (["user", "item"], {"bottom": [8], "top": []}),
    ],
)
def test_models_without_numbers_and_without_layers(ids, options, tmp_path, log_folder):
    schema = Schema.from_dict({"label": "click", "ids": ids})
    model = {"name": "dlrm", "embedding_dim": 4, "options": options}
    config = TrainConfig.from_dict({"batch_size": 500, "model": model})
    train_run(config, schema, f"{log_folder}/*.parquet", out=tmp_path / "run")
    serve(tmp_path / "run", tmp_path / "served")
    scorers = [Scorer(tmp_path / "served", backend=kind) for kind in ("dots", "onnx")]

    @settings(max_examples=30, deadline=None)
    @given(data=st.data())
    def check(data):
        check_same_logits(scorers, ids, data)

    check()


class Vectors:
    """Rows that are pooled already: samples x features x dim."""

    def __init__(self, vectors, is_shared):
        self._vectors, self._is_shared = vectors, is_shared
        _, num_features, dim = vectors.shape
        self.width, self.features = num_features * dim, range(num_features)

    def pool_apart(self, bags, first, first_shared):
        num_samples = len(self._vectors)
        shared = self._vectors[0, self._is_shared].reshape(-1)
        own = self._vectors[:, ~self._is_shared].reshape(num_samples, -1)
        own = np.ascontiguousarray(np.concatenate([np.zeros((num_samples, first), np.float32), own], axis=1))
        shared = np.concatenate([np.zeros(first_shared, np.float32), shared])
        unknown = np.zeros(len(self.features), np.int64)
        return PooledApart(own, shared, tuple(self._is_shared.tolist()), unknown)


def made_model(random, num_features, num_numbers, dim, bottom, top):
    """Weights of a DLRM by name."""
    num_vectors = num_features + (num_numbers > 0)
    inputs = num_vectors * (num_vectors - 1) // 2 + (dim if num_numbers else 0)
    sizes = {
        "bottom.linears": [num_numbers, *bottom, dim] if num_numbers else [],
        "top.linears": [inputs, *top],
    }
    weights = {}
    for prefix, some in sizes.items():
        for number, (before, after) in enumerate(pairwise(some)):
            weights[f"{prefix}.{number}.weight"] = random.normal(size=(after, before)) / max(1, before) ** 0.5
            weights[f"{prefix}.{number}.bias"] = random.normal(size=after)
    last = [inputs, *top][-1]
    weights |= {"out.weight": random.normal(size=(1, last)) / last**0.5, "out.bias": random.normal(size=1)}
    return {name: one.astype(np.float32) for name, one in weights.items()}


def plain_logits(weights, vectors, numbers):
    """What a DLRM is, in double precision."""

    def mlp(prefix, x):
        number = 0
        while f"{prefix}.{number}.weight" in weights:
            x = x @ weights[f"{prefix}.{number}.weight"].T.astype(float) + weights[f"{prefix}.{number}.bias"]
            x, number = np.maximum(x, 0), number + 1
        return x

    first = [mlp("bottom.linears", numbers)] if numbers.shape[1] else []
    vectors = np.concatenate([one[:, None] for one in first] + [vectors.astype(float)], axis=1)
    products = np.einsum("sid,sjd->sij", vectors, vectors)
    pairs = products[:, *np.tril_indices(vectors.shape[1], -1)]
    last = mlp("top.linears", np.concatenate([*first, pairs], axis=1))
    return last @ weights["out.weight"][0] + weights["out.bias"]


SIZES = st.lists(st.integers(1, 40), max_size=2)


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    num_samples=st.sampled_from([1, 2, 5, 32, 67]),
    num_features=st.integers(2, 24),
    num_numbers=st.integers(0, 5),
    dim=st.integers(1, 17),
    bottom=SIZES,
    top=SIZES,
    shares_numbers=st.booleans(),
)
def test_layers_and_products_are_those_of_numpy(
    data, num_samples, num_features, num_numbers, dim, bottom, top, shares_numbers, tmp_path_factory
):
    random = np.random.default_rng(num_features)
    weights = made_model(random, num_features, num_numbers, dim, bottom, top)
    path = tmp_path_factory.getbasetemp() / "weights.safetensors"
    save_file(weights, path)
    flags = st.lists(st.booleans(), min_size=num_features, max_size=num_features)
    is_shared = np.array(data.draw(flags, label="is shared"))
    if num_samples == 1:
        is_shared[:] = shares_numbers = False
    vectors = (random.normal(size=(num_samples, num_features, dim)) / dim**0.5).astype(np.float32)
    vectors[:, is_shared] = vectors[:1, is_shared]
    numbers = random.normal(size=(1 if shares_numbers else num_samples, num_numbers)).astype(np.float32)
    empty = np.zeros(0, np.int64)
    samples = Samples(IdBags(empty, empty, empty, num_samples), numbers)
    found, _ = SharedDots(path, num_numbers > 0).logits(Vectors(vectors, is_shared), samples)
    every = np.repeat(numbers, num_samples, axis=0) if shares_numbers else numbers
    expected = plain_logits(weights, vectors, every)
    assert np.abs(found - expected).max() <= 1e-5 * max(1, np.abs(expected).max())


def test_a_replaced_model_is_freed_without_looking_for_garbage(served_run):
    scorer = Scorer(served_run[1], backend="dots")
    scorer.warm_up()
    parts = [weakref.ref(one) for one in (scorer, scorer.model, scorer.rows, scorer.dense)]
    gc.disable()
    try:
        del scorer
        assert [one() for one in parts] == [None] * len(parts)
    finally:
        gc.enable()


def test_auto_takes_the_parts(served_run):
    scorer = Scorer(served_run[1])
    assert scorer.dense.kind == "dots"
    assert np.array_equal(
        scorer.score({"user": 1, "item": "a", "tags": [1], "price": 2.0}, [{}, {}, {}]),
        np.repeat(scorer.score({"user": 1, "item": "a", "tags": [1], "price": 2.0}, [{}, {}])[:1], 3),
    )
