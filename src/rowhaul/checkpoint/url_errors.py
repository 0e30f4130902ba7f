"""Errors of fsspec's file systems, each in one line that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fsspec.registry import known_implementations

from rowhaul.checkpoint.location import Url
from rowhaul.errors import ConfigError, StorageError

_PACKAGES = {"s3": "'rowhaul[s3]'", "s3a": "'rowhaul[s3]'", "gs": "gcsfs", "gcs": "gcsfs"}


@contextmanager
def explained(url: Url, creating: bool = False) -> Iterator[None]:
    """Raise our own errors for what a file system raises, but `FileNotFoundError` for a file that is absent.

    Args:
        url: of the file or folder.
        creating: a file is written; where something is not there, it is the bucket or the folder.
    """
    try:
        yield
    except (StorageError, ConfigError):
        raise
    except FileNotFoundError as error:
        if creating or "bucket does not exist" in str(error):
            raise StorageError(f"{url}: {_line(error)}; create the bucket or correct the URL") from error
        raise
    except Exception as error:  # every file system has its own
        raise _our_error(url, error) from error


def _our_error(url: Url, error: Exception) -> StorageError | ConfigError:
    scheme = str(url).partition("://")[0].rpartition("::")[2]
    if isinstance(error, ImportError):
        package = _PACKAGES.get(scheme, "")
        hint = f"pip install {package}" if package else str(known_implementations[scheme].get("err", error))
        return ConfigError(f"{url}: {scheme}:// needs a package that is not installed: {hint}")
    if isinstance(error, ValueError) and scheme not in known_implementations:
        return ConfigError(
            f"{url}: URL scheme {scheme!r} is not known; use s3, gs or another that fsspec knows, or a path"
        )
    kind = type(error).__name__
    if "Credential" in kind:
        return StorageError(
            f"{url}: no valid credentials ({_line(error)}); set them as the storage's own tools expect them "
            "(for S3 as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
        )
    if isinstance(error, PermissionError):
        return StorageError(
            f"{url}: access denied ({_line(error)}); check the credentials and the rights of the account"
        )
    return StorageError(f"{url}: the storage does not answer as it should: {kind}: {_line(error)}")


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
