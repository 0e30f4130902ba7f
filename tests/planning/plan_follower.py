"""A rank that takes plans from a leader and says what it got, one line of JSON each.

Started as a program by the tests: ``plan_follower.py ADDRESS RANK LEADER [NUMBER OF PLANS TO TAKE]``.
"""

from __future__ import annotations

import json
import os
import sys

from rowhaul._threads import Failure
from rowhaul.planning.planner import samples_digest
from rowhaul.planning.sharing import PlanClient


def say(**told):
    print(json.dumps(told), flush=True)


def main(address, rank, leader, most=1 << 60):
    client = PlanClient(address, int(rank), int(leader), Failure())
    try:
        taken = 0
        while taken < int(most) and (planned := client.next()) is not None:
            taken += 1
            say(
                iteration=planned.plan.iteration,
                plan=planned.plan.digest().hex(),
                samples=samples_digest(planned.samples).hex(),
                told=[planned.plan_digest.hex(), planned.samples_digest.hex()],
                descriptors=len(os.listdir("/proc/self/fd")),
            )
        say(ended=taken)
    except Exception as error:
        say(
            error=type(error).__name__,
            text=str(error),
            notes=error.__notes__ if hasattr(error, "__notes__") else [],
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
