"""One process per rank: told who it is, heard, ended; and the bytes between them counted."""

import sys
from pathlib import Path

import pytest

from testbed import RankProcesses, RanksFailedError, counters, probe, run_cluster, run_in
from testbed import processes as starting

pytestmark = pytest.mark.slow

HAUL_BYTES, SIDE_BYTES = 60_000, 500_000

EXCHANGE = """
import os, socket, sys
sys.path.insert(0, {folder!r})
import probe
rank = int(os.environ["RANK"])
for address, port, size in {exchanges}:
    if rank < 2:
        probe.main(("listen", "connect")[rank], address, port, size, 30)
names = [(i, d) for i in ("haul0", "side0") for d in ("tx", "rx")]
print(*(open(f"/sys/class/net/{{i}}/statistics/{{d}}_bytes").read().strip() for i, d in names))
"""


def test_ranks_are_told_what_torchrun_would_tell_them(network, tmp_path):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    names += [starting.INTERFACE_VARIABLE, starting.SIDE_INTERFACE_VARIABLE, "MINE"]
    command = ["sh", "-c", "echo " + " ".join(f"${name}" for name in names)]
    done = run_in(network, lambda rank: command, 30, folder=tmp_path, environment={"MINE": "yes"})
    assert [output.stdout for output in done.outputs] == [
        f"{rank} {rank} 4 4 {network.side_address(0)} 29500 haul0 side0 yes\n" for rank in range(4)
    ]


def test_counters_are_those_of_the_ranks_and_tell_the_interfaces_apart(network, tmp_path):
    exchanges = [
        (network.haul_address(0), 6000, HAUL_BYTES),
        (network.side_address(0), 6001, SIDE_BYTES),
    ]
    folder = str(Path(probe.__file__).parent)
    program = EXCHANGE.format(folder=folder, exchanges=exchanges)
    done = run_in(network, lambda rank: [sys.executable, "-c", program], 60, folder=tmp_path)
    for traffic, payload in ((done.counters.haul, HAUL_BYTES), (done.counters.side, SIDE_BYTES)):
        for rank in (0, 1):
            for counted in (traffic[rank].sent_bytes, traffic[rank].received_bytes):
                assert payload < counted < 1.1 * payload
        for rank in (2, 3):  # at most what finding an address costs
            assert traffic[rank].sent_bytes + traffic[rank].received_bytes < 1000
    now = counters.read(network)
    for rank in (2, 3):  # nothing was under way to them when they looked
        totals = list(map(int, done.outputs[rank].stdout.split()))
        haul, side = now.haul[rank], now.side[rank]
        expected = [haul.sent_bytes, haul.received_bytes, side.sent_bytes, side.received_bytes]
        assert all(abs(total - own) < 1000 for total, own in zip(totals, expected, strict=True))


def test_a_rank_that_fails_is_named_and_quoted_and_the_others_are_ended(network, tmp_path):
    script = 'if [ $RANK = 2 ]; then echo "I am broken" >&2; exit 7; fi; sleep 1000 & wait'
    with RankProcesses(network, lambda rank: ["sh", "-c", script], tmp_path) as processes:
        with pytest.raises(RanksFailedError) as failure:
            processes.wait(timeout_seconds=60, grace_seconds=0.2)
        assert "rank 2 with code 7" in str(failure.value)
        assert "I am broken" in str(failure.value)
        assert "ranks 0, 1, 3" in str(failure.value)
        assert not processes.running
        assert processes._alive() == []  # nor what they had started


def test_ranks_that_take_too_long_are_ended(network, tmp_path):
    with pytest.raises(RanksFailedError, match=r"did not end within 0.3 s: ranks 1\n"):
        run_in(network, lambda rank: ["sleep", "1000" if rank == 1 else "0"], 0.3, folder=tmp_path)


def test_a_cluster_in_one_call(network, tmp_path):
    done = run_cluster(
        lambda rank: ["echo", f"hello from {rank}"], network.links[:2], network.links[3:], 30, folder=tmp_path
    )
    assert [output.stdout for output in done.outputs] == [f"hello from {rank}\n" for rank in range(3)]
    assert len(done.counters.haul) == len(done.counters.side) == 3
