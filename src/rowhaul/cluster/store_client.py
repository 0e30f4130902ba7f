"""A connection to the rendezvous store, as a store of `torch.distributed`: Gloo uses it too."""

from __future__ import annotations

import math
import select
import socket
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed import PrefixStore as TorchPrefixStore  # type: ignore[attr-defined]  # compiled
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]  # compiled

from rowhaul._proof import prove
from rowhaul.cluster import store_server as server

# For the answer itself, beyond the wait that was asked for. The store may be in rank 0, whose threads do not
# run while one of them holds the GIL; that it has died shows at once, and that its host has in heartbeats.
_GRACE_SECONDS = 60.0
_PIECE = 1.0  # seconds of waiting


class StoreClient(TorchStore):
    """Serves one thread at a time: a request can block it.

    Torch's C++ code calls these methods too, by the names it knows, and does not keep the object alive.

    Args:
        connection: connected to a `StoreServer`.
        secret: the run's secret.
        seconds: time limit of the proof.
    """

    timeout: timedelta  # a property of torch's class

    def __init__(self, connection: socket.socket, secret: bytes | None, seconds: float) -> None:
        super().__init__()
        self._connection, self._lock = connection, threading.Lock()
        # Closed with the last object that uses it, as torch's stores are; at exit the kernel does that.
        weakref.finalize(self, connection.close).atexit = False
        prove(connection, secret, seconds, server.PURPOSE)
        server.prepare(connection)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._request(server.SET, key, value)

    def get(self, key: str) -> bytes:
        """Return a value, once there is one."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values, once all are there."""
        return self._wait(server.GET, keys, self.timeout)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several values."""
        self._request(server.SET, *(one for pair in zip(keys, values, strict=True) for one in pair))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        self._wait(server.WAIT, keys, self.timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        return self._request(server.CHECK, *keys) == [b"1"]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first; return the sum."""
        return int(self._request(server.ADD, key, str(amount))[0])

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value."""
        self._request(server.APPEND, key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a value if it is the expected one; return what it is afterwards."""
        return self._request(server.COMPARE_SET, key, expected, desired)[0]

    def delete_key(self, key: str) -> bool:
        """Remove a value; return whether there was one."""
        return self._request(server.DELETE, key) == [b"1"]

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._request(server.COUNT)[0])

    def has_extended_api(self) -> bool:
        """Return whether there are `append`, `multi_get` and `multi_set`."""
        return True

    compareSet, deleteKey, getNumKeys = compare_set, delete_key, num_keys  # noqa: N815  # as C++ calls them

    def _wait(self, kind: int, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        seconds = timeout.total_seconds()
        return self._request(kind, str(seconds), *keys, patience=seconds)

    def _request(self, kind: int, *parts: str | bytes, patience: float = 0.0) -> list[bytes]:
        encoded = [part.encode() if isinstance(part, str) else bytes(part) for part in parts]
        with self._lock:
            try:
                self._connection.settimeout(_GRACE_SECONDS)
                server.send_message(self._connection, bytes([kind]), *encoded)
                self._await_answer(patience + _GRACE_SECONDS)
                status, *results = server.receive_message(self._connection)
            except (OSError, ValueError) as error:
                self._connection.close()  # an answer that is late must not be taken for the next one
                reason = "it does not answer" if isinstance(error, TimeoutError) else str(error)
                raise DistNetworkError(f"the rendezvous store is lost: {reason}") from None
            except BaseException:  # Ctrl-C before the answer: the next request would take it for its own
                self._connection.close()
                raise
        if status[0] == server.TIMED_OUT:
            missing = ", ".join(key.decode(errors="replace") for key in results[:3])
            raise DistStoreError(f"waited {patience:g} s for {missing}")
        return results

    def _await_answer(self, seconds: float) -> None:
        """Wait in pieces: the time for which Ctrl-Z stops this process, and the store, counts as one."""
        incoming = select.poll()
        incoming.register(self._connection, select.POLLIN)
        for _ in range(math.ceil(seconds / _PIECE)):
            if incoming.poll(1000 * _PIECE):
                return
        raise TimeoutError


class PrefixStore(TorchPrefixStore):
    """A part of a store, below a prefix; keeps the store itself alive, which torch's class does not."""

    def __init__(self, prefix: str, store: Any) -> None:
        super().__init__(prefix, store)
        self._kept = store
