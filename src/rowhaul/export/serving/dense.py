"""The part of a model without rows as a graph: from pooled vectors and numbers to logits."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from rowhaul.errors import ConfigError
from rowhaul.export.serving.parts import DotsParts
from rowhaul.nn.layers import PairwiseDots
from rowhaul.nn.models import RecommendationModel
from rowhaul.nn.models.dlrm import DLRM

KINDS = ("onnx", "pt2")  # that can be asked for


class DensePart(nn.Module):
    """A model from its pooled vectors on, in evaluation: no dropout, batch norm by running statistics."""

    def __init__(self, model: RecommendationModel) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, pooled: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Logits, one per sample; ``numbers`` are left out where a model has no dense columns."""
        if numbers is None:
            numbers = pooled.new_zeros((pooled.shape[0], 0))
        no_index = torch.zeros(0, dtype=torch.int64, device=pooled.device)  # only dropout reads it
        return self.model.logits(pooled, numbers, no_index)

    def inputs(self) -> dict[str, tuple[Tensor, dict[int, Any]]]:
        """Return examples of the inputs, and which of their sizes differ between requests."""
        dtype = next(self.model.parameters()).dtype
        widths = {"pooled": sum(self.model.widths), "numbers": self.model.num_dense}
        samples = torch.export.Dim("samples", min=1)
        return {
            name: (torch.zeros(2, width, dtype=dtype), {0: samples})
            for name, width in widths.items()
            if width
        }

    @property
    def outputs(self) -> list[str]:
        """The names of what `forward` returns."""
        return ["logits"]


def check_exporters(kinds: list[str]) -> None:
    """Refuse unknown kinds of graphs, and those that need a package that is not installed."""
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"--dense {kind!r} is not known; choose {' or '.join(KINDS)}")
    if "onnx" in kinds and not all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime")):
        raise ConfigError("--dense onnx needs ONNX: pip install 'rowhaul[onnx]'; --dense pt2 does without")


def graph_kinds(model: RecommendationModel, kinds: Sequence[str]) -> list[str]:
    """Return the kinds of graphs to write where some are asked for: beside ``onnx``, a DLRM in parts."""
    return [*kinds, *(["dots"] if "onnx" in kinds and type(model) is DLRM else [])]


def export_dense(model: RecommendationModel, kind: str, path: Path) -> None:
    """Write the part of a model without rows; any number of samples can be given to it."""
    was_training, dots = model.training, [one for one in model.modules() if isinstance(one, PairwiseDots)]
    try:
        for one in dots:
            one.in_slices = kind == "onnx"
        with torch.no_grad(), _quietly():
            part = DotsParts(cast(DLRM, model)) if kind == "dots" else DensePart(model)
            inputs = part.inputs()
            given, sizes = zip(*inputs.values(), strict=True)
            program = torch.export.export(part, given, dynamic_shapes=sizes)
            if kind == "pt2":
                torch.export.save(program, path)
            else:
                _write_onnx(program, path, list(inputs), part.outputs)
    finally:
        model.train(was_training)
        for one in dots:
            one.in_slices = False


def _write_onnx(
    program: torch.export.ExportedProgram, path: Path, inputs: Sequence[str], outputs: Sequence[str]
) -> None:
    # Not optimized: weights keep their names, so that published changes can replace them. ONNX Runtime does
    # its own optimizations when it opens the graph.
    made = torch.onnx.export(
        program,
        (),
        dynamo=True,
        verbose=False,
        input_names=inputs,
        output_names=outputs,
        optimize=False,
    )
    assert made is not None
    made.save(path, external_data=False)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep PyTorch's remarks on its own deprecations and on absent packages from users."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
