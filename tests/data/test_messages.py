"""Messages of JSON: parsed together as one by one, and what cannot be trained on is told apart."""

import json

import pytest

from rowhaul.data.schema import Schema
from rowhaul.data.sources.messages import MessageDecoder
from rowhaul.errors import DataError

SCHEMA = Schema.from_dict(
    {"label": "click", "dense": ["price"], "ids": ["user", "item", "tags", {"name": "zip", "type": "hex"}]}
)
GOOD = {"click": 1, "price": 0.5, "user": 7, "item": "a", "tags": [1, 2], "zip": 255}


def encoded(*changes):
    return [json.dumps({**GOOD, **one}).encode() for one in changes]


def decode(messages, decoder=None):
    decoder = decoder or MessageDecoder(SCHEMA, {})
    return decoder.decode(messages, lambda place: f"message {place}")


def content(block):
    arrays = [array for ids in block.ids for array in (ids.values, ids.offsets) if array is not None]
    return [array.tolist() for array in (*arrays, block.dense, block.targets.labels)]


@pytest.mark.parametrize(
    "changes",
    [
        [{}, {"price": None}, {"user": 8, "extra": {"x": [1]}}],
        [{"user": None}, {"tags": []}, {"item": "b", "zip": None}],
        [{"click": True}, {"click": 0}, {"price": 3}],
        [{"tags": 4}, {"tags": None}, {}],
    ],
)
def test_messages_parsed_together_are_those_parsed_alone(changes):
    """The first call learns the types, so that the second one can parse messages together."""
    warm = MessageDecoder(SCHEMA, {})
    decode(encoded({}), warm)
    together, alone = decode(encoded(*changes), warm), decode(encoded(*changes))
    assert content(together.block)[-2:] == content(alone.block)[-2:]
    for one, other in zip(together.block.ids, alone.block.ids, strict=True):
        assert one.values.tolist() == other.values.tolist()
    assert list(together.places) == list(alone.places) == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"click": 2}, "label 'click' is 2; 0 or 1 is needed"),
        ({"click": None}, "label 'click' is None"),
        ({"price": "cheap"}, "dense field 'price' is 'cheap'"),
        ({"price": 1e39}, "dense field 'price' is 1e+39"),
        ({"user": "7"}, "so far it has integer ids"),
        ({"user": 1.5}, "id field 'user' is 1.5"),
        ({"user": True}, "id field 'user' is True"),
        ({"user": 1 << 63}, "id field 'user' is 9223372036854775808"),
        ({"item": 3}, "so far it has text ids"),
        ({"tags": [1, None]}, "id field 'tags'"),
        ({"zip": "ff"}, "so far it has hex ids"),
        ({"item": "\ud800"}, "id field 'item' is '\\ud800', which has half of a surrogate pair"),
        ({"item": ["a", "b\udfff"]}, "which has half of a surrogate pair"),
        ({"price": 10**400}, "dense field 'price' is 1000"),
        ({"click": 10**400}, "label 'click' is 1000"),
    ],
)
def test_a_bad_value_is_set_aside_and_nothing_else(change, why):
    decoder = MessageDecoder(SCHEMA, {})
    decode(encoded({}), decoder)
    decoded = decode(encoded({}, change, {"user": 9}), decoder)
    assert list(decoded.places) == [0, 2]
    ((place, aside),) = decoded.set_aside
    assert (place, aside.where) == (1, "message 1")
    assert why in aside.why


def test_messages_parsed_together_are_looked_at_as_closely():
    decoder = MessageDecoder(SCHEMA, {})
    decode(encoded({}), decoder)
    rest = {name: value for name, value in GOOD.items() if name != "price"}
    within = json.dumps(rest | {"more": {"price": 1}}).encode()
    no_text = encoded({"item": "?"})[0].replace(b"?", b"\xff")
    decoded = decode([*encoded({}), no_text, within, *encoded({"user": 9})], decoder)
    assert list(decoded.places) == [0, 3]
    not_utf8, missing = (one.why for _, one in decoded.set_aside)
    assert "'utf-8' codec can't decode" in not_utf8
    assert missing.startswith("no field 'price'")


def test_a_name_that_is_no_text_can_be_told():
    ((_, aside),) = decode([b'{"\\ud800": 1}']).set_aside
    assert aside.why.encode().endswith(b"it has \\ud800")


def test_a_missing_field_is_no_null():
    decoder = MessageDecoder(SCHEMA, {})
    decode(encoded({}), decoder)
    lacking = json.dumps({name: value for name, value in GOOD.items() if name != "price"}).encode()
    decoded = decode([*encoded({}, {"price": None}), lacking, b"", b'{"a": 1}\n{"a": 2}', b"\xff"], decoder)
    assert list(decoded.places) == [0, 1]
    reasons = [one.why for _, one in decoded.set_aside]
    assert reasons[0].startswith("no field 'price' (null for a missing value); it has click, user")
    assert all("not JSON" in why for why in reasons[1:])
    with pytest.raises(DataError, match="the schema names no label"):
        MessageDecoder(Schema.from_dict({"ids": ["user"]}), {})
