"""`GraphWriter`: the graph of a model, exported once, then written with whatever weights training has.

Exporting takes seconds and looks into PyTorch's internals, so it is done once before training, with weights
that do not matter. Afterwards only the weights in the files are replaced.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rowhaul._files import sync
from rowhaul.errors import ConfigError
from rowhaul.export.serving.dense import check_exporters, export_dense, graph_kinds
from rowhaul.nn.models import RecommendationModel
from rowhaul.serve.files import ServedFile
from rowhaul.serve.folder import DENSE_FILES
from rowhaul.serve.program import load_program

_PART = "model."  # what the graph calls the model


class _Graph(Protocol):
    """A graph whose weights can be replaced."""

    def names(self) -> set[str]:
        """Name the weights."""

    def write(self, weights: Mapping[str, Tensor], path: Path) -> None:
        """Write the graph with other weights."""


class GraphWriter:
    """Writes a model's graphs.

    Args:
        files: of exported graphs, by kind.
        needed: names of the weights that they must have.
    """

    def __init__(self, files: Mapping[str, Path], needed: Iterable[str]) -> None:
        self._graphs = {kind: _GRAPHS[kind](path) for kind, path in files.items()}
        for kind, graph in self._graphs.items():
            if missing := sorted(set(needed) - graph.names()):
                raise ConfigError(
                    f"the {kind} graph of this model has no weights {', '.join(missing)} by name, so that "
                    "changes cannot be published; export it when it is trained (rowhaul export)"
                )

    @classmethod
    def exported(cls, model: RecommendationModel, kinds: Sequence[str]) -> GraphWriter:
        """Export a model that is on the CPU; its weights do not matter."""
        check_exporters(list(kinds))
        with tempfile.TemporaryDirectory(prefix="rowhaul-graph-") as folder:
            files = {kind: Path(folder) / DENSE_FILES[kind] for kind in graph_kinds(model, kinds)}
            for kind, path in files.items():
                export_dense(model, kind, path)
            return cls(files, [name for name, _ in model.named_parameters()])

    @property
    def kinds(self) -> list[str]:
        """Kinds of graphs."""
        return list(self._graphs)

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> dict[str, dict[str, Any]]:
        """Write all graphs into a folder, with weights by their names in the model; returns their entries."""
        for kind, graph in self._graphs.items():
            graph.write(weights, folder / DENSE_FILES[kind])
            sync(folder / DENSE_FILES[kind])
        return {kind: ServedFile.of(folder, DENSE_FILES[kind])._asdict() for kind in self._graphs}


class _OnnxGraph:
    def __init__(self, path: Path) -> None:
        import onnx

        self._model = onnx.load(path)
        self._weights = {
            one.name.removeprefix(_PART): one
            for one in self._model.graph.initializer
            if one.name.startswith(_PART)
        }

    def names(self) -> set[str]:
        return set(self._weights)

    def write(self, weights: Mapping[str, Tensor], path: Path) -> None:
        for name, place in self._weights.items():
            place.raw_data = weights[name].contiguous().numpy().tobytes()
        path.write_bytes(self._model.SerializeToString())


class _Program:
    def __init__(self, path: Path) -> None:
        self._program = load_program(path)

    def names(self) -> set[str]:
        return {name.removeprefix(_PART) for name in self._program.state_dict}

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor], path: Path) -> None:
        for name, tensor in self._program.state_dict.items():
            tensor.copy_(weights[name.removeprefix(_PART)])
        torch.export.save(self._program, path)


class _Weights:
    def __init__(self, path: Path) -> None:
        self._names = set(load_file(path))

    def names(self) -> set[str]:
        return self._names

    def write(self, weights: Mapping[str, Tensor], path: Path) -> None:
        save_file({name: weights[name].contiguous() for name in sorted(self._names)}, path)


_GRAPHS: dict[str, Callable[[Path], _Graph]] = {"onnx": _OnnxGraph, "pt2": _Program, "dots": _Weights}
