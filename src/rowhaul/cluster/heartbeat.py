"""Who is still there: every rank beats once a second in the rendezvous store and looks at the others.

A rank that is killed often shows first as a broken connection, on some rank, without a name; one that
is stopped shows as nothing at all. The heartbeat tells both: which rank, and what it was. It also
carries last words: a rank that fails says why, one that has finished says goodbye.

Silence is counted in this rank's own rounds, not in seconds: a process that was itself suspended, or
a store that was slow for everybody, does not make the others look dead.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed import DistError

from rowhaul._threads import Failure
from rowhaul.cluster.rendezvous import Store
from rowhaul.cluster.roll_call import beat_key
from rowhaul.cluster.waiting import ranks_text
from rowhaul.errors import ClusterError, RankLostError
from rowhaul.transport.base import LinkError

_MAX_WORDS = 2000  # characters of last words


class Heartbeat:
    """Beats for a rank and watches the others; sets the rank's failure when one is lost.

    Args:
        store: a connection of its own to the store, below the run's token; nothing else may use it.
        rank: of this process.
        roles: of all ranks, in words.
        failure: of this rank.
        store_name: how to name the store in a message.
        store_rank: the rank that keeps the store, if it is one.
        interval: seconds between beats.
        num_missed: after so many rounds without a beat a rank is lost.
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
        self._left: set[int] = set()  # said goodbye
        self._ended: set[int] = set()  # will not beat again, whyever
        self._num_rounds = 0
        self._store_is_lost = False
        self._link_error: tuple[float, BaseException] | None = None
        self._last_words: dict[str, Any] | None = None
        self._told, self._wake, self._over = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="rowhaul-heartbeat", daemon=True)
        self._watch = threading.Thread(target=self._watch_store, name="rowhaul-heartbeat-watch", daemon=True)

    def start(self) -> None:
        """Begin to beat, and let broken connections be explained by what is known of the others."""
        self._failure.explain_with(self.explain)
        self._thread.start()
        self._watch.start()

    def explain(self, error: BaseException) -> BaseException:
        """Replace a broken connection by the loss behind it, waiting a little for that to be known."""
        if isinstance(error, ClusterError) or not is_broken_connection(error):
            return error
        self._told.wait(max(0.0, self._patience_ends(error) - time.monotonic()))
        if self.lost is not None:
            return self.lost
        if self._left:
            gone = ranks_text(sorted(self._left), self._roles)
            return ClusterError(f"{gone} finished before this rank did, and closed its connections ({error})")
        return error

    def leave(self, error: BaseException | None = None, linger: float = 30.0) -> None:
        """Say goodbye, or what went wrong, and stop. A rank that keeps the store stays for the others.

        Args:
            error: why this rank ends, if it fails.
            linger: how many seconds the rank that keeps the store waits for the others to leave.
        """
        if self._last_words is None:
            self._last_words = {"left": True} if error is None else self._failed(self.explain(error))
        self._wake.set()
        if not self._store_is_lost:
            keeps_store = self._store_rank == self._rank
            self._thread.join(linger if keeps_store and error is None else 3 * self._interval)
        self._over.set()

    def _run(self) -> None:
        try:
            while True:
                last_words = self._last_words
                self._round(last_words or self._post())
                if last_words is not None and self._may_go():
                    break
                if not self._over.is_set():
                    self._wake.wait(self._interval)
                if self._over.is_set():
                    break
                self._wake.clear()
        except DistError as error:
            self._tell_store_lost(f"is gone ({next(iter(str(error).splitlines()), '')})")
        finally:
            self._over.set()

    def _round(self, post: dict[str, Any]) -> None:
        self._store.set(self._keys[self._rank], json.dumps(post))
        posts = [json.loads(value) for value in self._store.multi_get(self._keys)]
        self._num_rounds += 1
        silent = [rank for rank, post in enumerate(posts) if rank != self._rank and self._is_lost(rank, post)]
        if silent:
            self._tell_lost(silent)

    def _is_lost(self, rank: int, post: dict[str, Any]) -> bool:
        """Look at what a rank has posted; True if it has been silent for too long."""
        if "left" in post:
            self._left.add(rank)
        elif "lost" in post:
            self._tell(RankLostError(post["lost"], self._roles[post["lost"]], post["reason"]))
        elif "failed" in post:
            self._tell(RankLostError(rank, self._roles[rank], f"failed: {post['failed']}"))
        elif post["beat"] != self._counts[rank]:
            self._counts[rank], self._silent_rounds[rank] = post["beat"], 0
            return False
        else:
            self._silent_rounds[rank] += 1
            return self._silent_rounds[rank] >= self._num_missed
        self._ended.add(rank)
        return False

    def _post(self) -> dict[str, Any]:
        error = self.lost or self._failure.error
        if error is not None and not self._may_be_explained(error):
            return self._failed(error)
        self._counts[self._rank] += 1
        return {"beat": self._counts[self._rank]}

    def _failed(self, error: BaseException) -> dict[str, Any]:
        if isinstance(error, RankLostError):  # the others shall name that rank, not this one
            return {"lost": error.rank, "reason": error.reason}
        return {"failed": f"{type(error).__name__}: {error}"[:_MAX_WORDS]}

    def _may_go(self) -> bool:
        """A rank that keeps the store stays as long as others need it."""
        others = set(range(len(self._roles))) - {self._rank}
        silent = {rank for rank in others if self._silent_rounds[rank] >= self._num_missed}
        return self._store_rank != self._rank or self._ended | silent >= others

    def _may_be_explained(self, error: BaseException) -> bool:
        """A broken connection is another rank's doing, most likely; it will be known soon."""
        return is_broken_connection(error) and time.monotonic() < self._patience_ends(error)

    def _patience_ends(self, error: BaseException) -> float:
        """Until when a broken connection may still find its explanation."""
        if self._link_error is None:
            self._link_error = (time.monotonic(), error)
        return self._link_error[0] + (self._num_missed + 2) * self._interval

    def _watch_store(self) -> None:
        """Notice a store that does not answer: the other thread is then stuck in a request."""
        seen, num_ticks = -1, 0
        while not self._over.wait(self._interval / 2):
            num_ticks = 0 if self._num_rounds != seen else num_ticks + 1
            seen = self._num_rounds
            if num_ticks >= 2 * self._num_missed:
                self._tell_store_lost(f"has not answered for {self._num_missed * self._interval:g} s")
                return

    def _tell_lost(self, ranks: Sequence[int]) -> None:
        reason = f"has not been heard of for {self._num_missed * self._interval:g} s"
        if len(ranks) > 1:
            reason += f", nor {ranks_text(ranks[1:], self._roles)}"
        reason += ": its process or its host has died, is stopped or cannot be reached"
        self._tell(RankLostError(ranks[0], self._roles[ranks[0]], reason))

    def _tell_store_lost(self, what: str) -> None:
        self._store_is_lost = True
        keeper = self._store_rank
        if keeper is None:
            kept = "its launcher, or the host of that, has died or cannot be reached"
            self._tell(ClusterError(f"{self._store_name} {what}: {kept}"))
        elif keeper not in self._left and keeper != self._rank:
            reason = f"is lost: {self._store_name}, which it keeps, {what}"
            self._tell(RankLostError(keeper, self._roles[keeper], reason))

    def _tell(self, error: ClusterError) -> None:
        if self.lost is None and self._last_words is None:
            self.lost = error
            self._failure.set(error)
        self._told.set()


def is_broken_connection(error: BaseException) -> bool:
    """Whether an error may be another rank's fault."""
    return isinstance(error, LinkError | ConnectionError | DistError)
