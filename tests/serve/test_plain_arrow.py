"""What takes more memory than its bytes is refused; all else is read as Arrow's own reader reads it."""

import struct

import numpy as np
import pyarrow as pa
import pytest

from rowhaul.errors import RowhaulError
from rowhaul.serve import bodies
from rowhaul.serve.settings import ServeSettings

LIMITS = ServeSettings("served")
V4 = pa.ipc.MetadataVersion.V4
PLAIN = pa.table(
    {
        "id": pa.array([1, None, 3]),
        "number": pa.array([0.5, None, 2], pa.float32()),
        "flag": pa.array([True, None, False]),
        "text": pa.array(["a", None, "long" * 9]),
        "list": pa.array([[1, 2], None, []]),
        "texts": pa.array([["a"], ["b", None], None], pa.large_list(pa.string())),
        "two": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)),
        "nothing": pa.nulls(3),
        "nothings": pa.array([[None, None], [], None]),
        "other": pa.array([{"a": 1}, None, {"a": 2}]),
    }
)


def written(*batches, custom_metadata=None, **options):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as stream:
        for one in batches:
            stream.write_batch(one, custom_metadata=custom_metadata)
    return sink.getvalue().to_pybytes()


def batch(table=PLAIN):
    return table.combine_chunks().to_batches()[0]


def entry(body, table, field):
    """Where a table of a flatbuffer says how far away a field is."""
    return table - struct.unpack_from("<i", body, table)[0] + 4 + 2 * field


def field_at(body, table, field):
    return table + struct.unpack_from("<H", body, entry(body, table, field))[0]


def first_message(body):
    """The table of a stream's first message: after a mark and the length of the metadata."""
    return 8 + struct.unpack_from("<I", body, 8)[0]


def big_endian(body):
    """The same stream, said to be big-endian: the schema's field for it is where the next one is."""
    body = bytearray(body)
    header = field_at(body, first_message(body), 2)
    schema = header + struct.unpack_from("<I", body, header)[0]
    first, second = entry(body, schema, 0), entry(body, schema, 1)
    body[first : first + 2] = body[second : second + 2]
    return bytes(body)


def parsed(body, limits=LIMITS):
    return bodies.parse(body, bodies.ARROW, limits)[1]


@pytest.mark.parametrize("options", [{}, {"metadata_version": V4}])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_plain_streams_are_read_as_arrow_reads_them(count, options):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, PLAIN.schema, options=pa.ipc.IpcWriteOptions(**options)) as stream:
        for _ in range(count):
            stream.write_table(PLAIN)
    body = sink.getvalue().to_pybytes()
    found = parsed(body)
    whole = found if isinstance(found, pa.Table) else pa.Table.from_batches([found])
    assert whole.equals(pa.ipc.open_stream(body).read_all())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (written(batch(), compression="zstd"), "it is compressed"),
        (written(batch(), compression="lz4"), "it is compressed"),
        (written(batch(), batch(), compression="zstd"), "it is compressed"),
        (
            written(batch(), metadata_version=V4, custom_metadata={"ARROW:experimental_compression": "zstd"}),
            "it is compressed",
        ),
        (written(batch(pa.table({"a": pa.array(["x"]).dictionary_encode()}))), "dictionary-encoded"),
        (written(batch(pa.table({"a": pa.array(["x"], pa.string_view())}))), "string or binary views"),
        (big_endian(written(batch())), "it is big-endian"),
    ],
)
def test_what_arrow_would_unpack_or_copy_is_refused(body, said):
    with pytest.raises(bodies.BodyError, match=said):
        parsed(body)


def test_values_of_all_columns_count_together():
    columns = {name: np.zeros(100) for name in "abc"} | {"list": pa.array([[None] * 3] * 100)}
    body = written(batch(pa.table(columns)), batch(pa.table(columns)))
    num_values = 2 * (3 * 100 + 100 + 300)
    assert parsed(body, ServeSettings("served", max_body_bytes=num_values)).num_rows == 200
    with pytest.raises(bodies.TooLargeError, match=f"{num_values:,} values"):
        parsed(body, ServeSettings("served", max_body_bytes=num_values - 1))


def test_a_name_that_is_no_text_is_refused():
    body = written(batch(pa.table({"name": [1]}))).replace(b"name", b"n\xffme")
    with pytest.raises(bodies.BodyError, match="no Arrow stream"):
        parsed(body)


def test_only_a_schema_and_record_batches_are_a_stream():
    """Arrow itself takes whatever comes first for a schema."""
    messages = pa.ipc.MessageReader.open_stream(written(batch()))
    schema, rows = (one.serialize().to_pybytes() for one in messages)
    unknown = bytearray(schema)
    unknown[field_at(schema, first_message(schema), 1)] = 9
    for body in (b"", rows, rows + schema, schema + rows + schema, bytes(unknown) + rows):
        with pytest.raises(bodies.BodyError, match="no Arrow stream: it has to be a schema, and record"):
            parsed(body)


def test_damaged_streams_are_refused_or_read_but_never_end_the_server():
    random, body = np.random.default_rng(5), written(batch(), batch())
    for _ in range(2000):
        damaged = bytearray(body)
        for place in random.integers(0, len(body), random.integers(1, 4)):
            damaged[place] = random.integers(0, 256)
        try:
            parsed(bytes(damaged[: random.integers(len(body) // 2, len(body) + 1)]))
        except RowhaulError:
            continue
