"""A DLRM in parts gives the logits of the whole graph, whatever the candidates of a request share."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served_models import serve

from rowhaul.data.schema import Schema
from rowhaul.serve import Scorer
from rowhaul.serve.dots_kernels import SPARE, fill_dots
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


@settings(max_examples=50, deadline=None)
@given(
    num_samples=st.integers(0, 4),
    num_own=st.integers(1, 24),
    num_shared=st.integers(0, 24),
    dim=st.integers(1, 9),
    dtype=st.sampled_from([np.float32, np.float64]),
    passes=st.booleans(),
)
def test_dots_are_those_of_numpy(num_samples, num_own, num_shared, dim, dtype, passes):
    random = np.random.default_rng(num_own)
    own = random.normal(size=(num_samples, num_own, dim)).astype(dtype)
    shared = random.normal(size=(num_shared, dim)).astype(dtype)
    rows = []
    for vectors in own:
        row = [vectors[0]] if passes else []
        for place, vector in enumerate(vectors):
            row += [shared @ vector, vectors[:place] @ vector]
        rows.append(np.concatenate(row))
    expected = np.concatenate([*rows, np.empty(0)])
    out = np.full(len(expected) + SPARE + 1, 7, dtype)
    fill_dots(own.reshape(num_samples, -1), shared.reshape(-1), dim, dim if passes else 0, out)
    assert np.allclose(out[: len(expected)], expected, rtol=1e-5, atol=1e-5)
    assert out[-1] == 7


def test_auto_takes_the_parts(served_run):
    scorer = Scorer(served_run[1])
    assert scorer.dense.kind == "dots"
    assert np.array_equal(
        scorer.score({"user": 1, "item": "a", "tags": [1], "price": 2.0}, [{}, {}, {}]),
        np.repeat(scorer.score({"user": 1, "item": "a", "tags": [1], "price": 2.0}, [{}, {}])[:1], 3),
    )
