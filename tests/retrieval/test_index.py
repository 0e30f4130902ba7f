"""Indexes of item vectors against comparing all, and what they refuse."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rowhaul.errors import ConfigError, DataError
from rowhaul.retrieval import ItemIndex, exact_search, recall, write_index


def clustered(count, size=16, seed=0):
    """Vectors around a few centres, as learned ones are."""
    draw = np.random.default_rng(seed)
    centres = draw.normal(size=(20, size))
    around = centres[draw.integers(20, size=count)] + 0.5 * draw.normal(size=(count, size))
    return (around * draw.lognormal(sigma=0.7, size=(count, 1))).astype(np.float32)  # of many lengths


def test_exact_search_equals_sorting_all_products():
    items, users = clustered(50), clustered(7, seed=1)
    items[30] = items[3]  # a tie
    places, scores = exact_search(items, users, 20)
    for user, found, told in zip(users, places, scores, strict=True):
        products = items @ user
        assert list(found) == sorted(range(50), key=lambda i: (-products[i], i))[:20]
        np.testing.assert_allclose(told, products[found], rtol=1e-5, atol=1e-5)
    assert exact_search(items, users, 99)[0].shape == (7, 50)
    assert exact_search(items, users[:0], 5)[0].shape == (0, 5)


@pytest.mark.parametrize(("kind", "least"), [("exact", 1.0), ("flat", 1.0), ("hnsw", 0.95)])
def test_an_index_finds_what_comparing_all_finds(kind, least, tmp_path):
    if kind != "exact":
        pytest.importorskip("faiss", reason="FAISS is not installed (extra retrieval)")
    items, users = clustered(4000), clustered(50, seed=1)
    keys = np.arange(4000) * 7 - 5
    write_index(tmp_path / "items", keys, items, kind, step=3)
    index = ItemIndex.read(tmp_path / "items")
    assert (index.facts.kind, index.facts.num_items, index.facts.step) == (kind, 4000, 3)
    found, scores = index.search(users, 100)
    exact, best = exact_search(items, users, 100)
    assert recall((found + 5) // 7, exact) >= least
    assert (scores[:, 0] <= best[:, 0] * (1 + 1e-5)).all()
    products = np.take_along_axis(users @ items.T, (found + 5) // 7, axis=1)
    np.testing.assert_allclose(scores, products, rtol=1e-4, atol=1e-4)
    assert (np.diff(scores, axis=1) <= 0).all()
    table = pq.read_table(tmp_path / "items" / "items.parquet")
    assert table["key"].to_pylist() == keys.tolist()
    assert np.array_equal(np.array(table["vector"].to_pylist(), np.float32), items)


@pytest.mark.parametrize("kind", ["exact", "flat", "hnsw"])
def test_of_too_few_items_the_rest_is_filled(kind, tmp_path):
    if kind != "exact":
        pytest.importorskip("faiss", reason="FAISS is not installed (extra retrieval)")
    index = write_index(tmp_path / "items", np.array([70, 80, 90]), clustered(3), kind)
    keys, scores = index.search(clustered(2, seed=1), 5)
    assert keys.shape == scores.shape == (2, 5)
    assert [sorted(one) for one in keys[:, :3].tolist()] == [[70, 80, 90]] * 2
    assert (keys[:, 3:] == -1).all()
    assert np.isneginf(scores[:, 3:]).all()


def test_refusals_say_what_to_change(tmp_path):
    keys, items = np.arange(4), clustered(4)
    with pytest.raises(ConfigError, match=r"unknown index 'hsnw' .did you mean 'hnsw'"):
        write_index(tmp_path / "items", keys, items, "hsnw")
    index = write_index(tmp_path / "items", keys, items)
    with pytest.raises(ConfigError, match="exists; choose another folder"):
        write_index(tmp_path / "items", keys, items)
    with pytest.raises(ConfigError, match="need 16 columns"):
        index.search(items[:, :3])
    with pytest.raises(ConfigError, match="k must be at least 1"):
        index.search(items, 0)
    with pytest.raises(ConfigError, match=r"got keys of shape \(3,\) and vectors of shape \(4, 16\)"):
        write_index(tmp_path / "other", keys[:3], items)
    with pytest.raises(ConfigError, match=r"got keys of shape \(0,\)"):
        write_index(tmp_path / "other", keys[:0], items[:0])
    broken = items.copy()
    broken[2, 5] = np.nan
    with pytest.raises(DataError, match="the vector of item 2 is not finite"):
        write_index(tmp_path / "other", keys, broken)
    with pytest.raises(DataError, match="the vector of user 2 is not finite"):
        index.search(broken)
    assert not (tmp_path / "other").exists()
    (tmp_path / "items" / "index.json").write_text(json.dumps({"kind": "exact"}))
    with pytest.raises(DataError, match="is no index of items"):
        ItemIndex.read(tmp_path / "items")


def test_items_that_are_not_those_of_the_index_are_refused(tmp_path):
    pytest.importorskip("faiss", reason="FAISS is not installed (extra retrieval)")
    for name, count in (("few", 4), ("many", 9)):
        write_index(tmp_path / name, np.arange(count), clustered(count), "flat")
    shutil.copy(tmp_path / "many" / "index.faiss", tmp_path / "few")
    with pytest.raises(DataError, match=r"has 9 items, and items.parquet beside it 4; write the index again"):
        ItemIndex.read(tmp_path / "few")
    pq.write_table(pa.table({"key": [1]}), tmp_path / "many" / "items.parquet")
    with pytest.raises(DataError, match="is no index of items"):
        ItemIndex.read(tmp_path / "many")


def test_keys_and_users_may_be_lists_or_of_other_types(tmp_path):
    items, users = clustered(4), clustered(2, seed=1)
    expected = write_index(tmp_path / "arrays", np.array([9, -8, 7, 6]), items).search(users, 2)
    kinds = {"list": [9, -8, 7, 6], "int32": np.array([9, -8, 7, 6], np.int32)}
    for name, keys in {**kinds, "tensor": torch.tensor([9, -8, 7, 6])}.items():
        made = write_index(tmp_path / name, keys, items.tolist())
        for index in (made, ItemIndex.read(tmp_path / name)):
            assert index.keys.dtype == np.int64
            for given in (users, users.tolist()):
                found = index.search(given, np.int64(2))
                assert all(map(np.array_equal, found, expected))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([1.0, 2.0, 3.0], "keys of items must be integers, got float64"),
        (["a", "b", "c"], "must be integers, got <U1; hash text"),
        ([5, 1, 5], "item 5 is there 2 times; keep one vector"),
        ([[1], [2], [3]], r"got keys of shape \(3, 1\)"),
    ],
)
def test_keys_that_are_none_are_refused(keys, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        write_index(tmp_path / "items", keys, clustered(3))
    assert not (tmp_path / "items").exists()


def test_whole_numbers_of_items_are_searched_for(tmp_path):
    items = clustered(4)
    index = write_index(tmp_path / "items", np.arange(4), items)
    for k in (2.5, 2.0, 0, "2"):
        for search in (index.search, lambda users, k: exact_search(items, users, k)):
            with pytest.raises(ConfigError, match=f"k must be at least 1, a whole number; got {k!r}"):
                search(items, k)
    with pytest.raises(ConfigError, match="vectors of users must be an array of numbers"):
        index.search([[1, 2], [3]])


def test_recall_leaves_out_what_fills_short_answers():
    assert recall(np.array([[3, 1, -1], [2, -1, -1]]), np.array([[1, 2, -1], [2, 3, -1]])) == 0.5
    assert recall(np.array([[3, -1]]), np.array([[3, 4]])) == 0.5
    assert recall(np.array([[-5, -1]]), np.array([[-5, -1]])) == 1.0  # a key may be negative, too
