"""The parser agrees with Python's own readers on good text, and names the line and column of bad text."""

import bz2
import csv
import gzip
import io
import lzma
import zipfile

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowhaul.data.keys import hash_string
from rowhaul.data.text import blocks as text_blocks
from rowhaul.data.text import reader as text
from rowhaul.data.text.blocks import TextFile, first_line
from rowhaul.data.text.layout import Field, TextLayout
from rowhaul.data.text.reader import BadLines, Place, read_text
from rowhaul.errors import BadLineError, DataError

in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def parse(tmp_path):
    """Parse bytes and return the columns as lists, and the bad lines."""

    def run(data, fields, skip=False, start=Place(0, 1), **layout):
        path = tmp_path / "log"
        path.write_bytes(data)
        bad_lines = BadLines(skip)
        columns = {field.name: [] for field in fields if field.kind != "skip"}
        for rows in read_text(TextFile(path), TextLayout(tuple(fields), **layout), start, bad_lines):
            for name, column in rows.columns.items():
                columns[name] += column.to_pylist()
        return columns, bad_lines

    return run


def reason(parse, data, *fields, **layout):
    """Line and words of the error that the text causes."""
    with pytest.raises(BadLineError) as caught:
        parse(data, fields, **layout)
    return caught.value.line, caught.value.reason


ANY_FIELD = st.text(st.sampled_from('ab"\n\r, é;'), max_size=12)


@in_one_folder
@given(
    records=st.lists(st.tuples(ANY_FIELD, ANY_FIELD, ANY_FIELD), min_size=1, max_size=20),
    line_break=st.sampled_from(["\n", "\r\n"]),
    last_break=st.booleans(),
    block=st.integers(1, 40),
)
def test_quoted_csv_equals_pythons_reader(parse, records, line_break, last_break, block):
    buffer = io.StringIO()
    lone_return = any("\r" in field for record in records for field in record)  # Python may not quote it
    quoting = csv.QUOTE_ALL if lone_return else csv.QUOTE_MINIMAL
    csv.writer(buffer, lineterminator=line_break, quoting=quoting).writerows(records)
    data = buffer.getvalue()
    data = data if last_break else data.removesuffix(line_break)
    fields = [Field(name, "string") for name in "abc"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_blocks, "BLOCK_BYTES", block)
        columns, _ = parse(data.encode(), fields, delimiter=",", quoting=True)
    for number, name in enumerate("abc"):
        assert columns[name] == [hash_string(row[number]) if row[number] else None for row in records]


@in_one_folder
@given(
    records=st.lists(
        st.lists(st.text(st.sampled_from("ab:"), max_size=5), min_size=2, max_size=2), max_size=9
    ),
    block=st.integers(1, 9),
)
def test_a_delimiter_of_two_bytes_cuts_as_split_does(parse, records, block):
    lines = ["::".join(record) for record in records]
    data = "".join(line + "\n" for line in lines)
    good = [line.split("::") for line in lines if len(line.split("::")) == 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_blocks, "BLOCK_BYTES", block)
        columns, bad = parse(
            data.encode(), [Field("a", "string"), Field("b", "string")], skip=True, delimiter="::"
        )
    assert columns["a"] == [hash_string(a) if a else None for a, _ in good]
    assert columns["b"] == [hash_string(b) if b else None for _, b in good]
    assert bad.count == len(records) - len(good)


@pytest.mark.parametrize("delimiter", [",", "::", "<=>", "========"])
@pytest.mark.parametrize("quoting", [True, False])
def test_a_delimiter_of_any_size_may_lie_on_the_border_of_blocks(parse, monkeypatch, delimiter, quoting):
    part = delimiter[:-1]
    records = [
        ['"a"', "b", "1"], [f'"x""{part}y"', '"q"', "2"], ["", "", "3\r"], ['"z"', '"w"', '"4"\r'],
        [f"u{part}\r", f"v{part}v", "5\r"], ['"bad"x', "y", "6"], ['"last"', f'"{delimiter}"', '"7"'],
    ]  # fmt: skip
    data = "\n".join(delimiter.join(record) for record in records).encode()
    fields = [Field("a", "string"), Field("b", "string"), Field("c", "string")]

    def read(block):
        monkeypatch.setattr(text_blocks, "BLOCK_BYTES", block)
        return parse(data, fields, skip=True, delimiter=delimiter, quoting=quoting)

    whole = read(len(data))
    assert whole[1].count == 1
    for block in range(1, len(data)):
        assert read(block) == whole, block


