"""A client that asks a server for scores, again and again."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

_TIMEOUT_SECONDS = 10.0


class Client:
    """Sends requests in a thread, so many a second at most; use as a context.

    Args:
        url: of the server.
        request: makes a request; None: not yet.
        per_second: requests.
    """

    def __init__(self, url: str, request: Callable[[], dict[str, Any] | None], per_second: float) -> None:
        self._place, self._request, self._pause = urlsplit(url), request, 1 / per_second
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="rowhaul-client")

    def __enter__(self) -> Client:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _ask(self) -> None:
        assert self._place.hostname is not None
        connection = http.client.HTTPConnection(self._place.hostname, self._place.port, _TIMEOUT_SECONDS)
        due = time.monotonic()
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            due = max(due + self._pause, time.monotonic())
            if (request := self._request()) is None:
                continue
            try:
                body, headers = json.dumps(request), {"Content-Type": "application/json"}
                connection.request("POST", "/score", body, headers)
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                connection.close()  # opened again by the next request
        connection.close()


def read_json(url: str) -> dict[str, Any] | None:
    """Return what a server answers; None if it does not."""
    place = urlsplit(url)
    assert place.hostname is not None
    connection = http.client.HTTPConnection(place.hostname, place.port, _TIMEOUT_SECONDS)
    try:
        connection.request("GET", f"{place.path}?{place.query}")
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        return found
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()
