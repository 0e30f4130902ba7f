"""The collection against torch.nn.EmbeddingBag: forward, gradients and steps."""

import copy
import os
import pickle
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rowhaul import optim
from rowhaul.errors import CheckpointError, ConfigError, UnknownKeyError
from rowhaul.nn import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
    RowOptimizer,
)

EXTREME_KEYS = [0, -1, 1, 2**63 - 1, -(2**63), 2**32, -(2**32), 123456789]


def jagged(bags_by_feature, weights=None):
    """A KeyedJaggedTensor from {feature: [[ids of sample 0], [ids of sample 1], ...]}."""
    values = [key for bags in bags_by_feature.values() for bag in bags for key in bag]
    lengths = [len(bag) for bags in bags_by_feature.values() for bag in bags]
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(bags_by_feature),
        values=torch.tensor(values, dtype=torch.int64),
        weights=weights,
        lengths=torch.tensor(lengths, dtype=torch.int32),
    )


def values_of(collection, table):
    """{key: values} of every row of a table."""
    dim = next(c.embedding_dim for c in collection.embedding_bag_configs() if c.name == table)
    return {
        int(key): record[:dim].copy()
        for keys, records in collection.rows(table)
        for key, record in zip(keys, records, strict=True)
    }


@contextmanager
def torch_threads(number):
    """Collections made inside share their work among so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


@settings(max_examples=60, deadline=None)
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


def one_table(dim=4, features=("f",), **options):
    table = EmbeddingBagConfig(embedding_dim=dim, name="t", feature_names=list(features))
    return EmbeddingBagCollection([table], **options)


def test_initial_rows_do_not_depend_on_order_batch_or_other_tables():
    first, second = one_table(dim=5, seed=9), one_table(dim=5, seed=9)
    first(jagged({"f": [[1, 2], [3]]}))
    second(jagged({"f": [[3]]}))
    second(jagged({"f": [[2], [1, 1]]}))
    assert {k: v.tobytes() for k, v in values_of(first, "t").items()} == {
        k: v.tobytes() for k, v in values_of(second, "t").items()
    }


def expected_initial(seed, table, key, dim, low, high):
    """Fresh rows in plain Python integers: what the compiled kernel must equal, bit by bit."""
    mask = 2**64 - 1

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    row_seed = mix((key & mask) ^ xxhash.xxh64_intdigest(table.encode(), seed=seed))
    step, row = (high - low) / 2**24, []
    for k in range(dim):
        draw = mix((row_seed + (k // 2 + 1) * 0x9E3779B97F4A7C15) & mask)
        row.append(low + step * (draw >> 40 if k % 2 == 0 else (draw >> 8) & 0xFFFFFF))
    return np.array(row)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1), st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_initial_bits_are_a_function_of_seed_table_and_key(key, seed, dim):
    collection = one_table(dim=dim, seed=seed)
    collection(jagged({"f": [[key]]}))
    low, high = collection.embedding_bag_configs()[0].initial_range
    expected = expected_initial(seed, "t", key, dim, low, high).astype(np.float32)
    assert values_of(collection, "t")[key].tobytes() == expected.tobytes()


def test_initial_bits_never_change():
    """Fresh rows are never stored or sent, so their bits are part of the format."""
    collection = one_table(dim=3, seed=1)
    collection(jagged({"f": [[0], [-1]]}))
    bits = {key: row.tobytes().hex() for key, row in values_of(collection, "t").items()}
    assert bits == {-1: "4dc429bba18f003cc92e1b3c", 0: "b349523be166143afd9b893b"}


def test_initial_values_are_uniform():
    collection = one_table(dim=64)
    collection(jagged({"f": [list(range(2000))]}))
    low, high = collection.embedding_bag_configs()[0].initial_range
    sample = (np.stack(list(values_of(collection, "t").values())).ravel() - low) / (high - low)
    counts, _ = np.histogram(sample, bins=50, range=(0, 1))
    expected = len(sample) / 50
    assert ((counts - expected) ** 2 / expected).sum() < 100  # 49 degrees of freedom
    assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 0.01


def test_eval_inserts_nothing_and_reads_initial_values():
    trained, other = one_table(seed=4), one_table(seed=4)
    batch = jagged({"f": [[5], [6, 7]]})
    expected = trained(batch).values().detach()
    other.eval()
    torch.testing.assert_close(other(batch).values(), expected, rtol=0, atol=0)
    assert other.num_rows("t") == 0
    assert not other(batch).values().requires_grad


def test_unknown_keys_can_be_zeros_or_an_error():
    zeros, error = one_table(on_unknown="default").eval(), one_table(on_unknown="error").eval()
    assert torch.equal(zeros(jagged({"f": [[5]]})).values(), torch.zeros(1, 4))
    with pytest.raises(UnknownKeyError, match=r"table 't': key 5 was never trained \(1 such keys"):
        error(jagged({"f": [[5]]}))


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


def test_zero_grad_drops_gradients():
    collection = one_table()
    rows = RowOptimizer(collection)
    collection(jagged({"f": [[1]]})).values().sum().backward()
    before = values_of(collection, "t")
    rows.zero_grad()
    rows.step()
    assert all((values_of(collection, "t")[key] == row).all() for key, row in before.items())


def test_state_dict_round_trip_continues_with_the_same_bits():
    straight, saved = one_table(optimizer=optim.Adam(lr=0.1)), one_table(optimizer=optim.Adam(lr=0.1))
    batches = [jagged({"f": [[k % 3], [k]]}) for k in range(6)]

    def train(collection, rows, some):
        for batch in some:
            (collection(batch).values() ** 2).sum().backward()
            rows.step()

    rows = RowOptimizer(straight)
    train(straight, rows, batches)
    rows_a = RowOptimizer(saved)
    train(saved, rows_a, batches[:3])
    loaded = one_table(optimizer=optim.Adam(lr=0.1))
    loaded(jagged({"f": [[999]]}))  # forgotten by the load
    loaded.load_state_dict(saved.state_dict())
    rows_b = RowOptimizer(loaded)
    rows_b.load_state_dict(rows_a.state_dict())
    train(loaded, rows_b, batches[3:])
    expected = values_of(straight, "t")
    found = values_of(loaded, "t")
    assert {k: v.tobytes() for k, v in found.items()} == {k: v.tobytes() for k, v in expected.items()}


def test_a_state_dict_of_another_optimizer_is_refused():
    adam, sgd = one_table(optimizer=optim.Adam(lr=0.1)), one_table(optimizer=optim.SGD(lr=0.1))
    adam(jagged({"f": [[1]]}))
    with pytest.raises(CheckpointError, match="needs 4 elements a record"):
        sgd.load_state_dict(adam.state_dict())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_has_rows_of_its_own(duplicate):
    original = one_table(optimizer=optim.SGD(lr=1.0))
    original(jagged({"f": [[1], [2]]}))
    copied = duplicate(original)
    before = {key: row.tobytes() for key, row in values_of(original, "t").items()}
    assert {key: row.tobytes() for key, row in values_of(copied, "t").items()} == before
    copied(jagged({"f": [[1], [3]]})).values().sum().backward()
    RowOptimizer(copied).step()
    assert {key: row.tobytes() for key, row in values_of(original, "t").items()} == before
    assert copied.num_rows("t") == 3


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_bits_do_not_depend_on_the_number_of_threads(name):
    """Batches large enough that the groups really run side by side."""
    tables = [EmbeddingBagConfig(embedding_dim=d, name=f"t{n}", feature_names=[f"f{n}"])
              for n, d in enumerate([16, 16, 16, 8, 8])]  # fmt: skip
    random = np.random.default_rng(0)
    batches = [
        jagged({f"f{n}": random.zipf(1.3, (3000, 1)).clip(max=900).tolist() for n in range(5)})
        for _ in range(3)
    ]
    direction = torch.randn(3000, 64, generator=torch.Generator().manual_seed(0))
    found = []
    for num_threads in (1, 2, 4):
        with torch_threads(num_threads):
            collection = EmbeddingBagCollection(tables, optimizer=optim.row_optimizer(name, lr=0.1))
        rows = RowOptimizer(collection)
        for batch in batches:
            collection(batch).values().backward(direction)
            rows.step()
        found.append([
            {k: v.tobytes() for k, v in values_of(collection, config.name).items()} for config in tables
        ])  # fmt: skip
    assert found[0] == found[1] == found[2]


def test_several_threads_may_score_at_once():
    collection = one_table(dim=8)
    collection(jagged({"f": [[key] for key in range(500)]}))
    collection.eval()
    batches = [jagged({"f": [[key * step % 700] for key in range(3000)]}) for step in range(1, 9)]
    expected = [collection(batch).values() for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for found, right in zip(pool.map(collection, batches), expected, strict=True):
                assert torch.equal(found.values(), right)


def in_forked_child(check):
    """Run ``check`` in a forked process; True if it returned in time."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends the child if it hangs
        check()
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def test_a_forked_process_can_read_with_threads():
    with torch_threads(2):
        tables = [EmbeddingBagConfig(embedding_dim=64, name=n, feature_names=[n]) for n in "ab"]
        collection = EmbeddingBagCollection(tables)
    many = jagged({name: [[key] for key in range(1000)] for name in "ab"})
    expected = collection(many).values().detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forks in threaded programs
        assert in_forked_child(lambda: torch.testing.assert_close(collection.eval()(many).values(), expected))


