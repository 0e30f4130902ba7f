"""Detects lost ranks: every rank beats once a second in the rendezvous store and watches the others.

A killed rank often shows first as a broken connection on some other rank, without a name; a stopped one
does not show at all. The heartbeat names both. It also carries each rank's last post: why it failed, or that
it has finished.

Silence is counted in this rank's own rounds, not in seconds: a process that was itself suspended, or
a store that was slow for all, does not make the others look dead.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed import DistError

from rowhaul._threads import Failure
from rowhaul.cluster.rendezvous import Store, first_line
from rowhaul.cluster.roll_call import beat_key
from rowhaul.cluster.waiting import ranks_text
from rowhaul.errors import ClusterError, RankLostError
from rowhaul.transport.base import LinkError

_MAX_ERROR_LENGTH = 2000  # characters


class Heartbeat:
    """Beats for a rank and watches the others; sets the rank's failure when one is lost.

    Args:
        store: a connection of its own to the store, below the run's token; nothing else may use it.
        rank: of this process.
        roles: of all ranks.
        failure: of this rank.
        store_name: the store's name in messages.
        store_rank: the rank that hosts the store, if one does.
        interval: seconds between beats.
        num_missed: rounds without a beat after which a rank counts as lost.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        roles: Sequence[str],
        failure: Failure,
        *,
        store_name: str,
        store_rank: int | None,
        interval: float = 1.0,
        num_missed: int = 6,
    ) -> None:
        self.lost: ClusterError | None = None
        self._store, self._rank, self._roles, self._failure = store, rank, roles, failure
        self._store_name, self._store_rank = store_name, store_rank
        self._interval, self._num_missed = interval, num_missed
        self._keys = [beat_key(one) for one in range(len(roles))]
        self._counts = [0] * len(roles)
        self._silent_rounds = [0] * len(roles)
        self._left: set[int] = set()  # finished without an error
        self._ended: set[int] = set()  # will not beat again
        self._num_rounds = 0
        self._store_is_lost = False
        self._first_link_error: float | None = None
        self._last_post: dict[str, Any] | None = None
        self._found, self._wake, self._over = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="rowhaul-heartbeat", daemon=True)
        self._watch = threading.Thread(target=self._watch_store, name="rowhaul-heartbeat-watch", daemon=True)

    def start(self) -> None:
        """Begin to beat, and explain broken connections by lost ranks."""
        self._failure.explain_with(self.explain)
        self._thread.start()
        self._watch.start()

    def explain(self, error: BaseException) -> BaseException:
        """Replace a broken connection by the loss behind it, after a short wait for it to be detected."""
        if isinstance(error, ClusterError) or not is_broken_connection(error):
            return error
        self._found.wait(max(0.0, self._patience_ends() - time.monotonic()))
        if self.lost is not None:
            return self.lost
        if self._left:
            gone = ranks_text(sorted(self._left), self._roles)
            return ClusterError(f"{gone} finished before this rank did, and closed its connections ({error})")
        return error

    def leave(self, error: BaseException | None = None, linger: float = 30.0) -> None:
        """Post success or the error, and stop.

        Args:
            error: why this rank ends, if it fails.
            linger: seconds that the rank hosting the store waits for the others to leave.
        """
        if self._last_post is None:
            self._last_post = {"left": True} if error is None else self._failed(self.explain(error))
        self._wake.set()
        if not self._store_is_lost:
            hosts_store = self._store_rank == self._rank
            self._thread.join(linger if hosts_store and error is None else 3 * self._interval)
        self._over.set()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                last_post = self._last_post
                self._round(last_post or self._post())
                if last_post is not None and self._may_end():
                    break
                self._wake.wait(self._interval)
                self._wake.clear()
        except DistError as error:
            self._report_store_lost(f"is gone ({first_line(error)})")
        finally:
            self._over.set()

    def _round(self, post: dict[str, Any]) -> None:
        self._store.set(self._keys[self._rank], json.dumps(post))
        posts = [json.loads(value) for value in self._store.multi_get(self._keys)]
        self._num_rounds += 1
        silent = [rank for rank, post in enumerate(posts) if rank != self._rank and self._is_lost(rank, post)]
        if not silent:
            return
        reason = f"has not been heard of for {self._num_missed * self._interval:g} s"
        if len(silent) > 1:
            reason += f", nor {ranks_text(silent[1:], self._roles)}"
        reason += ": its process or its host has died, is stopped or cannot be reached"
        self._report(RankLostError(silent[0], self._roles[silent[0]], reason))

    def _is_lost(self, rank: int, post: dict[str, Any]) -> bool:
        """Read a rank's post; return whether the rank has been silent for too long."""
        if "beat" in post:
            has_beaten = post["beat"] != self._counts[rank]
            self._counts[rank] = post["beat"]
            self._silent_rounds[rank] = 0 if has_beaten else self._silent_rounds[rank] + 1
            return self._silent_rounds[rank] >= self._num_missed
        self._ended.add(rank)
        if "left" in post:
            self._left.add(rank)
        elif "lost" in post:
            self._report(RankLostError(post["lost"], self._roles[post["lost"]], post["reason"]))
        else:
            self._report(RankLostError(rank, self._roles[rank], f"failed: {post['failed']}"))
        return False

    def _post(self) -> dict[str, Any]:
        error = self.lost or self._failure.error
        # A broken connection is most likely caused by a lost rank, which will be detected soon.
        if error is not None and (
            not is_broken_connection(error) or time.monotonic() >= self._patience_ends()
        ):
            return self._failed(error)
        self._counts[self._rank] += 1
        return {"beat": self._counts[self._rank]}

    def _failed(self, error: BaseException) -> dict[str, Any]:
        if isinstance(error, RankLostError):  # the others shall name that rank, not this one
            return {"lost": error.rank, "reason": error.reason}
        return {"failed": f"{type(error).__name__}: {error}"[:_MAX_ERROR_LENGTH]}

    def _may_end(self) -> bool:
        """The rank that hosts the store stays as long as others need it."""
        others = set(range(len(self._roles))) - {self._rank}
        silent = {rank for rank in others if self._silent_rounds[rank] >= self._num_missed}
        return self._store_rank != self._rank or self._ended | silent >= others

    def _patience_ends(self) -> float:
        """Until when the cause of a broken connection may still be detected."""
        if self._first_link_error is None:
            self._first_link_error = time.monotonic()
        return self._first_link_error + (self._num_missed + 2) * self._interval

    def _watch_store(self) -> None:
        """Detect a store that does not answer: the other thread is then stuck in a request."""
        seen, num_ticks = -1, 0
        while not self._over.wait(self._interval / 2):
            num_ticks = 0 if self._num_rounds != seen else num_ticks + 1
            seen = self._num_rounds
            if num_ticks >= 2 * self._num_missed:
                self._report_store_lost(f"has not answered for {self._num_missed * self._interval:g} s")
                return

    def _report_store_lost(self, what: str) -> None:
        self._store_is_lost = True
        keeper = self._store_rank
        if keeper is None:
            kept = "its launcher, or the host of that, has died or cannot be reached"
            self._report(ClusterError(f"{self._store_name} {what}: {kept}"))
        elif keeper not in self._left and keeper != self._rank:
            reason = f"is lost: {self._store_name}, which it keeps, {what}"
            self._report(RankLostError(keeper, self._roles[keeper], reason))

    def _report(self, error: ClusterError) -> None:
        if self.lost is None and self._last_post is None:
            self.lost = error
            self._failure.set(error)
        self._found.set()


def is_broken_connection(error: BaseException) -> bool:
    """Whether another rank may have caused an error."""
    return isinstance(error, LinkError | ConnectionError | DistError)
