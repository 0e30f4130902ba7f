"""Detects the loss of a rendezvous store that a launcher hosts: its process or its host is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch.distributed import DistError

from rowhaul.cluster.rendezvous import Store, first_line
from rowhaul.errors import ClusterError


class StoreLostError(ClusterError):
    """The rendezvous store is gone, for all ranks alike."""


class StoreWatch:
    """Asks the store for a sign of life, in a thread; another one notices when no answer comes.

    Args:
        store: a connection of its own; nothing else may use it.
        name: the store's name in messages.
        on_loss: called with the error.
        interval: seconds between requests.
        num_missed: rounds without an answer after which the store is lost.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        on_loss: Callable[[ClusterError], None],
        interval: float,
        num_missed: int,
    ) -> None:
        self._store, self._name, self._on_loss = store, name, on_loss
        self._interval, self._num_missed = interval, num_missed
        self._num_answers = 0
        self._over = threading.Event()

    def start(self) -> None:
        """Begin to ask."""
        for call in (self._ask, self._notice):
            threading.Thread(target=call, name="rowhaul-store-watch", daemon=True).start()

    def close(self) -> None:
        """Stop; does not wait."""
        self._over.set()

    def _ask(self) -> None:
        try:
            while not self._over.wait(self._interval):
                self._store.check(["alive"])
                self._num_answers += 1
        except DistError as error:
            self._lose(f"is gone ({first_line(error)})")

    def _notice(self) -> None:
        """Count rounds in which the other thread is stuck in a request."""
        seen, num_rounds = -1, 0
        while not self._over.wait(self._interval):
            num_rounds = 0 if self._num_answers != seen else num_rounds + 1
            seen = self._num_answers
            if num_rounds > self._num_missed:
                self._lose(f"has not answered for {self._num_missed * self._interval:g} s")

    def _lose(self, what: str) -> None:
        if not self._over.is_set():
            self._over.set()
            kept = "its launcher, or the host of that, has died or cannot be reached"
            self._on_loss(StoreLostError(f"{self._name} {what}: {kept}"))
