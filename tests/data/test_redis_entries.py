"""Entries of a Redis stream as samples, in whatever company they come; no server is needed for that."""

import json
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from rowhaul.data.keys import hash_string
from rowhaul.data.schema import Schema
from rowhaul.data.sources.redis_stream import RedisSource

pytest.importorskip("redis")
SCHEMA = Schema.from_dict(
    {"label": "click", "dense": ["price"], "ids": ["user", "item", "tags"], "time": "at"}
)
TEXTS = Schema.from_dict(
    {"label": "click", "ids": ["item", {"name": "tags", "separator": "|"}, {"name": "zip", "type": "hex"}]}
)
AT = datetime(2026, 1, 2, tzinfo=UTC)
ROWS = [
    {"click": 1, "price": 0.5, "user": 2**63 + 7, "item": b"a", "tags": [1, 2], "at": AT},
    {"click": 0, "price": None, "user": None, "item": b"b", "tags": [], "at": AT},
    {"click": 1, "price": 2.5, "user": 7, "item": None, "tags": None, "at": AT},
]
TYPES = pa.schema(
    {
        "click": pa.int8(), "price": pa.float32(), "user": pa.uint64(), "item": pa.binary(),
        "tags": pa.list_(pa.int64()), "at": pa.timestamp("us", "UTC"),
    }
)  # fmt: skip


def source(schema=SCHEMA):
    return RedisSource("redis://nowhere/clicks", schema, {})


def arrow(rows, types=TYPES):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, types) as stream:
        stream.write_table(pa.Table.from_pylist(rows, types))
    return {b"arrow": sink.getvalue().to_pybytes()}


def chunk_of(source, entries, first=1):
    numbered = [(f"{first + number}-0".encode(), fields) for number, fields in enumerate(entries)]
    return source._chunk("0-0", 0, numbered)


def samples(chunk):
    """Everything there is to learn from each sample."""
    found = []
    for row in range(len(chunk.block)):
        one = chunk.block.cut(row, row + 1)
        time = None if one.times is None else one.times.tolist()
        found.append(([ids.values.tolist() for ids in one.ids], one.dense.tolist(), time))
    return found


ALONE = [([[-(2**63) + 7], [hash_string("a")], [1, 2]], [[0.5]]), ([[], [hash_string("b")], []], [[0.0]])]
ALONE = [(*one, [int(AT.timestamp())]) for one in [*ALONE, ([[7], [], []], [[2.5]])]]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"click": 2}, "label 'click' is 2; 0 or 1 is needed"),
        ({"price": float("inf")}, "dense field 'price' is inf; a number or null is needed"),
        ({"at": None}, "time field 'at' is None; a timestamp, or a number of s since 1970, is needed"),
        ({"tags": [4, None]}, "id field 'tags' is [4, None]; a 64-bit integer, a string, a list of those"),
    ],
)
def test_a_bad_sample_among_columns_is_set_aside_and_nothing_else(change, why):
    assert samples(chunk_of(source(), [arrow(ROWS)])) == ALONE
    chunk = chunk_of(source(), [arrow(ROWS[:1]), arrow([ROWS[1], ROWS[0] | change, ROWS[2]])])
    assert samples(chunk) == ALONE
    ((before, aside),) = chunk.set_aside
    assert (before, aside.where) == (2, "entry 2-0")
    assert aside.why.startswith(why)
    assert "'price': " in aside.content
    assert [chunk.after(count)["id"] for count in (1, 2, 3)] == ["1-0", "1-0", "2-0"]
    assert chunk.after(2) == {"id": "1-0", "lines": 1, "entry": "2-0"}


def other_columns():
    """The same columns in another order, and of other types."""
    types = TYPES.set(0, pa.field("click", pa.float64())).set(3, pa.field("item", pa.string_view()))
    return pa.schema([*types][::-1])


