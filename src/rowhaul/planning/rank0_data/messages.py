"""The messages of rank 0 about batches that only it can read.

Ids of a whole global batch go to every host, so they are packed: numbers are sent as their distance from the
smallest, in as few bytes as the largest distance needs, and in none if all are equal. Positions in the stream
are sent as their difference from counting up, which is constant in most streams. Weights of ids, if there are
any, go with the ids as they are.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.data.samples import Samples
from rowhaul.errors import DataError
from rowhaul.transport.base import Bytes

Ints = npt.NDArray[np.int64]

_HEADER = struct.Struct("<qqqq")
HEADER_BYTES = _HEADER.size
_IDS = struct.Struct("<qqq6q")  # samples, ids, time; least and width of ids, lengths and positions
_WIDTHS = (0, 1, 2, 4, 8)  # bytes of a number
_MORE = ("weights", "groups")  # columns that samples may have beside labels


class Kind(IntEnum):
    """The kind of a message."""

    DESCRIPTION = 1  # of the batches to come
    IDS = 2  # of one batch
    END = 3  # there are no more batches
    DENSE = 4  # dense values, labels and weights of the samples that a host trains
    WHOLE = 5  # a batch with all its values, to be evaluated by one worker


@dataclass(frozen=True)
class Header:
    """Precedes every payload."""

    kind: Kind
    num_bytes: int = 0
    num_samples: int = 0
    worker: int = -1  # that evaluates a whole batch

    def to_bytes(self) -> Bytes:
        """Encode as `HEADER_BYTES` bytes."""
        packed = _HEADER.pack(self.kind, self.num_bytes, self.num_samples, self.worker)
        return np.frombuffer(packed, np.uint8).copy()

    @classmethod
    def from_bytes(cls, data: Bytes) -> Header:
        """The inverse of `to_bytes`."""
        kind, num_bytes, num_samples, worker = _HEADER.unpack(data.tobytes())
        return cls(Kind(kind), num_bytes, num_samples, worker)


@dataclass(frozen=True)
class Description:
    """The columns that all batches of a stream share; ``label_type`` is empty without labels.

    ``num_labels`` is 0 where each sample has one label. ``more`` names the columns after the labels, with
    their types.
    """

    features: tuple[str, ...] = ()
    num_dense: int = 0
    dense_type: str = "<f4"
    label_type: str = "<f4"
    num_labels: int = 0
    more: dict[str, str] = field(default_factory=dict)
    num_totals: int = 0
    id_weight_type: str = ""  # empty without weights of ids

    @classmethod
    def of(cls, samples: Samples) -> Description:
        """Describe a batch."""
        labels, totals = samples.labels, samples.global_totals()
        more = {name: getattr(samples, name) for name in _MORE}
        return cls(
            tuple(samples.features),
            samples.dense.shape[1],
            samples.dense.dtype.str,
            "" if labels is None else labels.dtype.str,
            labels.shape[1] if labels is not None and labels.ndim > 1 else 0,
            {name: column.dtype.str for name, column in more.items() if column is not None},
            0 if totals is None else len(totals),
            "" if samples.id_weights is None else samples.id_weights.dtype.str,
        )

    def check(self, samples: Samples) -> None:
        """Refuse a batch with other columns than the first."""
        found = Description.of(samples)
        if found != self:
            raise DataError(f"batches must all have the same columns: the first had {self}, this has {found}")

    def to_bytes(self) -> Bytes:
        """Encode as a message."""
        return np.frombuffer(json.dumps(vars(self)).encode(), np.uint8).copy()

    @classmethod
    def from_bytes(cls, data: Bytes) -> Description:
        """The inverse of `to_bytes`."""
        fields: dict[str, Any] = json.loads(data.tobytes())
        return cls(**{**fields, "features": tuple(fields["features"])})

    def columns(self, num_samples: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of all that is sent for a number of samples, in order, without the totals."""
        columns: dict[str, tuple[str, tuple[int, ...]]] = {
            "dense": (self.dense_type, (num_samples, self.num_dense))
        }
        if self.label_type:
            tasks = (self.num_labels,) if self.num_labels else ()
            columns["labels"] = (self.label_type, (num_samples, *tasks))
        return columns | {name: (kind, (num_samples,)) for name, kind in self.more.items()}

    def dense_bytes(self, num_samples: int) -> int:
        """Return the length of `pack_dense` for a number of samples."""
        columns = self.columns(num_samples).values()
        return 8 * self.num_totals + sum(
            np.dtype(kind).itemsize * math.prod(shape) for kind, shape in columns
        )


