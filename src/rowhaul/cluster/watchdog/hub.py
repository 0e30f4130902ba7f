"""The hub: rank 0's watchdog hears all watchdogs, decides which ranks are lost or stuck, and tells all."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any

from rowhaul._proof import demand
from rowhaul.cluster.watchdog.beats import Beat
from rowhaul.cluster.watchdog.lines import Lines, Message
from rowhaul.cluster.watchdog.losses import Losses
from rowhaul.cluster.watchdog.settings import PURPOSE, Settings
from rowhaul.cluster.watchdog.stalls import Stall, Stalls
from rowhaul.errors import SecretError

_MOST_UNPROVED = 64  # connections; the oldest makes way for the next
# Ranks for their stacks, which go to all ranks: more than may wait to be sent ends connections.
_MOST_ASKED = 8

Later = Callable[[Callable[[], None]], None]
"""Runs a call in the loop of the process, from any thread."""


class Hub:
    """Listens for watchdogs.

    Args:
        settings: of this watchdog.
        selector: of the loop; its keys carry the method to call.
        later: runs a call in the loop.
    """

    def __init__(self, settings: Settings, selector: selectors.BaseSelector, later: Later) -> None:
        self._settings, self._selector, self._later = settings, selector, later
        self._losses = Losses(settings.roles, settings.interval, settings.num_missed, settings.first_missed)
        self._stalls = Stalls(
            settings.addresses, settings.interval, settings.warn_seconds, settings.end_seconds
        )
        self._lines: dict[int, Lines] = {}
        self._num_rounds = 0
        self._lock = threading.Lock()  # of the next attribute
        self._unproved: dict[socket.socket, bool] = {}  # all True, oldest first
        self._has_ended_run = False
        family = socket.AF_INET6 if ":" in settings.listen else socket.AF_INET
        self._listener = socket.create_server(
            (settings.listen, 0), family=family, backlog=2 * len(settings.roles) + _MOST_UNPROVED
        )
        self.port: int = self._listener.getsockname()[1]
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def is_needed(self) -> bool:
        """Whether ranks other than this one still run."""
        others = [rank for rank in range(len(self._settings.roles)) if rank != self._settings.rank]
        return not self._losses.have_ended(others)

    def round(self) -> None:
        """Count silence, look for progress, and let every watchdog know that the hub is alive."""
        self._num_rounds += 1
        self._losses.round()
        self._tell_losses()
        beats = self._losses.beats()
        self._tell_stall(self._stalls.round(beats))
        if own := self._lines.get(self._settings.rank):
            own.send({"table": {str(rank): beat.to_json() for rank, beat in beats.items()}})
        self._broadcast({"round": self._num_rounds})
        self._tell_end()

    def flush(self) -> bool:
        """Send what waits; return whether nothing does any more."""
        waiting = [lines for lines in self._lines.values() if not lines.flush()]
        return not waiting

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            with self._lock:
                if len(self._unproved) >= _MOST_UNPROVED:
                    oldest = next(iter(self._unproved))
                    del self._unproved[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
                self._unproved[connection] = True
            try:
                threading.Thread(target=self._admit, args=(connection,), daemon=True).start()
            except RuntimeError:  # the system has no thread to give; a rank tries again
                self._leaves(connection)
                connection.close()

    def _admit(self, connection: socket.socket) -> None:
        """In a thread: demand a proof of the secret."""
        refusal = ""
        try:
            demand(connection, self._settings.secret, self._settings.proof_seconds, PURPOSE)
        except SecretError as error:
            refusal = f"refused a connection to the watchdog of rank 0: {error}"
        made_way = not self._leaves(connection)  # at once: a rank must not make way any more
        if not refusal:
            self._later(lambda: self._welcome(connection))
            return
        connection.close()
        if not made_way:
            self._later(lambda: self._refuse(refusal))

    def _leaves(self, connection: socket.socket) -> bool:
        """Take a connection from the unproved ones; return whether it was still among them."""
        with self._lock:
            return self._unproved.pop(connection, False)

    def _refuse(self, text: str) -> None:
        if own := self._lines.get(self._settings.rank):
            own.send({"notice": text})

    def _welcome(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lines = Lines(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(lines, None))

    def _hear(self, lines: Lines, rank: int | None) -> None:
        for message in lines.receive():
            if rank is None:
                rank = self._introduced(lines, message)
            if rank is not None:
                self._understand(rank, message)
        if lines.is_closed:
            self._selector.unregister(lines.connection)
            lines.close()
            if rank is not None:
                self._losses.closed(rank)
        self._tell_losses()

    def _introduced(self, lines: Lines, message: Message) -> int | None:
        """Return the rank that a first message names."""
        rank = message.get("rank")
        if message.get("token") != self._settings.token or rank in self._lines:
            lines.is_closed = True  # of another run
            return None
        assert isinstance(rank, int)
        self._lines[rank] = lines
        self._selector.modify(lines.connection, selectors.EVENT_READ, lambda: self._hear(lines, rank))
        if self._losses.first is not None:
            lines.send(self._losses.first)
        return rank

    def _understand(self, rank: int, message: Message) -> None:
        if "beat" in message:
            self._losses.beaten(rank, Beat.from_json(message["beat"]))
        elif "post" in message:
            self._losses.posted(rank, message["post"])
            self._broadcast({"left": self._losses.left})
            self._tell_end()
        elif "stacks" in message:
            self._broadcast({"notice": f"stacks of rank {rank}:\n{message['stacks']}"})

    def _tell_losses(self) -> None:
        if self._losses.first is not None and not self._has_ended_run:
            self._has_ended_run = True
            self._broadcast(self._losses.first)
            self._tell_end()

    def _tell_end(self) -> None:
        if not self.is_needed:
            self._broadcast({"all_ended": True})

    def _tell_stall(self, stall: Stall) -> None:
        if self._has_ended_run:
            return
        if stall.fatal:
            self._has_ended_run = True
            event: dict[str, Any] = {"lost": stall.blamed, "reason": stall.fatal}
            self._broadcast(event)
        elif stall.notice:
            self._broadcast({"notice": stall.notice})
            for rank in stall.culprits[:_MOST_ASKED] if self._settings.stacks else ():
                self._lines[rank].send({"want_stacks": True})

    def _broadcast(self, message: Message) -> None:
        for lines in self._lines.values():
            if not lines.is_closed:
                lines.send(message)