@pytest.mark.parametrize(
    "types",
    [other_columns(), TYPES.set(4, pa.field("tags", pa.null())), TYPES.set(5, pa.field("at", pa.date32()))],
)
def test_entries_of_other_columns_do_not_matter_to_each_other(types):
    row = ROWS[2] | {"item": None}
    chunk = chunk_of(source(), [arrow(ROWS), arrow([row], types), arrow(ROWS)])
    assert samples(chunk) == [*ALONE, ALONE[2], *ALONE]
    assert not chunk.set_aside


def test_ids_of_another_kind_are_set_aside_where_there_are_some():
    learning, types = source(), TYPES.set(3, pa.field("item", pa.int64()))
    chunk = chunk_of(
        learning, [arrow(ROWS[2:]), arrow(ROWS[1:2]), arrow([ROWS[0] | {"item": 3}, ROWS[2]], types)]
    )
    assert samples(chunk) == [ALONE[2], ALONE[1], ALONE[2]]
    ((_, aside),) = chunk.set_aside
    assert aside.why.startswith("id field 'item' is 3, but so far it has text ids")
    assert learning.kinds == {"user": "integer", "item": "text"}  # nothing says what tags are
    lacking = chunk_of(learning, [arrow([{"click": 1}], pa.schema({"click": pa.int8()})), arrow(ROWS)])
    assert samples(lacking) == ALONE
    assert "no field 'price', 'user', 'item', 'tags', 'at'" in lacking.set_aside[0][1].why


def test_dictionaries_that_do_not_fit_into_one_are_decoded_one_by_one():
    schema = Schema.from_dict({"label": "click", "ids": ["item"]})
    types = pa.schema({"click": pa.int8(), "item": pa.dictionary(pa.int8(), pa.string())})
    names = [f"item-{number}" for number in range(200)]
    entries = [[{"click": 1, "item": one} for one in some] for some in (names[:100], names[100:])]
    chunk = chunk_of(source(schema), [arrow(rows, types) for rows in entries])
    assert chunk.block.ids[0].values.tolist() == [hash_string(one) for one in names]
    assert chunk.after(150) == {"id": "1-0", "lines": 50, "entry": "2-0"}


@pytest.mark.parametrize(
    ("ids", "keys"),
    [
        (["a", None, "b"], [hash_string("a"), hash_string("b")]),
        ([b"a", None, b"b"], [hash_string("a"), hash_string("b")]),
        ([2**53 + 1, None, -7], [2**53 + 1, -7]),
    ],
)
def test_a_null_among_the_values_of_a_dictionary_is_no_id(ids, keys):
    schema = Schema.from_dict({"label": "click", "ids": ["item"]})
    column = pa.DictionaryArray.from_arrays(pa.array([2, 1, 0, None]), pa.array(ids))
    table = pa.table({"click": [1, 1, 0, 0], "item": column})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    chunk = chunk_of(source(schema), [{b"arrow": sink.getvalue().to_pybytes()}])
    assert [found[0] for found in samples(chunk)] == [[[keys[1]]], [[]], [[keys[0]]], [[]]]


def test_what_python_has_no_value_for_is_set_aside():
    types = pa.schema([*TYPES, pa.field("until", pa.timestamp("us"))])
    table = pa.Table.from_pylist([{**row, "until": None} for row in ROWS], types)
    table = table.set_column(6, "until", pa.array([2**62] * 3, pa.timestamp("us")))
    table = table.set_column(0, "click", pa.array([1, 2, 1], pa.int8()))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    chunk = chunk_of(source(), [{b"arrow": sink.getvalue().to_pybytes()}])
    assert samples(chunk) == [ALONE[0], ALONE[2]]
    assert "'until': a timestamp[us] that cannot be shown" in chunk.set_aside[0][1].content


def test_entries_of_all_kinds_go_together():
    whole, learning = arrow(ROWS)[b"arrow"], source()
    line = {**ROWS[2], "item": "b", "tags": [3], "at": int(AT.timestamp())}
    fields = {str(name).encode(): str(value).encode() for name, value in line.items() if name != "tags"}
    as_json = {b"json": json.dumps(line).encode()}
    entries = [as_json, as_json, arrow(ROWS), {b"arrow": whole[:-100]}, as_json, fields | {b"tags": b"3"}]
    expected = ([[7], [hash_string("b")], [3]], [[2.5]], [int(AT.timestamp())])
    for first in (1, 11):  # the second time JSON is parsed together
        chunk = chunk_of(learning, entries, first)
        assert samples(chunk) == [expected, expected, *ALONE, expected, expected]
        ((before, aside),) = chunk.set_aside
        assert (before, aside.where) == (5, f"entry {first + 3}-0")
        assert "is no Arrow stream" in aside.why
        assert chunk.after(6)["id"] == f"{first + 4}-0"


