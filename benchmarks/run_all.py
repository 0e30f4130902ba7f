"""Run every benchmark of this folder, one after the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NOT_BENCHMARKS = {
    "same_bits.py",
    "run_all.py",
    "report.py",
    "datasets.py",
    "torchrec_peer.py",
    "serving_peer.py",
}
MADE_BY_ITSELF = ".venv-torchrec/installed"  # by a benchmark that is run by itself
NEEDS = {
    "torchrec_colocated.py": MADE_BY_ITSELF,
    "peers.py": MADE_BY_ITSELF,
    "zoo_peers.py": ".venv-recbole/installed",  # made after FuxiCTR's
}
ARGUMENTS = {"papers.py": ["--quick"], "memory.py": ["--quick"]}  # whole, they take long


def main() -> None:
    scripts = sorted(path for path in Path(__file__).parent.glob("*.py") if path.name not in NOT_BENCHMARKS)
    for script in scripts:
        print(f"\n== {script.name}", flush=True)
        needed = NEEDS.get(script.name)
        if needed and not (script.parents[1] / needed).exists():
            print(f"skipped: there is no {needed}; run {script.name} by itself to make it", flush=True)
            continue
        subprocess.run([sys.executable, str(script), *ARGUMENTS.get(script.name, [])], check=True)


if __name__ == "__main__":
    main()
