"""A folder with item vectors and, where asked for, an index of them that FAISS reads.

::

    items/
      items.parquet     key (int64), vector (a list of `size` numbers): any tool reads them
      index.faiss       by distance, see `_built`, in the order of items.parquet; not for `exact`
      index.json        kind, size, number of items, the model's step
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rowhaul._files import whole
from rowhaul._nearest import did_you_mean
from rowhaul.errors import ConfigError, DataError
from rowhaul.retrieval.search import check_k, exact_search

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

ITEMS_FILE, INDEX_FILE, FACTS_FILE = "items.parquet", "index.faiss", "index.json"
KINDS = ("exact", "flat", "hnsw")
_LINKS = 32  # of an item in HNSW; FAISS's own default
_BUILD_WIDTH, _SEARCH_WIDTH = 200, 500  # candidates HNSW keeps: well above k=100, or recall@100 suffers


@dataclass(frozen=True)
class IndexFacts:
    """What index.json says."""

    kind: str
    num_items: int
    size: int
    step: int = 0  # of the model


class ItemIndex:
    """Finds the items with the largest products with a user's vector.

    Example:
        >>> index = ItemIndex.read("items/")
        >>> keys, scores = index.search(vectors, k=100)  # users x 100, best first
    """

    def __init__(self, facts: IndexFacts, keys: Int64s, vectors: Floats, searcher: Any = None) -> None:
        self.facts, self.keys, self.vectors = facts, keys, vectors
        self._searcher = searcher

    @classmethod
    def read(cls, folder: str | Path) -> ItemIndex:
        """Read what `write_index` wrote."""
        path = Path(folder)
        try:
            facts = IndexFacts(**json.loads((path / FACTS_FILE).read_text(encoding="utf-8")))
            table = pq.read_table(path / ITEMS_FILE)
            keys = table["key"].to_numpy()
            vectors = table["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            vectors = np.ascontiguousarray(vectors.reshape(len(keys), facts.size))
        except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
            raise DataError(f"{path} is no index of items: {error}; write one with `rowhaul index`") from None
        searcher = _searcher(path, facts.kind)
        if searcher is not None and searcher.ntotal != len(keys):
            raise DataError(
                f"{path / INDEX_FILE} has {searcher.ntotal:,} items, and {ITEMS_FILE} beside it "
                f"{len(keys):,}; write the index again with `rowhaul index`"
            )
        return cls(facts, keys, vectors, searcher)

    def search(self, users: npt.ArrayLike, k: int = 100) -> tuple[Int64s, Floats]:
        """Keys of the ``k`` best items of each user (users x k), best first, and their products.

        Where there are fewer, or an index finds fewer, the rest is -1 with a product of -inf.
        """
        places, scores = self.search_places(users, k)
        return np.where(places >= 0, self.keys[np.maximum(places, 0)], -1), scores

    def search_places(self, users: npt.ArrayLike, k: int) -> tuple[Int64s, Floats]:
        """As `search`, with places in ``keys`` instead of keys."""
        check_k(k)
        vectors = _vectors(users, "users")
        if vectors.ndim != 2 or vectors.shape[1] != self.facts.size:
            raise ConfigError(f"vectors of users need {self.facts.size} columns, got shape {vectors.shape}")
        missing = max(0, k - len(self.keys))
        places, scores = self._search(vectors, k - missing)
        beside = ((0, 0), (0, missing))
        return np.pad(places, beside, constant_values=-1), np.pad(scores, beside, constant_values=-np.inf)

    def _search(self, users: Floats, k: int) -> tuple[Int64s, Floats]:
        """Search for no more items than there are."""
        _check_finite("user", users, np.arange(len(users)))
        if self._searcher is None:
            return exact_search(self.vectors, users, k)
        _, places = self._searcher.search(_widened(users, np.zeros(len(users))), k)
        scores = np.einsum("uks,us->uk", self.vectors[np.maximum(places, 0)], users)
        scores = np.where(places >= 0, scores, -np.inf).astype(np.float32)
        order = np.argsort(-scores, axis=1, kind="stable")  # by products, not by distances
        return np.take_along_axis(places, order, axis=1), np.take_along_axis(scores, order, axis=1)


def _searcher(folder: Path, kind: str) -> Any:
    if kind == "exact":
        return None
    faiss = _faiss()
    try:
        return faiss.read_index(str(folder / INDEX_FILE))
    except RuntimeError as error:  # of FAISS, also where there is no file
        raise DataError(
            f"{folder / INDEX_FILE} cannot be read: {error}; write it again with `rowhaul index`"
        ) from None


def check_new_index(folder: str | Path, kind: str) -> Path:
    """Refuse a folder that an index of this kind cannot be written to, before vectors are made for it."""
    path = Path(folder)
    if kind not in KINDS:
        raise ConfigError(f"unknown index {kind!r}{did_you_mean(kind, KINDS)}; known are {', '.join(KINDS)}")
    if path.exists():
        raise ConfigError(f"{path} exists; choose another folder for the index")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent} to write {path.name} to; make it first")
    if kind != "exact":
        _faiss()
    return path


def write_index(
    folder: str | Path, keys: npt.ArrayLike, vectors: npt.ArrayLike, kind: str = "exact", step: int = 0
) -> ItemIndex:
    """Write item vectors, and an index of this kind, into a new folder.

    Args:
        folder: must not exist.
        keys: of the items: distinct integers.
        vectors: items x size.
        kind: ``exact`` compares all (NumPy alone), ``flat`` does so in FAISS, ``hnsw`` walks a
            graph; both need the extra ``retrieval``.
        step: of the model, to be told which one.
    """
    path = check_new_index(folder, kind)
    of_items, named = _vectors(vectors, "items"), np.asarray(keys)
    if of_items.ndim != 2 or named.ndim != 1 or not len(named) == len(of_items) > 0:
        raise ConfigError(
            "an index needs items, and a vector for each: items x size; got keys of shape "
            f"{named.shape} and vectors of shape {of_items.shape}"
        )
    ids = _distinct_keys(named)
    _check_finite("item", of_items, ids)
    facts = IndexFacts(kind, len(ids), of_items.shape[1], step)
    searcher = _built(kind, of_items) if kind != "exact" else None
    with whole(path) as temporary:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        flat = pa.FixedSizeListArray.from_arrays(pa.array(of_items.ravel()), facts.size)
        pq.write_table(pa.table({"key": pa.array(ids), "vector": flat}), temporary / ITEMS_FILE)
        if searcher is not None:
            _faiss().write_index(searcher, str(temporary / INDEX_FILE))
        (temporary / FACTS_FILE).write_text(json.dumps(asdict(facts), indent=1), encoding="utf-8")
    return ItemIndex(facts, ids, of_items, searcher)


def _vectors(given: npt.ArrayLike, whose: str) -> Floats:
    try:
        return np.ascontiguousarray(given, np.float32)
    except (TypeError, ValueError, RuntimeError) as error:  # the last from PyTorch
        raise ConfigError(f"vectors of {whose} must be an array of numbers: {error}") from None


def _distinct_keys(keys: npt.NDArray[Any]) -> Int64s:
    if not np.issubdtype(keys.dtype, np.integer):
        raise ConfigError(
            f"keys of items must be integers, got {keys.dtype}; hash text with rowhaul.data.hash_strings"
        )
    ids = keys.astype(np.int64)
    found, counts = np.unique(ids, return_counts=True)
    if len(found) < len(ids):
        raise ConfigError(
            f"item {found[np.argmax(counts)]} is there {counts.max():,} times; keep one vector for each key"
        )
    return ids


def _check_finite(whose: str, vectors: Floats, names: Int64s) -> None:
    wrong = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(wrong):
        raise DataError(
            f"the vector of {whose} {names[wrong[0]]} is not finite ({len(wrong):,} such): "
            "leave it out, or train the model again if its weights are not finite"
        )


def _built(kind: str, vectors: Floats) -> Any:
    """Make an index by distance of vectors that all have one length, thanks to a further column.

    The nearest to a user, whose further column is 0, then has the largest product (Bachrach et al., 2014).
    A graph by products themselves misses most of it where lengths differ.
    """
    squares = np.square(vectors, dtype=np.float64).sum(axis=1)
    wide, faiss = _widened(vectors, np.sqrt(squares.max(initial=0.0) - squares)), _faiss()
    size = wide.shape[1]
    if kind == "flat":
        made = faiss.IndexFlatL2(size)
    else:
        made = faiss.IndexHNSWFlat(size, _LINKS)
        made.hnsw.efConstruction, made.hnsw.efSearch = _BUILD_WIDTH, _SEARCH_WIDTH
    made.add(wide)
    return made


def _widened(vectors: Floats, column: npt.NDArray[np.float64]) -> Floats:
    return np.ascontiguousarray(np.column_stack([vectors, column]), np.float32)


def _faiss() -> ModuleType:
    try:
        import faiss
    except ImportError:
        raise ConfigError(
            "this kind of index needs FAISS: pip install 'rowhaul[retrieval]'; the kind exact does without"
        ) from None
    module: ModuleType = faiss
    return module
