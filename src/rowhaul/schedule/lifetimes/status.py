"""What becomes of a row that a batch names."""

from enum import IntEnum


class Status(IntEnum):
    """A row in an iteration, as the policy of its table has it."""

    WAITING = 0  # not admitted yet: reads its initial value, its gradient is dropped
    ADMITTED = 1  # admitted with this iteration, from which on it is trained: it begins afresh
    KNOWN = 2  # admitted before, and not forgotten since
