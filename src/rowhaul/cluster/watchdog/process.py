"""The watchdog's program, started by `Heartbeat`: ``python -I -S process.py PACKAGES PAGE CHANNEL``.

PACKAGES is the folder that holds the package rowhaul, PAGE the descriptor of the rank's page of activity, and
CHANNEL that of a socket to the rank: the settings come first. It ignores the signals that end a rank, so that
it can say how the rank ended, and then ends by itself.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])

from rowhaul._activity import Page
from rowhaul._proof import BrokenProofError, prove
from rowhaul.cluster.watchdog.beats import Beat
from rowhaul.cluster.watchdog.hub import Hub
from rowhaul.cluster.watchdog.lines import Lines, Message
from rowhaul.cluster.watchdog.settings import PURPOSE, Settings
from rowhaul.errors import SecretError

if TYPE_CHECKING:
    from typing import Any

_SETTLING_SECONDS = 5.0  # to send the last words
_LINGERING_SECONDS = 60.0  # in which the other ranks end after rank 0 has died
_ANSWERING_ROUNDS = 3  # in which a rank writes its stacks
_RETRY = 0.1  # seconds between two attempts to connect


class Watchdog:
    """Beats for a rank, passes on what the hub says, and is the hub itself on rank 0."""

    def __init__(self, page: Page, channel: socket.socket) -> None:
        self._page, self._channel = page, Lines(channel)
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], None]] = deque()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._to_hub: Lines | None = None
        self._is_connecting = False
        self._hub: Hub | None = None
        self._hub_name = ""
        self._silent_rounds = 0  # of the hub
        self._hub_has_left = self._has_lost_hub = False
        self._post: Message | None = None  # the rank's last
        self._has_posted = False
        self._stacks_rounds: int | None = None  # since they were asked for
        self._end_at = float("inf")
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain)
        self._selector.register(channel, selectors.EVENT_READ, self._hear_rank)

    def run(self, settings: Settings) -> None:
        """Work until the rank has ended and, on rank 0, all others have."""
        self._settings = settings
        self._watch_process()
        if settings.rank == 0:
            self._hub = Hub(settings, self._selector, self._later)
            self._channel.send({"listening": self._hub.port})
        next_round = time.monotonic()
        while not self._may_end():
            for key, _ in self._selector.select(max(0.0, next_round - time.monotonic())):
                key.data()
            while self._calls:
                self._calls.popleft()()
            if time.monotonic() >= next_round:
                next_round = time.monotonic() + settings.interval
                self._round()

    def _round(self) -> None:
        if self._to_hub is not None:
            if self._post is None:
                self._to_hub.send({"beat": Beat.read(self._page, self._settings.process).to_json()})
            self._to_hub.flush()
            self._silent_rounds += 1
            if self._silent_rounds >= self._settings.num_missed:
                seconds = self._settings.num_missed * self._settings.interval
                self._lose_hub(f"has not answered for {seconds:g} s")
        if self._stacks_rounds is not None:
            self._stacks_rounds += 1
            if self._stacks_rounds > _ANSWERING_ROUNDS:
                self._send_stacks("  it does not answer: a thread holds the interpreter's lock (GIL)")
        if self._hub is not None:
            self._hub.round()
        self._channel.flush()
        if os.getppid() != self._settings.process:
            self._rank_ended()

    def _may_end(self) -> bool:
        if self._post is None:
            return False
        if time.monotonic() > self._end_at:
            return True
        if self._hub is not None:
            return not self._hub.is_needed and self._hub.flush()
        if self._to_hub is None:
            return not self._is_connecting
        return self._to_hub.is_closed or (self._has_posted and self._to_hub.flush())

    def _watch_process(self) -> None:
        """Learn of the rank's end at once where the system can tell, even if its children hold our socket."""
        with contextlib.suppress(AttributeError, OSError):
            descriptor = os.pidfd_open(self._settings.process)  # type: ignore[attr-defined,unused-ignore]  # Linux only

            def ended() -> None:
                self._selector.unregister(descriptor)
                self._hear_rank()
                self._rank_ended()

            self._selector.register(descriptor, selectors.EVENT_READ, ended)

    def _hear_rank(self) -> None:
        if self._channel.connection.fileno() < 0:
            return
        for message in self._channel.receive():
            if "connect" in message:
                host, port = message["connect"]
                self._hub_name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                self._is_connecting = True
                threading.Thread(target=self._connect, args=(host, port), daemon=True).start()
            elif "post" in message:
                self._end(message["post"])
            elif "stacks" in message and self._stacks_rounds is not None:
                self._send_stacks(message["stacks"])
        if self._channel.is_closed:
            self._selector.unregister(self._channel.connection)
            self._channel.close()
            self._rank_ended()

    def _rank_ended(self) -> None:
        """Post for a rank that has ended without a word."""
        if self._post is None:
            self._end({"died": True})
            self._end_at = time.monotonic() + _LINGERING_SECONDS

    def _end(self, post: Message) -> None:
        if self._post is not None:
            return
        self._post = post
        if self._hub is None:
            self._end_at = time.monotonic() + _SETTLING_SECONDS
        self._send_post()

    def _send_post(self) -> None:
        if self._post is not None and self._to_hub is not None and not self._has_posted:
            self._has_posted = True
            self._to_hub.send({"post": self._post})
            self._channel.send({"posted": True})

    def _connect(self, host: str, port: int) -> None:
        """In a thread: connect to the hub; again where strangers have crowded this process out."""
        deadline = time.monotonic() + self._settings.first_missed * self._settings.interval
        while True:
            try:
                connection = self._attempt(host, port, max(_RETRY, deadline - time.monotonic()))
                break
            except (OSError, SecretError) as error:
                # Final are another secret, and that nobody listens: the hub was there when it was announced.
                may_pass = isinstance(error, OSError | BrokenProofError)
                may_pass = may_pass and not isinstance(error, ConnectionRefusedError)
                if not may_pass or self._post is not None or time.monotonic() + _RETRY > deadline:
                    self._later(partial(self._lose_hub, f"cannot be reached: {error}"))
                    return
            time.sleep(_RETRY)
        self._later(lambda: self._join(connection))

    def _attempt(self, host: str, port: int, seconds: float) -> socket.socket:
        settings = self._settings
        connection = socket.create_connection((host, port), seconds)
        try:
            prove(connection, settings.secret, min(settings.proof_seconds, seconds), PURPOSE)
        except BaseException:
            connection.close()
            raise
        return connection

    def _join(self, connection: socket.socket) -> None:
        self._is_connecting = False
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._to_hub = Lines(connection)
        self._selector.register(connection, selectors.EVENT_READ, self._hear_hub)
        self._to_hub.send({"rank": self._settings.rank, "token": self._settings.token})
        self._to_hub.send({"beat": Beat.read(self._page, self._settings.process).to_json()})
        self._send_post()

    def _hear_hub(self) -> None:
        assert self._to_hub is not None
        for message in self._to_hub.receive():
            self._silent_rounds = 0
            if "want_stacks" in message:
                self._stacks_rounds = 0
                self._channel.send(message)
            elif "table" in message and self._channel.is_behind:
                continue  # those of many ranks are long, and a busy rank reads none: a later one will do
            elif "round" not in message:
                self._hub_has_left |= 0 in message.get("left", ())
                self._channel.send(message)
        if self._to_hub.is_closed:
            self._selector.unregister(self._to_hub.connection)
            self._lose_hub("has closed the connection")

    def _lose_hub(self, what: str) -> None:
        if not self._hub_has_left and not self._has_lost_hub and self._post is None:
            self._channel.send({"hub_lost": f"its watchdog at {self._hub_name} {what}"})
        self._has_lost_hub, self._is_connecting = True, False
        if self._to_hub is not None and not self._to_hub.is_closed:
            self._selector.unregister(self._to_hub.connection)
            self._to_hub.close()
        self._to_hub = None

    def _send_stacks(self, text: str) -> None:
        self._stacks_rounds = None
        if self._to_hub is not None:
            self._to_hub.send({"stacks": text})

    def _later(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._wake.send(b".")

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)


def main(arguments: list[str]) -> None:
    """Run until the rank has ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    page, channel = Page(int(arguments[1])), socket.socket(fileno=int(arguments[2]))
    watchdog = Watchdog(page, channel)
    try:
        watchdog.run(_first_message(channel))
    except BaseException:
        with contextlib.suppress(OSError):
            Lines(channel).send({"broken": traceback.format_exc()})
        raise


def _first_message(channel: socket.socket) -> Settings:
    """Wait for the settings."""
    import json

    channel.setblocking(True)
    text = b""
    while not text.endswith(b"\n"):  # byte by byte: what follows is not ours to read
        if not (part := channel.recv(1)):
            raise ConnectionError("the rank ended before it sent the settings")
        text += part
    channel.setblocking(False)
    values: dict[str, Any] = json.loads(text)
    return Settings.from_json(values)


if __name__ == "__main__":
    main(sys.argv[1:])
