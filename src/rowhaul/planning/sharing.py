"""One scheduler for all ranks of a host: its plans reach the others through shared memory.

The rank that plans, the host's *leader*, packs a plan and its samples into a file that has no name and
passes its descriptor over a Unix socket; the other ranks map it. Whatever happens to any of the
processes, the kernel frees the memory with the last of them: nothing is left to clean up.
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

from rowhaul._threads import Failure
from rowhaul.errors import ClusterError
from rowhaul.planning.packing import unpack
from rowhaul.planning.plan_files import ONCE, PlanFiles
from rowhaul.planning.planner import PlannedBatch
from rowhaul.transport.local_sockets import as_system_address, is_same_user, new_address, receive_exactly
from rowhaul.transport.remote_errors import read_report, write_report

CONNECT_SECONDS = 30.0

_PATIENCE = 0.2  # seconds between two looks at whether something has failed
# What comes; its size, of the file that comes along or of the text; the file's number.
_FRAME = struct.Struct("<QQQ")
_PLAN, _END, _ERROR = range(3)
_HELLO = struct.Struct("<q")  # the rank of a subscriber
_GIVEN_BACK = struct.Struct("<Q")  # the number of a file that a subscriber is done with


class LeaderLostError(ClusterError):
    """The process that plans for this host has ended, or closed its plans, without a word."""


class SubscriberLostError(ClusterError):
    """A process that takes its plans from this one has ended, or never came."""


class PlanServer:
    """Sends plans to the other ranks of the host.

    Args:
        rank: of this process.
        subscribers: the ranks that will connect.
        failure: of this rank; waiting for a subscriber ends when it is set.
        address: of the socket: a path, or ``@name`` for a name without a file (Linux). By default a new
            one, to be told to the subscribers as `address`.
    """

    def __init__(
        self, rank: int, subscribers: Iterable[int], failure: Failure, address: str | None = None
    ) -> None:
        self.address = address or new_address()
        self._rank = rank
        self._expected = frozenset(subscribers)
        self._failure = failure
        self._sockets: dict[int, socket.socket] = {}
        self._files = PlanFiles()
        self._listening = select.poll()
        self._told: dict[int, bytes] = {}  # by subscribers, of files, and not read yet
        self._said_all = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(as_system_address(self.address))
            self._listener.listen(len(self._expected) + 1)
        except OSError as error:
            self._listener.close()
            raise OSError(
                error.errno, f"cannot share plans at the socket {self.address}: {error.strerror}"
            ) from error
        self._listener.settimeout(_PATIENCE)

    def accept(self, timeout: float = CONNECT_SECONDS) -> None:
        """Wait until every subscriber has connected; then the address is not needed any more."""
        deadline = time.monotonic() + timeout
        try:
            while missing := self._expected - self._sockets.keys():
                if time.monotonic() > deadline:
                    raise SubscriberLostError(
                        f"{_ranks(missing)} did not connect to rank {self._rank}, which plans for this host, "
                        f"within {timeout:g} s; did all of them start? (socket {self.address})"
                    )
                self._failure.check()
                with contextlib.suppress(TimeoutError):
                    self._welcome(self._listener.accept()[0])
        finally:
            self._stop_listening()

    def send(self, planned: PlannedBatch) -> None:
        """Send a plan to all subscribers, without the ids by sample: they have them in the samples."""
        if not self._sockets:
            return
        self._take_back()
        number, file, size = self._files.pack(
            replace(planned, plan=replace(planned.plan, ids=None)), self._sockets
        )
        try:
            self._tell_all(_FRAME.pack(_PLAN, size, number), [file])
        finally:
            if number == ONCE:
                os.close(file)

    def end(self) -> None:
        """Tell all subscribers that there are no more plans."""
        self._said_all = True
        self._tell_all(_FRAME.pack(_END, 0, ONCE), [])

    def fail(self, error: BaseException) -> None:
        """Tell all subscribers that are still there what went wrong, unless they know how it ended."""
        if self._said_all:
            return
        self._said_all = True
        text = write_report(error, self._rank)
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):  # a timeout too: who takes nothing cannot be told
                connection.sendall(_FRAME.pack(_ERROR, len(text), ONCE) + text)

    def close(self) -> None:
        """Close all connections."""
        self._stop_listening()
        for connection in self._sockets.values():
            connection.close()
        self._sockets.clear()
        self._files.close()

    def _take_back(self) -> None:
        """Hear which files subscribers are done with; does not wait."""
        ready = {descriptor for descriptor, _ in self._listening.poll(0)}
        for rank, connection in self._sockets.items():
            if connection.fileno() in ready:
                with contextlib.suppress(OSError):  # who has ended is found out when it is told something
                    self._told[rank] = self._told.get(rank, b"") + connection.recv(4096)
                told = self._told.get(rank, b"")
                whole = len(told) - len(told) % _GIVEN_BACK.size
                for (number,) in _GIVEN_BACK.iter_unpack(told[:whole]):
                    self._files.give_back(number, rank)
                self._told[rank] = told[whole:]

    def _welcome(self, connection: socket.socket) -> None:
        connection.settimeout(_PATIENCE)
        try:
            if not is_same_user(connection):
                raise PermissionError
            (rank,) = _HELLO.unpack(receive_exactly(connection, _HELLO.size, self._failure.check))
            if rank not in self._expected or rank in self._sockets:
                raise ConnectionError
        except (
            OSError,
            EOFError,
        ):  # a stranger, or a process that died on the way: `accept` names who is missing
            connection.close()
        else:
            self._sockets[rank] = connection
            self._listening.register(connection, select.POLLIN)

    def _tell_all(self, frame: bytes, files: list[int]) -> None:
        for rank, connection in self._sockets.items():
            try:
                self._tell(connection, frame, files)
            except OSError as error:
                raise SubscriberLostError(
                    f"rank {rank} does not take plans from rank {self._rank} of its host any more ({error}): "
                    "its process has ended; see its output"
                ) from error

    def _tell(self, connection: socket.socket, frame: bytes, files: list[int]) -> None:
        """Send a frame, which the system takes as a whole, as soon as there is room for it."""
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
    """Takes plans from the leader of the host.

    Args:
        address: the server's.
        rank: of this process.
        leader: the rank that plans, for messages.
        failure: of this rank; waiting for a plan ends when it is set.
        timeout: seconds to wait for the server to be there.
    """

    def __init__(
        self, address: str, rank: int, leader: int, failure: Failure, timeout: float = CONNECT_SECONDS
    ) -> None:
        self._leader = leader
        self._failure = failure
        self._ended = False
        self._error: Exception | None = None
        self._socket = self._connect(address, timeout)
        try:
            if not is_same_user(self._socket):
                raise PermissionError(f"the socket {address} of rank {leader} belongs to another user")
            self._socket.sendall(_HELLO.pack(rank))
        except BaseException:
            self._socket.close()
            raise

    def next(self) -> PlannedBatch | None:
        """The next plan, once it is there; None after the last. Raises what the leader failed with."""
        return None if self._ended and self._error is None else self.next_special()

    def next_special(self) -> PlannedBatch | None:
        """What the leader sends next, also after the last plan of an iteration: how to settle all rows."""
        if self._error is not None:
            raise self._error
        try:
            planned = self._receive_next()
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
        """Close the connection; plans already taken stay as they are."""
        self._socket.close()

    def _connect(self, address: str, timeout: float) -> socket.socket:
        deadline = time.monotonic() + timeout
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(_PATIENCE)
            try:
                connection.connect(as_system_address(address))
                return connection
            except (FileNotFoundError, ConnectionRefusedError, TimeoutError, BlockingIOError) as error:
                connection.close()
                self._failure.check()
                if time.monotonic() > deadline:
                    raise LeaderLostError(
                        f"rank {self._leader}, which plans for this host, did not open its socket {address} "
                        f"within {timeout:g} s ({error}); did it start, on the same host?"
                    ) from error
            except BaseException:
                connection.close()
                raise
            time.sleep(_PATIENCE / 10)

    def _receive_next(self) -> PlannedBatch | None:
        frame, files = self._receive_frame()
        try:
            what, size, number = _FRAME.unpack(frame)
            if what == _PLAN:
                if not files:
                    raise OSError(
                        "a plan came without its file: this process may open no more files (ulimit -n)"
                    )
                return unpack(files[0], size, partial(_give_back, self._socket, number))
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


def _give_back(connection: socket.socket, number: int) -> None:
    """Tell the leader that nothing here refers to a plan any more."""
    if number != ONCE:
        with contextlib.suppress(OSError):  # it has ended, or this end is closed
            connection.sendall(_GIVEN_BACK.pack(number))


def _ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
