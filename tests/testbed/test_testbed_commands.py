"""The commands, as a person types them."""

import os

import pytest
from typer.testing import CliRunner

from rowhaul.errors import RowhaulError
from testbed import cli, names

pytestmark = pytest.mark.slow


def typed(*arguments):
    """What a command prints; its errors are raised."""
    done = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def kept():
    """A network that is up, by its name."""
    name = f"test{os.getpid()}"
    said = typed("up", "--links", "20mbit,10mbit", "--stores", "40mbit", "--name", name)
    assert f"ip netns exec rhtb-kept-{name}-r0 bash" in said
    yield name
    if name in names.kept_networks():
        typed("down", "--name", name)


def test_run_down(kept, tmp_path):
    typed("clean")  # takes leftovers only
    said = typed("run", "--name", kept, "--output", str(tmp_path), "--", "sh", "-c", "echo I am $RANK")
    assert [f"[{rank}] I am {rank}" in said for rank in range(3)] == [True] * 3
    assert "store  40mbit" in said
    assert (tmp_path / "rank-2.stdout").read_text() == "I am 2\n"
    typed("down", "--name", kept)
    assert kept not in names.kept_networks()
    with pytest.raises(RowhaulError, match="no network"):
        typed("down", "--name", kept)


def test_check_prints_a_line_for_each_link(kept):
    said = typed("check", "--name", kept, "--seconds", "0.1")
    assert [line.split()[:3] for line in said.splitlines()[3:]] == [
        ["0", "worker", "20"],
        ["1", "worker", "10"],
        ["2", "store", "40"],
    ]


def test_run_in_a_network_of_its_own_passes_failure_on(tmp_path):
    with pytest.raises(RowhaulError, match="rank 1 with code 1"):
        typed("run", "--links", "20mbit*2", "--output", str(tmp_path), "--", "sh", "-c", "exit $RANK")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["up"], "--links is missing"),
        (["up", "--links", "20mbit@1ms"], "latency"),
        (["up", "--links", "20mbit", "--name", "A-b"], "small letters and digits"),
        (["run", "--links", "20mbit*many", "--", "true"], r"20mbit\*many"),
        (["run", "--stores", "20mbit", "--", "true"], "with --links only"),
        (["run", "--name", "nosuch", "--", "true"], "no network 'nosuch' is up"),
    ],
)
def test_mistakes_are_explained(arguments, reason):
    with pytest.raises(RowhaulError, match=reason):
        typed(*arguments)
