"""The secret that all processes of a run share: where it comes from, and how it is proved.

`demand` and `prove` are for any connected socket, stream or packet; see `rowhaul._proof`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from rowhaul._proof import demand, prove
from rowhaul.errors import SecretError

__all__ = ["VARIABLE", "SecretError", "demand", "load_secret", "prove"]

VARIABLE = "ROWHAUL_SECRET"
_LEAST_BYTES, _MOST_BYTES = 16, 4096
_MAKE_ONE = "make one with `openssl rand -hex 32`"


def load_secret(path: str | None, environment: Mapping[str, str] = os.environ) -> bytes | None:
    """Return the secret in a file, else the one in the environment, else None.

    White space around it does not count.
    """
    if path:
        path = os.path.expanduser(path)  # no shell has, in a file of settings
        return _checked(_read(path), f"the secret in {path}")
    if VARIABLE in environment:
        return _checked(environment[VARIABLE].encode(errors="surrogateescape"), f"the secret in {VARIABLE}")
    return None


def _read(path: str) -> bytes:
    try:
        # Nobody can fill a FIFO's other end in time, so do not wait for it.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise SecretError(f"the secret file {path} is not a regular file")
            if status.st_mode & stat.S_IRWXO:
                raise SecretError(
                    f"the secret file {path} is open to all users (mode {stat.S_IMODE(status.st_mode):04o}): "
                    f"run `chmod 600 {path}`, and make a new secret if others may have read it"
                )
            return file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise SecretError(f"the secret file {path} cannot be read: {error.strerror}") from None


def _checked(secret: bytes, name: str) -> bytes:
    if len(secret) > _MOST_BYTES:
        raise SecretError(f"{name} has more than {_MOST_BYTES} bytes: is this the right file? {_MAKE_ONE}")
    secret = secret.strip()
    if len(secret) < _LEAST_BYTES:
        size = f"has {len(secret)} bytes" if secret else "is empty"
        raise SecretError(f"{name} {size}; it needs at least {_LEAST_BYTES}: {_MAKE_ONE}")
    return secret
