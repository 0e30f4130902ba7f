"""Proof of a shared secret between two ends of a socket, by challenge and response.

Each end sends a random challenge; each answers with an HMAC-SHA256 of both challenges under the secret, the
connecting end first, so that a stranger who connects learns nothing to guess from. The secret itself is never
sent. Messages have fixed sizes and each is sent whole, so stream and packet sockets both work. It uses the
standard library alone: small processes without PyTorch need it too.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

from rowhaul.errors import SecretError

_MAGIC = b"rowhaul1"
_NONCE_BYTES = _MAC_BYTES = 32
_HELLO_BYTES = len(_MAGIC) + 1 + _NONCE_BYTES
_ACCEPTED, _REFUSED = b"\1", b"\0"


class BrokenProofError(SecretError):
    """The other end left, was silent or speaks another protocol: it is no rank, or not ready yet."""


def demand(connection: socket.socket, secret: bytes | None, seconds: float, purpose: str = "") -> None:
    """Demand a proof of the secret from the connecting end, then prove it in turn; for the listening end.

    Without a secret, only check that the other end is Rowhaul and has none either.

    Args:
        connection: a connected socket; its timeout is the same afterwards.
        secret: the shared secret, or None.
        seconds: time limit of the whole exchange.
        purpose: what the connection is for; both ends must say the same.

    Raises:
        SecretError: the other end is a stranger, has another secret, or only one end has one; close the
            socket.
    """
    with _Exchange(connection, seconds) as exchange:
        theirs, has_secret = exchange.receive_hello()
        ours = exchange.send_hello(secret)
        _check_both(secret, has_secret, exchange.peer)
        if secret is None:
            return
        proof = exchange.receive(_MAC_BYTES)
        if not hmac.compare_digest(proof, _mac(secret, b"client", purpose, theirs, ours)):
            exchange.send(_REFUSED + bytes(_MAC_BYTES))
            raise SecretError(f"{exchange.peer} was refused: it has another secret than this process")
        exchange.send(_ACCEPTED + _mac(secret, b"server", purpose, theirs, ours))


def prove(connection: socket.socket, secret: bytes | None, seconds: float, purpose: str = "") -> None:
    """Prove the secret, then demand the same proof; at the end that connects. Arguments as of `demand`."""
    with _Exchange(connection, seconds) as exchange:
        ours = exchange.send_hello(secret)
        theirs, has_secret = exchange.receive_hello()
        _check_both(secret, has_secret, exchange.peer)
        if secret is None:
            return
        exchange.send(_mac(secret, b"client", purpose, ours, theirs))
        verdict = exchange.receive(1 + _MAC_BYTES)
        if verdict[:1] != _ACCEPTED:
            raise SecretError(f"{exchange.peer} refused this process: it has another secret")
        if not hmac.compare_digest(verdict[1:], _mac(secret, b"server", purpose, ours, theirs)):
            raise SecretError(f"{exchange.peer} cannot prove the secret: it is not one of this run")


class _Exchange:
    """Messages of known sizes within a time limit."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self.peer = _peer_name(connection)
        self._connection, self._seconds = connection, seconds
        self._deadline = time.monotonic() + seconds
        self._timeout = connection.gettimeout()

    def __enter__(self) -> _Exchange:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._connection.settimeout(self._timeout)
        if isinstance(error, TimeoutError):
            raise BrokenProofError(f"{self.peer} did not finish the proof in {self._seconds:g} s") from None
        if isinstance(error, OSError):
            raise BrokenProofError(
                f"{self.peer} broke off during the proof of the secret ({error})"
            ) from None

    def send_hello(self, secret: bytes | None) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self.send(_MAGIC + bytes([secret is not None]) + nonce)
        return nonce

    def receive_hello(self) -> tuple[bytes, bool]:
        """Return the other end's challenge, and whether it has a secret."""
        hello = self.receive(_HELLO_BYTES, begins_with=_MAGIC)
        return hello[len(_MAGIC) + 1 :], hello[len(_MAGIC)] == 1

    def send(self, message: bytes) -> None:
        self._limit()
        self._connection.sendall(message)

    def receive(self, size: int, begins_with: bytes = b"") -> bytes:
        received = b""
        while len(received) < size:
            self._limit()
            part = self._connection.recv(size - len(received))
            if not part:
                raise ConnectionResetError("it closed the connection")
            received += part
            if not begins_with.startswith(received[: len(begins_with)]):
                raise BrokenProofError(f"{self.peer} does not speak Rowhaul's protocol")
        return received

    def _limit(self) -> None:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self._connection.settimeout(remaining)


def _check_both(secret: bytes | None, other_has: bool, peer: str) -> None:
    if secret is not None and not other_has:
        raise SecretError(
            f"{peer} has no secret, but this process has one: give every rank the same --secret-file or "
            "ROWHAUL_SECRET"
        )
    if secret is None and other_has:
        raise SecretError(
            f"{peer} demands a secret, but this process has none: give it the run's --secret-file or "
            "ROWHAUL_SECRET"
        )


def _mac(secret: bytes, side: bytes, purpose: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    # All parts before the last have fixed lengths, so that no two inputs give the same text.
    return hmac.digest(
        secret, b"rowhaul proof 1 " + side + client_nonce + server_nonce + purpose.encode(), "sha256"
    )


def _peer_name(connection: socket.socket) -> str:
    if connection.family == getattr(socket, "AF_UNIX", None):
        return "a process of this host"
    try:
        host, port, *_ = connection.getpeername()
    except OSError:
        return "a peer that has left"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
