"""Which deletions a lease knows of."""

import numpy as np

from rowhaul.database.leases import Leases


def test_only_deletions_after_a_lease_are_looked_at():
    """With an old lease held, every deletion since waits: a pull must not look at all of them."""
    leases = Leases(lambda group, records: None)
    oldest = leases.begin()
    for record in range(10):
        leases.retire(record % 2, np.array([record]))
    lease = leases.begin()
    for record in range(10, 15):
        leases.retire(record % 2, np.array([record]))
    assert sorted(leases.deleted_since(oldest, 1)) == [1, 3, 5, 7, 9, 11, 13]
    for _ in range(9):  # keep the last deletion before the lease
        leases._waiting.popleft()
    leases._waiting.appendleft("cannot be looked at")
    assert sorted(leases.deleted_since(lease, 0)) == [10, 12, 14]
