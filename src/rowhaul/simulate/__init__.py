"""What a schedule would cost on given links, before anything is bought or wired."""

from rowhaul.simulate.clock import Clock, TimeModel
from rowhaul.simulate.hot import HotModel
from rowhaul.simulate.links import Link, Links, parse_links
from rowhaul.simulate.results import Outcome, Results
from rowhaul.simulate.run import Simulation

__all__ = [
    "Clock",
    "HotModel",
    "Link",
    "Links",
    "Outcome",
    "Results",
    "Simulation",
    "TimeModel",
    "parse_links",
]
