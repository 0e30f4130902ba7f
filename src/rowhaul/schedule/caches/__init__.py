"""The workers' caches and the policies by which they give rows up."""

from rowhaul.schedule.caches.caches import Caches, Evictions
from rowhaul.schedule.caches.policies import POLICIES, policy_keys

__all__ = ["POLICIES", "Caches", "Evictions", "policy_keys"]
