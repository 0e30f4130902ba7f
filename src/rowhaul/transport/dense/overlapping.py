"""Sums dense gradients while backward() still computes others.

Buckets of the buffer are sent in order, each as soon as backward() has finished all parameters in it; what is
left is sent by `send_rest`. The order and the sizes are the same on all workers, only the moments differ. A
gradient that changes after it was sent, because backward() ran twice or the user has changed it, is noticed:
all workers then sum once more, and from then on after backward() only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from rowhaul.errors import ConfigError
from rowhaul.transport.base import Collective, RunningSum, Wire
from rowhaul.transport.dense.gradients import DenseGradients, SharedGradients

EXACT_WIRE = "float32"  # gradients travel as they are, in float64 if that is what they are
DENSE_WIRES = (EXACT_WIRE, "bfloat16")

Result = TypeVar("Result", covariant=True)


class Pending(Protocol[Result]):
    """The future result of a call."""

    def wait(self) -> Result:
        """Return the result once it is there."""


InDense = Callable[[Callable[[Collective], None]], Pending[None]]
BucketEnds = Callable[[int, torch.dtype, Wire | None], Sequence[int]]


def wire_type(name: str) -> torch.dtype | None:
    """Return the type that dense gradients are rounded to when they travel; None where they are not."""
    if name not in DENSE_WIRES:
        raise ConfigError(f"dense_wire must be {' or '.join(DENSE_WIRES)}, got {name!r}")
    return None if name == EXACT_WIRE else getattr(torch, name)


class OverlappingSum:
    """Sums the dense gradients of one iteration after the other.

    Args:
        gradients: packs them.
        in_dense: makes a call with the workers' collective in the thread that uses it.
        bucket_ends: of the collective.
        wire: the type that dense gradients are rounded to when they travel; None: exact.
        overlaps: whether to send before backward() has ended; not where backward() uses the collective, too.
    """

    def __init__(
        self,
        gradients: DenseGradients,
        in_dense: InDense,
        bucket_ends: BucketEnds,
        *,
        wire: torch.dtype | None = None,
        overlaps: bool = True,
    ) -> None:
        self._gradients, self._in_dense, self._bucket_ends = gradients, in_dense, bucket_ends
        self._wire = None if wire is None else Wire(wire, gradients.ends[-1] if gradients.ends else 0)
        self._shared: SharedGradients | None = None  # of the iteration in progress
        self._ends: list[int] = []  # of its buckets that may be sent early
        self._is_done: list[bool] = []  # of each parameter
        self._num_done = self._num_sent = 0  # parameters in order, buckets
        self._running: RunningSum | None = None  # used by the thread of the collective alone
        self._last: Pending[None] | None = None
        self._handles: list[RemovableHandle] = []
        if overlaps:
            for number, parameter in enumerate(gradients.parameters):
                hook = partial(self._finished, number)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def begin(self, num_replicated: int, row_dtype: torch.dtype) -> None:
        """Begin an iteration, before backward()."""
        gradients = self._gradients
        self._shared = shared = gradients.begin(num_replicated, row_dtype)
        size, dtype = shared.own.numel(), shared.own.dtype
        ends = self._bucket_ends(size, dtype, self._wire) if self._handles else []
        self._ends = [end for end in ends if end <= shared.num_dense]
        self._is_done = [False] * len(gradients.parameters)
        self._num_done = self._num_sent = 0
        self._running = None

    def complete(self, loss: Tensor | None) -> SharedGradients:
        """Pack what was not sent yet, after backward()."""
        shared = self._shared
        assert shared is not None
        changed = self._num_sent > 0 and self._gradients.has_changed(shared)
        self._gradients.complete(shared, loss)
        if changed:
            shared.flag_changed()
        return shared

    def send_rest(self) -> None:
        """Send what is left, once it is complete."""
        self._ends = []
        self._last = self._in_dense(self._finish_sum)

    def wait(self) -> None:
        """Return when the sums are there."""
        shared, last = self._shared, self._last
        assert shared is not None
        assert last is not None
        last.wait()
        if shared.any_changed:
            self.stop_overlapping()
            self._gradients.pack_again(shared)
            self._in_dense(self._finish_sum).wait()

    def spread(self) -> None:
        """Set the parameters' gradients to their sums."""
        assert self._shared is not None
        self._gradients.spread(self._shared)
        self._shared = None

    def make_room(self) -> None:
        """Prepare for another sum within an iteration: from now on send after backward() only.

        All workers must enter sums in the same order, but backward() sends at a moment of its own.
        """
        if self._num_sent and self._shared is not None:
            raise ConfigError(
                "sum_over_workers() was called while dense gradients were already on their way; call it "
                "before backward() or after step(), or once in the first iteration"
            )
        self.stop_overlapping()

    def stop_overlapping(self) -> None:
        """From now on send after backward() only."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _finished(self, number: int, parameter: Tensor) -> None:
        """In backward(): a parameter has its gradient."""
        if not self._ends or self._shared is None:
            return
        done = self._is_done
        done[number] = True
        while self._num_done < len(done) and done[self._num_done]:
            self._num_done += 1
        shared = self._shared
        while self._num_sent < len(self._ends):
            needed = bisect_left(self._gradients.ends, self._ends[self._num_sent]) + 1
            if self._num_done < needed:
                return
            if shared.num_packed < needed:
                self._gradients.pack(shared, needed)
            self._num_sent += 1
            self._in_dense(self._send_bucket)

    def _send_bucket(self, dense: Collective) -> None:
        self._started(dense).send_next()

    def _finish_sum(self, dense: Collective) -> None:
        self._started(dense).finish()
        self._running = None

    def _started(self, dense: Collective) -> RunningSum:
        if self._running is None:
            assert self._shared is not None
            self._running = dense.start_sum(self._shared.own, self._shared.total, self._wire)
        return self._running
