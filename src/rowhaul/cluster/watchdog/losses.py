"""Decides which ranks are lost: killed, stopped, unreachable, or failed by their own account.

Silence is counted in the hub's own rounds, not in seconds: a hub that was itself suspended does not take the
others for dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rowhaul.cluster.waiting import ranks_text
from rowhaul.cluster.watchdog.beats import Beat

ENDED = "has ended without a word: its process was killed or has crashed (see its output)"
_CLOSED = "has closed its connection without a word: its process or its host has died"


@dataclass
class _Rank:
    beat: Beat | None = None  # None before the first
    has_beaten: bool = False  # since the last round
    silent_rounds: int = 0
    has_ended: bool = False  # will not beat again


@dataclass
class Losses:
    """The ranks that still run, and the first loss.

    Args:
        roles: of all ranks.
        interval: seconds between rounds.
        num_missed: rounds without a beat after which a rank is lost.
        first_missed: the same before its first beat.
    """

    roles: Sequence[str]
    interval: float
    num_missed: int
    first_missed: int
    first: dict[str, Any] | None = None  # the first loss, as an event
    left: list[int] = field(default_factory=list)  # finished without an error

    def __post_init__(self) -> None:
        self._ranks = [_Rank() for _ in self.roles]

    def beats(self) -> dict[int, Beat]:
        """The latest beats of ranks that run."""
        return {
            number: rank.beat
            for number, rank in enumerate(self._ranks)
            if rank.beat is not None and not rank.has_ended
        }

    def have_ended(self, ranks: Sequence[int]) -> bool:
        """Whether all of these ranks have ended, in order or not."""
        return all(self._ranks[rank].has_ended for rank in ranks)

    def beaten(self, rank: int, beat: Beat) -> None:
        """A rank has beaten."""
        self._ranks[rank].beat = beat
        self._ranks[rank].has_beaten = not beat.is_stopped

    def posted(self, rank: int, post: dict[str, Any]) -> None:
        """A rank ends, with its last post: success, its error, or a loss that it knows of."""
        self._ranks[rank].has_ended = True
        if "left" in post:
            self.left.append(rank)
        elif "lost" in post:
            self._lose(post["lost"], post["reason"])
        elif "died" in post:
            self._lose(rank, ENDED)
        else:
            self._lose(rank, f"failed: {post['failed']}")

    def closed(self, rank: int) -> None:
        """A rank's connection has closed."""
        if not self._ranks[rank].has_ended:
            self._ranks[rank].has_ended = True
            self._lose(rank, _CLOSED)

    def round(self) -> None:
        """Count those that have not beaten since the last round."""
        silent = [number for number, rank in enumerate(self._ranks) if self._is_silent(rank)]
        if not silent:
            return
        rank = self._ranks[silent[0]]
        seconds = rank.silent_rounds * self.interval
        if rank.beat is not None and rank.beat.is_stopped:
            reason = f"is stopped (SIGSTOP, or Ctrl-Z) and has not run for {seconds:g} s"
        elif rank.beat is None:
            reason = f"has not begun to beat within {seconds:g} s: its process or its host has died"
        else:
            reason = f"has not been heard of for {seconds:g} s"
        if len(silent) > 1:
            reason += f", nor {ranks_text(silent[1:], self.roles)}"
        if rank.beat is not None and not rank.beat.is_stopped:
            reason += ": its process or its host has died, is stopped or cannot be reached"
        for number in silent:
            self._ranks[number].has_ended = True
        self._lose(silent[0], reason)

    def _is_silent(self, rank: _Rank) -> bool:
        if rank.has_ended:
            return False
        rank.silent_rounds = 0 if rank.has_beaten else rank.silent_rounds + 1
        rank.has_beaten = False
        return rank.silent_rounds >= (self.first_missed if rank.beat is None else self.num_missed)

    def _lose(self, rank: int, reason: str) -> None:
        if self.first is None:
            self.first = {"lost": rank, "reason": reason}
