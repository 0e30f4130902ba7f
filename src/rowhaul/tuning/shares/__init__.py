"""`--shares auto`: how many samples each worker trains, decided in training and looked at again.

Links are measured before training, compute during the first iterations. The simulator then proposes at most
three candidates (`candidates`): one machine, the best subset of the workers in equal shares, and unequal
shares. Each is tried in training (`trial`), and the quickest stays until iterations get slower or links
change (`drift`). All is decided on rank 0 and enters the schedule as control records.
"""

from rowhaul.tuning.shares.candidates import TRIED_BATCHES, first_batches, seconds_per_sample
from rowhaul.tuning.shares.controller import CHANGED_LINK, ShareController, seconds_between_checks
from rowhaul.tuning.shares.links import MeasuredLinks

__all__ = [
    "CHANGED_LINK",
    "TRIED_BATCHES",
    "MeasuredLinks",
    "ShareController",
    "first_batches",
    "seconds_between_checks",
    "seconds_per_sample",
]
