"""Disks that fill up, checkpoints that are damaged, readers that are slow, a folder that is in use."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from abc import abstractmethod
from contextlib import suppress
from pathlib import Path

from rowhaul.checkpoint.layout import finished_checkpoints
from testbed.chaos.faults.base import Fault, LostRank
from testbed.chaos.running import ChaosError


class DiskFull(Fault):
    """The disk of the run's folder fills up, for longer than the time between two checkpoints."""

    name, promise = "disk full", "a failed save is reported, training goes on, later saves succeed"
    seconds = 60.0

    def throw(self) -> None:
        filler, step = self.run.out / "filler", self.run.step
        try:
            with filler.open("wb", buffering=0) as file, suppress(OSError):  # the disk is full
                while True:
                    file.write(bytes(1 << 16))
            deadline = time.monotonic() + 30
            while "failed, training goes on" not in " ".join(self.run.said([0]).split()):
                if time.monotonic() > deadline or self.run.processes.failed:
                    raise ChaosError(f"{self.name}: no word of a failed save\n{self.run.said()}")
                time.sleep(0.05)
        finally:
            filler.unlink(missing_ok=True)
        deadline = time.monotonic() + 30
        while not any(int(path.name[5:]) > step for path in finished_checkpoints(self._checkpoints())):
            if time.monotonic() > deadline or not self.run.processes.running:
                raise ChaosError(f"{self.name}: no checkpoint after there was room again\n{self.run.said()}")
            time.sleep(0.05)

    def _checkpoints(self) -> Path:
        return self.run.out / "checkpoints"


class _Damaged(LostRank):
    """A rank is killed, and a file of the newest checkpoint is damaged before the run resumes."""

    promise = "reported, and resumed from the checkpoint before it to the same bits"
    damaged: Path | None = None

    def throw(self) -> None:
        self.kill(signal.SIGKILL)

    def repair(self) -> None:
        found = [Path(str(path)) for path in finished_checkpoints(self.run.out / "checkpoints")]
        if len(found) < 2:
            return
        file = self.run.random.choice(sorted(found[-1].glob("*")))
        self.damage(file)
        self.damaged = found[-1]

    def check_next(self) -> None:
        if self.damaged is not None:
            self.must_say(self.damaged.name, [0])
            self.must_say("damaged", [0])

    @abstractmethod
    def damage(self, file: Path) -> None:
        """Damage a file."""


class Truncated(_Damaged):
    """A file of the newest checkpoint is cut in half."""

    name = "checkpoint file truncated"

    def damage(self, file: Path) -> None:
        os.truncate(file, file.stat().st_size // 2)


class Flipped(_Damaged):
    """One bit of a file of the newest checkpoint is flipped."""

    name = "checkpoint bit flipped"

    def damage(self, file: Path) -> None:
        contents = bytearray(file.read_bytes())
        contents[self.run.random.randrange(len(contents))] ^= 1 << self.run.random.randrange(8)
        file.write_bytes(contents)


class SecondRun(Fault):
    """Somebody starts a second run in the same folder."""

    name, promise = "second run in the same folder", "the second is refused, the first goes on"

    def throw(self) -> None:
        hold = self.run.hold(self.victim)
        hold.touch()  # or the first might end before the second has started
        try:
            command = ["train", "--data", str(self.run.data), "--out", str(self.run.out), "--resume"]
            second = subprocess.run(
                [sys.executable, "-m", "rowhaul", *command, "--set", "cluster.workers=0"],
                capture_output=True,
                text=True,
                timeout=120,
            )
        finally:
            hold.unlink()
        if second.returncode == 0 or "is in use by" not in " ".join((second.stdout + second.stderr).split()):
            raise ChaosError(f"{self.name}: it was not refused: {second.stdout}{second.stderr}")


class SlowReader(Fault):
    """A machine reads no data for three seconds."""

    name, promise = "reader held for 3 s", "training goes on"
    hold_seconds = 3.0

    def throw(self) -> None:
        hold = self.run.hold(self.victim)
        hold.touch()
        time.sleep(self.hold_seconds)
        hold.unlink()


class StuckReader(SlowReader):
    """A machine reads no data until the others complain."""

    name, promise = "reader stuck", "the rank is named within 30 s, and training goes on afterwards"

    def throw(self) -> None:
        hold = self.run.hold(self.victim)
        hold.touch()
        deadline = time.monotonic() + 35.0
        try:
            while f"waiting for rank {self.victim}" not in " ".join(self.run.said().split()):
                if time.monotonic() > deadline:
                    raise ChaosError(f"{self.name}: nobody named the rank\n{self.run.said()}")
                time.sleep(0.1)
        finally:
            hold.unlink()


def disk(folder: Path, megabytes: int) -> None:
    """Mount a small disk of its own at a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True, timeout=30
    )


def remove_disk(folder: Path) -> None:
    """Unmount and remove it."""
    subprocess.run(["umount", "-l", str(folder)], check=False, timeout=30)
    shutil.rmtree(folder, ignore_errors=True)
