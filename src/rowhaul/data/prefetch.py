"""An iterator that runs ahead of its consumer in a separate thread.

The thread ends with the source, when the consumer stops early, fails or is collected, and when the
interpreter shuts down. A source that is stuck is abandoned after a few seconds.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")

_RECHECK_SECONDS = 0.2
_PATIENCE_SECONDS = 5.0  # with a source that is still making an item nobody wants


@dataclass(frozen=True)
class _Produced(Generic[Item]):
    item: Item


@dataclass(frozen=True)
class _Ended:
    error: BaseException | None


def prefetch(source: Iterable[Item], depth: int) -> Generator[Item, None, None]:
    """Yield what ``source`` yields, up to ``depth`` items made ahead; its errors are raised here."""
    waiting: queue.Queue[_Produced[Item] | _Ended] = queue.Queue(depth)
    stop = threading.Event()
    thread = threading.Thread(target=_produce, args=(source, waiting, stop), name="rowhaul-prefetch")
    thread.start()
    try:
        while isinstance(got := waiting.get(), _Produced):
            yield got.item
        if got.error is not None:
            try:
                raise got.error
            finally:
                del got  # the error's traceback holds this frame
    finally:
        stop.set()
        # The garbage collector may close this generator in the producer's own thread, which then
        # must not wait for itself, nor for a lock of the queue that it may be holding.
        if thread is not threading.current_thread():
            with contextlib.suppress(queue.Empty):
                waiting.get_nowait()  # unblock a producer that waits to put
            thread.join(_PATIENCE_SECONDS)


def _produce(
    source: Iterable[Item], waiting: queue.Queue[_Produced[Item] | _Ended], stop: threading.Event
) -> None:
    try:
        for item in source:
            if not _put(_Produced(item), waiting, stop):
                return
    except BaseException as error:
        _put(_Ended(error), waiting, stop)
    else:
        _put(_Ended(None), waiting, stop)
    finally:
        if (close := getattr(source, "close", None)) is not None:  # a generator's, in the thread that runs it
            close()


def _put(
    message: _Produced[Item] | _Ended, waiting: queue.Queue[_Produced[Item] | _Ended], stop: threading.Event
) -> bool:
    """Put a message; returns whether to continue: not when the consumer, or the program, is done."""
    while not stop.is_set() and threading.main_thread().is_alive():
        try:
            waiting.put(message, timeout=_RECHECK_SECONDS)
        except queue.Full:
            continue
        return not stop.is_set()
    return False
