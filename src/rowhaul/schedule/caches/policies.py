"""Which copy a full cache gives up first.

A policy is the list of keys that victims are sorted by, smallest first; what it leaves equal goes by
(last use, table, key). A new policy made of known keys is one line in `POLICIES`; a new key
is added to the kernel that computes priorities.
"""

from __future__ import annotations

from rowhaul.errors import ConfigError

# latest: 0 when the copy is outdated: its worker holds neither the latest record nor a gradient.
# mark: the age of the cache in which the row was used last (ESD §8.1): when a cache is full and every copy
#   in it has the mark of the present age, a new age begins.
# frequency: uses by this worker since the row came into its cache, per byte.
# next_use: rows that the window shows no use of come first, by the keys that follow; then the one whose
#   next use is farthest.
EMARK_KEYS = ("latest", "mark", "frequency")

POLICIES: dict[str, tuple[str, ...]] = {
    "lru": (),
    "lfu": ("frequency",),
    "emark": EMARK_KEYS,
    "belady": ("next_use", *EMARK_KEYS),
}


def policy_keys(name: str) -> tuple[str, ...]:
    """The keys of the policy of that name; ``emark:`` may be followed by their order."""
    base, colon, order = name.partition(":")
    if base not in POLICIES:
        raise ConfigError(f"unknown cache policy {name!r}; known are {', '.join(sorted(POLICIES))}")
    keys = POLICIES[base]
    if colon:
        given = tuple(order.split(","))
        if base != "emark" or sorted(given) != sorted(keys):
            allowed = f"only the keys {', '.join(EMARK_KEYS)} of emark can be put in another order"
            raise ConfigError(f"cache policy {name!r}: {allowed}, as in emark:mark,latest,frequency")
        keys = given
    return keys
