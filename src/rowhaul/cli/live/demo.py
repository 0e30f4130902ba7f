"""Runs the live demo: starts everything, says how it goes, ends everything."""

from __future__ import annotations

import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from rowhaul.cli.console import say
from rowhaul.cli.live.client import Client, read_json
from rowhaul.cli.live.processes import Command
from rowhaul.data.generate.events import Events

_SAID_EVERY = 5.0  # seconds
_POLL_SECONDS = 0.2
_WINDOW = 20_000  # samples of progressive validation


@dataclass(frozen=True)
class LiveSettings:
    """What the live demo does.

    Args:
        seconds: after which it ends; 0: at Ctrl-C.
        events_per_second: that appear.
        requests_per_second: that a client sends, 100 candidates each.
        publish_every: what the trainer has learned.
        port: of the server; 0: a free one.
        seed: of the events.
    """

    seconds: float = 0.0
    events_per_second: int = 5_000
    requests_per_second: float = 20.0
    publish_every: str = "5s"
    port: int = 0
    seed: int = 0


def run_live(settings: LiveSettings, folder: Path | None) -> None:
    """Run the demo in a folder, or in a temporary one that is removed at the end."""
    with _told_to_stop() as is_stopped, ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rowhaul-live-")))
        _Live(settings, folder, is_stopped).run(stack)


class _Live:
    def __init__(self, settings: LiveSettings, folder: Path, is_stopped: Callable[[], bool]) -> None:
        self._settings, self._folder, self._is_stopped = settings, folder, is_stopped
        self._checks: list[Callable[[], None]] = []
        self._end = time.monotonic() + settings.seconds if settings.seconds else float("inf")

    def run(self, stack: ExitStack) -> None:
        settings, folder = self._settings, self._folder
        served = folder / "served"
        events = Events(folder / "incoming", settings.events_per_second, settings.seed)
        trainer = stack.enter_context(Command("trainer", self._training(served), folder / "trainer.log"))
        self._checks.append(trainer.check)
        every = settings.publish_every
        say(f"A trainer follows {folder / 'incoming'} and publishes what changed every {every}.")
        if not self._wait(lambda: (served / "served.json").is_file()):
            return
        serving = ["serve", str(served), "--page", "--port", str(settings.port)]
        server = stack.enter_context(Command("server", serving, folder / "server.log"))
        self._checks.append(server.check)
        if not self._wait(lambda: _url_in(server.output) is not None):
            return
        url = _url_in(server.output)
        assert url is not None
        if not self._wait(lambda: read_json(f"{url}/healthz") is not None):
            return
        say(f"A server applies that while it scores. How fresh, good and fast it is: {url}/page")
        # Not before: events that wait for the trainer to start would all be old when it learns them.
        stack.enter_context(events)
        self._checks.append(lambda: _raise(events.error))
        say(f"{settings.events_per_second:,} click events a second appear, and a client asks for scores.\n")
        stack.enter_context(Client(url, events.request, settings.requests_per_second))
        last = self._follow(url)
        say("\n" + (summary(last) if last is not None else "it ended before the first score"))

    def _training(self, served: Path) -> list[str]:
        settings = self._settings
        arguments = ["train", "--data", str(self._folder / "incoming"), "--follow"]
        arguments += ["--out", str(self._folder / "run"), "--publish", str(served)]
        arguments += ["--publish-every", settings.publish_every, "--checkpoint-every", "1min"]
        arguments += ["--batch-size", "1024", "--set", f"seed={settings.seed}"]
        has_onnx = all(find_spec(name) is not None for name in ("onnx", "onnxruntime"))
        arguments += ["--publish-dense", "onnx" if has_onnx else "pt2"]
        return [*arguments, "--set", f"progressive_window={_WINDOW}"]

    def _follow(self, url: str) -> dict[str, Any] | None:
        """Say how it goes until the end; returns the last numbers."""
        last = None
        while self._wait(_passed(_SAID_EVERY)):
            last = read_json(f"{url}/stats?since={int(time.time()) - 60}") or last
            if last is not None:
                say(summary(last))
        return read_json(f"{url}/stats?since={int(time.time()) - 60}") or last

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Wait for something; false if the demo is to end first."""
        while not condition():
            if self._is_stopped() or time.monotonic() >= self._end:
                return False
            for check in self._checks:
                check()
            time.sleep(_POLL_SECONDS)
        return True


def summary(stats: dict[str, Any]) -> str:
    """Return the numbers of the page in a line."""
    windows = [one for one in stats["windows"] if one["auc"] is not None]
    auc = f"AUC {windows[-1]['auc']:.4f}" if windows else "no AUC yet"
    event = stats["newest_event"]
    fresh = "nothing learned yet" if event is None else f"knows events {stats['now'] - event:.1f} s old"
    newest = stats["samples"][-1] if stats["samples"] else {}
    rate, p99 = newest.get("requests_per_second"), newest.get("p99_ms")
    asked = "no requests yet" if not rate else f"{rate:.0f} requests/s"
    slow = "" if p99 is None else f", p99 {p99:.1f} ms"
    return f"{auc}, {fresh}, {asked}{slow}, {stats['deltas']:,} deltas, {stats['rows']:,} rows"


def _url_in(text: str) -> str | None:
    found = re.search(r"(http://\S+)/docs", "".join(text.splitlines()))
    return found.group(1) if found else None


def _passed(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


@contextmanager
def _told_to_stop() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C or SIGTERM into a request to end; a second one interrupts."""
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
