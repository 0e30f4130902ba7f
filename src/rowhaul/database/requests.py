"""Keys, bags and gradients as users pass them, checked in the caller's thread and turned into arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul._finite import is_finite
from rowhaul.data.keys import hash_strings, hash_texts
from rowhaul.database.settings import DatabaseSettings
from rowhaul.errors import ConfigError, DataError

Int64s = npt.NDArray[np.int64]
POOLINGS = ("sum", "mean")


@dataclass(frozen=True)
class TableKeys:
    """The keys requested of one table; ``offsets``, if given, cuts them into bags to pool."""

    table: str
    keys: Int64s
    offsets: Int64s | None = None
    is_mean: bool = False

    @property
    def num_vectors(self) -> int:
        """Vectors that a pull returns: one for each key, or one for each bag."""
        return len(self.keys) if self.offsets is None else len(self.offsets) - 1


@dataclass(frozen=True)
class Request:
    """Keys by table; ``is_single`` if they were passed without a table, as vectors are then returned."""

    parts: tuple[TableKeys, ...]
    is_single: bool

    def result(self, vectors: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Return vectors by table, or those of the only one."""
        return vectors[self.parts[0].table] if self.is_single else dict(vectors)


def read_request(
    settings: DatabaseSettings, keys: Any, table: str | None, lengths: Any = None, pooling: Any = None
) -> Request:
    """Check and copy the keys of a request."""
    for name in pooling if isinstance(pooling, Mapping) else ():
        settings.table(name)  # or raises
    if isinstance(keys, Mapping):
        if table is not None:
            raise ConfigError(f"keys are given by table already; omit table={table!r}")
        if lengths is not None and not isinstance(lengths, Mapping):
            raise ConfigError("keys are given by table, so lengths must be too: {table: lengths}")
        names = [settings.table(name).name for name in keys]
        cuts = {} if lengths is None else dict(lengths)
        for name in cuts:
            if name not in keys:
                raise ConfigError(f"table {name!r} has lengths, but no keys")
        if cuts and not isinstance(pooling, Mapping):
            pooling = dict.fromkeys(cuts, pooling)  # for tables with bags
        parts = (_part(settings, n, keys[n], cuts.get(n), _of_table(pooling, n)) for n in names)
        return Request(tuple(parts), False)
    if table is None:
        if len(settings.tables) > 1:
            known = ", ".join(spec.name for spec in settings.tables)
            raise ConfigError(f"the database has several tables ({known}): pass {{table: keys}}, or table=")
        table = settings.tables[0].name
    name = settings.table(table).name
    return Request((_part(settings, name, keys, lengths, _of_table(pooling, name)),), True)


def _of_table(pooling: Any, table: str) -> Any:
    return pooling.get(table) if isinstance(pooling, Mapping) else pooling


def _part(settings: DatabaseSettings, table: str, keys: Any, lengths: Any, pooling: Any) -> TableKeys:
    where = f"table {table!r}"
    numbers = as_keys(keys, where)
    if lengths is None:
        if pooling is not None:
            raise ConfigError(f"{where}: pooling={pooling!r} needs lengths=, the number of keys in each bag")
        return TableKeys(table, numbers)
    if pooling is None:
        pooling = "mean" if table in settings.means else "sum"
    if pooling not in POOLINGS:
        raise ConfigError(f"{where}: pooling must be 'sum' or 'mean', got {pooling!r}")
    return TableKeys(table, numbers, _offsets(lengths, len(numbers), where), pooling == "mean")


def as_keys(keys: Any, where: str) -> Int64s:
    """Copy keys into a new int64 array; strings become their hashes."""
    if isinstance(keys, np.ndarray) and keys.dtype == np.int64 and keys.ndim == 1:
        return keys.copy()  # the caller may reuse the array
    if isinstance(keys, str | bytes):
        raise DataError(f"{where}: keys must be a list or an array, got a string; write [{keys!r}]")
    if type(keys).__module__.partition(".")[0] == "pyarrow":
        return _arrow_keys(keys, where)
    if isinstance(keys, Sequence) and keys and all(isinstance(key, str) for key in keys):
        return _strings(keys, where)
    array = _as_array(keys, f"{where}: keys must be numbers or strings in one dimension")
    if array.ndim != 1:
        raise DataError(
            f"{where}: keys must have one dimension, got shape {array.shape}; "
            "flatten them, and pass lengths= if several keys form a bag"
        )
    if not len(array):
        return np.empty(0, np.int64)
    if array.dtype.kind == "U" and isinstance(keys, Sequence):  # NumPy would write numbers as text
        raise DataError(f"{where}: keys must be all numbers or all strings, got a mix")
    if array.dtype.kind == "U" or (array.dtype == object and all(isinstance(key, str) for key in array)):
        return _strings(array.tolist(), where)
    if array.dtype.kind not in "iu" or array.dtype == np.uint64:
        raise DataError(
            f"{where}: keys must be int64 numbers or strings, got {array.dtype}"
            + ("; view them as int64" if array.dtype == np.uint64 else "")
        )
    return array.astype(np.int64)  # a copy: the caller may reuse the array


