"""Nothing stays behind: not after an exception, nor a signal, nor, once cleaned, after a killed owner."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rowhaul.simulate.links import Link
from testbed import ShapedNetwork, TestbedError, iproute
from testbed import names as namespaces
from testbed import network as networking

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

OWNER = """
import subprocess, time
from rowhaul.simulate.links import Link
from testbed import ShapedNetwork
with ShapedNetwork([Link(1e6)] * 2) as network:
    inside = subprocess.Popen(network.inside(0, ["sleep", "1000"]), start_new_session=True)
    print(network.name, inside.pid, flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def owner():
    """A process that owns a network, the network's name, and a process inside."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        name, inside = process.stdout.readline().split()
        assert name in namespaces.networks()
        yield process, name, int(inside)
    finally:
        process.kill()
        process.communicate(timeout=20)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_exception_leaves_nothing():
    made, started = ShapedNetwork([Link(1e6)]), []

    def fail_inside():
        with made as network:
            started.append(subprocess.Popen(network.inside(0, ["sleep", "1000"])))
            _wait_until_inside(network, started[0].pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert made.network.name not in namespaces.networks()
    assert started[0].wait(timeout=10) == -signal.SIGTERM


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize(
    ("number", "exception"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)],
)
def test_signals_become_exceptions_and_leave_nothing(number, exception):
    if (inherited := signal.getsignal(number)) is signal.SIG_IGN:  # as nohup does
        signal.signal(number, signal.SIG_DFL)
    made, before = ShapedNetwork([Link(1e6)]), signal.getsignal(number)
    try:
        with pytest.raises(exception), made:
            signal.raise_signal(number)
        assert made.network.name not in namespaces.networks()
        assert signal.getsignal(number) is before
    finally:
        signal.signal(number, inherited)


def test_what_ignores_requests_is_killed(monkeypatch):
    monkeypatch.setattr("testbed.endings.SECONDS_TO_END", 0.3)
    with ShapedNetwork([Link(1e6)]) as network:
        inside = subprocess.Popen(
            network.inside(0, ["sh", "-c", "trap '' TERM; echo on; while :; do sleep 0.05; done"]),
            stdout=subprocess.PIPE,
        )
        inside.stdout.readline()
    assert network.name not in namespaces.networks()
    assert inside.wait(timeout=10) == -signal.SIGKILL
    inside.stdout.close()


def test_a_network_that_fails_halfway_is_removed(monkeypatch):
    def fail(*_):
        raise TestbedError("no more")

    monkeypatch.setattr(
        "testbed.iproute.tc_batch", lambda lines, namespace: "try" in "".join(lines) or fail()
    )
    made = ShapedNetwork([Link(1e6)] * 2)
    with pytest.raises(TestbedError, match="no more"):
        made.__enter__()
    assert made.network.name not in namespaces.networks()


def test_an_owner_that_is_asked_to_end_leaves_nothing(owner):
    process, name, inside = owner
    process.terminate()
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert name not in namespaces.networks()
    assert not is_alive(inside)


def test_what_a_killed_owner_leaves_is_cleaned_and_nothing_else(owner):
    process, name, inside = owner
    with ShapedNetwork([Link(1e6)]) as other:
        assert name not in networking.remove_leftovers()
        assert name in namespaces.networks()  # its owner lives
        process.kill()
        process.wait(timeout=20)
        assert is_alive(inside)
        assert name in networking.remove_leftovers()
        assert name not in namespaces.networks()
        assert not is_alive(inside)
        assert other.name in namespaces.networks()


def test_a_new_network_removes_leftovers():
    # This process's number, but it did not start then: its number has come back.
    name = f"rhtb-{os.getpid()}-1-0"
    iproute.ip_batch([f"netns add {name}-switch", f"netns add {name}-r0"])
    with ShapedNetwork([Link(1e6)]):
        assert name not in namespaces.networks()


def _wait_until_inside(network, pid):
    inode = os.stat(f"/var/run/netns/{network.namespace(0)}").st_ino
    deadline = time.monotonic() + 10
    while os.stat(f"/proc/{pid}/ns/net").st_ino != inode:
        assert time.monotonic() < deadline
        time.sleep(0.01)
