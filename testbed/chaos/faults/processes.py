"""Processes that are killed, stopped or asked to end."""

from __future__ import annotations

import signal
import time

from testbed.chaos.faults.base import Fault, LostRank


class Killed(LostRank):
    """SIGKILL of a rank."""

    name = "SIGKILL of a rank"

    def throw(self) -> None:
        self.kill(signal.SIGKILL)


class KilledWhileSaving(LostRank):
    """SIGKILL of a rank while a checkpoint is being written."""

    name = "SIGKILL of a rank while it saves"

    def throw(self) -> None:
        checkpoints, deadline = self.run.out / "checkpoints", time.monotonic() + 10
        while not list(checkpoints.glob("*.unfinished")) and time.monotonic() < deadline:
            time.sleep(0.001)
        self.kill(signal.SIGKILL)


class MachineGone(Killed):
    """A machine is lost for good: the run resumes with those that are left."""

    name = "machine gone for good"
    promise = "others name the rank and end; resumed with one worker fewer, equal to 1e-9 in float64"

    def repair(self) -> None:
        self.run.lose_a_worker()


class Stopped(LostRank):
    """SIGSTOP of a rank, for good."""

    name = "SIGSTOP of a rank"

    def throw(self) -> None:
        self.kill(signal.SIGSTOP)

    def repair(self) -> None:
        self.kill(signal.SIGCONT)  # it must notice that the others have ended
        self.run.wait_for_end(self.seconds, "a rank that was stopped goes on")


class Suspended(Fault):
    """SIGSTOP of a rank for two seconds."""

    name = "SIGSTOP of a rank for 2 s"
    promise = "training goes on"

    def throw(self) -> None:
        self.kill(signal.SIGSTOP)
        time.sleep(2.0)
        self.kill(signal.SIGCONT)


class Preempted(Fault):
    """SIGTERM to every rank at once."""

    name, promise = "SIGTERM to all ranks", "saved at once; resumed to the same bits"
    ends_run = True
    times = 1

    def throw(self) -> None:
        for _ in range(self.times):
            for rank in self.run.network.ranks:
                self.kill(signal.SIGTERM, rank)
            time.sleep(0.05)

    def check(self) -> None:
        self.must_say("Stopped and saved", [0])


class PreemptedTwice(Preempted):
    """The same, three times in a row, as launchers forward what they get."""

    name = "SIGTERM to all ranks, repeated"
    times = 3
