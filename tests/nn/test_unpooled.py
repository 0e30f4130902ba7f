"""The unpooled collection against torch.nn.Embedding and slow loops: rows, gradients, steps, and misuse."""

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from embedding_cases import jagged, torch_threads, values_of
from rowhaul import optim
from rowhaul.budget import BudgetSettings
from rowhaul.errors import ConfigError, DataError
from rowhaul.nn import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    RowOptimizer,
    RowPrecision,
)
from rowhaul.pruning import PruneSettings

KEYS = [0, -1, 1, 2**63 - 1, -(2**63), 5, 6, 7]
OPTIMIZERS = {
    "sgd": (optim.SGD(lr=0.5), lambda weights: torch.optim.SGD(weights, lr=0.5)),
    "adagrad": (
        optim.Adagrad(lr=0.5, eps=1e-10),
        lambda weights: torch.optim.Adagrad(weights, lr=0.5, eps=1e-10),
    ),
    "adam": (optim.Adam(lr=0.1), lambda weights: torch.optim.SparseAdam(weights, lr=0.1)),
}
histories = st.lists(st.lists(st.sampled_from(KEYS), max_size=5), min_size=3, max_size=3)


@st.composite
def cases(draw):
    """Tables read by one or two features, and a feature that may read two tables."""
    tables, batch = [], {}
    for number in range(draw(st.integers(1, 3))):
        names = [f"f{number}{k}" for k in range(draw(st.integers(1, 2)))]
        batch |= {name: draw(histories) for name in names}
        if number and draw(st.booleans()):
            names.append("f00")
        dim = draw(st.integers(1, 5))
        tables.append(
            EmbeddingConfig(
                embedding_dim=dim, name=f"t{number}", data_type=torch.float64, feature_names=names
            )
        )
    order = draw(st.permutations(list(batch)))
    return tables, {name: batch[name] for name in order}


@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=25)
@given(case=cases(), num_threads=st.sampled_from([1, 3]))
def test_equals_embedding(name, case, num_threads):
    """Two steps equal torch.nn.Embedding, whose rows get the sum over all places that read them."""
    tables, batch = case
    ours_optimizer, theirs_optimizer = OPTIMIZERS[name]
    with torch_threads(num_threads):
        ours = EmbeddingCollection(tables, optimizer=ours_optimizer, seed=3)
    features, rows = jagged(batch), RowOptimizer(ours)
    ours(features)
    known = {config.name: sorted(values_of(ours, config.name)) for config in tables}
    peers = {}
    for config in tables:
        start, count = values_of(ours, config.name), len(known[config.name])
        peers[config.name] = nn.Embedding(
            max(1, count), config.embedding_dim, dtype=torch.float64, sparse=name == "adam"
        )
        if count:
            peers[config.name].weight.data = torch.tensor(
                np.array([start[key] for key in known[config.name]])
            )
    stepper = theirs_optimizer([peer.weight for peer in peers.values()])
    for step in range(2):
        found, names = ours(features), chain.from_iterable(ours.embedding_names_by_table())
        stepper.zero_grad()
        losses = []
        for config in tables:
            for feature in config.feature_names:
                jt = found[next(names)]
                places = [known[config.name].index(key) for bag in batch[feature] for key in bag]
                expected = peers[config.name](torch.tensor(places, dtype=torch.int64))
                torch.testing.assert_close(jt.values(), expected)
                assert jt.lengths().tolist() == [len(bag) for bag in batch[feature]]
                direction = torch.randn_like(expected)
                losses.append(((jt.values() * direction).sum(), (expected * direction).sum()))
        sum(one for one, _ in losses).backward()
        sum(other for _, other in losses).backward()
        rows.step()
        stepper.step()
        assert step == 0 or len(found) == len(losses)
    for config in tables:
        after = values_of(ours, config.name)
        for place, key in enumerate(known[config.name]):
            expected = peers[config.name].weight.data[place].numpy()
            np.testing.assert_allclose(after[key], expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=60)
