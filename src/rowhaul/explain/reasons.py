"""Why a row moves, beyond the kind of the move: what would have had to be different for it to stay."""

from __future__ import annotations

from enum import IntEnum


class Reason(IntEnum):
    """Why a row moved."""

    FIRST_USE = 0  # the worker has never held the row
    TRAINED_ELSEWHERE = 1  # another worker trained the row last
    EVICTED = 2  # a cache had no room: a record pushed home, or pulled again by the worker that lost it
    SPLIT = 3  # several workers trained the row in one iteration
    SYNC = 4  # the synchronisation mode, or pruning, sends trained rows home
    HOT = 5  # the row has left the replicated hot set


REASON_TEXTS = {
    Reason.FIRST_USE: "first use",
    Reason.TRAINED_ELSEWHERE: "another worker trained it",
    Reason.EVICTED: "evicted",
    Reason.SPLIT: "split",
    Reason.SYNC: "sent home after training",
    Reason.HOT: "left the hot set",
}
