"""Who takes part: a name, where it runs, and the command of each rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
AUTO_STEPS = 80  # `--shares auto` has decided by then


@dataclass(frozen=True)
class Setting:
    """Links, a batch, and a model: what one table is about."""

    title: str
    links: tuple[float, ...]  # Mbit/s
    batch: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    dim: int = 64
    warm_up: int = 30
    steps: int = 60  # after the warm-up
    every: int = 10
    threads: int = 1  # of each process

    @property
    def fast(self) -> int:
        """How many links are as fast as the fastest."""
        return self.links.count(max(self.links))


@dataclass(frozen=True)
class Contender:
    """One line of a table."""

    name: str
    command: Callable[[Path, Path, int], list[str]]  # of the work, of the run, and the steps
    workers: int = 1  # machines, the fastest first
    stores: int = 0  # more machines, which only hold rows
    more_steps: int = 0  # before it counts
    threads: int = 1  # of each process


def rowhaul(setting: Setting, threads: int, *options: str) -> Callable[[Path, Path, int], list[str]]:
    """`rowhaul train` as a user types it."""

    def command(work: Path, run: Path, steps: int) -> list[str]:
        options_of_model = {"bottom": list(setting.bottom), "top": list(setting.top)}
        sizes = [f"model.options.{name}={json.dumps(value)}" for name, value in options_of_model.items()]
        return [
            *(sys.executable, "-m", "rowhaul", "train"),
            *("--data", str(work / "part-*.parquet"), "--schema", str(work / "schema.yaml")),
            *("--out", str(run), "--model", "dlrm", "--embedding-dim", str(setting.dim)),
            *("--batch-size", str(setting.batch), "--max-steps", str(steps), "--threads", str(threads)),
            *("--checkpoint-every", "0", "--set", f"log_every={setting.every}"),
            *(word for one in sizes for word in ("--set", one)),
            *options,
        ]

    return command


def script(python: str, name: str, *options: str) -> Callable[[Path, Path, int], list[str]]:
    """A rank of a peer."""
    return lambda work, run, steps: [
        *(python, str(FOLDER / name), str(work), str(run / "metrics.jsonl"), str(steps), *options)
    ]


def contenders(setting: Setting, torchrec: str) -> Sequence[Contender]:
    """All lines of a setting's table; one machine first."""
    everyone, threads = len(setting.links), setting.threads
    groups = {f"{everyone} machines": everyone}
    if setting.fast < everyone:
        groups = {f"the {setting.fast} fast ones": setting.fast, f"all {everyone}": everyone}
    torch = script(sys.executable, "torch_rank.py", str(threads))
    found = [
        Contender("one machine, Rowhaul", rowhaul(setting, threads), threads=threads),
        Contender(
            f"one machine, Rowhaul, {2 * threads} threads", rowhaul(setting, 2 * threads), threads=2 * threads
        ),
        Contender("one machine, PyTorch", torch, threads=threads),
    ]
    homes = ("--colocated", "--peer-to-peer", "--links", "measure")
    for who, workers in groups.items():
        peers = {"Rowhaul": rowhaul(setting, threads, *homes), "DDP": torch}
        for way, called in (("mixed", "tables"), ("row", "rows"), ("planner", "planner")):
            peers[f"TorchRec, {called}"] = script(torchrec, "torchrec_rank.py", way, str(threads))
        found += [
            Contender(f"{name}, {who}", command, workers, threads=threads) for name, command in peers.items()
        ]
    stored = rowhaul(setting, threads, "--stores", "1", "--links", "measure")
    auto = rowhaul(setting, threads, *homes, "--shares", "auto")
    return [
        *found,
        Contender(f"Rowhaul, {everyone} workers and a store", stored, everyone, 1, threads=threads),
        Contender(
            f"Rowhaul, {everyone} machines, shares auto",
            auto,
            everyone,
            more_steps=AUTO_STEPS,
            threads=threads,
        ),
    ]
