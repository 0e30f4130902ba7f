"""The rendezvous store does what torch's does, lets in who proves the secret, and bears strangers."""

import contextlib
import socket
import struct
import threading
from datetime import timedelta

import pytest
from torch.distributed import DistError, TCPStore

from rowhaul._proof import BrokenProofError
from rowhaul.cluster import store_server
from rowhaul.cluster.store_client import PrefixStore, StoreClient
from rowhaul.cluster.store_server import StoreServer

SECRET = b"a secret of this test"


@pytest.fixture
def server():
    made = StoreServer([socket.create_server(("127.0.0.1", 0))], SECRET)
    yield made
    made.close()


def client(server, secret=SECRET):
    return StoreClient(socket.create_connection(("127.0.0.1", server.port)), secret, 20.0)


def conversation(store):
    """What a store answers to every request; the keys include odd ones."""
    store.set("text", "value")
    store.set("bytes", bytes(range(256)))
    store.set("", "empty key")
    store.set("empty", "")
    yield [store.get(key) for key in ("text", "bytes", "", "empty")]
    yield store.check(["text", "bytes"]), store.check(["text", "missing"])
    yield store.add("count", 3), store.add("count", -5), store.get("count")
    store.multi_set(["a", "b"], ["1", "2"])
    yield store.multi_get(["b", "a"])
    store.append("a", "+")
    store.append("new", "first")
    yield store.multi_get(["a", "new"])
    yield store.compare_set("a", "1+", "changed"), store.compare_set("a", "1+", "again")
    yield store.compare_set("fresh", "", "made"), store.compare_set("never", "expected", "x")
    yield store.delete_key("a"), store.delete_key("a"), store.check(["a"])
    yield store.wait(["b"]), store.wait(["b"], timedelta(seconds=1))


def test_it_answers_as_torchs_store_does(server):
    theirs = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for prefix in ("", "x/y"):
        ours_said = list(conversation(PrefixStore(prefix, client(server))))
        assert ours_said == list(conversation(PrefixStore(prefix, theirs)))


def test_a_value_is_waited_for_and_a_wait_ends(server):
    one, other = client(server), client(server)
    threading.Timer(0.2, lambda: other.set("late", "now")).start()
    assert one.get("late") == b"now"
    one.set_timeout(timedelta(seconds=0.1))
    for wait in (lambda: one.get("never"), lambda: one.wait(["late", "never"], timedelta(seconds=0.1))):
        with pytest.raises(DistError, match=r"waited 0\.1 s for never"):
            wait()
    assert one.get("late") == b"now"  # the connection is as good as before


def test_many_clients_count_together(server):
    def count():
        mine = client(server)
        for _ in range(50):
            mine.add("sum", 1)

    threads = [threading.Thread(target=count) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client(server).get("sum") == b"1000"


def test_a_closed_server_ends_waits(server):
    one = client(server)
    threading.Timer(0.2, server.close).start()
    with pytest.raises(DistError, match="the rendezvous store is lost"):
        one.get("never")
    with pytest.raises(DistError, match="the rendezvous store is lost"):
        one.get("never")


@pytest.mark.slow
def test_silent_strangers_make_way(server, monkeypatch):
    monkeypatch.setattr(store_server, "_MOST_UNPROVED", 10)
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
    client(server).set("a", "b")
    closed = 0
    for one in strangers:
        one.settimeout(1.0)  # the last ten stay until they have had time enough
        try:
            closed += one.recv(1) == b""
        except ConnectionResetError:
            closed += 1
        except TimeoutError:
            pass
        one.close()
    assert closed >= 40


@pytest.mark.parametrize(
    "message",
    [struct.pack("<I", 0), struct.pack("<I", 1 << 31), struct.pack("<II", 4, 99), b"\5\0\0\0\1\0\0\0\x63"],
)
def test_nonsense_from_a_rank_ends_its_connection_alone(server, message):
    good, bad = client(server), client(server)
    bad._connection.sendall(message)
    assert bad._connection.recv(1) == b""
    good.set("still", "here")


def test_a_request_that_ctrl_c_has_cut_off_leaves_no_answer_behind(server, monkeypatch):
    one = client(server)
    one.multi_set(["a", "b"], ["of a", "of b"])

    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(one, "_await_answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.get("a")
    monkeypatch.undo()
    with pytest.raises(DistError, match="the rendezvous store is lost"):
        one.get("b")  # not "of a"


def test_a_server_without_a_thread_for_a_peer_serves_the_next(server, monkeypatch):
    def start(run, one):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(server, "_start", start)
    with pytest.raises(BrokenProofError):
        client(server)
    monkeypatch.undo()
    assert not server._unproved
    client(server).set("a", "b")


def test_refusals_are_logged_with_the_address_but_not_without_end(server, caplog):
    for _ in range(70):
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            stranger.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    refusals = [record.getMessage() for record in caplog.records]
    assert len(refusals) == 22  # 20, then the 32nd and the 64th
    assert refusals[0].startswith("the rendezvous store refused a connection (1 so far): 127.0.0.1:")


def test_a_store_lives_as_long_as_a_part_of_it_is_used(server):
    part = PrefixStore("inner", PrefixStore("outer", client(server)))
    part.set("a", "b")
    assert part.get("a") == b"b"
