"""The messages of rank 0 about batches that only it can read.

Ids of a whole global batch go to every host, so they are packed: numbers are sent as their distance from the
smallest, in as few bytes as the largest distance needs, and in none if all are equal. Positions in the stream
are sent as their difference from counting up, which is constant in most streams.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace
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


class Kind(IntEnum):
    """The kind of a message."""

    DESCRIPTION = 1  # of the batches to come
    IDS = 2  # of one batch
    END = 3  # there are no more batches
    DENSE = 4  # dense values and labels of the samples that a host trains
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
    """The columns that all batches of a stream share; ``label_type`` is empty without labels."""

    features: tuple[str, ...] = ()
    num_dense: int = 0
    dense_type: str = "<f4"
    label_type: str = "<f4"

    @classmethod
    def of(cls, samples: Samples) -> Description:
        """Describe a batch."""
        labels = samples.labels
        return cls(
            tuple(samples.features),
            samples.dense.shape[1],
            samples.dense.dtype.str,
            "" if labels is None else labels.dtype.str,
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

    def dense_bytes(self, num_samples: int) -> int:
        """Return the length of `pack_dense` for a number of samples."""
        label_bytes = np.dtype(self.label_type).itemsize if self.label_type else 0
        return num_samples * (self.num_dense * np.dtype(self.dense_type).itemsize + label_bytes)


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
    """Replace dense values and labels by NaN, in arrays that take no memory."""
    missing = np.broadcast_to(np.array(np.nan, samples.dense.dtype), samples.dense.shape)
    labels = samples.labels
    none = None if labels is None else np.broadcast_to(np.array(np.nan, labels.dtype), labels.shape)
    return replace(samples, dense=missing, labels=none)


def with_dense(samples: Samples, places: Ints, payload: Bytes, description: Description) -> Samples:
    """Add dense values and labels, packed by `pack_dense`, to some of the samples."""
    count, dense_type = len(places), np.dtype(description.dense_type)
    split = count * description.num_dense * dense_type.itemsize
    dense = np.full((len(samples), description.num_dense), np.nan, dense_type)
    dense[places] = np.frombuffer(payload[:split], dense_type).reshape(count, description.num_dense)
    labels = None
    if description.label_type:
        labels = np.full(len(samples), np.nan, description.label_type)
        labels[places] = np.frombuffer(payload[split:], description.label_type)
    return replace(samples, dense=dense, labels=labels)


def pack_dense(samples: Samples, places: Ints) -> Bytes:
    """Pack dense values and labels of some of the samples."""
    parts = [samples.dense[places].reshape(-1)]
    if samples.labels is not None:
        parts.append(samples.labels[places])
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts])


def pack_ids(samples: Samples) -> Bytes:
    """Pack ids, their number in each sample, and the samples' positions."""
    beyond = samples.index - np.arange(len(samples))
    packed = [_narrow(numbers) for numbers in (samples.values, samples.lengths.reshape(-1), beyond)]
    sizes = (number for least, width, _ in packed for number in (least, width))
    prefix = np.frombuffer(_IDS.pack(len(samples), len(samples.values), samples.time, *sizes), np.uint8)
    return np.concatenate([prefix, *(data for _, _, data in packed)])


def unpack_ids(payload: Bytes, description: Description) -> tuple[Samples, Bytes]:
    """Return the samples, `without_dense`, and the rest of the payload."""
    num_samples, num_ids, time, *codes = _IDS.unpack(payload[: _IDS.size].tobytes())
    num_features = len(description.features)
    counts, rest, numbers = (num_ids, num_features * num_samples, num_samples), payload[_IDS.size :], []
    for count, least, width in zip(counts, codes[::2], codes[1::2], strict=True):
        numbers.append(_widen(rest[: count * width], count, least, width))
        rest = rest[count * width :]
    values, lengths, beyond = numbers
    samples = Samples(
        features=description.features,
        values=values,
        lengths=lengths.astype(np.int32).reshape(num_features, num_samples),
        dense=np.empty((num_samples, description.num_dense), description.dense_type),
        labels=np.empty(num_samples, description.label_type) if description.label_type else None,
        index=beyond + np.arange(num_samples),
        time=time,
    )
    return without_dense(samples), rest


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
