"""The errors a user can cause, each a ``ValueError`` at heart.

A message says what was given, what is needed and what to change. Library code raises nothing else for a
user's mistake, and never exits the process.
"""

from __future__ import annotations


class RowhaulError(ValueError):
    """Base of every error that a user's input, configuration or files can cause."""


class ConfigError(RowhaulError):
    """A setting has the wrong name, type or value."""


class CacheTooSmallError(ConfigError):
    """A worker's cache cannot hold the rows that one batch needs at once."""


class DataError(RowhaulError):
    """A data file, its schema or one of its values is invalid."""


class BadLineError(DataError):
    """One line of a raw log cannot be read: carries ``path``, ``line`` (1-based) and ``reason``."""

    def __init__(self, path: str, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line:,}: {reason}")
        self.path, self.line, self.reason = path, line, reason


class CheckpointError(RowhaulError):
    """A checkpoint is missing, unfinished, damaged or of another model."""


class DamagedCheckpointError(CheckpointError):
    """A complete checkpoint is not what was written: a file is missing, cut off or changed."""


class StorageError(OSError, CheckpointError):
    """The storage behind a URL refuses, fails or cannot be reached."""


class UnknownKeyError(RowhaulError):
    """A key that was never trained was looked up with ``on_unknown="error"``."""


class ClusterError(RowhaulError):
    """Ranks cannot join, disagree, or have lost each other."""


class SecretError(ClusterError):
    """The secret of a run is unusable, or the other end of a connection cannot prove it."""


class RankLostError(ClusterError):
    """A rank died, stopped or failed while the others ran: carries ``rank`` and ``role``."""

    def __init__(self, rank: int, role: str, reason: str) -> None:
        super().__init__(f"rank {rank} ({role}) {reason}")
        self.rank, self.role, self.reason = rank, role, reason
