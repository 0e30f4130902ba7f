"""Gradients that are not finite, on a cluster: found on their worker, reported by all."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor, nn

from rowhaul.nn import Batch
from rowhaul.runtime.runtime import Runtime
from rowhaul.runtime.worker_rows import TakenGradients
from rowhaul.train.finite import ADVICE, DivergedError, describe, is_finite
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


def raise_diverged(runtime: Runtime, found: str) -> NoReturn:
    """Raise the same error on every worker: what the first of them has found."""
    texts = runtime.in_dense(lambda dense: gather_texts(dense, found.encode())).wait()
    workers = [worker for worker, text in enumerate(texts) if text]
    what = f"the sum of all workers' gradients overflows {_when(runtime)}"
    if workers:
        others = f" and {len(workers) - 1} more" if len(workers) > 1 else ""
        what = f"{texts[workers[0]].decode()} (on rank {workers[0]}{others})"
    error = DivergedError(f"{what}: {ADVICE}")
    runtime.failure.set(error)  # ends the threads that wait for this iteration
    raise error


def _when(runtime: Runtime) -> str:
    return f"at step {runtime.iteration + 1:,}"
