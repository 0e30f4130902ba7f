"""Where the latest version of every row is."""

from rowhaul.schedule.directory.directory import Directory, LocatedBatch

__all__ = ["Directory", "LocatedBatch"]