def test_loading_between_backward_and_step_drops_the_gradients():
    source, target = one_table(optimizer=optim.SGD(lr=1.0)), one_table(optimizer=optim.SGD(lr=1.0))
    source(jagged({"f": [[1], [2]]}))
    target(jagged({"f": [[5], [6], [7]]})).values().sum().backward()
    target.load_state_dict(source.state_dict())
    RowOptimizer(target).step()
    expected = {key: row.tobytes() for key, row in values_of(source, "t").items()}
    assert {key: row.tobytes() for key, row in values_of(target, "t").items()} == expected


@pytest.mark.parametrize("is_weighted", [False, True])
def test_clearing_between_forward_and_backward_is_refused(is_weighted):
    collection = one_table(is_weighted=is_weighted)
    weights = torch.ones(2, requires_grad=True) if is_weighted else None
    pooled = collection(jagged({"f": [[1], [2]]}, weights)).values()
    collection.clear()
    with pytest.raises(ConfigError, match="run forward again"):
        pooled.sum().backward()


def test_weights_changed_before_backward_are_noticed():
    collection = one_table(is_weighted=True)
    weights = torch.ones(2, requires_grad=True)
    pooled = collection(jagged({"f": [[1], [2]]}, weights)).values()
    with torch.no_grad():
        weights.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pooled.sum().backward()


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


def test_a_state_dict_that_does_not_fit_changes_nothing():
    tables = [EmbeddingBagConfig(embedding_dim=4, name=n, feature_names=[n]) for n in "ab"]
    collection = EmbeddingBagCollection(tables)
    collection(jagged({"a": [[1]], "b": [[2]]}))
    wrong = collection.state_dict()
    wrong["b.records"] = wrong["b.records"][:, :3]
    with pytest.raises(CheckpointError, match="table 'b'"):
        collection.load_state_dict(wrong)
    collection.load_state_dict({}, strict=False)
    assert collection.num_rows("a") == collection.num_rows("b") == 1


@pytest.mark.parametrize("keys", [np.array([1.0, 2.0]), np.array([3, 3]), np.array([[1], [2]])])
def test_keys_to_load_must_be_different_integers(keys):
    collection = one_table(dim=2, optimizer=optim.SGD(lr=1))
    with pytest.raises(CheckpointError, match="keys must be different int64"):
        collection.load_rows("t", keys, np.zeros((2, 2), np.float32))
    assert collection.num_rows("t") == 0


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
        (lambda: EmbeddingBagCollection([]), "no tables"),
        (lambda: one_table(on_unknown="zero"), "one of init, default, error, got 'zero'"),
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
