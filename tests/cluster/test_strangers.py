"""Two real ranks train on while strangers knock, babble, are silent, guess and try to read."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from rank_processes import go, started
from torch.distributed import DistError, TCPStore

from rowhaul._ports import free_port
from rowhaul.cluster.rendezvous import StoreAddress, connect
from rowhaul.errors import SecretError

SECRET = "a secret of two ranks 7af3"

# Exchanges messages until rank 0's stdin says that the strangers are gone.
WORKING = """
import logging
logging.basicConfig(level=logging.INFO)
with join(colocated=True, timeouts=Timeouts(arrival=90)) as cluster:
    say(joined=True, port=cluster.place.master_port, interface=cluster.interface.address)
    def told():
        sys.stdin.readline()
        stop.set()
    stop = threading.Event()
    if rank == 0:
        threading.Thread(target=told, daemon=True).start()
    exchanged = 0
    while True:
        mine = np.array([stop.is_set(), rank], np.uint8)
        everyone = cluster.control.all_gather(mine)
        assert everyone[:, 1].tolist() == [0, 1]
        exchanged += 1
        if everyone[0, 0]:
            break
        time.sleep(0.01)
    require_all(cluster, "end")
    say(exchanged=exchanged)
"""


def ports(process):
    return [one.laddr for one in psutil.Process(process.pid).net_connections("tcp") if one.status == "LISTEN"]


def babble(address):
    """Connect and send what a scanner, a browser, torch's store and a forger would; leave some open."""
    left = []
    for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"rowhaul1\1" + bytes(64), b"r"):
        knocking = socket.create_connection(tuple(address), 60)
        with contextlib.suppress(ConnectionError):
            knocking.sendall(sent)
        left.append(knocking)
    return left


@pytest.mark.slow
def test_strangers_neither_end_nor_slow_a_run_nor_read_anything():
    with started(WORKING, 2, ROWHAUL_SECRET=SECRET) as ranks:
        port = ranks[0].wait_for("port")
        ranks[1].wait_for("joined")
        listening = [one for rank in ranks for one in ports(rank.process)]
        assert {one.ip for one in listening} == {ranks[0].wait_for("interface")}  # Gloo's, too
        assert port in {one.port for one in listening}
        at = StoreAddress(("127.0.0.1",), port)
        knocking = []
        for num_rounds in (0, 10):  # more would need more open files than many systems allow
            knocking += [one for _ in range(num_rounds) for address in listening for one in babble(address)]
            for wrong in (None, b"a guess of twenty bytes"):
                with pytest.raises(SecretError):
                    connect(at, wrong, 60)
        with pytest.raises(DistError):  # as the token could be read before
            TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=2)).get("call")
        token = json.loads(connect(at, SECRET.encode(), 60).get("rowhaul/call"))["token"]
        ranks[0].process.stdin.write("\n")
        ranks[0].process.stdin.flush()
        reports = [rank.wait(100) for rank in ranks]
        for one in knocking:
            one.close()
        errors = ["".join(rank.errors) for rank in ranks]
    assert [report["code"] for report in reports] == [0, 0], errors
    assert reports[0]["exchanged"] == reports[1]["exchanged"] > 0
    assert "the rendezvous store refused a connection" in errors[0]
    assert "127.0.0.1:" in errors[0]
    assert "was refused: it has another secret than this process" in errors[0]
    assert not any(word in text for word in (SECRET, token) for text in errors)


JOINING = """
import logging
logging.basicConfig(level=logging.INFO)
if rank and os.environ.get("OTHER") is not None:
    os.environ.pop("ROWHAUL_SECRET")
    if os.environ["OTHER"]:
        os.environ["ROWHAUL_SECRET"] = os.environ["OTHER"]
wait_for_go()
try:
    with join(colocated=True, timeouts=Timeouts(arrival=5, master=60)) as cluster:
        say(hosts=cluster.hosts)
except ClusterError as error:
    say(error=str(error), kind=type(error).__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "says", "logged"),
    [
        ("", "demands a secret, but this process has none", "has no secret, but this process has one"),
        ("another secret altogether", "refused this process: it has another secret", "was refused"),
    ],
)
def test_a_rank_with_another_secret_or_none_is_refused_by_name(other, says, logged):
    with started(JOINING, 2, ROWHAUL_SECRET=SECRET, OTHER=other) as ranks:
        go(ranks)
        first, second = (rank.wait(100) for rank in ranks)
        log = "".join(ranks[0].errors)
    assert second["kind"] == "SecretError"
    assert second["error"].startswith("rank 1 cannot join: 127.0.0.1:")
    assert says in second["error"]
    assert logged in log
    assert "rank 1" in first["error"]  # did not arrive
    assert not any(word in log + second["error"] for word in (SECRET, other) if word)


TORCHRUN = """
import json, os, sys
from rowhaul.cluster import *
from rowhaul.errors import ClusterError
if os.environ["RANK"] == "1" and "OTHER" in os.environ:
    os.environ["ROWHAUL_SECRET"] = os.environ["OTHER"]
def say(**what):
    os.write(1, (json.dumps(what) + "\\n").encode())  # at once: both ranks write to one pipe

try:
    with join(colocated=True, timeouts=Timeouts(master=float(os.environ["MASTER"]), arrival=60)) as cluster:
        say(hosts=cluster.hosts, master=cluster.place.master_port)
except ClusterError as error:
    say(error=str(error))
    sys.exit(1)
"""


def torchrun(tmp_path: Path, **variables):
    script = tmp_path / "rank.py"
    script.write_text(TORCHRUN)
    port = str(free_port())
    command = ["-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *command, "--master-addr", "127.0.0.1", "--master-port", port, str(script)],
        env={**os.environ, "ROWHAUL_SECRET": SECRET, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert SECRET not in done.stdout + done.stderr
    print(done.stderr)  # shown where a test fails
    return done.returncode, said


@pytest.mark.slow
def test_under_torchrun_ranks_meet_in_a_store_of_their_own(tmp_path):
    code, said = torchrun(tmp_path, MASTER="60")
    assert code == 0
    assert [one["hosts"] for one in said] == [[[0, 1]]] * 2


@pytest.mark.slow
def test_under_torchrun_another_secret_is_refused_too(tmp_path):
    code, said = torchrun(tmp_path, MASTER="15", OTHER="another secret altogether")
    assert code == 1
    (error,) = [one["error"] for one in said if one["error"].startswith("rank 1 cannot")]
    assert "rank 1 cannot join: the announcement of rank 0's store was signed with another secret" in error


INITIALISED = """
dist.init_process_group("gloo")
with join(colocated=True) as cluster:
    say(hosts=cluster.hosts)
say(initialised=dist.is_initialized())
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_join_beside_a_group_that_the_user_has_made():
    with started(INITIALISED, 2, ROWHAUL_SECRET=SECRET, GLOO_SOCKET_IFNAME="lo") as ranks:
        for rank in ranks:
            report = rank.wait(100)
            assert (report["code"], report["hosts"], report["initialised"]) == (0, [[0, 1]], True), (
                rank.errors
            )
