"""Where the latest version of every row is."""

from rowhaul.schedule.directory.directory import Directory, LocatedBatch
from rowhaul.schedule.directory.states import State

__all__ = ["Directory", "LocatedBatch", "State"]