@in_one_folder
@given(st.lists(st.decimals(-(10**12), 10**12, places=3) | st.integers(-(10**15), 10**15), min_size=1))
def test_short_numbers_are_rounded_to_float32_exactly(parse, numbers):
    columns, _ = parse("".join(f"{number}\n" for number in numbers).encode(), [Field("x", "number")])
    assert columns["x"] == [float(np.float32(float(number))) for number in numbers]


@in_one_folder
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_any_number_is_rounded_as_if_off_by_less_than_a_float64_can_tell(parse, numbers):
    largest = float(np.finfo(np.float32).max)
    kept = [number for number in numbers if abs(number) <= largest]
    columns, bad = parse("".join(f"{n!r}\n" for n in numbers).encode(), [Field("x", "number")], skip=True)
    assert bad.count == len(numbers) - len(kept)
    for got, number in zip(columns["x"], kept, strict=True):
        near = [np.nextafter(number, -np.inf), number, np.nextafter(number, np.inf)]
        assert got in [float(np.float32(np.clip(one, -largest, largest))) for one in near]


@in_one_folder
@given(st.lists(st.integers(-(2**66), 2**66) | st.integers(-(2**63) - 2, -(2**63) + 2), min_size=1))
def test_integers_are_exact_up_to_64_bits(parse, numbers):
    kept = [number for number in numbers if -(2**63) <= number < 2**63]
    columns, bad = parse("".join(f"{n}\n" for n in numbers).encode(), [Field("x", "integer")], skip=True)
    assert columns["x"] == kept
    assert bad.count == len(numbers) - len(kept)


