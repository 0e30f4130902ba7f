"""Which worker trains which sample, which rows move, and when: decided alike on every rank.

Pure and deterministic: integers in, integers out; no tensors, no files, no clock.
"""

from rowhaul.schedule.batch import IdBatch
from rowhaul.schedule.control import ControlRecord
from rowhaul.schedule.dispatch import make_dispatcher
from rowhaul.schedule.dispatch.task import Dispatcher, DispatchTask
from rowhaul.schedule.lifetimes import Lifetimes, RowPolicy
from rowhaul.schedule.phases import Phase, phases_of
from rowhaul.schedule.plan import KIND_NAMES, Kind, Moves, Payload, Plan, Steps
from rowhaul.schedule.row_states import State
from rowhaul.schedule.scheduler import Scheduler
from rowhaul.schedule.settings import CacheSettings, HotRows, ScheduleSettings
from rowhaul.schedule.sizes import RowSizes, link_prices
from rowhaul.schedule.topology import Topology, home_of, homes_of
from rowhaul.schedule.transportation import transport

__all__ = [
    "KIND_NAMES",
    "CacheSettings",
    "ControlRecord",
    "DispatchTask",
    "Dispatcher",
    "HotRows",
    "IdBatch",
    "Kind",
    "Lifetimes",
    "Moves",
    "Payload",
    "Phase",
    "Plan",
    "RowPolicy",
    "RowSizes",
    "ScheduleSettings",
    "Scheduler",
    "State",
    "Steps",
    "Topology",
    "home_of",
    "homes_of",
    "link_prices",
    "make_dispatcher",
    "phases_of",
    "transport",
]
