"""The workers' caches and the policies by which they give rows up."""

from rowhaul.schedule.caches.caches import Caches, Evictions
from rowhaul.schedule.caches.policies import POLICIES, make_policy

__all__ = ["POLICIES", "Caches", "Evictions", "make_policy"]
