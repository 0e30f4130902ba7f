"""`SharedDots`: a DLRM that computes once what all candidates of a request share.

Dot products of two shared vectors are the same for all candidates, and so is what they add to the first layer
after them. All else is done by kernels too, since that layer has other inputs in each form of request, and
products of small vectors are what graphs do worst. The file has the weights, by their names in the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from rowhaul._linear_layers import FIELDS, pack, padded
from rowhaul.serve.dots_kernels import score_dots
from rowhaul.serve.requests import Samples
from rowhaul.serve.rows import MappedRows

Floats = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]
_NUM_FORMS = 16  # that are remembered, with weights of their own; the requests of one caller have one


class _Layer:
    """A linear layer for the kernels."""

    def __init__(self, weight: Floats, bias: Floats, has_relu: bool) -> None:
        inputs, outputs = weight.shape
        self._packed, self._bias = pack(weight), np.zeros(padded(outputs), np.float32)
        self._bias[:outputs] = bias
        self.width = max(inputs, padded(outputs))
        self.fields = (self._packed.ctypes.data, self._bias.ctypes.data, inputs, padded(outputs), has_relu)


class _Form(NamedTuple):
    """The first layer after the products, for requests that share the same features."""

    own: _Layer
    shared: _Layer


class SharedDots:
    """The part of a DLRM without rows; any number of threads may call it.

    Args:
        path: of the weights.
        has_numbers: whether there are dense columns: their vector comes first.
    """

    kind = "dots"

    def __init__(self, path: Path, has_numbers: bool) -> None:
        weights = load_file(path)
        self._has_numbers = has_numbers
        top = [*_linears(weights, "top."), (weights["out.weight"].T, weights["out.bias"])]
        self._before = [_Layer(*one, True) for one in _linears(weights, "bottom.")]
        self._after = [_Layer(*one, number < len(top)) for number, one in enumerate(top[1:], start=2)]
        self._tables = _table(self._before), _table(self._after)
        # Without `self`, so that a replaced model is freed at once: nothing else would look for a cycle soon.
        self._form = lru_cache(_NUM_FORMS)(partial(_form_of, *top[0], len(top) > 1))

    def logits(self, rows: MappedRows, samples: Samples) -> tuple[Floats, Int64s]:
        """Return a logit for each sample, and how many ids of each feature have no row."""
        dim, numbers = rows.width // len(rows.features), np.ascontiguousarray(samples.numbers)
        shares_numbers = self._has_numbers and len(numbers) != len(samples)
        own_room = dim if self._has_numbers and not shares_numbers else 0
        pooled = rows.pool_apart(samples.bags, own_room, dim if shares_numbers else 0)
        vectors = ((shares_numbers,) if self._has_numbers else ()) + pooled.is_shared
        form = self._form(vectors, dim if self._has_numbers else 0)
        layers = (*self._before, form.own, form.shared, *self._after)
        width = padded(max(one.width for one in layers))
        out, (before, after) = np.empty(len(samples), np.float32), self._tables
        first, shared = np.array(form.own.fields), np.array(form.shared.fields)
        score_dots(numbers, pooled.own, pooled.shared, dim, before, first, shared, after, width, out)
        return out, pooled.num_unknown


def _form_of(
    weight: Floats, bias: Floats, has_relu: bool, vectors: tuple[bool, ...], num_passed: int
) -> _Form:
    """Divide the first layer's inputs by which vectors are shared; ``num_passed`` are no products."""
    own, shared = ([vector for vector, one in enumerate(vectors) if one is kind] for kind in (False, True))
    return _Form(
        _Layer(weight[_inputs(own, shared, num_passed)], bias, has_relu),
        _Layer(weight[_inputs(shared, [], num_passed)], bias, False),
    )


def _linears(weights: dict[str, Any], prefix: str) -> list[tuple[Floats, Floats]]:
    """Return the layers of an MLP, inputs x outputs."""
    names = [f"{prefix}linears.{number}." for number in range(len(weights))]
    return [(weights[f"{one}weight"].T, weights[f"{one}bias"]) for one in names if f"{one}weight" in weights]


def _table(layers: Sequence[_Layer]) -> Int64s:
    return np.array([one.fields for one in layers], np.int64).reshape(-1, FIELDS)


def _inputs(vectors: Sequence[int], others: Sequence[int], num_passed: int) -> Int64s:
    """Return which inputs of the layer after the products `write_dots` writes."""
    found = list(range(num_passed)) if 0 in vectors else []
    for place, vector in enumerate(vectors):
        for other in (*others, *vectors[:place]):
            low, high = sorted((vector, other))
            found.append(num_passed + high * (high - 1) // 2 + low)
    return np.array(found, np.int64)
