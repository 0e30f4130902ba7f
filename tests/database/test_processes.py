"""The distributed database between real processes: one launch for everything."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from database_ranks import run_processes
from test_distributed import NAMES, TABLES, compare, follow, follow_in_one

from rowhaul.database import DistributedEmbeddingDatabase, EmbeddingDatabase
from rowhaul.errors import ClusterError
from rowhaul.optim import RowwiseAdagrad

pytestmark = pytest.mark.slow

RULE = RowwiseAdagrad(lr=0.1, initial_accumulator_value=1e-2)
NUM_RANKS = 3


def history() -> list[tuple[Any, ...]]:
    """Every call at least once, with rows and bags of all sizes."""
    random = np.random.default_rng(8)

    def ask() -> dict[str, Any]:
        keys = {name: random.integers(0, 3000, 400) for name in NAMES}
        return {"keys": keys, "lengths": {"b": [100] * 4, "c": [1] * 400}, "pooling": {"b": "mean"}}

    def asks() -> list[dict[str, Any]]:
        return [ask() for _ in range(NUM_RANKS)]

    def keys() -> list[Any]:
        return [random.integers(0, 3000, 200) for _ in range(NUM_RANKS)]

    return [
        ("train", [asks(), asks()]),
        ("migrate", "b", keys(), 2),
        ("train", [asks()]),
        ("delete", "b", keys(), 0),
        ("snapshot", asks()),
        ("save", asks()),
        ("migrate", "c", keys(), 0),
        ("train", [asks(), asks()]),
    ]


def digest(seen: Any) -> str:
    return hashlib.sha256(repr(_bytes_of(seen)).encode()).hexdigest()


def _bytes_of(seen: Any) -> Any:
    if isinstance(seen, torch.Tensor):
        return seen.numpy().tobytes()
    if isinstance(seen, dict):
        return {name: _bytes_of(value) for name, value in seen.items()}
    return [_bytes_of(one) for one in seen] if isinstance(seen, list) else seen


def everything(rank: int, folder: str) -> tuple[Any, list[str], list[str]]:
    runs = []
    for repeat in range(2):
        with DistributedEmbeddingDatabase(TABLES, RULE, dtype="float64", seed=3) as db:
            runs.append(follow(db, history(), Path(folder) / str(repeat)))
    messages = []
    dist.barrier()  # together, as the time-out is short
    with DistributedEmbeddingDatabase({"t": 4}, timeout_seconds=4) as db:
        ticket = db.prefetch([rank])
        ticket.wait()
        with pytest.raises(ClusterError) as caught:
            db.update() if rank == 1 else db.pull(ticket)
        messages.append(str(caught.value))
        dist.barrier()
        if rank:
            with pytest.raises(ClusterError) as caught:  # rank 0 asks for nothing
                db.prefetch([5]).wait()
            messages.append(str(caught.value))
        dist.barrier()
    return _as_numpy(runs[0]), [digest(run) for run in runs], messages


def _as_numpy(seen: Any) -> Any:
    if isinstance(seen, torch.Tensor):
        return seen.numpy()
    if isinstance(seen, dict):
        return {name: _as_numpy(value) for name, value in seen.items()}
    return [_as_numpy(one) for one in seen] if isinstance(seen, list) else seen


def _as_tensors(seen: Any) -> Any:
    if isinstance(seen, np.ndarray):
        return torch.from_numpy(seen)
    if isinstance(seen, dict):
        return {name: _as_tensors(value) for name, value in seen.items()}
    return [_as_tensors(one) for one in seen] if isinstance(seen, list) else seen


def test_processes_are_one_database(tmp_path: Path) -> None:
    results = run_processes(NUM_RANKS, everything, str(tmp_path))
    with EmbeddingDatabase(TABLES, RULE, dtype="float64", seed=3) as one:
        expected = follow_in_one(one, history(), NUM_RANKS)
    for rank, (seen, digests, messages) in enumerate(results):
        compare(_as_tensors(seen), expected[rank])
        assert digests[0] == digests[1]
        assert "same calls in the same order" in messages[0]
        if rank:
            assert "has every rank made the same calls" in messages[1]
