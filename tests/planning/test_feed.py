"""The leader of a host and its followers are fed the same plans."""

from dataclasses import replace

import pytest
from planned_cases import assert_same, planner, samples
from sharing_ends import as_shared, close_all, connected

from rowhaul._threads import Failure
from rowhaul.planning.disagreement import DisagreementError
from rowhaul.planning.feed import NO_DIGEST, FollowerFeed, LeaderFeed
from rowhaul.planning.planner import samples_digest
from rowhaul.schedule import ControlRecord


def feeds(batches, *, own_samples=None, failure=None, **settings):
    failure = failure or Failure()
    server, client = connected(leader_failure=failure)
    leader = LeaderFeed(planner(batches, failure, audience=server, **settings), server, failure)
    return leader, FollowerFeed(client, own_samples)


def test_leader_and_follower_see_the_same():
    batches = [samples(number) for number in range(3)]
    leader, follower = feeds(batches)
    for feed in (leader, follower):
        feed.receive(ControlRecord(0, 1, "shares", (8, 0)))
        feed.allow(3)
    for _ in batches:
        assert_same(follower.next(), as_shared(leader.next()))
        assert follower.own_digest == leader.own_digest != NO_DIGEST
    assert leader.next() is follower.next() is None
    assert leader.own_digest == follower.own_digest == NO_DIGEST
    assert leader.at_rest(lambda scheduler: scheduler.iteration) == 3
    assert follower.at_rest(lambda scheduler: scheduler.iteration) is None
    close_all(leader, follower)


def test_the_digest_of_a_ranks_own_reading_differs_where_its_samples_do():
    leader, follower = feeds([samples(number) for number in range(3)], own_samples=[samples(0), samples(9)])
    leader.allow(2)
    own, planned = [], []
    for _ in range(3):
        planned.append(follower.next().samples_digest)
        own.append(follower.own_digest)
    assert own == [planned[0], samples_digest(samples(9)), NO_DIGEST]
    close_all(leader, follower)


def test_a_rank_that_reads_for_itself_compares_where_its_leader_does_not():
    batches = [samples(number) for number in range(2)]
    leader, follower = feeds(batches, own_samples=[samples(0), samples(9)], compares=False)
    leader.allow(1)
    assert leader.next().samples_digest == leader.own_digest == NO_DIGEST
    follower.next()
    assert follower.own_digest == NO_DIGEST, "the same"
    follower.next()
    assert follower.own_digest == samples_digest(samples(9))
    close_all(leader, follower)


def test_a_plan_of_no_iteration_is_taken_for_no_other():
    """Where one rank evaluates and another trains, as where people forget that stores take part."""
    leader, follower = feeds([samples(number) for number in range(3)])
    leader.allow(1)
    plan = leader.next().plan
    assert follower.next() is not None
    with pytest.raises(DisagreementError, match=r"rank 7, .* trains the next batch where .* evaluates"):
        follower.share(lambda scheduler: plan)
    leader.share(lambda scheduler: plan)
    with pytest.raises(DisagreementError, match=r"rank 7, .* evaluates, saves .* where this rank trains the"):
        follower.next()
    leader.share(lambda scheduler: plan)
    assert follower.share(lambda scheduler: plan).digest() == replace(plan, ids=None).digest()
    leader.allow(3)
    assert follower.next() is not None
    with pytest.raises(DisagreementError, match=r"rank 7, .* is at the end of the data where this rank eval"):
        follower.share(lambda scheduler: plan)
    close_all(leader, follower)


def test_a_follower_learns_why_its_leader_closed():
    failure = Failure()
    leader, follower = feeds([samples(0)], failure=failure)
    failure.set(ConnectionError("rank 4 was lost"))
    leader.close()
    with pytest.raises(ConnectionError, match="rank 4 was lost"):
        follower.next()
    follower.close()
