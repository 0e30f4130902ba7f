"""Run every benchmark of this folder, one after the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NOT_BENCHMARKS = {"run_all.py", "report.py", "datasets.py", "torchrec_peer.py"}
ARGUMENTS = {"papers.py": ["--quick"]}  # the whole of it takes a quarter of an hour


def main() -> None:
    scripts = sorted(path for path in Path(__file__).parent.glob("*.py") if path.name not in NOT_BENCHMARKS)
    for script in scripts:
        print(f"\n== {script.name}", flush=True)
        subprocess.run([sys.executable, str(script), *ARGUMENTS.get(script.name, [])], check=True)


if __name__ == "__main__":
    main()
