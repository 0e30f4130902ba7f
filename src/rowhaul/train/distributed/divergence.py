"""Gradients that are not finite, on a cluster: found on their worker, reported by all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor, nn

from rowhaul._finite import is_finite
from rowhaul.nn import Batch
from rowhaul.runtime.runtime import Runtime
from rowhaul.runtime.worker_rows import TakenGradients
from rowhaul.train.finite import ADVICE, DivergedError, describe
from rowhaul.transport.base import gather_texts
from rowhaul.transport.dense.gradients import SharedGradients


def find_nonfinite(
    runtime: Runtime,
    model: nn.Module,
    batch: Batch,
    loss: Tensor | None,
    shared: SharedGradients,
    taken: TakenGradients,
) -> str:
    """Describe a loss or gradient of this worker that is not finite; empty if all are."""
    if is_finite(shared.own) and all(is_finite(gradients) for _, gradients in taken.parts):
        return ""
    assert runtime.mover.cache is not None
    when = _when(runtime)
    found = describe(when, model, [batch], loss, taken.named(runtime.mover.cache))
    return found or f"a gradient is not finite {when}"


def raise_diverged(runtime: Runtime, found: str, summing: Sequence[int]) -> NoReturn:
    """Raise the same error on every summing worker: what the first of them has found.

    If ranks disagree as well, that is the error of them all: it may be why training has diverged.
    """
    runtime.await_agreements()
    texts = runtime.in_dense(lambda dense: gather_texts(dense, found.encode())).wait()
    found_by = [(worker, text) for worker, text in zip(summing, texts, strict=True) if text]
    what = f"the sum of all workers' gradients overflows {_when(runtime)}"
    if found_by:
        (first, text), *more = found_by
        others = f" and {len(more)} more" if more else ""
        what = f"{text.decode()} (on rank {first}{others})"
    error = DivergedError(f"{what}: {ADVICE}")
    runtime.failure.set(error)  # ends the threads that wait for this iteration
    raise error


def _when(runtime: Runtime) -> str:
    return f"at step {runtime.iteration + 1:,}"
