"""The dense part of some models by NumPy, which computes what all candidates of a request share only once.

A linear layer over vectors side by side is a sum of products, one for each vector: those of shared vectors
are the same for all candidates, so they are added to the bias once, and the candidates' product is smaller.
DLRM's dot products between two shared vectors are inputs like any others that are shared. Which features are
shared is for each request to say; the parts of the first layer are kept for the splits seen last.

`FORMS` has the models; all others are computed by their graph, candidate by candidate.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul.serve.form_kernels import add_and_clip, candidate_dots, pick_columns

Floats = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Weights = Mapping[str, Floats]
ABOUT = "rowhaul"  # metadata of a file of weights: JSON with the model's name and the widths of its vectors
_MOST_SPLITS = 32  # whose weights are kept


@dataclass(frozen=True)
class SharedInputs:
    """Which inputs of the dense part are the same for all candidates: columns of vectors, and all numbers."""

    pooled: Mask
    numbers: bool


class RequestForm:
    """Computes logits of a request; any number of threads may call it."""

    def __init__(self, weights: Weights, widths: tuple[int, ...]) -> None:
        self._weights, self._widths = weights, widths

    def __call__(self, pooled: Floats, numbers: Floats, shared: SharedInputs) -> Floats:
        """Return a logit for each candidate."""
        raise NotImplementedError

    def layers(self, name: str) -> list[_Layer]:
        """Return the linear layers of an MLP; without a name, the one that makes the logit."""
        if not name:
            return [_Layer.of(self._weights, "out")]
        count = sum(one.startswith(f"{name}.linears.") and one.endswith(".weight") for one in self._weights)
        return [_Layer.of(self._weights, f"{name}.linears.{number}") for number in range(count)]


class _Layer(NamedTuple):
    """A linear layer: inputs x outputs, and what is added."""

    weight: Floats
    bias: Floats

    @classmethod
    def of(cls, weights: Weights, name: str) -> _Layer:
        # Copies, all of one kind for the compiler: contiguous, and writable.
        return cls(weights[f"{name}.weight"].T.copy(), weights[f"{name}.bias"].copy())


class _Parts(NamedTuple):
    """The weights of a layer's inputs that are shared, and of the others."""

    shared: Floats
    others: Floats


class _Top:
    """An MLP and the layer that makes the logit, of inputs that are partly shared."""

    def __init__(self, layers: list[_Layer]) -> None:
        self._layers, self._adding = layers, threading.Lock()
        self._parts: dict[bytes, _Parts] = {}

    def __call__(self, shared_inputs: Floats, is_shared: Mask, candidates: Floats) -> Floats:
        """Return logits, given all inputs of the first candidate, and of each those that are not shared."""
        (weight, bias), *others = self._layers
        values = candidates
        if is_shared.any():
            parts = self._of(is_shared, weight)
            weight, bias = parts.others, shared_inputs[is_shared] @ parts.shared + bias
        for following in others:
            values = values @ weight
            add_and_clip(values, bias)
            weight, bias = following
        logits: Floats = (values @ weight + bias)[:, 0]
        return logits

    def _of(self, is_shared: Mask, weight: Floats) -> _Parts:
        key = is_shared.tobytes()
        if (found := self._parts.get(key)) is None:
            found = _Parts(weight[is_shared], weight[~is_shared])
            with self._adding:
                if len(self._parts) >= _MOST_SPLITS:
                    del self._parts[next(iter(self._parts))]
                self._parts[key] = found
        return found


def _mlp(values: Floats, layers: list[_Layer]) -> Floats:
    for weight, bias in layers:
        values = values @ weight
        add_and_clip(values, bias)
    return values


