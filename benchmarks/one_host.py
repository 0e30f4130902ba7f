"""Workers that share one machine, in equal shares and with `--shares auto`, against one process with threads.

All are `rowhaul train` as typed: the default DLRM on a Criteo-like log, co-located workers with a thread
each; `auto` tries one machine in training, and goes on as one process with as many threads. They take turns;
samples per second are those of the last lines of the log, when `auto` has decided.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report import print_machine, print_table
from rowhaul._cores import usable_cores

DECIDED = 80  # steps, within which `auto` has decided and begun anew
COUNTED = 200  # steps that are


def train(folder: Path, log: Path, batch_size: int, options: tuple[str, ...]) -> float:
    """Samples per second at the end of a run."""
    out = folder / "run"
    command = [sys.executable, "-m", "rowhaul", "train", "--data", str(log), "--out", str(out), *options]
    command += ["--batch-size", str(batch_size), "--max-steps", str(DECIDED + COUNTED), "--epochs", "99"]
    subprocess.run([*command, "--set", "log_every=10"], check=True, stdout=subprocess.DEVNULL, timeout=600)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    speeds = [one["samples_per_second"] for one in lines if one["kind"] == "train" and one["step"] > DECIDED]
    shutil.rmtree(out)
    return statistics.median(speeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-sizes", default="4096,1024,256", help="of all workers together")
    parser.add_argument("--workers", type=int, default=usable_cores())
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    print_machine()
    several = ("--workers", str(given.workers), "--colocated", "--peer-to-peer", "--threads", "1")
    contenders = {
        "one process": ("--threads", str(given.workers)),
        "equal shares": several,
        "shares auto": (*several, "--shares", "auto"),
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder, log = Path(temporary), Path(temporary) / "log"
        generate = [sys.executable, "-m", "rowhaul", "generate", "--rows", "400000", "--out", str(log)]
        subprocess.run([*generate, "--test-share", "0"], check=True, stdout=subprocess.DEVNULL)
        rows: list[list[object]] = []
        for batch_size in map(int, given.batch_sizes.split(",")):
            speeds: dict[str, list[float]] = {name: [] for name in contenders}
            for _ in range(given.repeats):
                for name, options in contenders.items():
                    speeds[name].append(train(folder, log, batch_size, options))
            medians = [statistics.median(some) for some in speeds.values()]
            ratios = [
                statistics.median(a / b for a, b in zip(some, speeds["one process"], strict=True))
                for name, some in speeds.items()
                if name != "one process"
            ]
            rows.append([f"{batch_size:,}", *medians, *ratios])
    columns = ["batch", *(f"{name}, samples/s" for name in contenders), "equal: ratio", "auto: ratio"]
    print_table(f"{given.workers} workers that share one machine, default DLRM", columns, rows)


if __name__ == "__main__":
    main()
