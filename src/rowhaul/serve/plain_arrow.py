"""Refuses Arrow streams that ask for more memory than their bytes, before anything of them is decoded.

Arrow unpacks what a stream tells it to and can be given no limit: some kilobytes that are compressed become
gigabytes, and nulls take no bytes at all. So values must lie in a stream as they are, and they are counted.
Both are said in the metadata of its messages, which pyarrow reads but does not show: flatbuffers, laid out as
Message.fbs and Schema.fbs of Arrow say.
"""

from __future__ import annotations

import struct

import pyarrow as pa

_INT16, _INT32 = struct.Struct("<h").unpack_from, struct.Struct("<i").unpack_from
_UINT16, _UINT32 = struct.Struct("<H").unpack_from, struct.Struct("<I").unpack_from
# Fields of a message, by number; kinds of messages; a version.
_VERSION, _KIND, _HEADER, _CUSTOM_METADATA = 0, 1, 2, 4
_SCHEMA, _DICTIONARY, _RECORD_BATCH = 1, 2, 3
_VERSION_4 = 3
# Fields of a schema, and of a record batch.
_ENDIANNESS = 0
_NODES, _COMPRESSION, _NUM_VIEW_BUFFERS = 1, 3, 4


class PackedError(ValueError):
    """A stream that would have to be unpacked."""


def num_plain_values(message: pa.Message) -> int:
    """Count the values of all columns of a message, and of the lists in them, as far as it says itself.

    Raises:
        PackedError: values would take more memory than they do in the stream; says how to write it instead.
    """
    metadata = message.metadata.to_pybytes()  # Arrow has verified it: all offsets lead into it
    root = _UINT32(metadata)[0]
    place, header = _place(metadata, root, _KIND), _target(metadata, root, _HEADER)
    kind = metadata[place] if place and header else 0
    if kind == _SCHEMA:
        _check_schema(metadata, header)
    if kind == _DICTIONARY:  # a value that is sent once can be used, and copied, any number of times
        raise PackedError("it has dictionary-encoded columns; cast them to the type of their values")
    if kind != _RECORD_BATCH:
        return 0
    _check_batch(metadata, root, header)
    nodes = _target(metadata, header, _NODES)  # each the length of an array and its number of nulls
    count = _UINT32(metadata, nodes)[0] if nodes else 0
    return sum(map(abs, struct.unpack_from(f"<{2 * count}q", metadata, nodes + 4)[::2]))


def _check_schema(metadata: bytes, schema: int) -> None:
    place = _place(metadata, schema, _ENDIANNESS)
    if place and _INT16(metadata, place)[0]:
        raise PackedError("it is big-endian; write it little-endian")


def _check_batch(metadata: bytes, message: int, batch: int) -> None:
    version = _place(metadata, message, _VERSION)
    is_old = not version or _INT16(metadata, version)[0] <= _VERSION_4
    # Arrow 0.17 said by a text that a batch is compressed, which is understood to this day.
    has_text = is_old and _place(metadata, message, _CUSTOM_METADATA)
    if has_text or _place(metadata, batch, _COMPRESSION):
        raise PackedError("it is compressed; send it without (pyarrow.ipc.IpcWriteOptions(compression=None))")
    views = _target(metadata, batch, _NUM_VIEW_BUFFERS)
    if views and _UINT32(metadata, views)[0]:  # all may show the same bytes, which Arrow checks for each
        raise PackedError("it has columns of string or binary views; cast them to strings")


def _target(metadata: bytes, table: int, field: int) -> int:
    """Return where the table or vector is that a field leads to, 0 where there is none."""
    place = _place(metadata, table, field)
    return place + int(_UINT32(metadata, place)[0]) if place else 0


def _place(metadata: bytes, table: int, field: int) -> int:
    """Return where the value of a field is, 0 where a table has none."""
    about, entry = table - _INT32(metadata, table)[0], 4 + 2 * field
    if entry >= _UINT16(metadata, about)[0]:
        return 0
    offset = _UINT16(metadata, about + entry)[0]
    return table + int(offset) if offset else 0
