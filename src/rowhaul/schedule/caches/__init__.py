"""The workers' caches and the policies by which they give rows up."""

from rowhaul.schedule.caches.caches import UNITS, Caches, Evictions
from rowhaul.schedule.caches.kernels import find
from rowhaul.schedule.caches.policies import POLICIES, Policy, make_policy
from rowhaul.schedule.caches.pool import COPY

__all__ = ["COPY", "POLICIES", "UNITS", "Caches", "Evictions", "Policy", "find", "make_policy"]
