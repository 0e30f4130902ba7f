"""What a run has learned, and how far two runs are apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.checkpoint import CheckpointReader, latest_checkpoint

Learned = dict[str, npt.NDArray[Any]]


def learned(out: Path) -> Learned:
    """Read the newest checkpoint of a run: dense weights, and rows by key."""
    checkpoint = latest_checkpoint(out / "checkpoints")
    assert checkpoint is not None
    reader = CheckpointReader(checkpoint)
    found: Learned = {"step": np.array([reader.facts["step"]])}
    for group in ("model", "dense-optimizer"):
        found |= {f"{group} {name}": tensor.numpy() for name, tensor in reader.tensors(group).items()}
    for name in reader.tables:
        blocks = list(reader.rows(name))
        keys = np.concatenate([keys for keys, _ in blocks])
        records = np.concatenate([records for _, records in blocks])
        order = np.argsort(keys)
        found[f"keys of {name}"], found[f"records of {name}"] = keys[order], records[order]
    return found


def difference(a: Learned, b: Learned) -> float:
    """The largest difference of any two numbers: 0 where all bits are equal, infinite where shapes differ."""
    if a.keys() != b.keys() or any(a[name].shape != b[name].shape for name in a):
        return float("inf")
    most = 0.0
    for name in a:
        if a[name].tobytes() != b[name].tobytes():
            apart = float(np.abs(a[name].astype(np.float64) - b[name].astype(np.float64)).max())
            most = max(most, apart if np.isfinite(apart) else float("inf"), 5e-324)
    return most
