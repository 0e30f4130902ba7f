"""When trained rows travel: one module per way."""

from rowhaul.schedule.sync.at_home import AtHomeExchange
from rowhaul.schedule.sync.bounded import BoundedExchange
from rowhaul.schedule.sync.exact import ExactExchange
from rowhaul.schedule.sync.exchange import Exchange, Step, SyncMode, Wiring, make_sync
from rowhaul.schedule.threads import Threads

__all__ = ["Exchange", "Step", "SyncMode", "Wiring", "make_exchange", "make_sync"]


def make_exchange(mode: SyncMode, wiring: Wiring, threads: Threads) -> Exchange:
    """The implementation of a mode; bounded staleness plans in one thread."""
    if mode.name == "at-home":
        return AtHomeExchange(wiring)
    return BoundedExchange(mode, wiring) if mode.name == "bounded" else ExactExchange(mode, wiring, threads)