def texts(**fields):
    return {
        name.encode(): value
        for name, value in ({"click": b"1", "item": b"", "tags": b"", "zip": b""} | fields).items()
    }


def keys(chunk):
    return [ids for ids, _, _ in samples(chunk)]


def test_ids_in_fields_are_of_the_kind_of_the_first_however_they_come_together():
    entries = [
        texts(tags=b"4"),
        texts(item=b"a"),
        texts(item=b"7", tags=b"5|6"),
        texts(item=b" "),
        texts(tags=b"x"),
    ]
    expected = [
        [[], [4], []],
        [[hash_string("a")], [], []],
        [[hash_string("7")], [5, 6], []],
        [[hash_string(" ")], [], []],
    ]
    one_by_one = source(TEXTS)
    found = [keys(chunk_of(one_by_one, [entry])) for entry in entries]
    together = chunk_of(source(TEXTS), entries)
    assert keys(together) == expected == [one for some in found for one in some]
    ((_, aside),) = together.set_aside
    assert "id field 'tags' is ['x'], but so far it has integer ids" in aside.why


def test_a_sample_that_is_set_aside_says_nothing_of_the_kind_of_ids():
    assert keys(chunk_of(source(TEXTS), [texts(item=b"a", click=b"2"), texts(item=b"7")])) == [[[7], [], []]]


@pytest.mark.parametrize(("given", "key"), [(b"10", 16), (b"0aF", 175), (b" f ", 15), (b"f" * 16, -1)])
def test_hexadecimal_ids_in_fields_are_read_as_such(given, key):
    assert keys(chunk_of(source(TEXTS), [texts(zip=given)])) == [[[], [], [key]]]


@pytest.mark.parametrize(
    ("name", "given", "why"),
    [
        ("item", b"1_0", "'item' is '1_0', but so far it has integer ids"),
        ("item", b"007", "'item' is '007', but"),
        ("item", b"+7", "'item' is '+7', but"),
        ("item", b"-0", "'item' is '-0', but"),
        ("item", "٣".encode(), "but so far it has integer ids"),
        ("item", str(1 << 63).encode(), "but so far it has integer ids"),
        ("item", b"\t7", "but so far it has integer ids"),
        ("item", b"caf\xe9", "which is not UTF-8"),
        ("zip", b"xyz", "but so far it has hex ids"),
        ("zip", b"f" * 17, "but so far it has hex ids"),
        ("click", b"0_1", "label 'click' is '0_1'; 0 or 1 is needed"),
    ],
)
def test_fields_are_read_as_text_files_are(name, given, why):
    chunk = chunk_of(source(TEXTS), [texts(item=b"7"), texts(**{name: given}), texts(item=b" 7")])
    assert keys(chunk) == [[[7], [], []]] * 2
    ((_, aside),) = chunk.set_aside
    assert why in aside.why


def test_other_bytes_are_not_taken_for_the_same_text():
    chunk = chunk_of(
        source(TEXTS), [texts(item=b"caf\xe9"), texts(item=b"caf\xe8"), texts(item="café".encode())]
    )
    assert keys(chunk) == [[[hash_string("café")], [], []]]
    assert len(chunk.set_aside) == 2


def test_integers_that_the_schema_asks_for_may_be_written_otherwise():
    schema = Schema.from_dict({"label": "click", "ids": [{"name": "item", "type": "integer"}]})
    chunk = chunk_of(source(schema), [texts(item=one) for one in (b"007", b"+7", b"-7", b"7 ", b"1_0")])
    assert keys(chunk) == [[[7]], [[7]], [[-7]], [[7]]]
