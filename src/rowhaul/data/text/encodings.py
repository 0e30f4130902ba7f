"""Text that is not UTF-8: noticed, or turned into UTF-8 while it is read."""

from __future__ import annotations

import codecs
import io
from typing import IO

_INVALID = "\udcff"  # a lone surrogate, which UTF-8 cannot hold: what cannot be decoded stays invalid
_HANDLER = "rowhaul.invalid"
_BYTES_AT_ONCE = 1 << 18


def _keep_invalid(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _INVALID, error.end


codecs.register_error(_HANDLER, _keep_invalid)


def is_utf8_name(encoding: str) -> bool:
    """Whether a name means plain UTF-8."""
    return codecs.lookup(encoding).name == "utf-8"


class Utf8Blocks:
    """Says of one block of a file after the other whether all up to its end is UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._is_valid = True

    def __call__(self, block: bytes, *, final: bool = False) -> bool:
        """Look at the next block; ``final`` says that none follows, so that no character may be cut off."""
        if self._is_valid and not (block.isascii() and not self._decoder.getstate()[0]):
            try:
                self._decoder.decode(block, final)
            except UnicodeDecodeError:
                self._is_valid = False
        return self._is_valid


class Utf8Stream(io.RawIOBase):
    """The bytes of a file as UTF-8; what is invalid in its encoding is invalid UTF-8, too."""

    def __init__(self, stored: IO[bytes], encoding: str) -> None:
        self._stored = stored
        self._decoder = codecs.getincrementaldecoder(encoding)(_HANDLER)
        self._waiting = memoryview(b"")
        self._ended = False

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # a buffer of bytes
        """Fill a buffer; 0 at the end."""
        while not self._waiting and not self._ended:
            block = self._stored.read(_BYTES_AT_ONCE)
            self._ended = not block
            text = self._decoder.decode(block, final=self._ended)
            self._waiting = memoryview(text.encode("utf-8", "surrogatepass"))
        size = min(len(buffer), len(self._waiting))
        buffer[:size] = self._waiting[:size]
        self._waiting = self._waiting[size:]
        return size
