"""Rows that were never trained: their bits, and reading them without inserting."""

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from embedding_cases import jagged, one_table, values_of
from rowhaul.errors import ConfigError, UnknownKeyError
from rowhaul.nn import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    RowPrecision,
)
from rowhaul.optim import Adagrad
from rowhaul.pruning import PruneSettings


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


def test_initial_rows_do_not_depend_on_order_batch_or_other_tables():
    first, second = one_table(dim=5, seed=9), one_table(dim=5, seed=9)
    first(jagged({"f": [[1, 2], [3]]}))
    second(jagged({"f": [[3]]}))
    second(jagged({"f": [[2], [1, 1]]}))
    assert {k: v.tobytes() for k, v in values_of(first, "t").items()} == {
        k: v.tobytes() for k, v in values_of(second, "t").items()
    }


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1), st.integers(1, 9))
@settings(max_examples=50)
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


def from_key(seed, keys):
    """A row that shows its seed and key."""
    return np.stack([np.full(len(keys), seed), keys, -keys], axis=1).astype(float)


def made_by(init_fn, unpooled=False, **options):
    config, kind = (
        (EmbeddingConfig, EmbeddingCollection) if unpooled else (EmbeddingBagConfig, EmbeddingBagCollection)
    )
    tables = [
        config(embedding_dim=3, name="plain", feature_names=["g"]),
        config(embedding_dim=3, name="made", feature_names=["f"], init_fn=init_fn),
    ]
    return kind(tables, seed=5, **options)


@pytest.mark.parametrize("unpooled", [False, True])
def test_init_fn_makes_the_first_values_of_its_table(unpooled):
    """In whatever order keys come, trained or only read; other tables and optimizer state are as ever."""
    collection, usual = made_by(from_key, unpooled), made_by(None, unpooled)
    for batch in ({"g": [[1], []], "f": [[7, 2], [7]]}, {"g": [[2], [4]], "f": [[3], [2, 9]]}):
        collection(jagged(batch))
        usual(jagged(batch))
    assert values_of(collection, "made").keys() == {7, 2, 3, 9}
    for key, row in values_of(collection, "made").items():
        assert row.tolist() == [5, key, -key]
    for key, row in values_of(usual, "plain").items():
        assert np.array_equal(values_of(collection, "plain")[key], row)
    for (_, records), (_, others) in zip(collection.rows("made"), usual.rows("made"), strict=True):
        assert np.array_equal(records[:, 3:], others[:, 3:])
    found = collection.eval()(jagged({"g": [[1]], "f": [[11]]}))
    assert (
        found["f"].values().tolist() == [[5, 11, -11]] if unpooled else found["f"].tolist() == [[5, 11, -11]]
    )
    assert 11 not in values_of(collection, "made")


def test_init_fn_is_checked_and_refused_where_rows_are_not_whole():
    with pytest.raises(ConfigError, match=r"must return finite values of shape \(1, 3\)"):
        made_by(lambda seed, keys: np.zeros((len(keys), 2)))(jagged({"g": [[]], "f": [[1]]}))
    for how in (RowPrecision("int8"), PruneSettings(ratio=0.5, chunks=2)):
        with pytest.raises(ConfigError, match="'made' has an init_fn, which is called for whole rows"):
            made_by(from_key, row_settings=how)
    made_by(from_key, row_settings=RowPrecision())


@pytest.mark.parametrize("wrong", [OSError("not there yet"), np.zeros((1, 3))])
def test_rows_whose_first_values_cannot_be_made_are_not_there(wrong):
    """The next try asks for them again."""
    answers = [wrong, np.full((1, 2), 7.0)]

    def values(seed, keys):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    made = EmbeddingBagCollection(
        [EmbeddingBagConfig(embedding_dim=2, name="t", feature_names=["f"], init_fn=values)]
    )
    with pytest.raises((OSError, ConfigError)):
        made(jagged({"f": [[1]]}))
    assert made.num_rows("t") == 0
    assert made(jagged({"f": [[1]]})).values().tolist() == [[7.0, 7.0]]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"optimizer": "adam"}, r"rowhaul.optim.Adam\(lr=0.01\), got 'adam'"),
        ({"optimizer": Adagrad}, "must be one of rowhaul.optim's"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
    ],
)
def test_settings_of_another_type_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        EmbeddingBagCollection(
            [EmbeddingBagConfig(embedding_dim=2, name="t", feature_names=["f"])], **settings
        )
