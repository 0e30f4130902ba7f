"""What a fault is: thrown at a run that trains, it says what must come of it."""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod

from testbed.chaos.running import ChaosError, Run


class Fault(ABC):
    """One thing that goes wrong.

    Attributes:
        name: in the table.
        promise: what must come of it, in words.
        ends_run: whether the ranks must end, to be started again.
        seconds: within which they end, or training goes on.
    """

    name: str
    promise: str
    ends_run = False
    seconds = 30.0

    def __init__(self, run: Run) -> None:
        self.run = run
        self.victim = run.random.choice(list(run.network.ranks))

    @abstractmethod
    def throw(self) -> None:
        """Cause the fault, and wait for what must be seen while it lasts."""

    def repair(self) -> None:
        """Make the next attempt possible, after the ranks have ended, or training has gone on."""
        return None

    def survivors(self) -> list[int]:
        """Ranks that must end by themselves."""
        return list(self.run.network.ranks)

    def check(self) -> None:
        """Raise unless the ranks said the right thing, once they have ended."""
        return None

    def check_next(self) -> None:
        """Raise unless the next attempt said the right thing, once it trains."""
        return None

    def kill(self, number: signal.Signals, rank: int | None = None) -> None:
        """Send a signal to the victim, or to another rank."""
        os.kill(self.run.processes.pids[self.victim if rank is None else rank], number)

    def must_say(self, text: str, ranks: list[int] | None = None) -> None:
        """Raise unless some rank has printed a text."""
        said = " ".join(self.run.said(ranks).split())
        if text not in said:
            raise ChaosError(f"{self.name}: no rank said {text!r}; they said:\n{self.run.said(ranks)}")


class LostRank(Fault):
    """A rank that is gone: the others name it and end, and the run resumes."""

    promise = "others name the rank and end; resumed to the same bits"
    ends_run = True

    def survivors(self) -> list[int]:
        return [rank for rank in self.run.network.ranks if rank != self.victim]

    def check(self) -> None:
        self.must_say(f"rank {self.victim} (", self.survivors())
