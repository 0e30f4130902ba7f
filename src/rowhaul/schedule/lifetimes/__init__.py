"""Which rows exist: admission after some sightings, a time to live, and a limit of rows."""

from rowhaul.schedule.lifetimes.lifetimes import Forgotten, Lifetimes
from rowhaul.schedule.lifetimes.policy import DEFAULT, KEEP_ALL, RowPolicy, Status, policies_by_table

__all__ = ["DEFAULT", "KEEP_ALL", "Forgotten", "Lifetimes", "RowPolicy", "Status", "policies_by_table"]
