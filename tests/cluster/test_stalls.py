"""Which ranks hold up the others, decided from their beats alone."""

from rowhaul._activity import Activity, Doing
from rowhaul.cluster.watchdog.beats import Beat
from rowhaul.cluster.watchdog.stalls import Stalls

ADDRESSES = ("10.0.0.1", "10.0.0.2")


def saving(is_blocked, ticks=0):
    """A rank that has been writing a checkpoint for six seconds."""
    return Beat(10, ticks, (Doing(Activity.SAVING, 6.0),), is_blocked=is_blocked)


def test_a_disk_that_no_rank_can_write_to_is_named_though_none_waits_for_another():
    stalls = Stalls(ADDRESSES, interval=1.0, warn_seconds=2.0, end_seconds=4.0)
    found = [stalls.round({0: saving(True), 1: saving(True)}) for _ in range(5)]
    assert [bool(one.notice) for one in found] == [False, False, True, False, False]
    assert found[2].notice.startswith("waiting for rank 0 (10.0.0.1), saving a checkpoint since 6 s")
    assert found[2].notice.count("its disk or file server does not answer") == 2
    assert found[4].blamed == 0
    assert "held up the others for 4 s" in found[4].fatal


def test_ranks_that_only_take_long_to_save_are_left_alone():
    stalls = Stalls(ADDRESSES, interval=1.0, warn_seconds=2.0, end_seconds=4.0)
    assert not any(stalls.round({0: saving(False), 1: saving(False)}).notice for _ in range(9))
    moving = [stalls.round({0: saving(True, ticks), 1: saving(True)}) for ticks in range(9)]
    assert not any(one.notice or one.fatal for one in moving)
