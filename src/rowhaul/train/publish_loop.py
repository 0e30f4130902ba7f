"""When a run publishes, and what it says of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rowhaul.train.checkpoint_pace import Pace

if TYPE_CHECKING:
    from rowhaul.publishing.quality import TrainingRecord
    from rowhaul.train.progressive import ProgressiveValues
    from rowhaul.train.session import Session


class Publishing:
    """Publishes versions of a session's model when they are due.

    Args:
        session: of the run.
        tell: notes something in the log, and to the listener.
    """

    def __init__(self, session: Session, tell: Callable[[str], None]) -> None:
        self._session, self._tell = session, tell
        config = session.trainer.config.publish
        self._is_used, self.pace = config.is_used, config.pace if config.is_used else Pace()
        self._asked_at, self._asked_step = time.monotonic(), session.trainer.step
        self._outcomes: deque[tuple[int, Exception | None]] = deque()  # of versions that were published
        self._record: TrainingRecord | None = None
        session.should_publish = self._is_overdue

    def _is_overdue(self) -> bool:
        by_clock = self._is_used and self.pace.seconds > 0
        return by_clock and time.monotonic() - self._asked_at >= self.pace.seconds

    def publish_if_due(self) -> None:
        """Publish beside training; a version that fails is in the next one."""
        step, every = self._session.trainer.step, self.pace.steps
        by_step = bool(every) and step % every == 0
        if self._is_used and (by_step or self._session.publish_due) and step != self._asked_step:
            asked, self._asked_step = time.monotonic(), step  # on all ranks, whether or not it can begin
            if self._session.publish_beside(partial(self._end, step), waits=by_step):
                self._asked_at = asked
        self.tell_outcomes()

    def scored(self, step: int, values: ProgressiveValues) -> None:
        """Write down a window of progressive validation beside what is published."""
        if self._is_used:
            from rowhaul.publishing.quality import TrainingRecord  # what publishes imports much

            if self._record is None:
                self._record = TrainingRecord(self._session.trainer.config.publish.path)
            rows = self._session.num_rows()
            self._record.scored(step, values.by_name() | ({} if rows is None else {"num_rows": rows}))

    def publish_last(self) -> None:
        """Publish the end of the run, and wait until it can be read."""
        if self._is_used:
            self._session.publish_last(partial(self._end, self._session.trainer.step))
            self.tell_outcomes()

    def tell_outcomes(self) -> None:
        """Log what was published, and say what went wrong; called by the thread that trains."""
        while self._outcomes:
            step, error = self._outcomes.popleft()
            if error is None:
                self._session.log.event("publish", step, f"published step {step:,}")
            else:
                self._tell(
                    f"publishing step {step:,} failed, training goes on: {error}; what changed is in the next"
                )

    def _end(self, step: int, error: Exception | None) -> None:
        self._outcomes.append((step, error))