@in_one_folder
@given(st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_hexadecimal_ids_are_their_own_value(parse, numbers):
    data = "".join(f"{number:x}\n{number:016X}\n" for number in numbers)
    columns, _ = parse(data.encode(), [Field("x", "hex")])
    expected = [number - 2**64 if number >= 2**63 else number for number in numbers]
    assert columns["x"] == [one for one in expected for _ in range(2)]


def test_lists_of_ids_grow_and_drop_blank_entries(parse, monkeypatch):
    monkeypatch.setattr(text, "ROWS_AT_ONCE", 4)
    fields = [Field("a", "integer", "|"), Field("b", "string", " "), Field("c", "hex", ",")]
    data = b"1|2|3\tx y\tff,0\n\t\t\n|7|\tz\t1\n" + b"|".join(b"%d" % i for i in range(500)) + b"\tq\t\n"
    columns, _ = parse(data, fields)
    assert columns["a"] == [[1, 2, 3], [], [7], list(range(500))]
    assert columns["b"] == [[hash_string("x"), hash_string("y")], [], [hash_string("z")], [hash_string("q")]]
    assert columns["c"] == [[255, 0], [], [1], []]


def test_doubled_quotes_survive_a_list_that_has_to_grow(parse, monkeypatch):
    monkeypatch.setattr(text, "ROWS_AT_ONCE", 2)
    ids = ",".join(str(number) for number in range(50))
    columns, _ = parse(
        f'"say ""hi""";"{ids}"\n'.encode(),
        [Field("a", "string"), Field("b", "integer", ",")],
        delimiter=";",
        quoting=True,
    )
    assert columns == {"a": [hash_string('say "hi"')], "b": [list(range(50))]}


def test_blank_the_missing_word_and_blank_lines(parse):
    fields = [Field("y", "label"), Field("x", "number"), Field("k", "integer"), Field("s", "string")]
    data = b"1\t\t\t\n\n0\t-1\t-1\t-1\n\r\n1\t -2.5 \t 7\t-12\n"
    columns, _ = parse(data, fields, missing="-1")
    assert columns["y"] == [1, 0, 1]
    assert columns["x"] == [None, None, -2.5]
    assert columns["k"] == [None, None, 7]
    assert columns["s"] == [None, None, hash_string("-12")]


@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_a_blank_line_of_one_column_is_a_missing_field(parse, monkeypatch, line_break):
    """But not the last line of the file, which many writers leave blank."""
    for lines, expected in (
        (["1", "", "2"], [1, None, 2]),
        (["1", "", "2", ""], [1, None, 2]),
        (["", "", "2", "", "", ""], [None, None, 2, None, None]),
        (["1", '""', ""], [1, None]),
    ):
        data = "".join(line + line_break for line in lines).encode()
        for block in (1, 2, 3, 100):
            monkeypatch.setattr(text_blocks, "BLOCK_BYTES", block)
            assert parse(data, [Field("a", "integer")], quoting=True)[0]["a"] == expected
    assert parse(b"1\n\n2", [Field("a", "integer")])[0]["a"] == [1, None, 2]
    assert reason(parse, b"1\n\n0\n", Field("y", "label")) == (2, "column y: the label is missing")


def test_labels_from_a_threshold(parse):
    columns, _ = parse(b"4\n3.5\n5\n", [Field("y", "label")], positive_from=4)
    assert columns["y"] == [1, 0, 1]


def test_bytes_that_are_not_utf8_are_bad_only_where_they_are_hashed(parse):
    fields = [Field("s", "string"), Field("x", "skip")]
    columns, bad = parse(b"a\t\xff\n\xff\xfe\ta\n\xc3\xa9\t1\n", fields, skip=True)
    assert columns["s"] == [hash_string("a"), hash_string("é")]
    assert bad.count == 1


@pytest.mark.parametrize("cut", ["é".encode()[:1], "🦊".encode()[:3]])
def test_a_character_that_the_end_of_the_file_cuts_off_is_bad(parse, cut):
    columns, bad = parse("é\n".encode() + cut, [Field("s", "string")], skip=True)
    assert (columns["s"], bad.count) == ([hash_string("é")], 1)
    assert parse(b"a\t\xc3", [Field("s", "string"), Field("x", "skip")])[0]["s"] == [hash_string("a")]


@pytest.mark.parametrize("codes", [(0x80, 0x800), (0x10000, 0x10FFFF)])
def test_utf8_is_checked_as_python_does(codes, parse):
    """All first bytes, in characters that are whole, cut off, overlong or followed by others."""
    good = [chr(code).encode() for code in (*codes, 0xD7FF, 0xE000, 0xFFFD)]
    edges = [b"\xc0\xaf", b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80"]
    cut = [text[:size] for text in good for size in range(1, len(text))]
    texts = [*good, *edges, *cut, *(bytes([byte]) for byte in range(128, 256)), b"a\xc3\xa9\xe9"]
    columns, bad = parse(b"\n".join(texts) + b"\n\xff\n", [Field("s", "string")], skip=True)
    valid = [text.decode() for text in texts if is_valid(text)]
    assert columns["s"] == [hash_string(text) for text in valid]
    assert bad.count == len(texts) + 1 - len(valid)


def is_valid(text):
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("label", "2", "column x: '2' is not 0 or 1"),
        ("label", "yes", "column x: 'yes' is not a finite number"),
        ("label", "nan", "column x: 'nan' is not a finite number"),
        ("label", "", "column x: the label is missing"),
        ("count", "abc", "column x: 'abc' is not an integer"),
        ("count", "1.5", "column x: '1.5' is not an integer"),
        ("number", "NaN", "column x: 'NaN' is not a finite number"),
        ("number", "-inf", "column x: '-inf' is not a finite number"),
        ("number", "1e", "column x: '1e' is not a finite number"),
        ("number", ".", "column x: '.' is not a finite number"),
        ("number", "1e39", "column x: '1e39' is too large for a float32"),
        ("integer", "-", "column x: '-' is not an integer"),
        ("integer", "9223372036854775808", "column x: '9223372036854775808' does not fit in 64 bits"),
        ("hex", "0x12", "column x: '0x12' is not hexadecimal"),
        ("hex", "0" * 17, f"column x: '{'0' * 17}' has more than 16 hexadecimal digits"),
        ("integer", "é" * 50, f"column x: '{'é' * 40}…' is not an integer"),
    ],
)
def test_a_bad_value_is_named_in_words(parse, kind, value, words):
    fields = (Field("k", "integer"), Field("x", kind))
    assert reason(parse, f"1\t1\n2\t{value}\n".encode(), *fields) == (2, words)


def test_a_wrong_number_of_columns(parse):
    fields = (Field("a", "integer"), Field("b", "integer"))
    assert reason(parse, b"1\t2\n3\n", *fields) == (2, "2 columns expected, 1 found")
    assert reason(parse, b"1\t2\t3\n", *fields) == (1, "2 columns expected, 3 found")


def test_quotes_that_do_not_fit(parse):
    fields = (Field("a", "string"), Field("b", "integer"))
    after = reason(parse, b'x,1\n"y"z,2\n', *fields, delimiter=",", quoting=True)
    assert after == (2, 'text follows a closing quote ("); double a quote that is part of the text')
    open_quote = reason(parse, b'x,1\n"y,2\nz,3\n', *fields, delimiter=",", quoting=True)
    assert open_quote == (2, 'a quote (") is opened and not closed')


