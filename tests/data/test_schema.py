"""The schema file: what a person writes comes back, and mistakes are named."""

import pytest
import yaml

from rowhaul.data.schema import Schema
from rowhaul.errors import DataError

WRITTEN = """
label: {name: stars, positive_from: 4}
dense: [age, {name: price, transform: log1p}]
ids: [user, {name: item, table: items}, {name: last, table: items, type: integer, separator: "|"}]
csv: {delimiter: "::", header: false, columns: [user, item, last, age, price, stars]}
"""


def test_a_schema_survives_its_file(tmp_path):
    schema = Schema.from_dict(yaml.safe_load(WRITTEN))
    schema.write(tmp_path / "schema.yaml")
    assert Schema.read(tmp_path / "schema.yaml") == schema
    assert schema.features == ("user", "item", "last")
    assert schema.tables == {"user": ("user",), "items": ("item", "last")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ids: []", "no id column"),
        ("ids: user", "`ids` must be a list of columns, got 'user'"),
        ("ids: [user, user]", "column 'user' is named more than once"),
        ("ids: [user]\nlables: x", "unknown entry 'lables'; known are label, dense, ids, csv"),
        ("ids: [{table: t}]", "a column needs a `name`"),
        ("ids: [5]", "expected a column name or a mapping, got 5"),
        ("ids: [{name: a, type: float}]", "unknown type 'float'; known are auto, string, integer, hex"),
        ("ids: [{name: a, separator: 5}]", "`separator` must be str, got 5"),
        ("dense: [{name: a, transform: sqrt}]\nids: [b]", "unknown transform 'sqrt'; known are none, log1p"),
        ("label: {name: y, positive_from: x}\nids: [b]", "`positive_from` must be int or float, got 'x'"),
        ("label: {name: y, positive_from: .nan}\nids: [b]", "`positive_from` must be int or float, got nan"),
        ("ids: [b]\ncsv: {delimiter: 5}", "`delimiter` must be str, got 5"),
        ("ids: [b]\ncsv: {header: 'no'}", "`header` must be bool, got 'no'"),
        ("ids: [b]\ncsv: {columns: 5}", "`columns` must be list or tuple, got 5"),
        ("ids: [b]\ncsv: {columns: [1]}", "`columns` must be a list of names"),
        ("ids: [b]\ncsv: {header: false}", "columns must name every column in order"),
        ("- a", "expected `label`, `dense` and `ids`, got list"),
        ("ids: [", "not a YAML file"),
    ],
)
def test_mistakes_are_named(text, message, tmp_path):
    path = tmp_path / "schema.yaml"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        Schema.read(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
