"""Raw files as blocks of bytes, plain, gzipped or inside a zip archive."""

from __future__ import annotations

import gzip
import io
import re
import zipfile
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from rowhaul.data.text.encodings import Utf8Stream, is_utf8_name
from rowhaul.errors import DataError

BLOCK_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_PACKED = {  # what is not unpacked here, by how it begins
    re.compile(rb"PK(\x03\x04|\x05\x06)"): "a zip archive",
    re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"): "compressed with bzip2",
    re.compile(rb"\x28\xb5\x2f\xfd"): "compressed with zstd",
    re.compile(rb"\xfd7zXZ\x00"): "compressed with xz",
}
_LONGEST_MAGIC = 10
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONGEST_FIRST_LINE = 1 << 20


@dataclass(frozen=True)
class TextFile:
    """A raw file on disk, or a member of a zip archive."""

    path: Path
    member: str = ""
    encoding: str = "utf-8"

    def __str__(self) -> str:
        return f"{self.path}: {self.member}" if self.member else str(self.path)

    @contextmanager
    def open(self) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """The decompressed stream, as UTF-8, and the stored one under it."""
        with self._explained(), self.path.open("rb") as stored, self._decompressed(stored) as stream:
            if is_utf8_name(self.encoding):
                yield stream, stored
            else:
                yield io.BufferedReader(Utf8Stream(stream, self.encoding), BLOCK_BYTES), stored

    @contextmanager
    def _decompressed(self, stored: IO[bytes]) -> Iterator[IO[bytes]]:
        if self.member:
            with zipfile.ZipFile(stored) as archive, archive.open(self.member) as stream:
                yield stream
            return
        start = stored.read(_LONGEST_MAGIC)
        stored.seek(0)
        if start.startswith(_GZIP_MAGIC):
            with gzip.GzipFile(fileobj=stored) as stream:
                yield cast(IO[bytes], stream)
            return
        for magic, what in _PACKED.items():
            if magic.match(start):
                raise DataError(f"{self} is {what}; unpack it (gzip is read as it is)")
        yield stored

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except EOFError:
            raise DataError(
                f"{self} is cut short: the compressed data lacks its end; copy or download it again"
            ) from None
        except (gzip.BadGzipFile, zlib.error, zipfile.BadZipFile) as error:
            raise DataError(f"{self} is damaged ({error}); copy or download it again") from None
        except FileNotFoundError:
            raise DataError(f"{self}: no such file (working directory: {Path.cwd()})") from None
        except IsADirectoryError:
            raise DataError(f"{self} is a folder; name the files in it") from None
        except OSError as error:
            raise DataError(f"{self} cannot be read: {error.strerror or error}") from None


@dataclass(frozen=True)
class FirstLine:
    """The first line of a file without its line break, and where it and the next line begin."""

    text: bytes
    start: int
    next_start: int


def first_line(file: TextFile) -> FirstLine:
    """Peek at a file; an empty one is an error."""
    with file.open() as (stream, _):
        text = stream.readline(_LONGEST_FIRST_LINE)
    if not text:
        raise DataError(f"{file} is empty")
    start = len(_BYTE_ORDER_MARK) if text.startswith(_BYTE_ORDER_MARK) else 0
    return FirstLine(text[start:].rstrip(b"\r\n"), start, len(text))


def _go_to(stream: IO[bytes], offset: int) -> int:
    if stream.seekable():
        return stream.seek(offset)
    passed = 0
    while passed < offset and (block := stream.read(min(BLOCK_BYTES, offset - passed))):
        passed += len(block)
    return passed


def read_blocks(file: TextFile, offset: int) -> Generator[tuple[bytes, int], None, None]:
    """The decompressed bytes from ``offset`` on, each block with the number of stored bytes used so far."""
    with file.open() as (stream, stored):
        if _go_to(stream, offset) != offset:
            raise DataError(f"{file} has fewer than {offset:,} bytes; it was longer when this began")
        while block := stream.read(BLOCK_BYTES):
            yield block, stored.tell()
