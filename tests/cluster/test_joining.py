"""Three real processes join, talk, disagree and leave."""

import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_processes import go, started

from rowhaul._ports import free_port
from rowhaul.cluster import Place, Timeouts, join
from rowhaul.errors import ClusterError
from rowhaul.transport.in_process import InProcessNetwork

MEETING = """
def refusal(call):
    try:
        call()
    except ClusterError as error:
        return str(error)

with join(num_stores=1, timeouts=Timeouts(arrival=90)) as cluster:
    got = np.zeros(3, np.uint8)
    ahead, behind = (rank + 1) % 3, (rank - 1) % 3
    transfer = cluster.moves.post({behind: got}, {ahead: np.full(3, rank, np.uint8)})
    transfer.wait_received(); transfer.wait_sent()
    total = torch.full((5,), float(rank * rank + 1))
    if cluster.dense is not None:
        cluster.dense.sum_in_rank_order(total)
    say(role=cluster.role, got=got.tolist(), dense=total.tolist(), leader=cluster.leader,
        hosts=cluster.hosts, interface=cluster.interface.name, variable=os.environ.get("GLOO_SOCKET_IFNAME"),
        gathered=cluster.control.all_gather(np.array([rank], np.uint8)).ravel().tolist())
    facts = {"batch size": "256" if rank == 1 else "512", "seed": "7"}
    facts |= {"extra": "x"} if rank == 2 else {}
    say(differing=refusal(lambda: check_same(cluster, facts)))
    say(same=refusal(lambda: check_same(cluster, {"seed": "7"})))
    folder = os.environ["FOLDER"]
    say(shared=refusal(lambda: check_shared_folder(cluster, folder, "checkpoints")))
    own = folder if rank != 2 else folder + "-elsewhere"
    say(apart=refusal(lambda: check_shared_folder(cluster, own, "checkpoints", seconds=0.5)))
    if rank != 1:
        say(alone=refusal(lambda: require_all(cluster, "save", seconds=3.0)))
    for _ in range(3):
        require_all(cluster, "evaluate")
    say(met=True)
say(initialised=dist.is_initialized())
with join(colocated=True) as again:
    say(again=again.control.all_gather(np.array([rank], np.uint8)).ravel().tolist())
"""


@pytest.fixture(scope="module")
def meeting(tmp_path_factory):
    with started(MEETING, 3, FOLDER=str(tmp_path_factory.mktemp("shared"))) as ranks:
        reports = [rank.wait(100) for rank in ranks]
        for rank, report in zip(ranks, reports, strict=True):
            assert report["code"] == 0, "".join(rank.errors)
        return reports


def test_messages_reach_the_rank_they_are_for(meeting):
    assert [report["got"] for report in meeting] == [[2] * 3, [0] * 3, [1] * 3]
    assert all(report["gathered"] == [0, 1, 2] for report in meeting)


def test_workers_come_first_and_stores_have_no_dense_group(meeting):
    assert [report["role"] for report in meeting] == ["worker 0", "worker 1", "store 0"]
    assert [report["dense"][0] for report in meeting] == [3.0, 3.0, 5.0]


def test_ranks_of_one_host_find_each_other_and_their_leader(meeting):
    assert all(report["hosts"] == [[0, 1, 2]] and report["leader"] == 2 for report in meeting)


def test_the_interface_leads_to_the_master_and_the_environment_is_restored(meeting):
    assert all(report["interface"].startswith("lo") for report in meeting)
    assert all(report["variable"] is None for report in meeting)


def test_differing_facts_are_named_with_values_and_ranks_on_every_rank(meeting):
    messages = {report["differing"] for report in meeting}
    assert len(messages) == 1
    (message,) = messages
    assert "batch size: 512 on ranks 0, 2; 256 on rank 1" in message
    assert "extra: (not given) on ranks 0-1; x on rank 2" in message
    assert "seed" not in message
    assert all(report["same"] is None for report in meeting)


def test_a_folder_that_is_not_shared_is_named_with_the_ranks_that_do_not_see_it(meeting):
    assert all(report["shared"] is None for report in meeting)
    for report in meeting:
        assert "rank 2 (store 0)" in report["apart"]
        assert "checkpoints" in report["apart"]


def test_a_collective_call_on_some_ranks_only_names_the_others(meeting):
    for rank in (0, 2):
        assert "rank 1 (worker 1) did not join in 'save' within 3 s" in meeting[rank]["alone"]
    assert all(report["met"] for report in meeting)


def test_nothing_is_left_after_closing_and_ranks_can_join_again(meeting):
    assert all(report["initialised"] is False and report["again"] == [0, 1, 2] for report in meeting)


MISSING = """
wait_for_go()
try:
    join(timeouts=Timeouts(arrival=4, master=60))
except ClusterError as error:
    say(error=str(error), initialised=dist.is_initialized())
"""


@pytest.mark.slow
def test_a_rank_that_does_not_start_is_named_by_the_others():
    with started(MISSING, 4, ranks=[0, 1, 2]) as ranks:
        go(ranks)
        reports = [rank.wait(100) for rank in ranks]
    assert "rank 3 (store 0) of 4 did not arrive within 4 s" in reports[0]["error"]
    # A rank that starts much later than another may find that one gone already.
    assert any("rank 3 (store 0) of 4" in report["error"] for report in reports[1:])
    assert not any(report["initialised"] for report in reports)


