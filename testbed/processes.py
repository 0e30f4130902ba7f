"""One process per rank, each inside its namespace, with the variables that ``torchrun`` would set."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from testbed import endings, layout
from testbed.errors import RanksFailedError, TestbedError
from testbed.layout import Network

INTERFACE_VARIABLE = "ROWHAUL_INTERFACE"  # rows travel here
SIDE_INTERFACE_VARIABLE = "ROWHAUL_SIDE_INTERFACE"  # dense gradients and control messages travel here
MASTER_PORT = 29500  # always free: the network is our own

_POLL_SECONDS = 0.02
_QUOTED_LINES = 12


@dataclass(frozen=True)
class RankOutput:
    """What a rank printed, and how it ended."""

    rank: int
    exit_code: int
    stdout_path: Path
    stderr_path: Path

    @property
    def stdout(self) -> str:
        """What it printed."""
        return self.stdout_path.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What it complained of."""
        return self.stderr_path.read_text(errors="replace")


class RankProcesses:
    """The processes of all ranks; on leaving the ``with`` block all that still run are ended.

    ``command_of_rank`` gives each rank's command line; what it starts is ended
    with it. Output goes to ``rank-N.stdout`` and ``rank-N.stderr`` in ``folder``.
    """

    def __init__(
        self,
        network: Network,
        command_of_rank: Callable[[int], Sequence[str]],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        master_port: int = MASTER_PORT,
    ) -> None:
        self.network = network
        self.folder = folder
        self._command_of_rank = command_of_rank
        self._environment = dict(environment or {})
        self._master_port = master_port
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> RankProcesses:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for rank in self.network.ranks:
                self._processes.append(self._start(rank))
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    @property
    def pids(self) -> list[int]:
        """The process of every rank."""
        return [process.pid for process in self._processes]

    @property
    def running(self) -> list[int]:
        """Ranks that have not ended."""
        return [rank for rank, process in enumerate(self._processes) if process.poll() is None]

    @property
    def failed(self) -> list[int]:
        """Ranks that ended with an error."""
        return [rank for rank, process in enumerate(self._processes) if process.poll()]

    def wait(
        self,
        timeout_seconds: float,
        grace_seconds: float = 5.0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[RankOutput]:
        """Wait until all ranks have ended by themselves.

        Raises `RanksFailedError` when one ends with an error and the others do not end within
        ``grace_seconds``, when all end and one has an error, or after ``timeout_seconds``. ``meanwhile``
        is called now and then.
        """
        deadline = time.monotonic() + timeout_seconds
        while self.running and time.monotonic() < deadline:
            if self.failed:
                deadline = min(deadline, time.monotonic() + grace_seconds)
                grace_seconds = float("inf")  # it has begun
            meanwhile()
            time.sleep(_POLL_SECONDS)
        meanwhile()
        failed, running = self.failed, self.running
        if failed or running:
            self.end()
            raise RanksFailedError(self._complaint(failed, running, timeout_seconds))
        return self.outputs()

    def outputs(self) -> list[RankOutput]:
        """What the ranks printed, once all have ended, however they did."""
        if self.running:
            raise TestbedError(f"ranks {self.running} still run; wait for them, or end them")
        return [
            RankOutput(
                rank,
                process.returncode,
                self.folder / f"rank-{rank}.stdout",
                self.folder / f"rank-{rank}.stderr",
            )
            for rank, process in enumerate(self._processes)
        ]

    def end(self) -> None:
        """End all processes that still run, and what they have started."""
        endings.end(self._alive)

    def _alive(self) -> list[int]:
        """Each rank leads a session of its own, which what it starts belongs to, also after it has ended."""
        sessions = set(self.pids)
        inside = endings.processes_in([self.network.namespace(rank) for rank in self.network.ranks])
        not_yet_inside = {self._processes[rank].pid for rank in self.running}
        return sorted(not_yet_inside | {pid for pid in inside if endings.session_of(pid) in sessions})

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        command = self.network.inside(rank, self._command_of_rank(rank))
        with (
            (self.folder / f"rank-{rank}.stdout").open("wb") as stdout,
            (self.folder / f"rank-{rank}.stderr").open("wb") as stderr,
        ):
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=rank_environment(self.network, rank, self._master_port) | self._environment,
                start_new_session=True,  # Ctrl-C is for us, who end them in order
            )

    def _complaint(self, failed: list[int], running: list[int], timeout_seconds: float) -> str:
        lines = []
        if failed:
            codes = ", ".join(f"rank {rank} with code {self._processes[rank].returncode}" for rank in failed)
            lines.append(f"ended with an error: {codes}")
        if running:
            cause = "after that of others" if failed else f"within {timeout_seconds:g} s"
            lines.append(f"did not end {cause}: ranks {', '.join(map(str, running))}")
        first = (failed or running)[0]
        said = (self.folder / f"rank-{first}.stderr").read_text(errors="replace").splitlines()
        lines += [f"rank {first} said last:", *(f"  {line}" for line in said[-_QUOTED_LINES:])]
        lines.append(f"all output: {self.folder}/rank-*.std*")
        return "\n".join(lines)


def rank_environment(network: Network, rank: int, master_port: int = MASTER_PORT) -> dict[str, str]:
    """The variables of a rank: ours, those of ``torchrun`` (all ranks share one host), and the interfaces."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")
    # The commands that were installed beside this Python are found, also when sudo has reset the path.
    environment["PATH"] = os.pathsep.join(
        (str(Path(sys.executable).parent), environment.get("PATH", os.defpath))
    )
    return environment | {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(network.ranks)),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(len(network.ranks)),
        "GROUP_RANK": "0",
        "MASTER_ADDR": network.side_address(0),
        "MASTER_PORT": str(master_port),
        INTERFACE_VARIABLE: layout.HAUL,
        SIDE_INTERFACE_VARIABLE: layout.SIDE,
        # For programs that know neither of the above: without it Gloo may bind 127.0.0.1, and hang.
        "GLOO_SOCKET_IFNAME": layout.HAUL,
    }
