"""When trained rows travel: one module per way."""

from rowhaul.schedule.sync.bounded import BoundedExchange
from rowhaul.schedule.sync.exact import ExactExchange
from rowhaul.schedule.sync.exchange import Exchange, Step, SyncMode, Wiring, make_sync

__all__ = ["Exchange", "Step", "SyncMode", "Wiring", "make_exchange", "make_sync"]


def make_exchange(mode: SyncMode, wiring: Wiring) -> Exchange:
    """The implementation of a mode."""
    return BoundedExchange(mode, wiring) if mode.name == "bounded" else ExactExchange(mode, wiring)