DIES_WHILE_STARTING = """
import rowhaul.cluster.joining as joining
if rank == 2:
    def die(*arguments): os._exit(1)
    joining.GlooTransport.connect = die
try:
    join(timeouts=Timeouts(arrival=90))
except ClusterError as error:
    say(error=str(error), kind=type(error).__name__, initialised=dist.is_initialized())
"""


@pytest.mark.slow
def test_a_rank_that_dies_while_starting_is_named_and_no_half_made_group_is_left():
    with started(DIES_WHILE_STARTING, 3) as ranks:
        reports = [rank.wait(100) for rank in ranks[:2]]
    for report in reports:
        assert report["error"].startswith("rank 2 (store 0) has ended without a word")
        assert report["kind"] == "RankLostError"
        assert report["initialised"] is False


DIES_WHILE_TALKING = """
try:
    with join(colocated=True, timeouts=Timeouts(arrival=90)) as cluster:
        if cluster.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        received = np.empty(1240, np.uint8)
        cluster.moves.post({1: received}, {}).wait_received()
except RowhaulError as error:
    say(error=str(error), kind=type(error).__name__)
"""


@pytest.mark.slow
def test_a_connection_that_breaks_in_the_users_own_thread_is_explained_by_the_rank_that_is_gone():
    with started(DIES_WHILE_TALKING, 2) as ranks:
        report = ranks[0].wait(100)
    assert report["error"].startswith("rank 1 (worker 1) has ended without a word")
    assert report["kind"] == "RankLostError"


@pytest.fixture
def variables(monkeypatch):
    def set_all(**values):
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        for name, value in {"MASTER_ADDR": "127.0.0.1", "RANK": 0, "WORLD_SIZE": 2, **values}.items():
            monkeypatch.setenv(name, str(value))

    return set_all


def test_a_port_in_use_is_named_with_what_to_change(variables):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        variables(MASTER_PORT=port)
        with pytest.raises(ClusterError, match=rf"port {port} of this host is in use.*MASTER_PORT"):
            join(timeouts=Timeouts(master=5))
    assert not dist.is_initialized()


def test_an_unreachable_master_is_told_with_what_was_tried(variables):
    with socket.socket() as closed:  # bound, but nobody listens
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        variables(MASTER_PORT=port, RANK=1)
        with pytest.raises(ClusterError) as caught:
            join(timeouts=Timeouts(master=0.6))
    for part in (f"127.0.0.1:{port}", "interface lo", "local address 127.0.0.1", "refused", "0.6 s"):
        assert part in str(caught.value)


def test_a_master_that_is_something_else_is_told(variables):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        variables(MASTER_PORT=silent.getsockname()[1], RANK=1)
        with pytest.raises(ClusterError, match="did not finish the proof in"):
            join(timeouts=Timeouts(master=0.6))


def test_a_master_whose_name_is_unknown_is_told(variables):
    variables(MASTER_PORT=1234, RANK=1, MASTER_ADDR="no-such-host.invalid")
    with pytest.raises(ClusterError, match=r"no-such-host.invalid:1234 \(no route to it\)"):
        join(timeouts=Timeouts(master=0.3))


def test_variables_that_are_missing_or_wrong_are_named(variables, monkeypatch):
    variables(MASTER_PORT="x")
    with pytest.raises(ClusterError, match="MASTER_PORT must be a whole number; got 'x'"):
        join()
    variables(MASTER_PORT=1, RANK=2)
    with pytest.raises(ClusterError, match="RANK=2 and WORLD_SIZE=2"):
        join()
    monkeypatch.delenv("RANK")
    with pytest.raises(ClusterError, match=r"RANK not set.*torchrun"):
        join()


def test_more_stores_than_ranks_are_refused(variables):
    variables(MASTER_PORT=1)
    with pytest.raises(ClusterError, match=r"2 ranks cannot hold 2 stores .* start at least 3 ranks"):
        join(num_stores=2)


def test_a_transport_can_be_given():
    """Ranks that are threads of one process join over the in-process network."""
    network = InProcessNetwork(3)
    port = free_port()

    def run(rank):
        place = Place(rank, 3, "127.0.0.1", port)
        with join(num_stores=1, place=place, transport=network) as cluster:
            ranks = cluster.control.all_gather(np.array([cluster.rank], np.uint8))
            values = torch.full((4,), 1.0 + cluster.rank)
            if cluster.dense is not None:
                cluster.dense.sum_in_rank_order(values)
            got = np.zeros(1, np.uint8)
            others = (rank - 1) % 3, (rank + 1) % 3
            for links in (cluster.moves, cluster.data):
                links.post({others[0]: got}, {others[1]: np.array([rank], np.uint8)}).wait_received()
            return cluster.role, ranks.tolist(), values[0].item(), int(got[0])

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(run, range(3)))
    assert results == [
        ("worker 0", [[0], [1], [2]], 3.0, 2),
        ("worker 1", [[0], [1], [2]], 3.0, 0),
        ("store 0", [[0], [1], [2]], 3.0, 1),
    ]
    assert not dist.is_initialized()
