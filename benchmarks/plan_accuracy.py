"""What `rowhaul plan` predicts against what is then measured: 1, 2 and 4 machines on shaped links.

Every machine is a network namespace with one link that carries rows, dense gradients and control messages.
All of them share this machine's cores, and `plan` knows it (``--share-cores``). It measures the machine right
before each round of runs, since the speed of a borrowed processor changes within minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import argparse
import json
import statistics
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import replace

from peer_ranks.contenders import Contender, Setting, rowhaul
from peer_ranks.work import write_work
from peers import SETTINGS, run
from report import console, print_machine, print_table
from testbed.errors import TestbedUnavailable

COLOCATED = ("--colocated", "--peer-to-peer", "--links", "measure", "--dispatcher", "joint")


def predicted(setting: Setting, work: Path, counts: list[int]) -> dict[int, float]:
    """Seconds of a step, by machines, as `rowhaul plan` says."""
    train = rowhaul(setting, 1)(work, Path("unused"), 0)
    words = iter(train[train.index("train") + 1 :])
    kept = []
    for word in words:
        value = next(words)
        if word not in ("--out", "--max-steps", "--checkpoint-every"):
            kept += [word, value]
    command = [
        *(sys.executable, "-m", "rowhaul", "plan", *kept, "--links", f"{setting.links[0]:g}mbit"),
        *("--machines", ",".join(map(str, counts)), "--dispatchers", "joint", "--share-cores", "--json"),
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return {one["machines"]: one["seconds"] for one in json.loads(done.stdout)["predictions"]}


def compare(setting: Setting, counts: list[int], given: argparse.Namespace) -> None:
    """Print predictions and measurements, medians over the rounds."""
    foreseen: defaultdict[int, list[float]] = defaultdict(list)
    found: defaultdict[int, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as top:
        work = Path(top) / "work"
        write_work(work, setting, setting.warm_up + setting.steps)
        for turn in range(given.repeats):
            for count, seconds in predicted(setting, work, counts).items():
                foreseen[count].append(seconds)
            for count in counts:
                folder = Path(top) / f"{turn}-{count}"
                folder.mkdir()
                options = COLOCATED if count > 1 else ()
                one = Contender(f"{count}", rowhaul(setting, 1, *options), count)
                result = run(one, replace(setting, links=setting.links[:count]), work, folder, given.timeout)
                found[count].append(result.seconds)
    rows = []
    for count in counts:
        ratios = [ours / real for ours, real in zip(foreseen[count], found[count], strict=True)]
        times = [1e3 * statistics.median(some[count]) for some in (foreseen, found)]
        rows.append([count, *times, f"{statistics.median(ratios) - 1:+.0%}"])
    columns = ["machines", "predicted, ms a step", "measured", "off by"]
    print_table(f"{setting.title}, {setting.batch:,} samples a step", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", default="equal,gigabit", help="comma-separated, as in peers.py")
    parser.add_argument("--machines", default="1,2,4")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one run")
    given = parser.parse_args()
    print_machine()
    for name in given.settings.split(","):
        try:
            compare(SETTINGS[name], [int(one) for one in given.machines.split(",")], given)
        except TestbedUnavailable as reason:
            console.print(f"skipped: {reason}")
            return


if __name__ == "__main__":
    main()
