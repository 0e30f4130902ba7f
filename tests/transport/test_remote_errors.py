"""Errors travel to other ranks as the kinds, messages and attributes that they had."""

import pytest

from rowhaul.errors import BadLineError, CacheTooSmallError, DataError, StorageError
from rowhaul.planning.sharing import LeaderLostError
from rowhaul.transport.remote_errors import read_report, write_report


@pytest.mark.parametrize(
    "error",
    [
        DataError("no rows"),
        BadLineError("a.csv", 12, "too few fields"),
        CacheTooSmallError("needs 9 rows"),
        KeyError("user"),
        FileNotFoundError(2, "No such file or directory", "part-3.parquet"),
        ZeroDivisionError(),
        LeaderLostError("rank 3"),
        StorageError("s3://bucket refuses"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_keep_their_kind_message_and_attributes(error):
    back = read_report(write_report(error, 4))
    assert type(back) is type(error)
    assert str(back) == str(error)
    notes = vars(back).pop("__notes__")
    assert notes == ["(on rank 4, which plans for this host)"]
    assert vars(back) == vars(error)


class StrangeError(DataError):
    """A class that other processes do not have."""


def test_errors_of_unknown_kinds_become_the_nearest_known():
    assert type(read_report(write_report(StrangeError("x"), 0))) is DataError
    several = ExceptionGroup("several", [KeyError("a"), DataError("b")])  # one is not made from a text alone
    back = read_report(write_report(several, 0))
    assert (type(back), str(back)) == (Exception, "several (2 sub-exceptions)")
    interrupted = read_report(write_report(KeyboardInterrupt(), 0))
    assert (type(interrupted), str(interrupted)) == (RuntimeError, "KeyboardInterrupt: ")