def _as_array(given: Any, needed: str) -> npt.NDArray[Any]:
    """An array of what was given; raise what is ``needed`` if there is none."""
    try:
        return given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    except (TypeError, ValueError, OverflowError) as error:  # types unknown to NumPy, rows of other lengths
        raise DataError(f"{needed}: {error}") from None


def _strings(strings: Sequence[str], where: str) -> Int64s:
    try:
        return hash_texts(strings)
    except UnicodeError as error:
        raise DataError(f"{where}: a key cannot be written as UTF-8: {error}") from None


def _arrow_keys(keys: Any, where: str) -> Int64s:
    if keys.null_count:
        raise DataError(f"{where}: {keys.null_count} of {len(keys)} keys are null; remove them")
    try:
        return hash_strings(keys)
    except TypeError:
        return as_keys(keys.to_numpy(), where)


def _offsets(lengths: Any, num_keys: int, where: str) -> Int64s:
    needed = f"{where}: lengths must be whole numbers in one dimension"
    array = _as_array(lengths, needed)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise DataError(f"{needed}, got {array.dtype} of shape {array.shape}")
    if len(array) and array.min() < 0:
        raise DataError(f"{where}: lengths must not be negative, got {array.min()}")
    if len(array) and array.max() > num_keys:  # the sum of such could be any number
        raise DataError(f"{where}: a length is {array.max():,}, but {num_keys:,} keys were given")
    offsets = np.zeros(len(array) + 1, np.int64)
    np.cumsum(array, out=offsets[1:])
    if offsets[-1] != num_keys:
        raise DataError(f"{where}: the lengths add up to {offsets[-1]:,}, but {num_keys:,} keys were given")
    return offsets


def gradient_tensors(
    request: Request, gradients: Any, dims: Mapping[str, int], dtype: torch.dtype
) -> list[Tensor]:
    """Check the gradients of a request's vectors, in the order of its parts; they are not copied."""
    if request.is_single and not isinstance(gradients, Mapping):
        gradients = {request.parts[0].table: gradients}
    if not isinstance(gradients, Mapping):
        raise DataError("the ticket is for several tables: pass gradients as {table: gradients}")
    names = [part.table for part in request.parts]
    if set(gradients) != set(names):
        raise DataError(f"gradients for tables {sorted(gradients)}, but the ticket is for {sorted(names)}")
    shapes = {part.table: (part.num_vectors, dims[part.table]) for part in request.parts}
    return [as_gradient(gradients[n], shape, dtype, f"table {n!r}") for n, shape in shapes.items()]


def check_finite(request: Request, gradients: Iterable[npt.NDArray[Any]]) -> None:
    """Refuse gradients that would spoil rows for good; those of empty bags reach no row.

    Raises:
        DataError: it names the table and the key.
    """
    for part, given in zip(request.parts, gradients, strict=True):
        if is_finite(given):
            continue
        first = np.arange(part.num_vectors + 1) if part.offsets is None else part.offsets
        wrong = np.flatnonzero(~np.isfinite(given).all(axis=1) & (np.diff(first) > 0))
        if len(wrong):
            which = "of" if part.offsets is None else "of the bag that begins with"
            raise DataError(
                f"table {part.table!r}: the gradient {which} key {part.keys[first[wrong[0]]]} is not finite "
                f"({len(wrong):,} such); nothing was pushed. Lower the learning rate, clip gradients, or go "
                "on without this push"
            )


def as_gradient(given: Any, shape: tuple[int, int], dtype: torch.dtype, where: str) -> Tensor:
    """Check a gradient of vectors; a tensor of the right dtype is not copied."""
    if given is None:
        raise DataError(f"{where}: no gradient; was backward() called, and did the rows require one?")
    if isinstance(given, Tensor) and given.layout is not torch.strided:
        raise DataError(
            f"{where}: gradients must be a dense tensor with a row for each vector, got {given.layout}"
        )
    try:
        tensor = given.detach() if isinstance(given, Tensor) else torch.from_numpy(np.array(given))
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: gradients must be a tensor or an array: {error}") from None
    if tuple(tensor.shape) != shape:
        raise DataError(
            f"{where}: gradients of shape {tuple(tensor.shape)}, but the ticket's vectors are {shape}"
        )
    if not tensor.is_floating_point():
        raise DataError(f"{where}: gradients must be floating-point numbers, got {tensor.dtype}")
    return tensor.to(device="cpu", dtype=dtype).contiguous()
