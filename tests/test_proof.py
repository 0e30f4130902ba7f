"""Both ends of a real socket prove a shared secret; strangers of every kind are refused by name."""

import hmac
import socket
import subprocess
import sys
import threading

import pytest

from rowhaul._proof import demand, prove
from rowhaul.errors import SecretError

SECRET, OTHER = b"correct horse battery", b"another secret of a run"
KINDS = [socket.SOCK_STREAM, socket.SOCK_SEQPACKET]


def outcome(call):
    try:
        call()
    except SecretError as error:
        return str(error)


def exchange(client, server, ours=SECRET, theirs=SECRET, seconds=20.0, purposes=("", "")):
    """What went wrong at the connecting end, and at the listening end."""
    found = []

    def listen():
        found.append(outcome(lambda: demand(server, theirs, seconds, purposes[1])))
        if found[0]:
            server.close()

    thread = threading.Thread(target=listen)
    thread.start()
    said = outcome(lambda: prove(client, ours, seconds, purposes[0]))
    if said:
        client.close()
    thread.join(60)
    return said, found[0]


@pytest.fixture(params=KINDS, ids=["stream", "packets"])
def pair(request):
    ends = socket.socketpair(socket.AF_UNIX, request.param)
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "no secret"])
def test_the_same_on_both_ends_lets_in_and_leaves_the_socket_as_it_was(pair, secret):
    client, server = pair
    client.settimeout(7.0)
    assert exchange(client, server, secret, secret) == (None, None)
    assert client.gettimeout() == 7.0
    assert server.gettimeout() is None
    client.sendall(b"payload")
    assert server.recv(100) == b"payload"  # not a byte of the exchange is left


@pytest.mark.parametrize(
    ("ours", "theirs", "client_says", "server_says"),
    [
        (OTHER, SECRET, "refused this process: it has another secret", "was refused: it has another secret"),
        (None, SECRET, "demands a secret, but this process has none", "has no secret, but this process"),
        (SECRET, None, "has no secret, but this process has one", "demands a secret, but this process"),
    ],
)
def test_other_secrets_are_refused_and_both_ends_say_why(pair, ours, theirs, client_says, server_says):
    said, heard = exchange(*pair, ours, theirs)
    assert client_says in said
    assert server_says in heard
    assert not any(secret.decode() in text for secret in (SECRET, OTHER) for text in (said, heard))


def test_a_proof_for_one_purpose_is_none_for_another(pair):
    said, heard = exchange(*pair, purposes=("plans", "store"))
    assert "refused" in said
    assert "refused" in heard


def test_the_address_of_a_stranger_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        server, address = listener.accept()
        with client, server:
            said, heard = exchange(client, server, OTHER, SECRET)
    assert f"127.0.0.1:{address[1]} was refused" in heard
    assert f"127.0.0.1:{port} refused" in said


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not speak Rowhaul's protocol"),
        (b"r", "did not finish the proof in 0.2 s"),
        (b"", "did not finish the proof in 0.2 s"),
        (b"rowhaul1" + bytes(1) + bytes(32), "has no secret"),
        (b"rowhaul1" + bytes([1]) + bytes(32) + bytes(32), "was refused"),
    ],
)
def test_garbage_silence_and_forgeries_are_refused(sent, says):
    client, server = socket.socketpair()
    with client, server:
        client.sendall(sent)
        assert says in outcome(lambda: demand(server, SECRET, 0.2))


def test_a_stranger_who_leaves_is_refused():
    client, server = socket.socketpair()
    with server:
        client.close()
        assert "broke off during the proof" in outcome(lambda: demand(server, SECRET, 5.0))


def test_slow_drops_of_bytes_do_not_extend_the_time():
    client, server = socket.socketpair()
    over = threading.Event()

    def drip():
        for byte in b"rowhaul1" + bytes(33):
            if over.wait(0.05):
                return
            client.sendall(bytes([byte]))

    with client, server:
        thread = threading.Thread(target=drip)
        thread.start()
        assert "did not finish" in outcome(lambda: demand(server, SECRET, 0.5))
        over.set()
        thread.join()


def test_an_impostor_that_listens_is_refused():
    """It accepts everything, and echoes what the client sent it as its own proof."""
    client, impostor = socket.socketpair()

    def pretend():
        hello = impostor.recv(41)
        impostor.sendall(hello)
        impostor.sendall(b"\1" + impostor.recv(32))

    with client, impostor:
        thread = threading.Thread(target=pretend)
        thread.start()
        assert "cannot prove the secret" in outcome(lambda: prove(client, SECRET, 20.0))
        thread.join()


def test_what_is_sent_is_as_documented_and_never_the_same_twice():
    proofs = set()
    for _ in range(2):
        client, server = socket.socketpair()
        with client, server:
            thread = threading.Thread(target=lambda end=client: outcome(lambda: prove(end, SECRET, 20.0)))
            thread.start()
            hello = server.recv(41)
            assert hello[:9] == b"rowhaul1\1"
            server.sendall(b"rowhaul1\1" + bytes(32))
            proof = server.recv(32)
            assert proof == hmac.digest(SECRET, b"rowhaul proof 1 client" + hello[9:] + bytes(32), "sha256")
            proofs.add(proof)
            server.close()
            thread.join()
    assert len(proofs) == 2


def test_it_needs_the_standard_library_only():
    script = "import sys, rowhaul.cluster.secret; print(*({'torch', 'numpy', 'numba'} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.strip() == ""
