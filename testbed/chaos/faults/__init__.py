"""The faults by kind."""

from testbed.chaos.faults.base import Fault, LostRank
from testbed.chaos.faults.network import LinkCutBriefly, Restarted, Stranger, Throttled, Unplugged
from testbed.chaos.faults.processes import (
    Killed,
    KilledWhileSaving,
    MachineGone,
    Preempted,
    PreemptedTwice,
    Stopped,
    Suspended,
)
from testbed.chaos.faults.storage import DiskFull, Flipped, SecondRun, SlowReader, StuckReader, Truncated

__all__ = ["ALL", "Fault", "LostRank", "MachineGone"]

ALL: tuple[type[Fault], ...] = (
    Killed,
    KilledWhileSaving,
    Stopped,
    Suspended,
    Unplugged,
    LinkCutBriefly,
    Throttled,
    Restarted,
    Preempted,
    PreemptedTwice,
    DiskFull,
    Truncated,
    Flipped,
    SecondRun,
    Stranger,
    SlowReader,
    StuckReader,
    MachineGone,
)
