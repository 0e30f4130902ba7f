"""The dense building blocks of the models, made from a seed of their own.

`torch.nn` layers draw their weights from the global generator, so a model's start depends on whatever
was built before it. Here every weight comes from a generator that belongs to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rowhaul.nn.dots import joined_dots
from rowhaul.nn.dropout import SampleDropout
from rowhaul.store.row_format import load_named

_ON_A_CARD = "rowhaul.device."  # functions that are loaded where there is one: they need Triton
_HAS_TRITON = find_spec("triton") is not None


def _fused(name: str, x: Tensor) -> Any:
    """Return a function of `rowhaul.device`, if ``x`` is on a card that can run it; else None.

    It is for float32: other types take PyTorch's own operations, which float64 compares it with.
    """
    if not x.is_cuda or x.dtype != torch.float32 or not _HAS_TRITON:
        return None
    if torch.is_autocast_enabled("cuda") or torch.compiler.is_compiling():
        return None
    return load_named(_ON_A_CARD + name)


class MLP(nn.Module):
    """Linear layers, each followed by ReLU and dropout; without layers it passes its input through.

    ``fuses``: ReLU is made in place, and on a card within the products, forward and backward. ``in_parts``:
    large products of float32 may be made of three in TF32 there, with up to three times the error of float32.
    """

    fuses = True
    in_parts = True

    def __init__(self, linears: Sequence[nn.Linear], dropouts: Sequence[SampleDropout]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)
        self.dropouts = nn.ModuleList(dropouts)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        """``index`` are the global indices of the samples in ``x``, for dropout."""
        linear_relu = _fused("layers:linear_relu", x) if self.fuses and x.dim() == 2 else None
        relu = torch.relu_ if self.fuses else torch.relu  # nobody else reads what a product has made
        for linear, dropout in zip(self.linears, self.dropouts, strict=True):
            if linear_relu is None:
                x = dropout(relu(linear(x)), index)
            else:
                x = dropout(linear_relu(x, linear.weight, linear.bias, in_parts=self.in_parts), index)
        return x


class LayerFactory:
    """Makes the layers of one model: weights from one generator, dropout layers numbered as they come."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed)
        self._num_dropouts = 0

    def weight(self, rows: int, columns: int) -> nn.Parameter:
        """A matrix with Glorot's uniform initialisation."""
        values = torch.empty(rows, columns)
        return nn.Parameter(nn.init.xavier_uniform_(values, generator=self._generator))

    def linear(self, inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
        """A linear layer, its bias zero."""
        layer = nn.Linear(inputs, outputs, bias, device="meta")  # draws nothing from the global generator
        layer.weight = self.weight(outputs, inputs)
        if bias:
            layer.bias = nn.Parameter(torch.zeros(outputs))
        return layer

    def mlp(self, inputs: int, hidden: Sequence[int], dropout: float = 0.0) -> MLP:
        """An MLP with these hidden sizes and this dropout after each."""
        linears = [self.linear(before, after) for before, after in pairwise((inputs, *hidden))]
        return MLP(linears, [self.dropout(dropout) for _ in linears])

    def dropout(self, p: float) -> SampleDropout:
        """The next dropout layer of the model."""
        self._num_dropouts += 1
        return SampleDropout(p, self._seed, layer=self._num_dropouts - 1)


class PairwiseDots(nn.Module):
    """Dot products of every two of a sample's vectors: the strictly lower triangle, row by row.

    ``in_slices`` copies the triangle row by row: ONNX Runtime takes longer to pick its columns one by one.
    ``fuses``: one kernel does all of it.
    """

    in_slices = False
    fuses = True
    lower: Tensor
    pair_of: Tensor

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.num_vectors, self.num_pairs = num_vectors, len(rows)
        pair_of = torch.full((num_vectors, num_vectors), self.num_pairs)
        pair_of[rows, columns] = pair_of[columns, rows] = torch.arange(self.num_pairs)
        self.register_buffer("lower", rows * num_vectors + columns, persistent=False)
        self.register_buffer("pair_of", pair_of.flatten(), persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:
        """From samples x vectors x dim to samples x pairs."""
        if self.in_slices:
            square, size = _products(vectors).flatten(1), vectors.shape[1]
            return torch.cat([square[:, row * size : row * size + row] for row in range(1, size)], dim=1)
        dots: Tensor = _LowerTriangleDots.apply(vectors, self.lower, self.pair_of)  # type: ignore[no-untyped-call]  # torch's apply has no types
        return dots

    def joined(self, first: Tensor | None, others: Tensor, *, pads: bool = False) -> Tensor:
        """A sample's first vector, if any, and the dot products of every two of its vectors.

        ``others`` has the other vectors of a sample side by side. ``pads``: columns of zeros may follow.
        """
        if self.fuses and not self.in_slices:
            on_card = _fused("dots:joined_dots", others)
            joined: Tensor | None = on_card and on_card(first, others, self.num_vectors, pads=pads)
            if joined is None and has_kernel(others, *(() if first is None else (first,))):
                joined = joined_dots(first, others, self.num_vectors)
            if joined is not None:
                return joined
        count = self.num_vectors - (first is not None)
        vectors = others.reshape(others.shape[0], count, others.shape[1] // count)
        if first is None:
            dots: Tensor = self(vectors)
            return dots
        return torch.cat([first, self(torch.cat([first.unsqueeze(1), vectors], dim=1))], dim=1)


def has_kernel(*tensors: Tensor) -> bool:
    """Whether a kernel for CPUs takes these tensors: all on one, of one type that it knows."""
    if torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    dtype = tensors[0].dtype
    on_cpu = all(one.device.type == "cpu" and one.dtype == dtype for one in tensors)
    return on_cpu and dtype in (torch.float32, torch.float64)


def _products(vectors: Tensor) -> Tensor:
    """Dot products of all vectors of a sample."""
    # A copy, since OpenBLAS (PyTorch's on ARM) multiplies strided batches ten times as slowly.
    return torch.bmm(vectors, vectors.transpose(1, 2).contiguous())


class _LowerTriangleDots(torch.autograd.Function):
    """The products are symmetric, so one product with the mirrored gradient gives the whole backward.

    Autograd would scatter into the square and multiply twice: 1.5 times as long for the whole step.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, lower: Tensor, pair_of: Tensor) -> Tensor:
        ctx.save_for_backward(vectors, pair_of)
        return _products(vectors).flatten(1).index_select(1, lower)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        vectors, pair_of = ctx.saved_tensors
        with_zero = nn.functional.pad(gradient, (0, 1))  # what the diagonal points at
        samples, num_vectors, _ = vectors.shape
        square = with_zero.index_select(1, pair_of).view(samples, num_vectors, num_vectors)
        # Autocast makes products, and so gradients, of fewer bits than the vectors that were given.
        return torch.bmm(square.to(vectors.dtype), vectors), None, None


def split_linear_column(pooled: Tensor, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Part each feature's block of columns into its embedding and, the last column, its linear weight.

    Args:
        pooled: samples x sum(widths).
        widths: columns of each feature.

    Returns:
        embeddings: samples x sum(width - 1), and linear weights: samples x features.
    """
    samples, features = pooled.shape[0], len(widths)  # not len(): it would fix the size of exported graphs
    if len(set(widths)) == 1:
        blocks = pooled.reshape(samples, features, widths[0])
        embeddings, linear = torch.split_with_sizes(blocks, [widths[0] - 1, 1], dim=2)
        return embeddings.reshape(samples, features * (widths[0] - 1)), linear.squeeze(2)
    parts = torch.split_with_sizes(pooled, [size for width in widths for size in (width - 1, 1)], dim=1)
    return torch.cat(parts[0::2], dim=1), torch.cat(parts[1::2], dim=1)
