"""Names ranks that hold up the others: alive, but without progress.

A cluster stalls while no rank makes progress and at least one waits: for others, or for a disk that does not
answer. Time is counted in rounds, as for losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rowhaul.cluster.watchdog.beats import Beat

_MOST_NAMED = 3
_LONGEST_PAUSE = 600.0  # seconds between two warnings


@dataclass(frozen=True)
class Stall:
    """What a round has found."""

    notice: str = ""  # to be logged by every rank
    culprits: tuple[int, ...] = ()  # at the first warning
    fatal: str = ""  # why the run has to end
    blamed: int | None = None  # on whose account; None if all ranks wait for each other


class Stalls:
    """Counts rounds without progress.

    Args:
        addresses: of all ranks.
        interval: seconds between rounds.
        warn_seconds: without progress, before the ranks that the others wait for are named.
        end_seconds: the same before the run has to end; 0 never ends it.
    """

    def __init__(
        self, addresses: Sequence[str], interval: float, warn_seconds: float, end_seconds: float
    ) -> None:
        self._addresses, self._interval = addresses, interval
        self._warn_seconds, self._end_seconds = warn_seconds, end_seconds
        self._rounds = self._num_warnings = 0
        self._warn_at = warn_seconds
        self._progress: dict[int, tuple[int, int]] = {}

    def round(self, beats: Mapping[int, Beat]) -> Stall:
        """Look at the latest beats of all ranks that run."""
        progress = {rank: (beat.iteration, beat.ticks) for rank, beat in beats.items()}
        someone_waits = any(
            beat.is_blocked or any(one.activity.waits for one in beat.doing) for beat in beats.values()
        )
        moves = progress != self._progress or not someone_waits
        self._progress = progress
        if moves:
            return self._moved_on()
        self._rounds += 1
        seconds = self._rounds * self._interval
        culprits = tuple(rank for rank, beat in beats.items() if not beat.waits)
        if self._end_seconds and seconds >= self._end_seconds:
            return self._ended(beats, culprits, seconds)
        if seconds < self._warn_at:
            return Stall()
        self._num_warnings += 1
        self._warn_at += min(_LONGEST_PAUSE, seconds)
        notice = f"waiting for {self._names(beats, culprits)}"
        if not culprits:
            notice = (
                f"all ranks wait for each other: {self._names(beats, tuple(beats))}; is the network between "
                "them broken?"
            )
        return Stall(notice, culprits if self._num_warnings == 1 else ())

    def _moved_on(self) -> Stall:
        seconds, num_warnings = self._rounds * self._interval, self._num_warnings
        self._rounds = self._num_warnings = 0
        self._warn_at = self._warn_seconds
        return Stall(f"going on after {seconds:.0f} s without progress" if num_warnings else "")

    def _ended(self, beats: Mapping[int, Beat], culprits: tuple[int, ...], seconds: float) -> Stall:
        advice = "the run was ended (cluster.stuck_after sets the limit, 0 has none)"
        if not culprits:
            every = self._names(beats, tuple(beats))
            waited = f"no rank has made progress for {seconds:.0f} s, all wait for each other"
            return Stall(fatal=f"{waited}: {every}; {advice}")
        first, *others = self._sorted(beats, culprits)
        beside = f", as have {self._names(beats, tuple(others))}" if others else ""
        doing = beats[first].text()
        return Stall(
            fatal=f"has held up the others for {seconds:.0f} s, {doing}{beside}; {advice}", blamed=first
        )

    def _names(self, beats: Mapping[int, Beat], ranks: tuple[int, ...]) -> str:
        named = self._sorted(beats, ranks)
        texts = [
            f"rank {rank} ({self._addresses[rank]}), {beats[rank].text()}" for rank in named[:_MOST_NAMED]
        ]
        more = len(named) - len(texts)
        return "; ".join(texts) + (f"; and {more} more" if more else "")

    def _sorted(self, beats: Mapping[int, Beat], ranks: tuple[int, ...]) -> list[int]:
        """Sort ranks: those that are behind come first."""
        return sorted(ranks, key=lambda rank: (beats[rank].iteration, rank))
