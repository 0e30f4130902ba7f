"""Connecting to a process of the same host: again where it has refused this one for being slow."""

import socket
import threading

import pytest

from rowhaul._proof import BrokenProofError
from rowhaul.errors import SecretError
from rowhaul.transport.local_sockets import as_system_address, connect, lets_in, new_address

SECRET = b"a secret of this test"


@pytest.fixture
def listener():
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
        address = new_address()
        made.bind(as_system_address(address))
        made.listen(1)
        made.settimeout(60)
        yield made, address


def accept(listener, num_refused):
    for _ in range(num_refused):
        listener.accept()[0].close()
    connection = listener.accept()[0]
    if lets_in(connection, SECRET, "test"):
        connection.sendall(b"hello")
    connection.close()


def test_a_process_that_was_too_slow_tries_again(listener):
    accepting = threading.Thread(target=accept, args=(listener[0], 3))
    accepting.start()
    with connect(listener[1], SECRET, "test", 60, socket.SOCK_SEQPACKET) as connection:
        assert connection.recv(5) == b"hello"
    accepting.join()


def test_a_full_queue_of_strangers_is_waited_for(listener):
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    for one in strangers:
        one.connect(as_system_address(listener[1]))
    threading.Timer(0.3, accept, args=(listener[0], 2)).start()
    with connect(listener[1], SECRET, "test", 60, socket.SOCK_SEQPACKET) as connection:
        assert connection.recv(5) == b"hello"
    for one in strangers:
        one.close()


def test_another_secret_is_refused_at_once_and_silence_in_the_end(listener):
    accepting = threading.Thread(target=accept, args=(listener[0], 0))
    accepting.start()
    with pytest.raises(SecretError, match="another secret"):
        connect(listener[1], b"a secret of another run", "test", 60, socket.SOCK_SEQPACKET)
    accepting.join()
    with pytest.raises(BrokenProofError, match="did not finish the proof"):
        connect(listener[1], SECRET, "test", 0.3, socket.SOCK_SEQPACKET)