def test_skipping_goes_on_with_the_next_line(parse):
    data = b'x,1\n"y"z,2\n"a\nb",3\n"never,4\nz,5\nw\nv,6'
    columns, bad = parse(
        data, [Field("a", "string"), Field("b", "integer")], skip=True, delimiter=",", quoting=True
    )
    assert columns["b"] == [1, 3, 5, 6]
    assert bad.count == 3
    assert [example.split(": ")[0].split(", ")[-1] for example in bad.examples] == [
        "line 2",
        "line 5",
        "line 7",
    ]


def test_only_some_bad_lines_are_kept(parse):
    _, bad = parse(b"x\n" * 1000 + b"1\n", [Field("a", "integer")], skip=True)
    assert bad.count == 1000
    assert len(bad.examples) == 5


@pytest.mark.parametrize("packed", [False, True])
def test_reading_can_start_at_any_chunks_end(tmp_path, monkeypatch, packed):
    monkeypatch.setattr(text, "ROWS_AT_ONCE", 10)
    lines = [f'{number},"a\n{number}"\n' if number % 3 else f"{number},bad,bad\n" for number in range(100)]
    path = tmp_path / "log"
    data = "".join(lines).encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    layout = TextLayout((Field("a", "integer"), Field("b", "string")), delimiter=",", quoting=True)

    def read(start):
        bad = BadLines(skip=True)
        rows = list(read_text(TextFile(path), layout, start, bad))
        return [(one.columns["a"].to_pylist(), one.lines.tolist(), one.end) for one in rows], bad

    whole, all_bad = read(Place(0, 1))
    assert [number for numbers, _, _ in whole for number in numbers] == [n for n in range(100) if n % 3]
    assert whole[-1][2] == Place(len(data), data.count(b"\n") + 1)
    assert all_bad.count == 34
    for number, (_, _, end) in enumerate(whole):
        assert read(end)[0] == whole[number + 1 :] or number == len(whole) - 1


def test_a_record_without_end_is_an_error_and_an_open_quote_a_bad_line(parse, monkeypatch):
    monkeypatch.setattr(text, "LONGEST_RECORD_BYTES", 100)
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 30)
    fields = [Field("a", "integer"), Field("b", "string")]
    with pytest.raises(DataError, match="line 2: no line break"):
        parse(b"1,x\n" + b"9" * 500, fields, delimiter=",", quoting=True)
    data = b'1,x\n2,"open\n' + b"3,y\n" * 100
    columns, bad = parse(data, fields, skip=True, delimiter=",", quoting=True)
    assert columns["a"] == [1] + [3] * 100
    assert bad.count == 1


@pytest.mark.parametrize("damage", ["cut", "flipped", "trailer"])
def test_damaged_gz(tmp_path, damage):
    good = gzip.compress(b"".join(b"%d\n" % (number * number) for number in range(20_000)))
    broken = {
        "cut": good[: len(good) // 2],
        "flipped": good[:3000] + bytes([good[3000] ^ 0xFF]) + good[3001:],
        "trailer": good[:-8] + b"\0" * 8,
    }[damage]
    path = tmp_path / "log.gz"
    path.write_bytes(broken)
    with pytest.raises(DataError, match=f"{path}.* (is cut short|is damaged)"):
        list(
            read_text(TextFile(path), TextLayout((Field("a", "string"),)), Place(0, 1), BadLines(skip=False))
        )


def test_gz_of_several_members(parse):
    columns, _ = parse(gzip.compress(b"1\n2") + gzip.compress(b"3\n4\n"), [Field("a", "integer")])
    assert columns["a"] == [1, 23, 4]


def test_other_compressions_are_named(tmp_path):
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("log.csv", "a,b\n")
    for data, words in (
        (zipped.getvalue(), "is a zip archive; unpack it"),
        (bz2.compress(b"a,b\n"), "is compressed with bzip2; unpack it"),
        (bz2.compress(b""), "is compressed with bzip2; unpack it"),
        (lzma.compress(b"a,b\n"), "is compressed with xz; unpack it"),
        (pa.compress(b"a,b\n", codec="zstd", asbytes=True), "is compressed with zstd; unpack it"),
    ):
        (tmp_path / "log").write_bytes(data)
        with pytest.raises(DataError, match=rf"log {words} \(gzip is read as it is\)"):
            first_line(TextFile(tmp_path / "log"))
    (tmp_path / "log").write_bytes(b"BZh9,PK\n")
    assert first_line(TextFile(tmp_path / "log")).text == b"BZh9,PK"


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        first_line(TextFile(tmp_path / "nothing"))
    with pytest.raises(DataError, match="is a folder"):
        first_line(TextFile(tmp_path))
    for name, data in (("plain", b""), ("packed.gz", gzip.compress(b""))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=f"{name} is empty"):
            first_line(TextFile(tmp_path / name))
