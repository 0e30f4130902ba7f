"""Starts all ranks on this machine, watches them, and ends them all when one dies.

The children get torchrun's variables in their environment and run as they would on a cluster. The
launcher hosts the rendezvous store, because it outlives every rank, and makes a secret for it. Each child is
a process group of its own: Ctrl-C reaches the launcher alone, which forwards it. A service manager may send
SIGTERM to all of them at once, and each rank gets it again when it is forwarded: a rank takes it once, saves
and ends. Ctrl-Z stops the launcher, and its store with it, so it stops the ranks and their watchdogs, too:
none that runs may wait for one that does not.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from rowhaul._cores import usable_cores
from rowhaul._ports import free_port
from rowhaul.cluster import tied_child
from rowhaul.cluster.place import EXIT_PEER_ENDED, STORE_VARIABLE, require_linux, roles_of
from rowhaul.cluster.secret import VARIABLE as SECRET_VARIABLE
from rowhaul.cluster.store_server import StoreServer, backlog
from rowhaul.errors import ClusterError

GRACE_SECONDS = 300.0  # after SIGTERM: ranks may be saving a large checkpoint
_POLL = 0.05  # seconds between two checks of the children
_NOTICING_SECONDS = 2.0  # in which the other ranks notice a loss, and end with a message of their own
_INTERRUPTED = 130  # the exit code of a rank that was asked to stop
_STOPPED_EARLY = (-signal.SIGTERM, -signal.SIGINT)  # by a signal, before it could handle one
_TAIL_LINES, _TAIL_BYTES = 20, 16384


@dataclass
class _Child:
    rank: int
    role: str
    process: subprocess.Popen[bytes]
    output: IO[bytes] | None  # None: the launcher's own output

    @property
    def ending(self) -> str:
        """How it ended, for messages."""
        code = self.process.returncode
        if code >= 0:
            return f"ended with exit code {code}"
        return f"was killed by {signal.Signals(-code).name}"


def launch(
    arguments: Sequence[str],
    num_workers: int,
    num_stores: int = 1,
    colocated: bool = False,
    *,
    command: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
    grace_seconds: float = GRACE_SECONDS,
    loss_seconds: float = 5.0,
) -> None:
    """Run a command as several ranks on this machine; return when all have succeeded.

    Rank 0 writes to this process's terminal; the output of the others is shown if they fail. Ctrl-C and
    SIGTERM are forwarded to all ranks. A second Ctrl-C kills them; a second SIGTERM does nothing. A process
    that ignores SIGINT, as a background job does, keeps ignoring it; SIGTERM ends it. Ctrl-Z stops this
    process and the ranks until it is continued.

    Args:
        arguments: of the command.
        num_workers: ranks that train.
        num_stores: ranks that only store; not used when co-located.
        colocated: workers store the rows.
        command: the command; by default ``python -m rowhaul``.
        environment: more variables for the children.
        grace_seconds: between forwarding SIGTERM and killing the ranks that still run.
        loss_seconds: between terminating the ranks that outlive a dead one and killing them.

    Raises:
        ClusterError: a rank died; the message says which, how, and its last output.
        KeyboardInterrupt: Ctrl-C was forwarded, or a rank was asked to stop, and all ranks have ended; with a
            text if they were killed.
    """
    require_linux()
    if num_workers < 1:
        raise ClusterError(f"the number of workers must be at least 1; got {num_workers}")
    if not colocated and num_stores < 1:
        raise ClusterError(f"the number of stores must be at least 1, or co-located; got {num_stores}")
    num_ranks = num_workers + (0 if colocated else num_stores)
    roles = roles_of(num_ranks, num_workers)
    whole = [*(command or (sys.executable, "-m", "rowhaul")), *arguments]
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=backlog(num_ranks)))
        signals = stack.enter_context(_recorded(signal.SIGINT, signal.SIGTERM))
        stops = stack.enter_context(_recorded(signal.SIGTSTP))
        children = _Children(grace_seconds, loss_seconds)
        stack.callback(children.kill)
        secret = secrets.token_hex(32)  # of this run alone
        store = StoreServer([listener], secret.encode())
        stack.callback(store.close)
        run = _variables(num_ranks, store.port) | {SECRET_VARIABLE: secret}
        variables = {**os.environ, **run, **(environment or {})}
        for rank, role in enumerate(roles):
            # A file without a name: nothing is left behind even if this process is killed.
            output = stack.enter_context(tempfile.TemporaryFile()) if rank else None
            children.start(rank, role, whole, variables, output)
        children.watch(signals, stops)
    if children.aborted:
        raise KeyboardInterrupt("the ranks were killed")
    if signals:  # the children have ended: now act on the first one
        signal.raise_signal(signals[0])
    elif children.stopped:
        raise KeyboardInterrupt


class _Children:
    """The processes, in the order of ranks."""

    def __init__(self, grace_seconds: float, loss_seconds: float) -> None:
        self.aborted = False  # by a second Ctrl-C
        self.stopped = False  # by a signal that one of them got, and that all have followed
        self._children: list[_Child] = []
        self._grace_seconds, self._loss_seconds = grace_seconds, loss_seconds
        self._num_handled = self._num_interrupts = 0
        self._terminated = False
        self._kill_at = float("inf")

    def start(
        self,
        rank: int,
        role: str,
        command: Sequence[str],
        variables: Mapping[str, str],
        output: IO[bytes] | None,
    ) -> None:
        tied = [sys.executable, "-I", "-S", tied_child.__file__, str(os.getpid()), *command]
        environment = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = subprocess.Popen(
            tied, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, process_group=0
        )
        self._children.append(_Child(rank, role, process, output))

    def watch(self, signals: Sequence[int], stops: list[int]) -> None:
        """Return when all have succeeded or have ended after a signal; if one fails, end the others.

        Args:
            signals: to end the run, that have come so far.
            stops: the same by Ctrl-Z; emptied when the ranks have stopped and gone on.
        """
        dead: _Child | None = None
        last_output, terminate_at, out_of_time = "", float("inf"), False
        while any(child.process.poll() is None for child in self._children):
            self._handle(signals)
            if stops:
                self._stop()
                stops.clear()
            now = time.monotonic()
            if dead is None and (dead := self._first_dead(signals)) is not None:
                last_output = _last_output(dead)
                terminate_at = now + _NOTICING_SECONDS
                self._kill_at = min(self._kill_at, terminate_at + self._loss_seconds)
            if now > terminate_at:
                terminate_at = float("inf")
                self._send(signal.SIGTERM)
            if now > self._kill_at:
                out_of_time = dead is None
                self.kill()
            time.sleep(_POLL)
        if self.aborted:
            return
        if out_of_time:
            raise ClusterError(
                f"ranks had not ended {self._grace_seconds:g} s after SIGTERM, and were killed: --resume "
                "goes on from the last checkpoint. To give them more time, set cluster.grace"
            )
        dead = dead or self._first_dead(signals)
        codes = {child.process.returncode for child in self._children}
        self.stopped = not signals and _INTERRUPTED in codes and codes <= {0, _INTERRUPTED, *_STOPPED_EARLY}
        if self.stopped or (signals and dead is not None and dead.process.returncode in _STOPPED_EARLY):
            return
        if dead is not None:
            raise ClusterError(
                f"rank {dead.rank} ({dead.role}) {dead.ending}; the other ranks were ended"
                + (last_output or _last_output(dead))
            )

    def kill(self) -> None:
        """Kill all running children."""
        for child in self._children:
            if child.process.poll() is None:
                child.process.kill()
        for child in self._children:
            child.process.wait()

    def _first_dead(self, signals: Sequence[int]) -> _Child | None:
        """Return the failed child that is the most likely cause: a killed one before the others.

        Those that ended because of another one come last.
        """
        good = (None, 0, _INTERRUPTED) if signals else (None, 0)
        ended = [child for child in self._children if child.process.poll() not in good]
        return min(ended, key=_after_causes, default=None)

    def _handle(self, signals: Sequence[int]) -> None:
        """Forward new signals; kill at a second Ctrl-C, ignore a second SIGTERM."""
        for number in signals[self._num_handled :]:
            self._num_handled += 1
            if number == signal.SIGINT:
                self._num_interrupts += 1
                self.aborted = self._num_interrupts > 1
                self.kill() if self.aborted else self._send(number)
            elif not self._terminated:
                self._terminated = True
                self._kill_at = min(self._kill_at, time.monotonic() + self._grace_seconds)
                self._send(number)

    def _stop(self) -> None:
        """Stop the ranks and this process, until somebody continues it.

        By the default action, as nothing else may stop a process that no shell could continue.
        """
        began = time.monotonic()
        self._send_to_groups(signal.SIGSTOP)
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, before)
        self._send_to_groups(signal.SIGCONT)
        self._kill_at += time.monotonic() - began

    def _send(self, number: int) -> None:
        for child in self._children:
            if child.process.poll() is None:
                child.process.send_signal(number)

    def _send_to_groups(self, number: int) -> None:
        for child in self._children:
            if child.process.poll() is None:
                os.killpg(child.process.pid, number)


def _after_causes(child: _Child) -> tuple[bool, bool, int]:
    code = child.process.returncode
    return code == EXIT_PEER_ENDED, code >= 0, child.rank


def _variables(num_ranks: int, store_port: int) -> dict[str, str]:
    found = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        STORE_VARIABLE: f"127.0.0.1:{store_port}",
        "MASTER_ADDR": "127.0.0.1",  # for groups that the command makes itself
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    if "OMP_NUM_THREADS" not in os.environ:
        num_cores = usable_cores()
        found["OMP_NUM_THREADS"] = str(max(1, num_cores // num_ranks))
    return found


@contextlib.contextmanager
def _recorded(*numbers: int) -> Iterator[list[int]]:
    """Record signals instead of acting on them, where they are not ignored."""
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only that one can set handlers
        yield signals
        return
    before = {
        number: signal.signal(number, lambda number, frame: signals.append(number))
        for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _last_output(child: _Child) -> str:
    if child.output is None:
        return " (see its output above)"
    size = os.fstat(child.output.fileno()).st_size
    text = os.pread(child.output.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    lines = text.decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
    return ". Its last lines:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""
