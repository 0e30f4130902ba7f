"""When trained rows travel: one module per way."""

from rowhaul.schedule.sync.bounded import BoundedExchange
from rowhaul.schedule.sync.exact import ExactExchange
from rowhaul.schedule.sync.iteration import Exchange, Outcome, Step, Wiring
from rowhaul.schedule.sync.mode import SyncMode, make_sync

__all__ = ["Exchange", "Outcome", "Step", "SyncMode", "Wiring", "make_exchange", "make_sync"]


def make_exchange(mode: SyncMode, wiring: Wiring) -> Exchange:
    """The mode at work."""
    return BoundedExchange(mode, wiring) if mode.name == "bounded" else ExactExchange(mode, wiring)
