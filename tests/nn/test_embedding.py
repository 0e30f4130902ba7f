"""The collection against torch.nn.EmbeddingBag: forward, gradients, steps, and misuse."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from embedding_cases import jagged, one_table, torch_threads, values_of
from rowhaul import optim
from rowhaul.errors import ConfigError
from rowhaul.nn import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
    RowOptimizer,
)

EXTREME_KEYS = [0, -1, 1, 2**63 - 1, -(2**63), 2**32, -(2**32), 123456789]


bags = st.lists(st.lists(st.sampled_from(EXTREME_KEYS), max_size=4), min_size=3, max_size=3)


@st.composite
def cases(draw):
    dims = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    tables, batch = [], {}
    for t, dim in enumerate(dims):
        names = [f"f{t}{k}" for k in range(draw(st.integers(1, 2)))]
        pooling = draw(st.sampled_from(PoolingType))
        tables.append(
            EmbeddingBagConfig(
                embedding_dim=dim, name=f"t{t}", data_type=torch.float64, feature_names=names, pooling=pooling
            )
        )
        batch |= {name: draw(bags) for name in names}
        if t and draw(st.booleans()):
            names.append("f00")  # a feature that reads two tables
    order = draw(st.permutations(list(batch)))
    return tables, {name: batch[name] for name in order}


@settings(max_examples=60)
@given(cases(), st.booleans(), st.sampled_from([1, 3]))
def test_equals_embedding_bag(case, weighted, num_threads):
    """Pooling, row gradients and one SGD step equal EmbeddingBag on pre-indexed ids."""
    tables, batch = case
    num_ids = sum(len(bag) for bags in batch.values() for bag in bags)
    weights = torch.randn(num_ids, dtype=torch.float64, requires_grad=True) if weighted else None
    with torch_threads(num_threads):
        ours = EmbeddingBagCollection(tables, is_weighted=weighted, optimizer=optim.SGD(lr=0.5), seed=3)
    features = jagged(batch, weights)
    rows = RowOptimizer(ours)
    pooled = ours(features)
    before = {config.name: values_of(ours, config.name) for config in tables}
    expected_parts, peers = [], {}
    for config in tables:
        known = sorted(before[config.name])
        peer = nn.EmbeddingBag(max(1, len(known)), config.embedding_dim, mode="sum", dtype=torch.float64)
        if known:
            peer.weight.data = torch.tensor(np.array([before[config.name][key] for key in known]))
        peers[config.name] = (known, peer)
        for name in config.feature_names:
            jt = features[name]
            indices = torch.tensor([known.index(key) for key in jt.values().tolist()], dtype=torch.int64)
            lengths = jt.lengths()
            part = peer(
                indices,
                torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]]),
                per_sample_weights=jt.weights() if weighted else None,
            )
            if config.pooling is PoolingType.MEAN:
                part = part / lengths.clamp(min=1).unsqueeze(1)
            expected_parts.append(part)
    expected = torch.cat(expected_parts, dim=1)
    torch.testing.assert_close(pooled.values(), expected)

    direction = torch.randn_like(expected)
    (pooled.values() * direction).sum().backward()
    our_weight_gradient = weights.grad.clone() if weighted else None
    if weighted:
        weights.grad = None
    (expected * direction).sum().backward()
    if weighted:
        torch.testing.assert_close(our_weight_gradient, weights.grad)
    rows.step()
    for name, (known, peer) in peers.items():
        after = values_of(ours, name)
        for position, key in enumerate(known):
            stepped = peer.weight.data[position] - 0.5 * peer.weight.grad[position]
            np.testing.assert_allclose(after[key], stepped.numpy(), rtol=1e-12, atol=1e-14)


def test_two_backwards_before_a_step_sum():
    once, twice = one_table(optimizer=optim.Adagrad(lr=0.1)), one_table(optimizer=optim.Adagrad(lr=0.1))
    whole = jagged({"f": [[1], [2], [1], [3]]})
    (once(whole).values().sum()).backward()
    for half in ({"f": [[1], [2]]}, {"f": [[1], [3]]}):
        twice(jagged(half)).values().sum().backward()
    RowOptimizer(once).step()
    RowOptimizer(twice).step()
    for key, row in values_of(once, "t").items():
        np.testing.assert_allclose(values_of(twice, "t")[key], row, rtol=1e-6)


def test_gradients_of_weights_alone_leave_none_for_rows():
    collection = one_table(is_weighted=True, optimizer=optim.SGD(lr=1.0))
    rows, weights = RowOptimizer(collection), torch.ones(2, requires_grad=True)
    loss = collection(jagged({"f": [[1], [2]]}, weights)).values().sum()
    before = values_of(collection, "t")
    (found,) = torch.autograd.grad(loss, [weights], retain_graph=True)
    loss.backward(inputs=[weights], retain_graph=True)
    assert torch.equal(weights.grad, found)
    rows.step()
    assert all((values_of(collection, "t")[key] == row).all() for key, row in before.items())
    loss.backward()
    rows.step()
    assert all((values_of(collection, "t")[key] == row - 1).all() for key, row in before.items())


def test_a_seed_of_numpy_is_that_of_python():
    ours, numpys = one_table(seed=-5), one_table(seed=np.int64(-5))
    for one in (ours, numpys):
        one(jagged({"f": [[1]]}))
    assert np.array_equal(values_of(ours, "t")[1], values_of(numpys, "t")[1])


def test_zero_grad_drops_gradients():
    collection = one_table()
    rows = RowOptimizer(collection)
    collection(jagged({"f": [[1]]})).values().sum().backward()
    before = values_of(collection, "t")
    rows.zero_grad()
    rows.step()
    assert all((values_of(collection, "t")[key] == row).all() for key, row in before.items())


def test_weights_changed_before_backward_are_noticed():
    collection = one_table(is_weighted=True)
    weights = torch.ones(2, requires_grad=True)
    pooled = collection(jagged({"f": [[1], [2]]}, weights)).values()
    with torch.no_grad():
        weights.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pooled.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_any_type_have_gradients_of_theirs(dtype):
    collection, found = one_table(is_weighted=True), []
    for kind in (dtype, torch.float32):
        weights = torch.ones(2, dtype=kind, requires_grad=True)
        collection(jagged({"f": [[1], [2]]}, weights)).values().sum().backward()
        assert weights.grad.dtype == kind
        found.append(weights.grad)
    assert torch.equal(found[0], found[1].to(dtype))


def test_a_second_backward_through_a_freed_graph_is_refused():
    pooled = one_table()(jagged({"f": [[1]]})).values()
    pooled.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        pooled.sum().backward()


def test_weights_of_half_precision_are_widened():
    collection = one_table(is_weighted=True)
    batch = {"f": [[1, 2]]}
    narrow = collection(jagged(batch, torch.tensor([0.5, 2.0], dtype=torch.bfloat16))).values()
    torch.testing.assert_close(narrow, collection(jagged(batch, torch.tensor([0.5, 2.0]))).values())


def test_learning_rate_schedulers_drive_the_rows():
    collection = one_table(optimizer=optim.SGD(lr=1.0))
    rows = RowOptimizer(collection)
    schedule = torch.optim.lr_scheduler.LambdaLR(rows, lambda step: 0.5**step)
    moved = []
    for _ in range(3):
        pooled = collection(jagged({"f": [[1]]})).values()
        before = values_of(collection, "t")[1]
        pooled.sum().backward()
        rows.step()
        schedule.step()
        moved.append((before - values_of(collection, "t")[1])[0])
    np.testing.assert_allclose(moved, [1, 0.5, 0.25], rtol=1e-5)


def test_vectors_follow_the_model_to_a_device():
    model = nn.Sequential(one_table())
    model.to("meta")  # a device that every machine has
    assert model(jagged({"f": [[1]]})).values().device.type == "meta"
    model[0].to("cpu")
    model.double()
    assert model(jagged({"f": [[1]]})).values().device.type == "cpu"


def test_an_empty_batch_passes():
    collection = one_table(features=("f", "g"))
    pooled = collection(jagged({"f": [], "g": []}))
    assert pooled.values().shape == (0, 8)
    pooled.values().sum().backward()
    RowOptimizer(collection).step()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EmbeddingBagConfig(embedding_dim=0, name="t", feature_names=["f"]), "at least 1, got 0"),
        (lambda: EmbeddingBagConfig(embedding_dim=4, feature_names=["f"]), "needs a name"),
        (lambda: EmbeddingBagConfig(embedding_dim=4, name="t"), "feature_names is empty"),
        (
            lambda: EmbeddingBagConfig(embedding_dim=4, name="t", feature_names="user"),
            r"feature_names must be a list such as \['user'\], got 'user'",
        ),
        (lambda: EmbeddingBagCollection([]), "no tables"),
        (
            lambda: EmbeddingBagCollection(
                EmbeddingBagConfig(embedding_dim=4, name="t", feature_names=["f"])
            ),
            "needs a list of EmbeddingBagConfig, got",
        ),
        (lambda: one_table(on_unknown="zero"), "one of init, default, error, tail, got 'zero'"),
        (lambda: one_table()(jagged({"g": [[1]]})), "feature 'f' is missing; the batch has g"),
        (lambda: one_table(is_weighted=True)(jagged({"f": [[1]]})), "carry no weights"),
        (lambda: RowOptimizer(nn.Linear(1, 1)), "no EmbeddingBagCollection"),
    ],
)
def test_mistakes_are_explained(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    "values", [torch.tensor([1.0]), torch.tensor([True]), torch.tensor([1j]), torch.tensor([[1]])]
)
def test_keys_that_are_no_integers_are_refused(values):
    features = KeyedJaggedTensor.from_lengths_sync(keys=["f"], values=values, lengths=torch.tensor([1]))
    with pytest.raises(ConfigError, match="keys must be int64 in one dimension"):
        one_table()(features)


def test_weights_of_another_shape_are_refused():
    features = jagged({"f": [[1], [2]]}, torch.ones(2, 1))
    with pytest.raises(ConfigError, match="weights must be one floating-point number an id"):
        one_table(is_weighted=True)(features)


def test_a_feature_of_two_tables_is_named_with_its_table():
    tables = [EmbeddingBagConfig(embedding_dim=d, name=f"t{d}", feature_names=["f"]) for d in (2, 3)]
    pooled = EmbeddingBagCollection(tables)(jagged({"f": [[1]]}))
    assert pooled.keys() == ["f@t2", "f@t3"]
    assert pooled["f@t3"].shape == (1, 3)