def samples_of_size(num_samples: int) -> Samples:
    """Make samples with nothing but a size."""
    return Samples(
        features=(),
        values=np.empty(0, np.int64),
        lengths=np.empty((0, num_samples), np.int32),
        dense=np.empty((num_samples, 0), np.float32),
        labels=None,
        index=np.arange(num_samples),
    )


def without_dense(samples: Samples) -> Samples:
    """Replace all but ids by NaN, or zeros, in arrays that take no memory."""
    return replace(samples, **_placeholders(Description.of(samples), len(samples)))


def with_dense(samples: Samples, places: Ints, payload: Bytes, description: Description) -> Samples:
    """Add all but ids, packed by `pack_dense`, to some of the samples."""
    split = 8 * description.num_totals
    columns: dict[str, Any] = {"totals": payload[:split].copy().view(np.float64) if split else None}
    rest = payload[split:]
    for name, (kind, shape) in description.columns(len(places)).items():
        size = np.dtype(kind).itemsize * math.prod(shape)
        columns[name] = np.full((len(samples), *shape[1:]), _nothing(kind), kind)
        columns[name][places] = np.frombuffer(rest[:size], kind).reshape(shape)
        rest = rest[size:]
    return replace(samples, **columns)


def pack_dense(samples: Samples, places: Ints) -> Bytes:
    """Pack all but ids of some of the samples: the totals of all, then column by column."""
    parts = [getattr(samples, name)[places] for name in Description.of(samples).columns(0)]
    if (totals := samples.global_totals()) is not None:
        parts.insert(0, totals)
    return np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])


def _placeholders(description: Description, num_samples: int) -> dict[str, Any]:
    """All but ids of some samples, not known yet."""
    columns: dict[str, Any] = {
        name: np.broadcast_to(_nothing(kind), shape)
        for name, (kind, shape) in description.columns(num_samples).items()
    }
    if description.num_totals:
        columns["totals"] = np.broadcast_to(_nothing("<f8"), description.num_totals)
    return columns


def _nothing(kind: str) -> npt.NDArray[Any]:
    """What stands for a value that is not here."""
    return np.array(np.nan if np.dtype(kind).kind == "f" else 0, kind)


def pack_ids(samples: Samples) -> Bytes:
    """Pack ids, their number in each sample, and the samples' positions."""
    beyond = samples.index - np.arange(len(samples))
    packed = [_narrow(numbers) for numbers in (samples.values, samples.lengths.reshape(-1), beyond)]
    sizes = (number for least, width, _ in packed for number in (least, width))
    prefix = np.frombuffer(_IDS.pack(len(samples), len(samples.values), samples.time, *sizes), np.uint8)
    weights = np.empty(0) if samples.id_weights is None else samples.id_weights
    return np.concatenate(
        [prefix, *(data for _, _, data in packed), np.ascontiguousarray(weights).view(np.uint8)]
    )


def unpack_ids(payload: Bytes, description: Description) -> tuple[Samples, Bytes]:
    """Return the samples, `without_dense`, and the rest of the payload."""
    num_samples, num_ids, time, *codes = _IDS.unpack(payload[: _IDS.size].tobytes())
    num_features = len(description.features)
    counts, rest, numbers = (num_ids, num_features * num_samples, num_samples), payload[_IDS.size :], []
    for count, least, width in zip(counts, codes[::2], codes[1::2], strict=True):
        numbers.append(_widen(rest[: count * width], count, least, width))
        rest = rest[count * width :]
    values, lengths, beyond = numbers
    weights = None
    if kind := description.id_weight_type:
        size = num_ids * np.dtype(kind).itemsize
        weights, rest = np.frombuffer(rest[:size], kind).copy(), rest[size:]
    samples = Samples(
        **{"labels": None, **_placeholders(description, num_samples)},
        features=description.features,
        values=values,
        lengths=lengths.astype(np.int32).reshape(num_features, num_samples),
        index=beyond + np.arange(num_samples),
        time=time,
        id_weights=weights,
    )
    return samples, rest


def _narrow(numbers: npt.NDArray[Any]) -> tuple[int, int, Bytes]:
    """Return the smallest number, the bytes of each difference from it, and the differences."""
    least, most = (int(numbers.min()), int(numbers.max())) if numbers.size else (0, 0)
    width = next(width for width in _WIDTHS if most - least < 256**width)
    if width == 8:
        return 0, 8, np.ascontiguousarray(numbers, np.int64).view(np.uint8)
    if width == 0:
        return least, 0, np.empty(0, np.uint8)
    return least, width, (numbers - least).astype(f"<u{width}").view(np.uint8)


def _widen(data: Bytes, count: int, least: int, width: int) -> Ints:
    if width == 0:
        return np.full(count, least, np.int64)
    if width == 8:
        return np.frombuffer(data, np.int64).copy()
    return np.frombuffer(data, f"<u{width}").astype(np.int64) + least
