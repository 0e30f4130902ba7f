"""Environments of peers whose pins clash with ours, or with each other's: made on the first run."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from report import console

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Environment:
    """A virtual environment ``.venv-<name>``: what pip installs, one call after the other."""

    name: str
    packages: Sequence[Sequence[str]]
    imports: str  # what must work in it

    def python(self) -> Path:
        """The interpreter; the environment is made anew when its packages have changed."""
        folder = ROOT / f".venv-{self.name}"
        python, stamp, wanted = folder / "bin" / "python", folder / "installed", json.dumps(self.packages)
        if stamp.exists() and stamp.read_text() == wanted:
            return python
        console.print(f"making {folder.name} (about 1 GB, a few minutes)")
        try:
            venv.create(folder, with_pip=True, clear=True)
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            for packages in self.packages:
                subprocess.run([*pip, *packages], check=True)
            subprocess.run([str(python), "-c", f"import {self.imports}"], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pinned = ", ".join(name for some in self.packages for name in some if "==" in name)
            sys.exit(
                f"{folder} could not be made: {error}\nLet pip reach an index that has {pinned}, or make the "
                "environment by hand."
            )
        stamp.write_text(wanted)
        return python


FUXICTR = Environment("fuxictr", [["torch==2.13.0", "fuxictr==2.3.10"]], "model_zoo.LongCTR.DIN.DIN")
# RecBole sets `np.float_`, which NumPy 2 has no more, and asks for a Ray of 2023, which its tuner alone
# imports: hence without dependencies.
RECBOLE = Environment(
    "recbole",
    [
        ["torch==2.13.0", "numpy<2", "scipy", "pandas", "scikit-learn", "pyyaml", "tqdm", "psutil"],
        ["colorlog==4.7.2", "colorama==0.4.4", "tensorboard", "thop", "tabulate", "plotly", "texttable"],
        ["--no-deps", "recbole==1.2.1"],
    ],
    "recbole.trainer",
)
