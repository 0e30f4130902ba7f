"""Errors of the testbed: it cannot run here, it broke, or a rank failed."""

from __future__ import annotations

from rowhaul.errors import RowhaulError


class TestbedError(RowhaulError):
    """Something about the testbed failed; the message says what and what to do."""

    __test__ = False  # not a test, whatever its name begins with


class TestbedUnavailable(TestbedError):  # noqa: N818 (a state, not a mistake)
    """This machine or this user cannot have a testbed; the message is the reason."""


class RanksFailedError(TestbedError):
    """Some ranks ended with an error or did not end in time; the message names them and quotes them."""
