"""The part of a model without rows: by NumPy, or as a graph by ONNX Runtime or PyTorch."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.serve.folder import NUMPY, ServedFolder
from rowhaul.serve.request_forms import ABOUT, FORMS, SharedInputs

Floats = npt.NDArray[Any]
BACKENDS = ("auto", "numpy", "onnx", "pt2")


class DenseGraph(Protocol):
    """Computes logits; any number of threads may call it."""

    kind: str

    def __call__(self, pooled: Floats, numbers: Floats, shared: SharedInputs) -> Floats:
        """Return a logit for each sample, given samples x vectors and samples x numbers.

        ``shared`` says which columns are the same in all samples: what they lead to may be computed once.
        """


def open_dense(folder: ServedFolder, backend: str = "auto", threads: int = 1) -> DenseGraph:
    """Open what a folder has; ``auto``: NumPy's, or ONNX where it is there and ONNX Runtime is installed."""
    if backend not in BACKENDS:
        raise ConfigError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    kinds = folder.dense_kinds
    if backend == "auto" and NUMPY in kinds:
        backend = NUMPY
    elif backend == "auto":
        backend = "onnx" if "onnx" in kinds and (has_onnxruntime() or "pt2" not in kinds) else "pt2"
    if backend not in kinds:
        raise CheckpointError(
            f"{folder.path} has no {backend} graph, only {', '.join(kinds)}; export with --dense {backend}"
        )
    return open_graph(folder.dense(backend), backend, bool(folder.schema.dense), threads)


def open_graph(path: Path, kind: str, has_numbers: bool, threads: int = 1) -> DenseGraph:
    """Open a file of the dense part."""
    if kind == NUMPY:
        return NumpyGraph(path)
    return OnnxGraph(path, has_numbers, threads) if kind == "onnx" else TorchGraph(path, has_numbers)


def has_onnxruntime() -> bool:
    """Whether ONNX Runtime is installed."""
    return find_spec("onnxruntime") is not None


class NumpyGraph:
    """The weights of a model that has a `RequestForm`; BLAS decides on its threads."""

    kind = NUMPY

    def __init__(self, path: Path) -> None:
        try:
            with safe_open(path, "numpy") as file:
                about = json.loads(file.metadata()[ABOUT])
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
            self._form = FORMS[about["model"]](weights, tuple(about["widths"]))
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} is damaged: {type(error).__name__} {error}; export again"
            ) from None

    def __call__(self, pooled: Floats, numbers: Floats, shared: SharedInputs) -> Floats:
        """Return a logit for each sample."""
        return self._form(pooled, numbers, shared)


class OnnxGraph:
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

    def __call__(self, pooled: Floats, numbers: Floats, shared: SharedInputs | None = None) -> Floats:
        """Return a logit for each sample."""
        given = {"pooled": pooled, "numbers": numbers} if self._has_numbers else {"pooled": pooled}
        logits: Floats = self._session.run(None, given)[0]
        return logits


class TorchGraph:
    """A graph run by PyTorch."""

    kind = "pt2"

    def __init__(self, path: Path, has_numbers: bool) -> None:
        import torch

        self._torch, self._has_numbers = torch, has_numbers
        self._module = torch.export.load(path).module()

    def __call__(self, pooled: Floats, numbers: Floats, shared: SharedInputs | None = None) -> Floats:
        """Return a logit for each sample."""
        given = (pooled, numbers) if self._has_numbers else (pooled,)
        with self._torch.inference_mode():
            logits = self._module(*(self._torch.from_numpy(one) for one in given))
        return np.asarray(logits.numpy())
