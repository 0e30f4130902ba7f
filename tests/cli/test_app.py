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
    def interrupted(**options):
        raise kernel_error(cause=KeyboardInterrupt())

    monkeypatch.setattr("rowhaul.cli.app.app", interrupted)
    code, _, err = rowhaul()
    assert code == 130
    assert err.strip() == "error: interrupted"


def test_other_failures_of_kernels_are_not_hidden(rowhaul, monkeypatch):
    def broken(**options):
        raise kernel_error(cause=ValueError())

    monkeypatch.setattr("rowhaul.cli.app.app", broken)
    with pytest.raises(SystemError):
        rowhaul()


def test_help_is_grouped_by_what_people_want_to_do(rowhaul):
    code, out, _ = rowhaul("--help")
    assert code == 0
    places = [out.index(f"─ {panel} ─") for panel in ("Data", "Train", "Cluster", "Look inside", "Serve")]
    assert places == sorted(places)
    assert out.index(" ckpt ") > places[3]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "error: No such command 'trian'"),
        (["train", "--nope"], "error: No such option: --nope"),
        (["predict"], "error: Missing argument 'run'"),
        (["train", "--epochs", "many"], "error: Invalid value for '--epochs'"),
        (["train", "--data", "nowhere.parquet"], "error: "),
    ],
)
def test_all_errors_look_the_same(arguments, said, rowhaul):
    code, out, err = rowhaul(*arguments)
    assert code == 2
    assert not out
    assert err.startswith(said)
    assert "╭" not in err


def test_shells_can_complete_commands(rowhaul, monkeypatch):
    monkeypatch.setenv("_ROWHAUL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "rowhaul net")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert rowhaul()[:2] == (0, "netcheck\n")