@given(
    rows=st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=4),
    length=st.none() | st.integers(0, 7),
    keep=st.sampled_from(["first", "last"]),
    dim=st.sampled_from([None, 2]),
)
def test_padding_and_cutting_equal_a_loop(rows, length, keep, dim):
    flat = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
    values = flat if dim is None else flat.unsqueeze(1).repeat(1, dim)
    values.requires_grad_()
    jt = JaggedTensor(values, lengths=torch.tensor([len(row) for row in rows], dtype=torch.int32))
    padded, mask = jt.to_padded_dense(length, -1.0, keep=keep), jt.padding_mask(length)
    wide = max(map(len, rows), default=0) if length is None else length
    expected = []
    for row in rows:
        kept = row[:wide] if keep == "first" else row[max(0, len(row) - wide) :]
        expected.append([*kept, *[-1] * (wide - len(kept))])
    shown = padded if dim is None else padded[..., 0]
    assert shown.tolist() == expected
    assert padded.shape == (len(rows), wide, *(() if dim is None else (dim,)))
    assert mask.tolist() == [[place < min(len(row), wide) for place in range(wide)] for row in rows]
    padded.sum().backward()
    assert values.grad.sum() == mask.sum() * (dim or 1)


def test_padding_says_what_is_wrong():
    jt = JaggedTensor(torch.zeros(1), lengths=torch.tensor([1]))
    with pytest.raises(DataError, match="keep must be first or last"):
        jt.to_padded_dense(keep="newest")
    with pytest.raises(DataError, match="0 or more"):
        jt.to_padded_dense(-1)


@pytest.mark.parametrize(
    "how",
    [
        RowPrecision("bfloat16"),
        RowPrecision("int8"),
        PruneSettings(ratio=0.5, period=2, dims=6, cold_start=2),
        BudgetSettings(1200, period=2),
    ],
    ids=["bfloat16", "int8", "pruned", "budget"],
)
def test_rows_held_otherwise_train_as_bags_of_one_id(how):
    """A row per id is a bag per id: whatever a source does with rows, it does the same for both."""
    features = ["item", "history"]
    unpooled = EmbeddingCollection(
        [EmbeddingConfig(embedding_dim=8, name="t", feature_names=features)],
        optimizer=optim.Adagrad(lr=0.1),
        row_settings=how,
    )
    pooled = EmbeddingBagCollection(
        [EmbeddingBagConfig(embedding_dim=8, name="t", feature_names=["one"])],
        optimizer=optim.Adagrad(lr=0.1),
        row_settings=how,
    )
    generator = np.random.default_rng(0)
    ours, theirs = RowOptimizer(unpooled), RowOptimizer(pooled)
    for _ in range(6):
        batch = {
            name: [generator.integers(0, 40, generator.integers(0, 5)).tolist() for _ in range(8)]
            for name in features
        }
        ids = [[key] for name in features for bag in batch[name] for key in bag]
        found = unpooled(jagged(batch))
        rows = torch.cat([found[name].values() for name in features])
        bags = pooled(jagged({"one": ids})).values()
        assert torch.equal(rows, bags)
        ((rows - 1) ** 2).sum().backward()
        ((bags - 1) ** 2).sum().backward()
        ours.step()
        theirs.step()
    for (keys, records), (other_keys, others) in zip(unpooled.rows("t"), pooled.rows("t"), strict=True):
        assert np.array_equal(keys, other_keys)
        assert np.array_equal(records, others)


def test_a_model_may_have_several_collections():
    """Each steps its own rows; a state_dict holds all of them."""

    def model():
        return nn.ModuleDict(
            {
                "pooled": EmbeddingBagCollection(
                    [EmbeddingBagConfig(embedding_dim=2, name="users", feature_names=["user"])]
                ),
                "rows": EmbeddingCollection(
                    [EmbeddingConfig(embedding_dim=2, name="items", feature_names=["item", "history"])]
                ),
            }
        )

    ids = jagged({"user": [[1], [2]], "item": [[1], [9]], "history": [[9, 9], []]})
    trained, rows = model(), None
    rows = RowOptimizer(trained)
    (trained["pooled"](ids).values().sum() + trained["rows"](ids)["history"].values().sum()).backward()
    rows.step()
    assert trained["rows"].num_rows("items") == 2
    loaded = model()
    loaded.load_state_dict(trained.state_dict())
    for name in ("item", "history"):
        assert torch.equal(
            loaded["rows"].eval()(ids)[name].values(), trained["rows"].eval()(ids)[name].values()
        )


