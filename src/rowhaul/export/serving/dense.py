"""The part of a model without rows as a graph: from pooled vectors and numbers to logits."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rowhaul.errors import ConfigError
from rowhaul.nn.layers import PairwiseDots
from rowhaul.nn.models import RecommendationModel
from rowhaul.nn.models.dlrm import DLRM


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


def check_exporters(kinds: list[str]) -> None:
    """Refuse unknown kinds of graphs, and those that need a package that is not installed."""
    for kind in kinds:
        if kind not in EXPORTERS:
            raise ConfigError(f"--dense {kind!r} is not known; choose {' or '.join(EXPORTERS)}")
    if "onnx" in kinds and not all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime")):
        raise ConfigError("--dense onnx needs ONNX: pip install 'rowhaul[onnx]'; --dense pt2 does without")


def graph_kinds(model: RecommendationModel, kinds: Sequence[str]) -> list[str]:
    """Return what to write where some kinds are asked for: of a DLRM also what the server's kernels read."""
    has_kernels = type(model) is DLRM and model.out.weight.dtype == torch.float32
    return [*kinds, *(["dots"] if has_kernels else [])]


def export_dense(model: RecommendationModel, kind: str, path: Path) -> None:
    """Write the part of a model without rows; any number of samples can be given to it."""
    if kind == "dots":
        save_file({name: one.detach().contiguous() for name, one in model.named_parameters()}, path)
        return
    dtype = next(model.parameters()).dtype
    given = [torch.zeros(2, sum(model.widths), dtype=dtype)]
    if model.num_dense:
        given.append(torch.zeros(2, model.num_dense, dtype=dtype))
    samples = torch.export.Dim("samples", min=1)
    was_training, dots = model.training, [one for one in model.modules() if isinstance(one, PairwiseDots)]
    try:
        for one in dots:
            one.in_slices = kind == "onnx"
        with torch.no_grad(), _quietly():
            part = DensePart(model)
            shapes = tuple({0: samples} for _ in given)
            program = torch.export.export(part, tuple(given), dynamic_shapes=shapes)
            EXPORTERS[kind](program, path)
    finally:
        model.train(was_training)
        for one in dots:
            one.in_slices = False


def _write_onnx(program: torch.export.ExportedProgram, path: Path) -> None:
    names = ["pooled", "numbers"][: len(program.graph_signature.user_inputs)]
    # Not optimized: weights keep their names, so that published changes can replace them. ONNX Runtime does
    # its own optimizations when it opens the graph.
    made = torch.onnx.export(
        program,
        (),
        dynamo=True,
        verbose=False,
        input_names=names,
        output_names=["logits"],
        optimize=False,
    )
    assert made is not None
    made.save(path, external_data=False)


def _write_program(program: torch.export.ExportedProgram, path: Path) -> None:
    torch.export.save(program, path)


EXPORTERS: dict[str, Callable[[torch.export.ExportedProgram, Path], None]] = {
    "onnx": _write_onnx,
    "pt2": _write_program,
}


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
