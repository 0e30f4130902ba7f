"""`SharedDotsGraph`: a DLRM in parts, so that what all candidates of a request share is computed once.

Dot products of two shared vectors are the same for all candidates, and so is what they add to the first layer
after them. The other products are made by a kernel: ONNX Runtime makes them from many tiny matrix products.
The graph in the file (`rowhaul.export.serving.parts`) has the layers before the products and those after
them; which columns of the first matrix after them belong to which products is an input.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul.serve.dots_kernels import SPARE, fill_dots
from rowhaul.serve.onnx_session import only_what_is_asked_for, open_session
from rowhaul.serve.requests import Samples
from rowhaul.serve.rows import MappedRows

Floats = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]
_NUM_FORMS = 64  # that are remembered; the requests of one caller have one
_TYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64}


class _Form(NamedTuple):
    """Where values are among the inputs of the first layer after the products."""

    own: Int64s  # those that each candidate has
    shared: Int64s  # those that are the same for all


class SharedDotsGraph:
    """The graph of a DLRM in parts; any number of threads may call it.

    Args:
        path: of its file.
        has_numbers: whether there are dense columns: their vector is the first one.
        threads: that one request may use, by ONNX Runtime.
    """

    kind = "dots"

    def __init__(self, path: Path, has_numbers: bool, threads: int) -> None:
        self._session, self._options = open_session(path, threads), only_what_is_asked_for()
        self._has_numbers = has_numbers
        # ONNX Runtime wants all inputs, those of the parts that are not run as well.
        self._nothing = {
            one.name: np.empty([size if isinstance(size, int) else 0 for size in one.shape], _TYPES[one.type])
            for one in self._session.get_inputs()
        }

    def logits(self, rows: MappedRows, samples: Samples) -> tuple[Floats, Int64s]:
        """Return a logit for each sample, and how many ids of each feature have no row."""
        dim = rows.width // len(rows.features)
        own_numbers = shared_numbers = 0
        if self._has_numbers:
            vector = self._run("vector", numbers=samples.numbers.astype(rows.dtype, copy=False))
            own_numbers, shared_numbers = (dim, 0) if len(vector) == len(samples) else (0, dim)
        pooled = rows.pool_apart(samples.bags, own_numbers, shared_numbers)
        if own_numbers:
            pooled.own[:, :dim] = vector
        elif shared_numbers:
            pooled.shared[:dim] = vector
        form = _form(pooled.is_shared, self._has_numbers, shared_numbers > 0, dim)
        logits = self._run(
            "logits",
            interactions=_interactions(pooled.own, pooled.shared, dim, own_numbers, len(form.own)),
            columns=form.own,
            shared=_interactions(
                pooled.shared[None], pooled.shared[:0], dim, shared_numbers, len(form.shared)
            ),
            shared_columns=form.shared,
        )
        return logits, pooled.num_unknown

    def _run(self, output: str, **given: Floats) -> Floats:
        found: Floats = self._session.run([output], {**self._nothing, **given}, self._options)[0]
        return found


def _interactions(own: Floats, shared: Floats, dim: int, num_passed: int, width: int) -> Floats:
    """Return what `fill_dots` makes, samples x width; one column of zeros where it makes nothing."""
    if own.shape[1] * (own.shape[1] + len(shared) - dim) + num_passed == 0:
        return np.zeros((len(own), 1), own.dtype)
    out = np.empty(len(own) * width + SPARE, own.dtype)
    fill_dots(own, shared, dim, num_passed, out)
    return out[:-SPARE].reshape(len(own), width)


@lru_cache(_NUM_FORMS)
def _form(is_shared: tuple[bool, ...], has_numbers: bool, numbers_are_shared: bool, dim: int) -> _Form:
    """Find the columns of what `fill_dots` makes; ``is_shared`` is of the features in order."""
    vectors = list(enumerate(((numbers_are_shared,) if has_numbers else ()) + is_shared))
    own, shared = ([vector for vector, one in vectors if one is kind] for kind in (False, True))
    num_passed = dim if has_numbers else 0
    return _Form(_columns(own, shared, num_passed), _columns(shared, [], num_passed))


def _columns(vectors: Sequence[int], others: Sequence[int], num_passed: int) -> Int64s:
    """Return the columns of a row of `fill_dots`: the inputs are the first vector, then all pairs."""
    columns = list(range(num_passed)) if 0 in vectors else []
    for place, vector in enumerate(vectors):
        for other in (*others, *vectors[:place]):
            low, high = sorted((vector, other))
            columns.append(num_passed + high * (high - 1) // 2 + low)
    return np.array(columns or [0], np.int64)
