"""Collections whose rows are in fewer bits: pooled as float32 rows are, stepped and saved as they are."""

import copy

import numpy as np
import pytest
import torch

from embedding_cases import jagged, one_table, torch_threads, values_of
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType, RowOptimizer, RowPrecision
from rowhaul.optim import Adam, RowwiseAdagrad
from rowhaul.pruning import PruneSettings

PACKED = ("bfloat16", "float16", "int8")
BATCH = jagged({"f": [[1, 2, 1], [], [9], [2, 7]], "g": [[3], [3, 4], [], [1]]})


def two_tables(row_dtype, dim=13, weighted=False, **options):
    tables = [
        EmbeddingBagConfig(embedding_dim=dim, name="s", feature_names=["f"]),
        EmbeddingBagConfig(embedding_dim=dim, name="m", feature_names=["g"], pooling=PoolingType.MEAN),
    ]
    options = {"optimizer": RowwiseAdagrad(lr=0.1), "seed": 3, **options}
    return EmbeddingBagCollection(tables, weighted, row_settings=RowPrecision(row_dtype), **options)


def unpacked(collection, weighted=False):
    """A collection of float32 rows with the values that packed ones have."""
    plain = two_tables("float32", weighted=weighted)
    for table in ("s", "m"):
        for keys, records in collection.rows(table):
            plain.load_rows(table, keys, records)
    return plain


def train(collection, steps=3, scale=1.0):
    rows = RowOptimizer(collection)
    for _ in range(steps):
        (scale * collection(BATCH).values() ** 2).sum().backward()
        rows.step()


@pytest.mark.parametrize("row_dtype", PACKED)
@pytest.mark.parametrize("weighted", [False, True])
def test_pooling_and_gradients_are_those_of_float32_rows_of_these_values(row_dtype, weighted):
    collection = two_tables(row_dtype, weighted=weighted)
    weights = torch.rand(len(BATCH.values())) if weighted else None
    batch = jagged({"f": [[1, 2, 1], [], [9], [2, 7]], "g": [[3], [3, 4], [], [1]]}, weights)
    if weights is not None:
        weights.requires_grad_()
    collection(batch)  # makes the rows
    plain = unpacked(collection, weighted)
    found, expected = (one(batch).values() for one in (collection, plain))
    assert torch.equal(found, expected)
    gradient = torch.randn(found.shape)
    gradients = []
    for pooled in (found, expected):
        if weights is not None:
            weights.grad = None
        pooled.backward(gradient, retain_graph=True)
        gradients.append(None if weights is None else weights.grad.clone())
    if weighted:
        assert torch.equal(*gradients)
    for mine, theirs in zip(collection.source.gradients(), plain.source.gradients(), strict=True):
        assert np.array_equal(mine.values, theirs.values)


@pytest.mark.parametrize("row_dtype", PACKED)
def test_unknown_keys_read_as_they_would_begin(row_dtype):
    collection = two_tables(row_dtype).eval()
    before = collection(BATCH).values()
    assert collection.num_rows("s") == 0
    assert torch.equal(collection.train()(BATCH).values(), before)
    assert collection.num_rows("s") == 4


@pytest.mark.parametrize("row_dtype", PACKED)
def test_training_repeats_and_goes_on_from_a_state_dict_with_the_same_bits(row_dtype):
    one, two, resumed = (two_tables(row_dtype, optimizer=Adam(lr=0.1)) for _ in range(3))
    train(one)
    train(two, steps=2)
    resumed.load_state_dict(copy.deepcopy(two.state_dict()))
    rows = RowOptimizer(resumed)
    rows.param_groups[0]["number"] = 2
    (resumed(BATCH).values() ** 2).sum().backward()
    rows.step()
    for name, array in one.state_dict().items():
        assert torch.equal(array, resumed.state_dict()[name]), name


@pytest.mark.parametrize("row_dtype", PACKED)
def test_threads_and_another_seed(row_dtype):
    with torch_threads(1):
        alone = two_tables(row_dtype)
    with torch_threads(2):
        shared, other = two_tables(row_dtype), two_tables(row_dtype, seed=4)
    for one in (alone, shared, other):
        train(one)
    for table in ("s", "m"):
        mine, theirs, others = (values_of(one, table) for one in (alone, shared, other))
        assert all(np.array_equal(mine[key], theirs[key]) for key in mine)
        assert not any(np.array_equal(mine[key], others[key]) for key in mine)


def test_bits_are_few():
    sizes = {}
    for row_dtype in ("float32", *PACKED):
        collection = one_table(dim=32, optimizer=RowwiseAdagrad(lr=0.1), row_settings=RowPrecision(row_dtype))
        collection(jagged({"f": [list(range(1 << 18))]}))
        sizes[row_dtype] = collection.allocated_bytes
    assert sizes["bfloat16"] <= 0.6 * sizes["float32"]
    assert sizes["float16"] == sizes["bfloat16"]
    assert sizes["int8"] <= 0.42 * sizes["float32"]


def test_small_updates_add_up():
    """Values that a step would not change if it were rounded to the nearest follow the sum of steps."""
    for row_dtype in PACKED:
        packed, plain = two_tables(row_dtype), two_tables("float32")
        train(packed, 300, 1e-3)
        train(plain, 300, 1e-3)
        mine, theirs = values_of(packed, "s"), values_of(plain, "s")
        apart = np.mean([np.abs(mine[key] - theirs[key]).mean() for key in mine])
        assert apart < 0.15 * np.mean([np.abs(one).mean() for one in theirs.values()])


def test_refusals():
    with pytest.raises(ConfigError, match="one of float32, bfloat16, float16, int8, got 'fp8'"):
        RowPrecision("fp8")
    with pytest.raises(ConfigError, match="both pruning and row_settings"):
        one_table(pruning=PruneSettings(ratio=0.5), row_settings=RowPrecision("int8"))
    table = EmbeddingBagConfig(embedding_dim=4, name="t", feature_names=["f"], data_type=torch.float64)
    with pytest.raises(ConfigError, match="use precision float32"):
        EmbeddingBagCollection([table], row_settings=RowPrecision("bfloat16"))
    packed, plain = two_tables("int8"), two_tables("float32")
    train(plain, 1)
    with pytest.raises(CheckpointError, match="load them into a model of the same row_dtype"):
        packed.load_state_dict(plain.state_dict())
    with pytest.raises(ConfigError, match="not pruned"):
        one_table(dim=8, pruning=PruneSettings(ratio=0.5, chunks=2)).stored_rows("t")