class DLRMForm(RequestForm):
    """See `rowhaul.nn.models.dlrm`."""

    def __init__(self, weights: Weights, widths: tuple[int, ...]) -> None:
        super().__init__(weights, widths)
        self._bottom, self._dim = self.layers("bottom"), widths[0]
        self._top = _Top(self.layers("top") + self.layers(""))
        num_vectors = len(widths) + bool(self._bottom)
        self._rows, self._columns = np.tril_indices(num_vectors, -1)

    def __call__(self, pooled: Floats, numbers: Floats, shared: SharedInputs) -> Floats:
        """Return a logit for each candidate."""
        first = np.empty((len(pooled), 0), pooled.dtype)
        is_shared = shared.pooled[:: self._dim].copy()
        if self._bottom:
            first = _mlp(numbers[:1] if shared.numbers else numbers, self._bottom)
            is_shared = np.concatenate([[shared.numbers], is_shared])
        of_inputs = is_shared[self._rows] & is_shared[self._columns]
        if self._bottom:
            of_inputs = np.concatenate([np.full(self._dim, shared.numbers), of_inputs])
        inputs = np.empty((len(pooled), int((~of_inputs).sum())), pooled.dtype)
        candidate_dots(first, pooled, is_shared, inputs)
        every = np.empty((1, len(of_inputs)), pooled.dtype)
        if of_inputs.any():
            candidate_dots(first[:1], pooled[:1], np.zeros_like(is_shared), every)
        return self._top(every[0], of_inputs, inputs)


class _SideBySide(RequestForm):
    """Models with an MLP over vectors and numbers side by side."""

    def __init__(self, weights: Weights, widths: tuple[int, ...], mlp: str, columns: Any) -> None:
        super().__init__(weights, widths)
        layers = self.layers(mlp) + self.layers("")
        self._columns = np.arange(sum(widths))[columns]
        self._num_numbers = len(layers[0].weight) - len(self._columns)
        self._top = _Top(layers)

    def deep(self, pooled: Floats, numbers: Floats, shared: SharedInputs) -> Floats:
        """Return what the MLP adds to each logit."""
        width = pooled.shape[1]
        columns = np.concatenate([self._columns, np.arange(width, width + self._num_numbers)])
        is_shared = np.concatenate([shared.pooled[self._columns], np.full(self._num_numbers, shared.numbers)])
        varying = columns[~is_shared]
        inputs, every = (
            np.empty((len(pooled), len(varying)), pooled.dtype),
            np.empty((1, len(columns)), pooled.dtype),
        )
        pick_columns(pooled, numbers, varying, inputs)
        pick_columns(pooled[:1], numbers[:1], columns, every)
        return self._top(every[0], is_shared, inputs)


class LegacyForm(_SideBySide):
    """See `rowhaul.nn.models.legacy`."""

    def __init__(self, weights: Weights, widths: tuple[int, ...]) -> None:
        super().__init__(weights, widths, "mlp", slice(None))

    def __call__(self, pooled: Floats, numbers: Floats, shared: SharedInputs) -> Floats:
        """Return a logit for each candidate."""
        return self.deep(pooled, numbers, shared)


class WideAndDeepForm(_SideBySide):
    """See `rowhaul.nn.models.wide_deep`."""

    def __init__(self, weights: Weights, widths: tuple[int, ...]) -> None:
        self._linear = np.cumsum(widths) - 1  # the last column of each vector
        super().__init__(weights, widths, "deep", np.delete(np.arange(sum(widths)), self._linear))
        self._wide = weights["wide.weight"][0] if "wide.weight" in weights else None

    def __call__(self, pooled: Floats, numbers: Floats, shared: SharedInputs) -> Floats:
        """Return a logit for each candidate."""
        logits: Floats = self.deep(pooled, numbers, shared) + pooled[:, self._linear].sum(1)
        return logits if self._wide is None else logits + numbers @ self._wide


class DeepFMForm(WideAndDeepForm):
    """See `rowhaul.nn.models.deepfm`."""

    def __call__(self, pooled: Floats, numbers: Floats, shared: SharedInputs) -> Floats:
        """Return a logit for each candidate."""
        vectors = pooled.reshape(len(pooled), len(self._widths), self._widths[0])[:, :, :-1]
        total = vectors.sum(1)
        squares = np.einsum("nd,nd->n", total, total) - np.einsum("nfd,nfd->n", vectors, vectors)
        logits: Floats = super().__call__(pooled, numbers, shared) + squares / 2
        return logits


FORMS: dict[str, Callable[[Weights, tuple[int, ...]], RequestForm]] = {
    "dlrm": DLRMForm,
    "legacy": LegacyForm,
    "wide_deep": WideAndDeepForm,
    "deepfm": DeepFMForm,
}
