"""The part of a model without rows, as a graph: by ONNX Runtime, or by PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rowhaul.errors import CheckpointError, ConfigError, RowhaulError
from rowhaul.serve.folder import ServedFolder
from rowhaul.serve.program import load_program
from rowhaul.serve.requests import Samples
from rowhaul.serve.rows import MappedRows
from rowhaul.serve.shared_dots import SharedDots

Floats = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]
BACKENDS = ("auto", "dots", "onnx", "pt2")  # the quickest first
_LIBRARIES = {"dots": "safetensors", "onnx": "onnxruntime", "pt2": "torch"}


class DenseGraph(Protocol):
    """Computes logits; any number of threads may call it."""

    kind: str

    def logits(self, rows: MappedRows, samples: Samples) -> tuple[Floats, Int64s]:
        """Return a logit for each sample, and how many ids of each feature have no row."""


def open_dense(folder: ServedFolder, backend: str = "auto", threads: int = 1) -> DenseGraph:
    """Open a graph of a folder; ``auto``: the first of `BACKENDS` that is there and can be run."""
    if backend not in BACKENDS:
        raise ConfigError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    kinds = folder.dense_kinds
    if backend == "auto":
        can_run = [one for one in BACKENDS[1:] if one != "onnx" or has_onnxruntime()]
        backend = next((one for one in (*can_run, *BACKENDS[1:]) if one in kinds), kinds[0])
    if backend not in kinds:
        advice = "a DLRM in float32 has one" if backend == "dots" else f"export with --dense {backend}"
        raise CheckpointError(f"{folder.path} has no {backend} graph, only {', '.join(kinds)}; {advice}")
    return open_graph(folder.dense(backend), backend, bool(folder.schema.dense), threads)


def open_graph(path: Path, kind: str, has_numbers: bool, threads: int = 1) -> DenseGraph:
    """Open a file of a graph.

    Raises:
        CheckpointError: that cannot be done here; a newer version of its library may have written it.
    """
    try:
        if kind == "onnx":
            return OnnxGraph(path, has_numbers, threads)
        return SharedDots(path, has_numbers) if kind == "dots" else TorchGraph(path, has_numbers)
    except RowhaulError:
        raise
    except Exception as error:  # every library has its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path} cannot be opened: {reason}; use the version of {_LIBRARIES[kind]} that wrote it, or "
            "export again"
        ) from error


def has_onnxruntime() -> bool:
    """Whether ONNX Runtime is installed."""
    return find_spec("onnxruntime") is not None


class _WholeGraph(ABC):
    """A graph from pooled vectors and numbers to logits."""

    @abstractmethod
    def __call__(self, pooled: Floats, numbers: Floats) -> Floats:
        """Return a logit for each sample, given samples x vectors and samples x numbers."""

    def logits(self, rows: MappedRows, samples: Samples) -> tuple[Floats, Int64s]:
        """Return a logit for each sample, and how many ids of each feature have no row."""
        pooled, num_unknown = rows.pool(samples.bags)
        numbers = samples.numbers.astype(pooled.dtype, copy=False)
        if len(numbers) != len(pooled):
            numbers = np.repeat(numbers, len(pooled), axis=0)
        return self(pooled, numbers), num_unknown


class OnnxGraph(_WholeGraph):
    """A graph run by ONNX Runtime."""

    kind = "onnx"

    def __init__(self, path: Path, has_numbers: bool, threads: int) -> None:
        if not has_onnxruntime():
            raise ConfigError(f"{path} needs ONNX Runtime: pip install 'rowhaul[serve]'")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # other requests need it
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._has_numbers = has_numbers

    def __call__(self, pooled: Floats, numbers: Floats) -> Floats:
        """Return a logit for each sample."""
        given = {"pooled": pooled, "numbers": numbers} if self._has_numbers else {"pooled": pooled}
        logits: Floats = self._session.run(None, given)[0]
        return logits


class TorchGraph(_WholeGraph):
    """A graph run by PyTorch."""

    kind = "pt2"

    def __init__(self, path: Path, has_numbers: bool) -> None:
        import torch

        self._torch, self._has_numbers = torch, has_numbers
        self._module = load_program(path).module()

    def __call__(self, pooled: Floats, numbers: Floats) -> Floats:
        """Return a logit for each sample."""
        given = (pooled, numbers) if self._has_numbers else (pooled,)
        with self._torch.inference_mode():
            logits = self._module(*(self._torch.from_numpy(one) for one in given))
        return np.asarray(logits.numpy())
