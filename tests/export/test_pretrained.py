"""Rows trained elsewhere are set by key, whatever file they come in; what does not fit changes nothing."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors

from embedding_cases import jagged, values_of
from rowhaul import load_pretrained, optim
from rowhaul.data import hash_string
from rowhaul.errors import ConfigError, DataError
from rowhaul.nn import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    RowOptimizer,
)

KEYS = np.array([7, -3, 2**60])
ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def collection(unpooled=False, **options):
    if unpooled:
        table = EmbeddingConfig(embedding_dim=4, name="t", feature_names=["f"])
        return EmbeddingCollection([table], optimizer=optim.Adam(lr=0.1), **options)
    table = EmbeddingBagConfig(embedding_dim=4, name="t", feature_names=["f"])
    return EmbeddingBagCollection([table], optimizer=optim.Adam(lr=0.1), **options)


def source(kind, folder):
    path = folder / f"rows.{kind}"
    if kind == "arrays":
        return KEYS, ROWS
    if kind == "npz":
        np.savez(path, keys=KEYS, values=ROWS)
    elif kind == "safetensors":
        save_file({"keys": KEYS, "values": ROWS}, path)
    else:
        pq.write_table(pa.table({"key": KEYS, "values": pa.array(list(ROWS), pa.list_(pa.float32()))}), path)
    return path


@pytest.mark.parametrize("unpooled", [False, True])
@pytest.mark.parametrize("kind", ["arrays", "npz", "safetensors", "parquet"])
def test_rows_are_set_by_key(kind, unpooled, tmp_path):
    """They train on as rows do that have just begun: with no state."""
    ours, fresh = collection(unpooled), collection(unpooled)
    assert load_pretrained(ours, "t", source(kind, tmp_path)) == 3
    for key, row in zip(KEYS.tolist(), ROWS, strict=True):
        assert np.array_equal(values_of(ours, "t")[key], row)
    fresh.load_rows("t", KEYS, np.concatenate([ROWS, np.zeros((3, 8), np.float32)], axis=1))
    for one in (ours, fresh):
        found = one(jagged({"f": [[7, 5], [-3]]}))
        (found["f"].values() if unpooled else found.values()).sum().backward()
        RowOptimizer(one).step()
    assert values_of(ours, "t").keys() == {7, 5, -3, 2**60}
    for key, row in values_of(fresh, "t").items():
        assert np.array_equal(values_of(ours, "t")[key], row)


@pytest.mark.parametrize("kind", [pa.string(), pa.string_view(), pa.binary()])
def test_text_keys_are_hashed_and_columns_named(kind, tmp_path):
    ours = collection()
    words = pa.array(["a", "b"]).cast(kind)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(8)), 4)
    pq.write_table(pa.table({"word": words, "vector": vectors}), tmp_path / "words.parquet")
    assert load_pretrained(ours, "t", tmp_path / "words.parquet", keys="word", values="vector") == 2
    assert values_of(ours, "t").keys() == {hash_string("a"), hash_string("b")}


@pytest.mark.parametrize(
    ("keys", "rows", "message"),
    [
        (KEYS, ROWS[:, :3], r"needs 4 values a key, so a float array of \(3, 4\); got float32 of \(3, 3\)"),
        (KEYS.astype(float), ROWS, "keys must be integers"),
        (np.array([1, 1, 2]), ROWS, "a key is there twice"),
        (KEYS, np.full((3, 4), np.nan), "the row of key 7 is not finite"),
        (KEYS, np.full((3, 4), 1e39), "the row of key 7 is not finite in float32"),
    ],
)
def test_what_does_not_fit_is_refused(keys, rows, message):
    ours = collection()
    with pytest.raises(DataError, match=message):
        load_pretrained(ours, "t", (keys, rows))
    assert ours.num_rows("t") == 0


@pytest.mark.parametrize(
    ("keys", "lengths", "message"),
    [
        ([1, 2], [3, 5], "a list of one length in every row"),  # as many values as two rows of 4
        ([1, 2], [0, 8], "a list of one length in every row"),
        (["a", None], [4, 4], "column 'key' has 1 missing keys"),
        ([1, None], [4, 4], "column 'key' has 1 missing keys"),
    ],
)
def test_parquet_rows_that_are_not_whole_are_refused(keys, lengths, message, tmp_path):
    ours, path = collection(), tmp_path / "rows.parquet"
    lists = pa.array([[1.0] * length for length in lengths], pa.list_(pa.float32()))
    pq.write_table(pa.table({"key": keys, "values": lists}), path)
    with pytest.raises(DataError, match=message):
        load_pretrained(ours, "t", path)
    assert ours.num_rows("t") == 0


def test_bad_files_and_names_are_refused(tmp_path):
    ours = collection()
    with pytest.raises(ConfigError, match="no table 'typo'; the tables are t"):
        load_pretrained(ours, "typo", (KEYS, ROWS))
    with pytest.raises(DataError, match="no such file"):
        load_pretrained(ours, "t", tmp_path / "absent.npz")
    with pytest.raises(ConfigError, match=r"rows are read from .npz, .safetensors, .parquet files"):
        load_pretrained(ours, "t", __file__)
    for kind in ("npz", "safetensors", "parquet"):
        with pytest.raises(DataError, match="'typo'; name the arrays"):
            load_pretrained(ours, "t", source(kind, tmp_path), values="typo")
        (tmp_path / f"cut.{kind}").write_bytes(b"nothing of the kind")
        with pytest.raises(DataError, match="cannot be read"):
            load_pretrained(ours, "t", tmp_path / f"cut.{kind}")


@pytest.mark.parametrize("kind", ["list", "weight", "bfloat16", "bfloat16 file", "lists"])
def test_tensors_and_lists_are_arrays(kind, tmp_path):
    narrow = {"keys": torch.from_numpy(KEYS), "values": torch.from_numpy(ROWS).bfloat16()}
    save_tensors(narrow, tmp_path / "rows.safetensors")
    given = {
        "list": [KEYS, ROWS],
        "weight": (narrow["keys"], torch.nn.Parameter(torch.from_numpy(ROWS))),
        "bfloat16": tuple(narrow.values()),
        "bfloat16 file": tmp_path / "rows.safetensors",
        "lists": (KEYS.tolist(), ROWS.tolist()),
    }
    ours = collection()
    assert load_pretrained(ours, "t", given[kind]) == 3
    for key, row in zip(KEYS.tolist(), ROWS, strict=True):
        assert np.array_equal(values_of(ours, "t")[key], row)


def test_rows_without_their_keys_are_refused():
    with pytest.raises(ConfigError, match=r"two arrays, \(keys, values\); got 1"):
        load_pretrained(collection(), "t", [ROWS])
