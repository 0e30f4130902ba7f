"""A leader and its followers in one process, for tests of sharing and of feeds."""

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor

from rowhaul._threads import Failure
from rowhaul.planning.sharing import PlanClient, PlanServer

LEADER = 7


def connected(subscribers=(0,), leader_failure=None, follower_failure=None, **options):
    """A server and its clients, all in this process."""
    server = PlanServer(LEADER, subscribers, leader_failure or Failure(), **options)
    with accepting(server):
        clients = [
            PlanClient(
                server.address, rank, LEADER, follower_failure or Failure(), secret=options.get("secret")
            )
            for rank in subscribers
        ]
    return server, *clients


@contextlib.contextmanager
def accepting(server, **options):
    """Accept subscribers meanwhile: each waits for the server's part of the proof."""
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(server.accept, **options)
        yield
        accepted.result()


def close_all(*ends):
    for end in ends:
        end.close()


def as_shared(planned):
    """What the other ranks of a host get: ids by sample stay with the planner."""
    return dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, ids=None))
