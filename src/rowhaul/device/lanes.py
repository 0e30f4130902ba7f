"""Streams of a card that work side by side; where kernels are interpreted, everything is in order anyway."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

Event = torch.cuda.Event | None


class _AtOnce(Executor):
    """Does work when it is given: interpreted kernels run in one thread."""

    def submit(self, fn: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*given, **named))
        except Exception as error:
            done.set_exception(error)
        return done


def worker(device: torch.device, name: str) -> Executor:
    """Return a thread that does one thing after the other."""
    if device.type != "cuda":
        return _AtOnce()
    # Threads begin with the first card as their own.
    number = torch.cuda.current_device() if device.index is None else device.index
    return ThreadPoolExecutor(1, name, torch.cuda.set_device, (number,))


class Lane:
    """One stream of a card.

    Args:
        device: the card.
        is_urgent: whether its kernels go before those of others.
    """

    def __init__(self, device: torch.device, *, is_urgent: bool = False) -> None:
        self.stream = torch.cuda.Stream(device, -1 if is_urgent else 0) if device.type == "cuda" else None

    def use(self) -> AbstractContextManager[object]:
        """Put what follows, in this thread, on this stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def wait(self, event: Event) -> None:
        """Make later work on this stream wait for an event."""
        if event is not None and self.stream is not None:
            self.stream.wait_event(event)

    def mark(self) -> Event:
        """Return an event after all that is on this stream by now."""
        return None if self.stream is None else self.stream.record_event()


class Lanes:
    """Beside the stream of training: one that plans and writes rows back, and one that fetches others."""

    def __init__(self, device: torch.device) -> None:
        self.planning = Lane(device, is_urgent=True)
        self.fetching = Lane(device, is_urgent=True)

    def all(self) -> tuple[Lane, ...]:
        """Return each of them."""
        return self.planning, self.fetching


class Listener:
    """Brings numbers from a card to host memory, and waits for them.

    It is pinned: a copy to pageable memory keeps other threads from starting kernels until it is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._heard = torch.empty(0, dtype=torch.uint8)

    def hear(self, tensor: Tensor) -> npt.NDArray[Any]:
        """Return the numbers of a tensor; they are valid until the next call."""
        if tensor.nbytes > len(self._heard):
            self._heard = pinned(2 * tensor.nbytes, torch.uint8, self._device)
        heard = self._heard[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        heard.copy_(tensor, non_blocking=True)
        settle(here(self._device))
        numbers: npt.NDArray[Any] = heard.numpy()
        return numbers


def pinned(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate host memory that a card copies to and from without waiting."""
    return torch.empty(count, dtype=dtype, pin_memory=device.type == "cuda")


def here(device: torch.device) -> Event:
    """Return an event after all that this thread has started on its stream."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def await_here(device: torch.device, event: Event) -> None:
    """Make what this thread starts from now on wait for an event."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def settle(event: Event) -> None:
    """Wait for an event in this thread."""
    if event is not None:
        event.synchronize()


def is_over(event: Event) -> bool:
    """Whether the card has come to an event."""
    return event is None or event.query()
