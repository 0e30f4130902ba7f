"""Starts all ranks on this machine, watches them, and ends all of them when one dies.

The children find torchrun's variables in their environment, so that they run as they would on a cluster.
The launcher keeps the rendezvous store: it outlives every rank, whichever dies. Each child is a process
group of its own, so that Ctrl-C reaches the launcher alone and is passed on in order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rowhaul.cluster import tied_child
from rowhaul.cluster.place import roles_of
from rowhaul.errors import ClusterError

_POLL = 0.05  # seconds between two looks at the children
_TAIL_LINES, _TAIL_BYTES = 20, 16384


@dataclass
class _Child:
    rank: int
    role: str
    process: subprocess.Popen[bytes]
    output: Path | None  # None: it writes to where the launcher writes

    @property
    def ending(self) -> str:
        """How it ended, in words."""
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
    grace_seconds: float = 5.0,
) -> None:
    """Run a command as several ranks on this machine and return when all have ended well.

    Rank 0 writes to this process's terminal; what the others write is kept and shown if they fail.
    Ctrl-C is passed on to all ranks, a second one kills them.

    Args:
        arguments: of the command.
        num_workers: ranks that train.
        num_stores: ranks that only store; not used when co-located.
        colocated: workers store the rows.
        command: what to run; by default ``python -m rowhaul``.
        environment: more variables for the children.
        grace_seconds: between asking a rank to end and killing it.

    Raises:
        ClusterError: a rank died; says which one, how, and its last words.
        KeyboardInterrupt: Ctrl-C was passed on, and all ranks have ended.
    """
    if num_workers < 1:
        raise ClusterError(f"the number of workers must be at least 1; got {num_workers}")
    if not colocated and num_stores < 1:
        raise ClusterError(f"the number of stores must be at least 1, or co-located; got {num_stores}")
    num_ranks = num_workers + (0 if colocated else num_stores)
    roles = roles_of(num_ranks, num_workers)
    whole = [*(command or (sys.executable, "-m", "rowhaul")), *arguments]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rowhaul-ranks-")))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=4 * num_ranks + 16))
        signals = stack.enter_context(_signals_noted())
        children = _Children(grace_seconds)
        stack.callback(children.kill)
        variables = {**os.environ, **_variables(num_ranks, listener.getsockname()[1]), **(environment or {})}
        for rank, role in enumerate(roles):
            children.start(rank, role, whole, variables, folder)
        store = _keep_store(listener)  # after the children: they import in the meantime
        children.watch(signals)
        del store
    signals.raise_again()


class _Signals:
    """The signals that this process got while children ran."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)

    def raise_again(self) -> None:
        """Let the first signal do what it does without us, now that the children have ended."""
        if self.received:
            signal.raise_signal(self.received[0])


class _Children:
    """The processes, in the order of ranks."""

    def __init__(self, grace_seconds: float) -> None:
        self._children: list[_Child] = []
        self._grace_seconds = grace_seconds
        self._num_passed_on = 0
        self._kill_at = float("inf")

    def start(
        self, rank: int, role: str, command: Sequence[str], variables: Mapping[str, str], folder: Path
    ) -> None:
        tied = [sys.executable, "-I", "-S", tied_child.__file__, str(os.getpid()), *command]
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        output = folder / f"rank-{rank}.log" if rank else None
        with contextlib.ExitStack() as stack:
            sink = stack.enter_context(output.open("wb")) if output else None
            process = subprocess.Popen(
                tied,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={**variables, **own},
                process_group=0,
            )
        self._children.append(_Child(rank, role, process, output))

    def watch(self, signals: _Signals) -> None:
        """Return when all have ended well; when one does not, end the others and raise."""
        dead: _Child | None = None
        last_words = ""
        while any(child.process.poll() is None for child in self._children):
            if dead is None and not signals.received and (dead := self._first_dead()) is not None:
                last_words = _last_words(dead)
                self._send(signal.SIGTERM)
            self._pass_on(signals)
            if time.monotonic() > self._kill_at:
                self.kill()
            time.sleep(_POLL)
        if signals.received:
            return
        dead = dead or self._first_dead()
        if dead is not None:
            raise ClusterError(
                f"rank {dead.rank} ({dead.role}) {dead.ending}; the other ranks were ended"
                + (last_words or _last_words(dead))
            )

    def kill(self) -> None:
        """End whatever still runs, at once."""
        for child in self._children:
            if child.process.poll() is None:
                child.process.kill()
        for child in self._children:
            child.process.wait()

    def _first_dead(self) -> _Child | None:
        """Of those that ended badly the one most likely to be the cause: a killed one before the others."""
        ended = [child for child in self._children if child.process.poll() not in (None, 0)]
        return min(ended, key=lambda child: (child.process.returncode >= 0, child.rank), default=None)

    def _pass_on(self, signals: _Signals) -> None:
        for number in signals.received[self._num_passed_on :]:
            self._num_passed_on += 1
            if self._num_passed_on > 1:
                self.kill()
            elif number == signal.SIGINT:
                self._send(signal.SIGINT, may_take_long=True)  # saving a checkpoint, for instance
            else:
                self._send(signal.Signals(number))

    def _send(self, number: signal.Signals, may_take_long: bool = False) -> None:
        if not may_take_long:
            self._kill_at = min(self._kill_at, time.monotonic() + self._grace_seconds)
        for child in self._children:
            if child.process.poll() is None:
                child.process.send_signal(number)


def _variables(num_ranks: int, port: int) -> dict[str, str]:
    found = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher keeps the store, as torchrun's agent does
    }
    if "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = str(max(1, _num_cores() // num_ranks))
    return found


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _keep_store(listener: socket.socket) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # compiled

    return TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=os.dup(listener.fileno()),  # the store closes what it is given
    )


@contextlib.contextmanager
def _signals_noted() -> Iterator[_Signals]:
    """Note Ctrl-C and requests to end instead of following them; only the main thread is asked."""
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {number: signal.signal(number, signals.note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _last_words(child: _Child) -> str:
    if child.output is None:
        return " (see its output above)"
    with child.output.open("rb") as file:
        file.seek(max(0, child.output.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
    return ". Its last lines:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""
