"""A trial of shares in training: candidates take turns, and the quickest stays.

The simulator's times may be off, above all on a busy machine, so that measured iterations decide. A turn has
`TURN` iterations, of which the last `JUDGED` count: until then rows move to the workers that train them now.
Candidates with more workers have their turns first, so that rows gather step by step on fewer.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from rowhaul.schedule.sizes import apportion

TURN = 12  # iterations of a candidate
JUDGED = 6  # the last ones of a turn
# A record posted after iteration t is in force from t + 4 on at the earliest, as t + 1 is agreed on by
# then, and a few iterations later where plans are made far ahead. So the next candidate is posted this number
# of iterations before the turn ends.
LEAD = 3
TIE = 1.02  # times within this factor are equal: the fewest machines win


@dataclass(frozen=True)
class ShareCandidate:
    """Shares to try."""

    shares: tuple[int, ...]
    dispatcher: str
    kind: str  # what it is, in words

    @property
    def num_workers(self) -> int:
        """Workers that train."""
        return sum(share > 0 for share in self.shares)

    def __str__(self) -> str:
        return f"{self.kind} {list(self.shares)}"


@dataclass
class _Turn:
    """The iterations of one candidate: how many, and the seconds per sample of those that were timed."""

    count: int = 0
    seconds: list[float] = field(default_factory=list)
    is_given_up: bool = False  # a cache had no room for its rows

    @property
    def typical(self) -> float:
        """Seconds per sample of the iterations that count; infinite if none was timed."""
        timed = self.seconds and not self.is_given_up
        return statistics.median(self.seconds[-JUDGED:]) if timed else float("inf")


class ShareTrial:
    """Candidates that take turns.

    Args:
        candidates: to try, in any order.
        known: a candidate whose time is known already, with its seconds per sample.
    """

    def __init__(
        self, candidates: Sequence[ShareCandidate], known: tuple[ShareCandidate, float] | None = None
    ) -> None:
        given = [one for one in candidates if known is None or one.shares != known[0].shares]
        self.candidates = sorted(given, key=lambda one: -one.num_workers)
        self.iterations = 0  # since the trial began
        self._turns = [_Turn() for _ in self.candidates]
        self._known = known
        self._posted = 0  # the number of candidates that were given out

    def next(self) -> ShareCandidate | None:
        """Return the candidate to post now; None after the last one."""
        self._posted += 1
        return self.candidates[self._posted - 1] if self._posted <= len(self.candidates) else None

    @property
    def is_over(self) -> bool:
        """Whether every candidate has had its turn."""
        return not self._turns or self._turns[-1].count >= TURN

    def observe(self, samples: Sequence[int], seconds: float | None) -> ShareCandidate | None:
        """Add an iteration with these samples per worker; return a candidate if one is to be posted.

        ``seconds`` is None for an iteration that cannot be timed, such as the first one after a pause.
        """
        self.iterations += 1
        size, place = sum(samples), self._posted - 1
        for number in range(max(place - 1, 0), min(place + 1, len(self.candidates))):
            shares = self.candidates[number].shares
            if list(samples) == apportion(size, shares).tolist():
                turn = self._turns[number]
                turn.count += 1
                if seconds is not None and size > 0:
                    turn.seconds.append(seconds / size)
        is_next_due = place < len(self._turns) and self._turns[place].count >= TURN - LEAD
        return self.next() if is_next_due else None

    def give_up(self, shares: tuple[int, ...]) -> None:
        """End the turn of these shares, which are no choice any more."""
        for one, turn in zip(self.candidates, self._turns, strict=True):
            if one.shares == shares:
                turn.count, turn.is_given_up = TURN, True
        if self._known is not None and self._known[0].shares == shares:
            self._known = None

    def measured(self) -> list[tuple[ShareCandidate, float]]:
        """All candidates that were timed, with their seconds per sample; the quickest first."""
        pairs = [(one, turn.typical) for one, turn in zip(self.candidates, self._turns, strict=True)]
        pairs += [self._known] if self._known is not None else []
        return sorted((pair for pair in pairs if pair[1] < float("inf")), key=lambda pair: pair[1])

    def best(self) -> ShareCandidate | None:
        """The quickest candidate; of equals, one with the fewest workers. None if none was timed."""
        measured = self.measured()
        if not measured:
            return None
        equal = [one for one, seconds in measured if seconds <= TIE * measured[0][1]]
        return min(equal, key=lambda one: one.num_workers)
