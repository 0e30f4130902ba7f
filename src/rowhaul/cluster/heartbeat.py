"""Detects lost and stuck ranks: a rank's end of the watchdog that beats for it (`rowhaul.cluster.watchdog`).

A killed rank often shows first as a broken connection on some other rank, without a name; a stopped or stuck
one does not show at all. The heartbeat names them all. It also carries each rank's last post: why it failed,
or that it has finished.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
import traceback
from itertools import islice
from pathlib import Path
from typing import Any

from torch.distributed import DistError

from rowhaul import _activity
from rowhaul._threads import Failure
from rowhaul.cluster.rendezvous import Store
from rowhaul.cluster.store_watch import StoreLostError, StoreWatch
from rowhaul.cluster.waiting import ranks_text, until
from rowhaul.cluster.watchdog import process as watchdog
from rowhaul.cluster.watchdog.beats import Beat
from rowhaul.cluster.watchdog.lines import Lines, Message
from rowhaul.cluster.watchdog.settings import Settings
from rowhaul.errors import ClusterError, RankLostError
from rowhaul.transport.base import LinkError

_log = logging.getLogger(__name__)

_HUB = "watchdog"  # the key of the hub's address
_PACKAGES = Path(watchdog.__file__).parents[3]
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ROWHAUL_SECRET")  # a watchdog is no rank, and needs no more
_MAX_ERROR_LENGTH = 2000  # characters
_MOST_FRAMES, _MOST_STACKS = 64, 100_000  # of a thread, the latest; characters of all
_STARTING_SECONDS = 60.0  # for a watchdog to answer, on a busy machine
_BUSY_SECONDS = 3.0  # by which a busy machine may detect a loss later
_POSTING_SECONDS = 3.0  # for a watchdog to send the last post


class Heartbeat:
    """Starts a rank's watchdog and acts on what it says; sets the rank's failure when a rank is lost.

    Args:
        settings: of the watchdog.
        failure: of this rank.
        keeps_store: whether this rank hosts the rendezvous store, which others need until they have left.
        page: what this rank is doing.
    """

    def __init__(
        self,
        settings: Settings,
        failure: Failure,
        *,
        keeps_store: bool = False,
        page: _activity.Page | None = None,
    ) -> None:
        self.lost: ClusterError | None = None
        self._settings, self._failure, self._keeps_store = settings, failure, keeps_store
        self._page = _activity.page if page is None else page
        self._table: dict[int, Beat] = {}
        self._left: list[int] = []  # finished without an error
        self._first_link_error: float | None = None
        self._last_post: Message | None = None
        self._port: int | None = None
        self._listens, self._posted, self._all_ended = (threading.Event() for _ in range(3))
        self._found = threading.Event()
        self._sending = threading.Lock()
        self._store_watch: StoreWatch | None = None
        self._thread = threading.Thread(target=self._run, name="rowhaul-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the watchdog, and explain broken connections by lost ranks."""
        ours, theirs = socket.socketpair()
        descriptors = (self._page.descriptor, theirs.fileno())
        program = [sys.executable, "-I", "-S", watchdog.__file__, str(_PACKAGES), *map(str, descriptors)]
        nothing = subprocess.DEVNULL  # an inherited pipe would stay open as long as the watchdog lives
        variables = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        with theirs:
            self._process = subprocess.Popen(
                program, pass_fds=descriptors, env=variables, stdin=nothing, stdout=nothing, stderr=nothing
            )
        self._lines = Lines(ours)
        self._send(self._settings.to_json())
        self._failure.explain_with(self.explain)
        self._thread.start()

    def port(self) -> int:
        """Wait until the hub listens; return its port. On rank 0 only."""
        if not self._listens.wait(_STARTING_SECONDS) or self._port is None:
            raise self.lost or ClusterError(
                f"the watchdog of rank {self._settings.rank} has not started within {_STARTING_SECONDS:g} s"
            )
        return self._port

    def connect(self, host: str, port: int) -> None:
        """Begin to beat at the hub; does not wait."""
        self._send({"connect": [host, port]})

    def meet(self, store: Store, seconds: float) -> None:
        """Begin to beat at the hub of rank 0, which announces it in the store; all ranks call this.

        Rank 0 may come some seconds later than others, and its watchdog may take as long as any to start.
        """
        patience = seconds + _STARTING_SECONDS
        if self._settings.rank == 0:
            store.set(_HUB, json.dumps([self._settings.listen, self.port()]))
        elif not until(lambda: bool(store.check([_HUB])), patience, self._failure.check):
            reason = f"has not announced its watchdog within {patience:g} s: has it ended?"
            raise RankLostError(0, self._settings.roles[0], reason)
        self.connect(*json.loads(store.get(_HUB)))

    def watch_store(self, store: Store, name: str) -> None:
        """Take the loss of a launcher's store for a failure; ``store`` is a connection of its own."""
        settings = self._settings
        self._store_watch = StoreWatch(store, name, self.fail, settings.interval, settings.num_missed)
        self._store_watch.start()

    def table(self) -> dict[int, Beat]:
        """The latest beats of all ranks that run, on rank 0; empty on others."""
        return dict(self._table)

    def explain(self, error: BaseException) -> BaseException:
        """Replace a broken connection by the loss behind it, after a short wait for it to be detected."""
        if not is_broken_connection(error):
            return error
        self._found.wait(max(0.0, self._patience_ends() - time.monotonic()))
        if self.lost is not None:
            return self.lost
        if self._left:
            gone = ranks_text(sorted(self._left), self._settings.roles)
            return ClusterError(f"{gone} finished before this rank did, and closed its connections ({error})")
        return error

    def leave(self, error: BaseException | None = None, linger: float = 30.0) -> None:
        """Post success or the error; the watchdog then ends by itself.

        Args:
            error: why this rank ends, if it fails.
            linger: seconds that the rank hosting the store waits for the others to leave.
        """
        self._end({"left": True} if error is None else self._failed(self.explain(error)))
        self._posted.wait(_POSTING_SECONDS)
        if self._keeps_store and error is None and self.lost is None:
            self._all_ended.wait(linger)

    def fail(self, error: ClusterError) -> None:
        """Take an error as the reason why connections break, and as this rank's failure."""
        if self.lost is None and self._last_post is None:
            self.lost = error
            self._failure.set(error)
        self._found.set()

    def _run(self) -> None:
        """Act on what the watchdog says, and post this rank's failure."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._lines.connection, selectors.EVENT_READ)
            while not self._lines.is_closed:
                if selector.select(self._settings.interval):
                    for message in self._lines.receive():
                        self._hear(message)
                self._post_failure()
        if self._last_post is None:
            self.fail(ClusterError("the watchdog that beats for this rank has ended: was it killed?"))
        for event in (self._listens, self._posted, self._all_ended, self._found):
            event.set()
        self._lines.close()
        self._process.wait()

    def _hear(self, message: Message) -> None:
        roles = self._settings.roles
        if "lost" in message:
            rank, reason = message["lost"], message["reason"]
            self.fail(ClusterError(reason) if rank is None else RankLostError(rank, roles[rank], reason))
        elif "hub_lost" in message:
            reason = f"is lost: {message['hub_lost']}"
            self.fail(RankLostError(0, roles[0], reason))
        elif "left" in message:
            self._left = [rank for rank in message["left"] if rank != self._settings.rank]
        elif "notice" in message:
            _log.warning("%s", message["notice"])
        elif "table" in message:
            self._table = {int(rank): Beat.from_json(beat) for rank, beat in message["table"].items()}
        elif "want_stacks" in message:
            self._send({"stacks": stacks()})
        elif "listening" in message:
            self._port = message["listening"]
            self._listens.set()
        elif "broken" in message:
            self.fail(ClusterError(f"the watchdog that beats for this rank has failed:\n{message['broken']}"))
        elif "posted" in message:
            self._posted.set()
        elif "all_ended" in message:
            self._all_ended.set()

    def _post_failure(self) -> None:
        error = self.lost or self._failure.error
        # A broken connection is most likely caused by a lost rank, which will be detected soon.
        if error is not None and (
            not is_broken_connection(error) or time.monotonic() >= self._patience_ends()
        ):
            self._end(self._failed(error))

    def _end(self, post: Message) -> None:
        with self._sending:
            if self._last_post is not None:
                return
            self._last_post = post
        if self._store_watch is not None:
            self._store_watch.close()
        self._send({"post": post})

    def _send(self, message: Message) -> None:
        with self._sending:
            self._lines.send(message)

    def _failed(self, error: BaseException) -> dict[str, Any]:
        if isinstance(error, RankLostError):  # the others shall name that rank, not this one
            return {"lost": error.rank, "reason": error.reason}
        if isinstance(error, StoreLostError):  # the others have lost it too: no rank is to blame
            return {"lost": None, "reason": str(error)}
        return {"failed": f"{type(error).__name__}: {error}"[:_MAX_ERROR_LENGTH]}

    def _patience_ends(self) -> float:
        """Until when the cause of a broken connection may still be detected."""
        if self._first_link_error is None:
            self._first_link_error = time.monotonic()
        detected = (self._settings.num_missed + 2) * self._settings.interval
        return self._first_link_error + detected + _BUSY_SECONDS


def stacks() -> str:
    """Return the stacks of all threads of this process, by name, the main thread's first.

    Not by `faulthandler`, which leaves out threads beyond a hundred. No source is read: the disk may be what
    everything waits for. Long ones are cut, since they are sent to all ranks.
    """
    names = {one.ident: one.name for one in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda one: one[0] != main):
        parts.append(f"thread {names.get(ident, ident)} (most recent call first):")
        for one, line in islice(traceback.walk_stack(frame), _MOST_FRAMES):
            code = one.f_code
            parts.append(f'  File "{code.co_filename}", line {line} in {code.co_name}')
    text = "\n".join(parts)
    return text if len(text) <= _MOST_STACKS else f"{text[:_MOST_STACKS]}\n..."


def is_broken_connection(error: BaseException) -> bool:
    """Whether another rank may have caused an error."""
    return isinstance(error, LinkError | ConnectionError | DistError)
