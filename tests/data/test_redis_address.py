"""Passwords in the address of a Redis stream are neither shown nor kept; no server is needed for that."""

import pytest

from rowhaul.data.schema import Schema
from rowhaul.data.sources.opening import is_address
from rowhaul.data.sources.redis_stream import PASSWORD_VARIABLE, RedisSource, shown, without_password
from rowhaul.errors import ConfigError

pytest.importorskip("redis")
SCHEMA = Schema.from_dict({"label": "click", "ids": ["user"]})


def login(address):
    """The user and password that a source logs in with."""
    options = RedisSource(address, SCHEMA, {})._server.connection_pool.connection_kwargs
    return options["username"], options["password"]


@pytest.mark.parametrize(
    ("address", "kept", "found"),
    [
        ("redis://host/clicks", "redis://host/clicks", (None, None)),
        ("redis://u:secret@host:1/2/clicks", "redis://u@host:1/2/clicks", ("u", "secret")),
        ("rediss://:secret@host/a@b?group=c:d@e", "rediss://host/a@b?group=c:d@e", (None, "secret")),
        ("redis://u@[::1]:7/clicks", "redis://u@[::1]:7/clicks", ("u", None)),
        (
            "redis://u%3A:se%40c%2Fret@host/clicks?group=g",
            "redis://u%3A@host/clicks?group=g",
            ("u:", "se@c/ret"),
        ),
    ],
)
def test_an_address_is_kept_without_its_password(address, kept, found, monkeypatch):
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    assert login(address) == found
    assert without_password(address) == kept == without_password(kept)
    assert is_address(kept)
    monkeypatch.setenv(PASSWORD_VARIABLE, "from outside")
    assert login(address) == (found[0], found[1] or "from outside")
    assert login(kept) == (found[0], "from outside")
    assert "secret" not in RedisSource(address, SCHEMA, {}).name


def test_other_data_are_kept_as_they_are():
    for one in ("-", "logs/a:b@c.parquet", "s3://key:secret@bucket/logs"):
        assert without_password(one) == one


@pytest.mark.parametrize(
    "address",
    [
        "redis://u:secret@host",
        "redis://:secret@host/x/clicks",
        "redis://:secret@host:port/clicks",
        "redis://u:secret@host/clicks?from=3",
        "redis://u:secret/secret@host/clicks",  # as some passwords are, but addresses are not
        "redis://u:secret#secret@host/clicks",
        "redis://u:secret?secret@host/clicks",
        "redis://u:1@host/secret@host/clicks",
        "redis://:[secret@host/clicks",
    ],
)
def test_a_wrong_address_is_refused_without_its_password(address):
    with pytest.raises(ConfigError) as found:
        RedisSource(address, SCHEMA, {})
    assert str(found.value).startswith("redis://")
    assert "secret" not in str(found.value)
    assert "secret" not in shown(address)
