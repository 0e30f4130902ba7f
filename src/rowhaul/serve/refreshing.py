"""`Refresher`: applies what training publishes while requests are scored."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from rowhaul.errors import RowhaulError
from rowhaul.serve.scorer import Refreshed, Scorer

_log = logging.getLogger(__name__)


class Refresher:
    """Looks for published versions in a thread of its own.

    A version that cannot be applied is named in the log, once, and tried again; the last good one is served.

    Args:
        scorer: to refresh.
        seconds: between two looks; 0: never.
        refreshed: called after each look that found something, also where that was not all.
        failed: called after each look that failed.
    """

    def __init__(
        self,
        scorer: Scorer,
        seconds: float,
        refreshed: Callable[[Refreshed], None] = lambda found: None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._scorer, self._seconds = scorer, seconds
        self._refreshed, self._failed = refreshed, failed
        self._ended = threading.Event()
        self.trouble = ""  # why the newest version is not served, if it is not
        self._thread = threading.Thread(target=self._run, name="rowhaul-refresh", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        if self._seconds:
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def look(self) -> None:
        """Apply what is there."""
        num_deltas, num_bases = self._scorer.num_deltas, self._scorer.num_bases
        try:
            try:
                self._scorer.refresh()
            finally:  # deltas before a bad one are served
                found = Refreshed(self._scorer.num_deltas - num_deltas, self._scorer.num_bases > num_bases)
                if any(found):
                    self._refreshed(found)
            self.trouble = ""
        except Exception as error:  # whatever it is: without the thread nothing newer would ever be served
            is_known = isinstance(error, RowhaulError | OSError)
            trouble = str(error) if is_known else f"{type(error).__name__}: {error}"
            if trouble != self.trouble:
                _log.warning("what was published cannot be applied: %s", trouble, exc_info=not is_known)
            self.trouble = trouble
            self._failed()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            self.look()