def test_ids_and_weights_are_handed_on():
    table = EmbeddingConfig(embedding_dim=2, name="t", feature_names=["f"])
    ids, weights = {"f": [[3, 4], [5]]}, torch.tensor([1.0, 2.0, 3.0])
    assert EmbeddingCollection([table])(jagged(ids, weights))["f"].weights().tolist() == [1, 2, 3]
    with_ids = EmbeddingCollection([table], need_indices=True)
    assert with_ids(jagged(ids))["f"].weights().tolist() == [3, 4, 5]
    with pytest.raises(ConfigError, match="need_indices"):
        with_ids(jagged(ids, weights))


def test_nothing_is_inserted_in_eval_mode():
    collection = EmbeddingCollection([EmbeddingConfig(embedding_dim=2, name="t", feature_names=["f"])])
    collection.eval()(jagged({"f": [[1], [2]]}))
    assert collection.num_rows("t") == 0


def test_configurations_of_bags_and_rows_are_not_mixed_up():
    bag = EmbeddingBagConfig(embedding_dim=2, name="t", feature_names=["f"])
    with pytest.raises(ConfigError, match="needs an EmbeddingConfig a table, got EmbeddingBagConfig"):
        EmbeddingCollection([bag])
    row = EmbeddingConfig(embedding_dim=2, name="t", feature_names=["f"])
    with pytest.raises(ConfigError, match="needs an EmbeddingBagConfig a table, got EmbeddingConfig"):
        EmbeddingBagCollection([row])


@pytest.mark.parametrize(
    "rule", [optim.SGD(lr=0.5), optim.Adagrad(lr=0.5), optim.Adam(lr=0.5), optim.RowwiseAdagrad(lr=0.5)]
)
@pytest.mark.parametrize("unpooled", [False, True])
def test_frozen_tables_are_read_and_never_change(rule, unpooled):
    config, kind = (
        (EmbeddingConfig, EmbeddingCollection) if unpooled else (EmbeddingBagConfig, EmbeddingBagCollection)
    )
    tables = [
        config(embedding_dim=2, name="still", feature_names=["a", "b"], frozen=True),
        config(embedding_dim=3, name="learns", feature_names=["b"]),
    ]
    collection = kind(tables, optimizer=rule)
    ids, rows = jagged({"a": [[1], [2]], "b": [[2, 3], []]}), RowOptimizer(collection)
    collection(ids)
    before = {name: values_of(collection, name) for name in ("still", "learns")}
    for _ in range(3):
        found = collection(ids)
        parts = [one.values() for one in found.values()] if unpooled else [found.values()]
        sum((one - 1).square().sum() for one in parts).backward()
        rows.step()
    after = {name: values_of(collection, name) for name in ("still", "learns")}
    assert all(np.array_equal(after["still"][key], row) for key, row in before["still"].items())
    assert not any(np.array_equal(after["learns"][key], row) for key, row in before["learns"].items())


def test_weights_of_frozen_tables_get_the_gradients_that_others_do():
    def tables(frozen):
        return [
            EmbeddingBagConfig(embedding_dim=2, name="still", feature_names=["a", "b"], frozen=frozen),
            EmbeddingBagConfig(embedding_dim=2, name="learns", feature_names=["b"]),
        ]

    found, moved = [], []
    for frozen in (False, True):
        collection = EmbeddingBagCollection(tables(frozen), is_weighted=True, optimizer=optim.SGD(lr=0.5))
        weights = torch.tensor([1.0, 2, 3, 4], requires_grad=True)
        ids = jagged({"a": [[1], [2]], "b": [[2, 3], []]}, weights)
        collection(ids)
        before = values_of(collection, "still")
        collection(ids).values().square().sum().backward()
        RowOptimizer(collection).step()
        found.append(weights.grad)
        after = values_of(collection, "still")
        moved.append(not all(np.array_equal(after[key], row) for key, row in before.items()))
    assert torch.equal(*found)
    assert moved == [True, False]


def test_frozen_tables_refuse_weight_decay():
    table = EmbeddingConfig(embedding_dim=2, name="t", feature_names=["f"], frozen=True)
    with pytest.raises(ConfigError, match="is frozen, but weight_decay is"):
        EmbeddingCollection([table], optimizer=optim.SGD(lr=0.1, weight_decay=0.1))
