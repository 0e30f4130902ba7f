"""Installs a built wheel into an empty environment, far from the repository, and tries the README there.

``python release/check.py dist/*.whl --constraints constraints.txt`` makes the environment, installs, and
then runs the demo, the README's Python, a Parquet file of the user's own, three workers and a store on this
machine. Anything that fails ends it with that command's output. It prints how long everything took; from
nothing to an AUC is what newcomers wait for.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OWN_PARQUET = """
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
random = np.random.default_rng(0)
users, items = random.zipf(1.3, 30_000) % 5_000, random.zipf(1.2, 30_000) % 2_000
clicks = random.random(30_000) < 1 / (1 + np.exp(-((users % 7) - 3 + (items % 5) - 2) / 2))
table = {"user": users, "item": [f"i{one}" for one in items], "click": clicks.astype(np.int8)}
pq.write_table(pa.table(table), "mine.parquet")
"""
TRAIN = "train --data mine.parquet --features user,item --label click --batch-size 512"
COMMANDS = (
    ("own Parquet", f"{TRAIN} --out mine"),
    ("its scores", "predict mine --data mine.parquet --out scores.csv"),
    ("three workers", f"{TRAIN} --workers 3 --stores 1 --out three"),
    ("a cluster?", "simulate mine.parquet --features user,item --workers 2 --links 1gbit --iterations 20"),
)


class Environment:
    """A virtual environment without the repository: another folder, no PYTHONPATH, kernels of its own."""

    def __init__(self, python: str, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        keep = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        self.variables = keep | {"PYTHONSAFEPATH": "1", "PATH": f"{self.bin}:{os.environ['PATH']}"}
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)

    def run(self, what: str, *command: str | Path) -> str:
        """Run a program of the environment; print how long it took; return its output."""
        begin = time.monotonic()
        done = subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd=self.folder,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(f"{what:<16} {time.monotonic() - begin:7.1f} s", flush=True)
        if done.returncode:
            sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}\nfailed with exit code {done.returncode}")
        return done.stdout


def main() -> None:
    """Check one wheel with one Python and one set of versions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--constraints", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--demo-rows", default="400000")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rowhaul-release-") as folder:
        begin = time.monotonic()
        print(f"{chosen.python}, {chosen.constraints}")
        fresh = Environment(chosen.python, Path(folder))
        versions = ("-c", str(chosen.constraints.resolve()), str(chosen.wheel.resolve()))
        fresh.run("install", "pip", "install", "--quiet", *versions)
        demo = fresh.run("demo", "rowhaul", "demo", "--rows", chosen.demo_rows)
        auc = re.search(r"AUC\s+(0\.\d+)", demo)
        if auc is None:
            sys.exit(f"the demo prints no AUC:\n{demo}")
        print(f"from nothing to an AUC of {auc[1]}: {time.monotonic() - begin:.0f} s", flush=True)
        readme = Path(__file__).parents[1] / "README.md"
        for snippet in re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.MULTILINE | re.DOTALL):
            fresh.run("README's Python", "python", "-c", snippet)
        fresh.run("a file", "python", "-c", OWN_PARQUET)
        for what, command in COMMANDS:
            fresh.run(what, "rowhaul", *command.split())
        where = fresh.run("it is the wheel", "python", "-c", "import rowhaul; print(rowhaul.__file__)")
        if not where.startswith(folder):
            sys.exit(f"rowhaul was imported from {where}")
        print(fresh.run("versions", "pip", "list", "--format=freeze"))


if __name__ == "__main__":
    main()
