"""Checks, before the run, that `rowhaul simulate` can write its results where it was asked to."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from rowhaul._files import temporary_beside
from rowhaul.errors import ConfigError


def check_outputs(
    outputs: Mapping[str, Path], data: Sequence[str], schema: Path | None, overwrite: bool
) -> None:
    """Refuse outputs that cannot be written or would replace anything but an earlier result.

    Args:
        outputs: the file that each option names.
        data: the data files, as the user names them.
        schema: the schema file that the user names.
        overwrite: whether regular files may be replaced.
    """
    if not outputs:
        return
    inputs = _inputs(data, schema)
    for option, path in outputs.items():
        _check_folder(option, path)
        _check_target(option, path, inputs, overwrite)
    if len({os.path.realpath(path) for path in outputs.values()}) < len(outputs):
        raise ConfigError(f"{' and '.join(outputs)} name the same file, {path}; name one file for each")
    for option, path in outputs.items():
        _check_writable(option, path)


def _inputs(data: Sequence[str], schema: Path | None) -> list[Path]:
    """The files that are read."""
    from rowhaul.data.files import expand_files
    from rowhaul.data.schema import SCHEMA_FILE

    files = expand_files(data)
    folders = {path.parent for path in files}
    beside = [above / SCHEMA_FILE for folder in folders for above in (folder, folder.resolve().parent)]
    return [*files, *beside, *([schema] if schema else [])]


def _check_folder(option: str, path: Path) -> None:
    """Refuse a path without a folder to write to."""
    folder = path.parent
    try:
        is_folder = stat.S_ISDIR(os.stat(folder).st_mode)
    except FileNotFoundError:
        raise ConfigError(f"{option} {path}: the folder {folder} does not exist; make it first") from None
    except NotADirectoryError:
        is_folder = False
    except OSError as error:
        raise ConfigError(f"{option} {path}: {_reason(error)}; name another file") from None
    if not is_folder:
        above = [folder, *folder.parents]
        no_folder = next(one for one in reversed(above) if os.path.exists(one) and not os.path.isdir(one))
        raise ConfigError(f"{option} {path}: {no_folder} is not a folder; name a file in a folder")


def _check_target(option: str, path: Path, inputs: Sequence[Path], overwrite: bool) -> None:
    """Refuse to replace anything but a regular file that is not an input."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{option} {path}: {_reason(error)}; name another file") from None
    if any(_is_same_file(path, one) for one in inputs):
        raise ConfigError(f"{option} {path} is one of the input files; name another file")
    if stat.S_ISLNK(mode):
        raise ConfigError(f"{option} {path} is a symbolic link; name the file itself, or another one")
    if stat.S_ISDIR(mode):
        raise ConfigError(f"{option} {path} is a folder; name a file")
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{option} {path} is not a regular file, so it is not replaced; name another file")
    if not overwrite:
        raise ConfigError(f"{path} exists; name another file for {option}, or pass --overwrite")


def _check_writable(option: str, path: Path) -> None:
    """Try to create the temporary file that writing begins with."""
    temporary = temporary_beside(path)
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.unlink(temporary)
    except FileExistsError:
        raise ConfigError(
            f"{option} {path}: {temporary} is in the way, perhaps left by a run that was killed; remove it"
        ) from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ConfigError(f"{option} {path}: {_reason(error)}; name another file") from None
        raise ConfigError(
            f"{option} {path}: no file can be made in the folder {path.parent} ({_reason(error)}); "
            "choose another folder"
        ) from None


def _is_same_file(path: Path, other: Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:  # one of them is not there
        return False


def _reason(error: OSError) -> str:
    if error.errno == errno.ENAMETOOLONG:
        return "the name is too long"
    return (error.strerror or str(error)).lower()
