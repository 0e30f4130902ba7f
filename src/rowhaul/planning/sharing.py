"""One scheduler for all ranks of a host: it shares its plans through memory.

The rank that plans, the host's *leader*, packs a plan and its samples into an unnamed file and passes its
descriptor over a Unix socket; the other ranks map it. The kernel frees the memory with the last process:
there is nothing to clean up.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from rowhaul._proof import BrokenProofError, prove
from rowhaul._threads import POLL_SECONDS, Failure
from rowhaul.errors import ClusterError
from rowhaul.planning.disagreement import DisagreementError, ranks_text
from rowhaul.planning.packing import ONCE, PlanFiles, unpack
from rowhaul.planning.planner import PlannedBatch
from rowhaul.transport.local_sockets import (
    as_system_address,
    is_same_user,
    lets_in,
    new_address,
    receive_exactly,
)
from rowhaul.transport.remote_errors import read_report, write_report

ARRIVAL_SECONDS = 600.0  # for other ranks to begin: some load more; the heartbeat notices one that dies
CONNECT_SECONDS = 30.0

# The kind of the frame; the size of the attached file, or of the text that follows; the file's number.
_FRAME = struct.Struct("<QQQ")
_PLAN, _END, _ERROR, _SPECIAL = range(4)
_DOING = {  # a rank that sends, or expects, such a frame
    _PLAN: "trains the next batch",
    _END: "is at the end of the data",
    _SPECIAL: "evaluates, saves or counts rows",
}
_HELLO = struct.Struct("<q")  # the rank of a subscriber
_RELEASED = struct.Struct("<Q")  # the number of a file that a subscriber releases
_PURPOSE = "planner"  # of the proof
_NOT_YET = (FileNotFoundError, ConnectionRefusedError, TimeoutError, BlockingIOError)  # it may open soon


class LeaderLostError(ConnectionError, ClusterError):
    """The process that plans for this host has ended without reporting an error."""


class SubscriberLostError(ConnectionError, ClusterError):
    """A process that gets its plans from this one has ended, or never connected."""


class PlanServer:
    """Sends plans to the other ranks of the host.

    Args:
        rank: of this process.
        subscribers: the ranks that will connect.
        failure: of this rank; waits end when it is set.
        address: of the socket: a path, or ``@name`` for a name without a file (Linux); by default a new
            one.
        secret: what subscribers must prove, and this process to them.
    """

    def __init__(
        self,
        rank: int,
        subscribers: Iterable[int],
        failure: Failure,
        address: str | None = None,
        secret: bytes | None = None,
    ) -> None:
        self.address = address or new_address()
        self._secret = secret
        self._rank = rank
        self._expected = frozenset(subscribers)
        self._failure = failure
        self._sockets: dict[int, socket.socket] = {}
        self._files = PlanFiles()
        self._listening = select.poll()
        self._unread: dict[int, bytes] = {}  # incomplete messages of subscribers
        self._has_ended = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(as_system_address(self.address))
            self._listener.listen(len(self._expected) + 1)
        except OSError as error:
            self._listener.close()
            raise OSError(
                error.errno, f"cannot share plans at the socket {self.address}: {error.strerror}"
            ) from error
        self._listener.settimeout(POLL_SECONDS)

    def accept(self, timeout: float = ARRIVAL_SECONDS) -> None:
        """Wait until every subscriber has connected; then stop listening."""
        deadline = time.monotonic() + timeout
        try:
            while missing := self._expected - self._sockets.keys():
                if time.monotonic() > deadline:
                    raise SubscriberLostError(
                        f"{ranks_text(sorted(missing))} did not connect to rank {self._rank}, which plans "
                        f"for this host, within {timeout:g} s; did all of them start? (socket {self.address})"
                    )
                self._failure.check()
                with contextlib.suppress(TimeoutError):
                    self._admit(self._listener.accept()[0])
        finally:
            self._stop_listening()

    def send(self, planned: PlannedBatch) -> None:
        """Send a plan to all subscribers, without the ids by sample, which are in the samples."""
        self._send_plan(_PLAN, planned)

    def send_special(self, planned: PlannedBatch) -> None:
        """Send a plan of no iteration, which subscribers ask for with `PlanClient.next_special`."""
        self._send_plan(_SPECIAL, planned)

    def _send_plan(self, kind: int, planned: PlannedBatch) -> None:
        if not self._sockets:
            return
        self._collect_released()
        number, file, size = self._files.pack(
            replace(planned, plan=replace(planned.plan, ids=None)), self._sockets
        )
        try:
            self._send_all(_FRAME.pack(kind, size, number), [file])
        finally:
            if number == ONCE:
                os.close(file)

    def end(self) -> None:
        """Announce to all subscribers that there are no more plans."""
        self._has_ended = True
        self._send_all(_FRAME.pack(_END, 0, ONCE), [])

    def fail(self, error: BaseException) -> None:
        """Send an error to all subscribers, unless the plans have ended already."""
        if self._has_ended:
            return
        self._has_ended = True
        text = write_report(error, self._rank)
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):  # it has ended, or does not read
                connection.sendall(_FRAME.pack(_ERROR, len(text), ONCE) + text)

    def close(self) -> None:
        """Close all connections."""
        self._stop_listening()
        for connection in self._sockets.values():
            connection.close()
        self._sockets.clear()
        self._files.close()

    def _collect_released(self) -> None:
        """Read which files subscribers have released; does not wait."""
        ready = {descriptor for descriptor, _ in self._listening.poll(0)}
        for rank, connection in self._sockets.items():
            if connection.fileno() in ready:
                unread = self._unread.get(rank, b"")
                with contextlib.suppress(OSError):  # an ended process is detected by the next send
                    unread += connection.recv(4096)
                whole = len(unread) - len(unread) % _RELEASED.size
                for (number,) in _RELEASED.iter_unpack(unread[:whole]):
                    self._files.give_back(number, rank)
                self._unread[rank] = unread[whole:]

    def _admit(self, connection: socket.socket) -> None:
        connection.settimeout(POLL_SECONDS)
        try:
            if not lets_in(connection, self._secret, _PURPOSE):
                raise PermissionError
            (rank,) = _HELLO.unpack(receive_exactly(connection, _HELLO.size, self._failure.check))
            if rank not in self._expected or rank in self._sockets:
                raise ConnectionError
        except (OSError, EOFError):  # a stranger, or a process that died: `accept` names the missing ones
            connection.close()
        else:
            self._sockets[rank] = connection
            self._listening.register(connection, select.POLLIN)

    def _send_all(self, frame: bytes, files: list[int]) -> None:
        for rank, connection in self._sockets.items():
            try:
                self._send(connection, frame, files)
            except OSError as error:
                raise SubscriberLostError(
                    f"rank {rank} does not accept plans from rank {self._rank} of its host any more "
                    f"({error}): its process has ended; see its output"
                ) from error

    def _send(self, connection: socket.socket, frame: bytes, files: list[int]) -> None:
        """Send a frame, which the system takes as a whole, as soon as the socket has room."""
        while True:
            try:
                socket.send_fds(connection, [frame], files)
                return
            except TimeoutError:
                self._failure.check()

    def _stop_listening(self) -> None:
        if self._listener.fileno() == -1:
            return
        self._listener.close()
        if not self.address.startswith("@"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address)


class PlanClient:
    """Receives plans from the leader of the host.

    Args:
        address: the server's.
        rank: of this process.
        leader: the rank that plans, for messages.
        failure: of this rank; waits end when it is set.
        timeout: seconds to wait for the server.
        secret: what the server must prove, and this process to it.
    """

    def __init__(
        self,
        address: str,
        rank: int,
        leader: int,
        failure: Failure,
        timeout: float = CONNECT_SECONDS,
        secret: bytes | None = None,
    ) -> None:
        self._leader = leader
        self._failure = failure
        self._ended = False
        self._error: Exception | None = None
        self._socket = self._connect(address, rank, timeout, secret)

    def next(self) -> PlannedBatch | None:
        """Wait for the next plan; None after the last. Raise the leader's error if it fails.

        Raises:
            DisagreementError: the leader does not train, but makes a plan of no iteration.
        """
        return None if self._ended and self._error is None else self._next(_PLAN)

    def next_special(self) -> PlannedBatch:
        """Wait for the leader's plan of no iteration, before or after the last: how to flush all rows.

        Raises:
            DisagreementError: the leader trains instead.
        """
        planned = self._next(_SPECIAL)
        if planned is None:
            raise self._disagreement(_END, _SPECIAL)
        return planned

    def _next(self, expected: int) -> PlannedBatch | None:
        if self._error is not None:
            raise self._error
        try:
            planned = self._receive_next(expected)
        except (ConnectionResetError, BrokenPipeError, EOFError) as error:
            self._failure.check()
            raise LeaderLostError(
                f"rank {self._leader}, which plans for this host, has ended or closed its plans "
                "without saying why; see its output"
            ) from error
        if self._error is not None:
            raise self._error
        return planned

    def close(self) -> None:
        """Close the connection; plans already received stay valid."""
        self._socket.close()

    def _connect(self, address: str, rank: int, timeout: float, secret: bytes | None) -> socket.socket:
        """Connect and prove the secret; again where the leader has refused this process for being slow."""
        deadline = time.monotonic() + timeout
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(POLL_SECONDS)
            try:
                connection.connect(as_system_address(address))
                if not is_same_user(connection):
                    raise PermissionError(
                        f"the socket {address} of rank {self._leader} belongs to another user"
                    )
                prove(connection, secret, max(POLL_SECONDS, deadline - time.monotonic()), _PURPOSE)
                connection.sendall(_HELLO.pack(rank))
                return connection
            except (*_NOT_YET, BrokenProofError) as error:
                connection.close()
                self._failure.check()
                if time.monotonic() > deadline:
                    what = "answer at" if isinstance(error, BrokenProofError) else "open"
                    raise LeaderLostError(
                        f"rank {self._leader}, which plans for this host, did not {what} its socket "
                        f"{address} within {timeout:g} s ({error}); did it start, on the same host?"
                    ) from error
            except BaseException:
                connection.close()
                raise
            time.sleep(POLL_SECONDS / 10)

    def _disagreement(self, what: int, expected: int) -> DisagreementError:
        return DisagreementError(
            f"rank {self._leader}, which plans for this host, {_DOING[what]} where this rank "
            f"{_DOING[expected]}: every rank, stores too, must train, evaluate and save in the same order; "
            "run the same script on all of them"
        )

    def _receive_next(self, expected: int) -> PlannedBatch | None:
        frame, files = self._receive_frame()
        try:
            what, size, number = _FRAME.unpack(frame)
            if what in (_PLAN, _SPECIAL):
                if what != expected:
                    raise self._disagreement(what, expected)
                if not files:
                    raise OSError(
                        "a plan arrived without its file: this process may open no more files (ulimit -n)"
                    )
                return unpack(files[0], size, partial(_release, self._socket, number))
        finally:
            for file in files:
                os.close(file)
        if what == _ERROR:
            self._error = read_report(receive_exactly(self._socket, size, self._failure.check))
        self._ended = True
        return None

    def _receive_frame(self) -> tuple[bytes, list[int]]:
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        while True:
            try:
                frame, files, _, _ = socket.recv_fds(self._socket, _FRAME.size, 1, flags)
            except TimeoutError:
                self._failure.check()
                continue
            if len(frame) < _FRAME.size:  # frames are sent as a whole
                for file in files:
                    os.close(file)
                raise EOFError("the connection is closed")
            return frame, files


def _release(connection: socket.socket, number: int) -> None:
    """Inform the leader that nothing here refers to a plan any more."""
    if number != ONCE:
        with contextlib.suppress(OSError):  # it has ended, or this end is closed
            connection.sendall(_RELEASED.pack(number))
