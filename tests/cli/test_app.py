"""How the program ends when something other than a command ends it."""

import pytest

from rowhaul.cli.progress import is_interruption


def kernel_error(cause=None, context=None):
    error = SystemError("CPUDispatcher(...) returned a result with an exception set")
    error.__cause__, error.__context__ = cause, context
    return error


@pytest.mark.parametrize(
    ("error", "interrupted"),
    [
        (KeyboardInterrupt(), True),
        (kernel_error(cause=KeyboardInterrupt()), True),
        (kernel_error(context=KeyboardInterrupt()), True),
        (kernel_error(cause=kernel_error(context=KeyboardInterrupt())), True),
        (kernel_error(cause=ValueError()), False),
        (kernel_error(), False),
        (ValueError(), False),
    ],
)
def test_ctrl_c_is_known_in_its_disguises(error, interrupted):
    assert is_interruption(error) == interrupted


def test_an_interrupted_kernel_ends_like_ctrl_c(rowhaul, monkeypatch):
    def interrupted():
        raise kernel_error(cause=KeyboardInterrupt())

    monkeypatch.setattr("rowhaul.cli.app.app", interrupted)
    code, _, err = rowhaul()
    assert code == 130
    assert err.strip() == "error: interrupted"


def test_other_failures_of_kernels_are_not_hidden(rowhaul, monkeypatch):
    def broken():
        raise kernel_error(cause=ValueError())

    monkeypatch.setattr("rowhaul.cli.app.app", broken)
    with pytest.raises(SystemError):
        rowhaul()
