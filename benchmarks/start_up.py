"""What a newcomer waits for: importing the package, and compiling the demo's kernels the first time.

python benchmarks/start_up.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import print_machine, print_table

REPEATS = 5


def seconds(*command: str, **environment: str) -> float:
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, *command], check=True, capture_output=True, env={**os.environ, **environment}
    )
    return time.perf_counter() - began


def median_of_imports(statement: str) -> float:
    return statistics.median(seconds("-c", statement) for _ in range(REPEATS))


def main() -> None:
    print_machine()
    torch_alone = median_of_imports("import torch")
    lines = [
        ["import rowhaul, beyond torch", median_of_imports("import torch, rowhaul") - torch_alone],
        [
            "import rowhaul.train, beyond torch",
            median_of_imports("import torch, rowhaul.train") - torch_alone,
        ],
        ["rowhaul --help", statistics.median(seconds("-m", "rowhaul", "--help") for _ in range(REPEATS))],
    ]
    demo = ("-m", "rowhaul", "demo", "--rows", "20000", "--out")
    with tempfile.TemporaryDirectory() as folder:
        out, cache = str(Path(folder) / "demo"), str(Path(folder) / "cache")
        cold = seconds(*demo, out, NUMBA_CACHE_DIR=cache)
        warm = statistics.median(seconds(*demo, out, NUMBA_CACHE_DIR=cache) for _ in range(3))
    lines.append(["demo, kernels compiled (20,000 rows)", cold])
    lines.append(["demo, kernels from the cache", warm])
    lines.append(["cold compilation of the demo's kernels", cold - warm])
    print_table("seconds", ["", "seconds"], lines)


if __name__ == "__main__":
    main()
