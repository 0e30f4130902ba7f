"""Rows that were trained elsewhere, by key: from arrays, NumPy archives, safetensors or Parquet files."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rowhaul._id_kinds import TEXT
from rowhaul.data.columns import id_kind, is_list
from rowhaul.data.keys import hash_strings
from rowhaul.errors import ConfigError, DataError
from rowhaul.nn import TableCollection

Arrays = npt.ArrayLike | Tensor
Rows = tuple[Arrays, Arrays]


def load_pretrained(
    collection: TableCollection,
    table: str,
    source: str | Path | Rows | list[Arrays],
    *,
    keys: str = "",
    values: str = "values",
) -> int:
    """Set rows of a table to values trained elsewhere; their optimizer state begins anew.

    Rows that the source lacks start as always. On a cluster, load in one process, save a checkpoint and
    resume from it. All is checked before a row changes.

    Args:
        collection: with the table.
        table: its name.
        source: arrays or tensors (keys, values), or an ``.npz``, ``.safetensors`` or ``.parquet`` file with
            both, as those of `rowhaul export`. Keys that are text in Parquet are hashed, as ids in data are.
        keys: the name of the keys in a file; by default ``key`` in Parquet, else ``keys``.
        values: the name of the values, rows × dim; a list a row in Parquet.

    Returns:
        The number of rows set.

    Example:
        >>> load_pretrained(collection, "items", "words.parquet", keys="item", values="vector")
    """
    if isinstance(source, tuple | list):
        if len(source) != 2:
            raise ConfigError(f"rows are two arrays, (keys, values); got {len(source)}")
        where, found = "the arrays", (source[0], source[1])
    else:
        where, found = str(source), _read(Path(source), keys, values)
    named, rows = _as_array(found[0]), _as_array(found[1])
    configs = {one.name: one for one in collection.table_configs()}
    if table not in configs:
        raise ConfigError(f"no table {table!r}; the tables are {', '.join(configs)}")
    dim = configs[table].embedding_dim
    if named.ndim != 1 or not np.issubdtype(named.dtype, np.integer):
        raise DataError(f"{where}: keys must be integers in one dimension, got {named.dtype} {named.shape}")
    if rows.shape != (len(named), dim) or not np.issubdtype(rows.dtype, np.floating):
        raise DataError(
            f"{where}: table {table!r} needs {dim} values a key, so a float array of {(len(named), dim)}; "
            f"got {rows.dtype} of {rows.shape}"
        )
    if len(np.unique(named)) < len(named):
        raise DataError(f"{where}: a key is there twice; keep one row for each")
    dtype = str(configs[table].data_type).removeprefix("torch.")
    optimizer = collection.optimizer
    records = np.full((len(named), dim + optimizer.state_width(dim)), optimizer.initial_state, dtype)
    with np.errstate(over="ignore"):  # too large for the table becomes infinity
        records[:, :dim] = rows
    finite = np.isfinite(records[:, :dim]).all(axis=1)
    if not finite.all():
        raise DataError(
            f"{where}: the row of key {named[np.argmin(finite)]} is not finite in {dtype}; leave it out"
        )
    collection.load_rows(table, named.astype(np.int64), records)
    return len(named)


def _as_array(given: Arrays) -> npt.NDArray[Any]:
    if not isinstance(given, Tensor):
        return np.asarray(given)
    given = given.detach().cpu()
    if given.is_floating_point() and given.dtype != torch.float64:
        given = given.float()  # NumPy has no bfloat16
    array: npt.NDArray[Any] = given.numpy()
    return array


def _read(path: Path, keys: str, values: str) -> Rows:
    if not path.is_file():
        raise DataError(f"{path}: no such file (working directory: {Path.cwd()})")
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise ConfigError(f"{path}: rows are read from {', '.join(readers)} files")
    try:
        return readers[path.suffix](path, keys, values)
    except KeyError as error:
        raise DataError(f"{path} has no {error}; name the arrays: keys=..., values=...") from None
    except (OSError, ValueError, zipfile.BadZipFile, SafetensorError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _read_npz(path: Path, keys: str, values: str) -> Rows:
    with np.load(path, allow_pickle=False) as arrays:
        for name in (keys or "keys", values):
            if name not in arrays:
                raise KeyError(name)
        return arrays[keys or "keys"], arrays[values]


def _read_safetensors(path: Path, keys: str, values: str) -> Rows:
    with safe_open(path, framework="pt") as file:  # NumPy has no bfloat16
        for name in (keys or "keys", values):
            if name not in file.keys():  # noqa: SIM118  # not a dict
                raise KeyError(name)
        return file.get_tensor(keys or "keys"), file.get_tensor(values)


def _read_parquet(path: Path, keys: str, values: str) -> Rows:
    name = keys or "key"
    found = pq.ParquetFile(path).schema_arrow.names
    for one in (name, values):
        if one not in found:
            raise KeyError(one)
    table = pq.read_table(path, columns=[name, values]).combine_chunks()
    column, lists = table[name].combine_chunks(), table[values].combine_chunks()
    if column.null_count:
        raise ValueError(f"column {name!r} has {column.null_count:,} missing keys; leave out those rows")
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    named = hash_strings(column) if id_kind(column.type) == TEXT else column.to_numpy()
    lengths = pc.list_value_length(lists).unique().to_pylist() if is_list(lists.type) else [None]
    if lists.null_count or len(lengths) > 1 or None in lengths:
        raise ValueError(f"column {values!r} must have a list of one length in every row")
    flat = lists.flatten().to_numpy(zero_copy_only=False)
    return named, flat.reshape(len(lists), *lengths)
