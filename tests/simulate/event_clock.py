"""The time model told event by event: the oracle of `rowhaul.simulate.clock`, slow and plain.

Every rank has lanes, as in the runtime: one moves rows, turn after turn, one sums dense gradients, and a
timer stands for computing. A lane goes on when all that it receives in a turn is there; it never waits
for what it sends. A message starts when both of its ends have come to its turn. Links serve
messages in the order in which they start; those that start together have equal parts of the link.

Times are compared for equality, so links and sizes must be such that they add up without rounding.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace

from rowhaul.schedule.phases import Phase, phases_of
from rowhaul.schedule.sum_plan import SCALE, ways_to_sum
from rowhaul.simulate.clock import TimeModel

SUM_TURNS = ("sum 1", "sum 2", "sum 3")
HALF_SUM_TURNS = tuple(f"half {turn}" for turn in SUM_TURNS)
ALL_SUM_TURNS = (*HALF_SUM_TURNS, *SUM_TURNS)


@dataclass(eq=False)
class Message:
    """All that one rank sends to another in a turn."""

    phase: object
    source: int
    target: int
    num_bytes: float = 0.0
    begun: int = 0  # of its two ends


@dataclass(eq=False)
class Lane:
    """A thread of a rank: its turns, and what it still waits for."""

    rank: int
    program: list[object]  # turns; words are places where it waits for or tells something
    place: int = -1
    waiting: int = 0


@dataclass
class IterationOfEvents:
    """Runs one iteration to its end; `seconds` tells how long it took."""

    model: TimeModel
    messages: list[Message]
    programs: dict[int, list[object]]
    compute_seconds: list[float]
    summing: list[int]
    seconds: float = 0.0
    free: dict[tuple[str, str, int], float] = field(default_factory=lambda: defaultdict(float))

    def run(self) -> float:
        self.prepare()
        while self.events:
            self.step()
        assert all(lane.place == len(lane.program) for lane in self.moving.values()), "a lane is stuck"
        return self.seconds

    def prepare(self):
        self.events: list[tuple[float, int, object]] = []
        self.serial = 0
        self.moving = {rank: Lane(rank, program) for rank, program in self.programs.items()}
        program = [*HALF_SUM_TURNS, "computed", *SUM_TURNS, "summed"]
        self.sums = {rank: Lane(rank, program) for rank in self.summing}
        self.computing = set(range(len(self.compute_seconds)))
        self.not_summed = set(self.summing)
        self.told = self.trained = False
        for lane in self.moving.values():
            self.at(0.0, lane)

    def at(self, time, what):
        self.serial += 1
        heapq.heappush(self.events, (time, self.serial, what))

    def step(self):
        """Everything that happens at one moment."""
        self.now = self.seconds = self.events[0][0]
        self.starting: list[Message] = []
        while self.events and self.events[0][0] == self.now:
            what = heapq.heappop(self.events)[2]
            if isinstance(what, Message):
                lanes = self.sums if what.phase in ALL_SUM_TURNS else self.moving
                lane = lanes[what.target]
                lane.waiting -= 1
                if not lane.waiting:
                    self.go_on(lane)
            elif isinstance(what, Lane):
                self.go_on(what)
            else:
                getattr(self, what[0])(*what[1:])
        self.start()

    def go_on(self, lane):
        """Take a lane as far as it gets without anything that has yet to come."""
        while True:
            lane.place += 1
            if lane.place == len(lane.program):
                return
            phase = lane.program[lane.place]
            if phase == "ready":
                seconds = self.compute_seconds[lane.rank]
                if lane.rank in self.sums:
                    self.at(self.now + self.model.half_sum_after * seconds, self.sums[lane.rank])
                self.at(self.now + seconds, ("computed", lane.rank))
            elif phase == "summed":
                self.not_summed.discard(lane.rank)
                self.tell_if_trained()
            elif phase == "computed":
                if lane.rank in self.computing:
                    return
            elif phase == "trained":
                if not self.trained:
                    return
            else:
                lane.waiting = self.begin(phase, lane.rank)
                if lane.waiting:
                    return

    def begin(self, phase, rank):
        """Come to a turn; gives the number of messages to be received."""
        for message in self.messages:
            if message.phase == phase and rank in (message.source, message.target):
                message.begun += 1
                if message.begun == 2:
                    self.starting.append(message)
        return sum(message.phase == phase and message.target == rank for message in self.messages)

    def computed(self, rank):
        self.computing.discard(rank)
        for lane in (self.sums.get(rank), self.moving[rank]):
            if lane is not None and lane.program[lane.place] == "computed":
                self.go_on(lane)
        self.tell_if_trained()

    def tell_if_trained(self):
        if not self.computing and not self.not_summed and not self.told:
            self.told = True
            self.at(self.now + (self.model.dense_seconds or 0.0), ("go_on_after_training",))

    def go_on_after_training(self):
        self.trained = True
        for lane in self.moving.values():
            if lane.place < len(lane.program) and lane.program[lane.place] == "trained":
                self.go_on(lane)

    def start(self):
        """Put messages onto their links; those that start together on a link share it equally."""
        on_link = defaultdict(list)
        for message in self.starting:
            for key, link in self.ends(message):
                on_link[key].append(link.latency_seconds + message.num_bytes / link.bytes_per_second)
        begin = {key: max(self.free[key], self.now) for key in on_link}
        for key, each in on_link.items():
            self.free[key] = begin[key] + sum(each)
        for message in self.starting:
            finish = []
            for key, link in self.ends(message):
                alone = link.latency_seconds + message.num_bytes / link.bytes_per_second
                # Until it is done, others have had as much as it has had, or all that they needed.
                finish.append(begin[key] + sum(min(alone, seconds) for seconds in on_link[key]))
            (_, source), (_, target) = self.ends(message)
            self.at(max(finish[0] + target.latency_seconds, finish[1] + source.latency_seconds), message)

    def ends(self, message):
        own = self.model.dense_links if message.phase in ALL_SUM_TURNS else None
        links, network = (own, "dense") if own else (self.model.links, "rows")
        ranks = (*links.workers, *links.stores)
        return (
            ((network, "sends", message.source), ranks[message.source]),
            ((network, "receives", message.target), ranks[message.target]),
        )


class FairLinks(IterationOfEvents):
    """The same with links that all messages share fairly at any time, as TCP would.

    Latencies cost a message time, but keep no link busy.
    """

    def run(self):
        self.left = {}  # bytes of each message under way
        moment = 0.0
        self.prepare()
        while self.events or self.left:
            speeds = self.fair_speeds()
            following = min(
                [moment + left / speeds[one] for one, left in self.left.items()], default=math.inf
            )
            following = min(following, self.events[0][0] if self.events else math.inf)
            for message, left in list(self.left.items()):
                self.left[message] = left - speeds[message] * (following - moment)
                if self.left[message] <= 1e-9 * message.num_bytes:
                    del self.left[message]
                    self.at(following, message)
            moment = following
            if self.events and self.events[0][0] <= moment:
                self.step()
        return self.seconds

    def start(self):
        for message in self.starting:
            (_, source), (_, target) = self.ends(message)
            self.at(self.now + source.latency_seconds + target.latency_seconds, ("travel", message))

    def travel(self, message):
        self.left[message] = float(message.num_bytes)

    def fair_speeds(self):
        """Bytes a second of each message: again and again the scarcest link is divided equally."""
        room, users, speeds = {}, defaultdict(set), {}
        for message in self.left:
            for key, link in self.ends(message):
                room[key] = link.bytes_per_second
                users[key].add(message)
        while users:
            scarcest = min(users, key=lambda key: room[key] / len(users[key]))
            each = room[scarcest] / len(users[scarcest])
            for message in list(users[scarcest]):
                speeds[message] = each
                for key, _ in self.ends(message):
                    room[key] -= each
                    users[key].discard(message)
            users = {key: some for key, some in users.items() if some}
        return speeds


def messages_of(plan, chosen, suffix=""):
    """The messages of some turns of a plan."""
    found = {}
    phases, moves = phases_of(plan).moves.tolist(), plan.moves
    for phase, source, target, num_bytes in zip(
        phases, moves.source.tolist(), moves.target.tolist(), moves.num_bytes.tolist(), strict=True
    ):
        if phase in chosen:
            key = Phase(phase).name + suffix, source, target
            found.setdefault(key, Message(*key)).num_bytes += num_bytes
    return list(found.values())


def messages_in_buckets(way, num_bytes, members):
    """The parts of a bucket; those of all others, with sums of as many; the last bucket's sums."""
    pairs = [(one, other) for one in range(len(members)) for other in range(len(members)) if one != other]
    if not way.parts:
        return [Message(SUM_TURNS[0], members[one], members[other], num_bytes) for one, other in pairs]
    found = []
    for adds, other in pairs:
        size = num_bytes * way.parts[adds] / (SCALE * way.buckets)
        there, back = (members[other], members[adds]), (members[adds], members[other])
        if size:
            found += [Message(SUM_TURNS[0], *there, size), Message(SUM_TURNS[2], *back, size)]
        if size and way.buckets > 1:
            found += [Message(SUM_TURNS[1], *ends, size * (way.buckets - 1)) for ends in (there, back)]
    return found


def messages_of_sum(model, num_bytes, members):
    """Half of it ahead, if the model says so."""
    early = num_bytes // 2 if model.half_sum_after < 1 else 0
    ahead = [replace(one, phase=f"half {one.phase}") for one in messages_of_one_sum(model, early, members)]
    return ahead + messages_of_one_sum(model, num_bytes - early, members)


def messages_of_one_sum(model, num_bytes, members):
    """The quickest way where nothing else travels, of those for the power of two below."""
    if len(members) < 2 or not num_bytes:
        return []
    num_workers, least = len(model.links.workers), 2 ** int(math.log2(num_bytes))
    programs = {worker: ["ready", "trained"] for worker in range(num_workers)}
    links = (model.dense_links or model.links).workers
    ways = ways_to_sum([links[one].bytes_per_second for one in members], least)
    taken = [
        IterationOfEvents(
            model, messages_in_buckets(way, least, members), programs, [0.0] * num_workers, members
        ).run()
        for way in ways
    ]
    return messages_in_buckets(ways[taken.index(min(taken))], num_bytes, members)


def seconds_by_events(plans, model, training, run=IterationOfEvents):
    """Seconds of each iteration."""
    num_workers, num_ranks = len(model.links.workers), len(model.links.workers) + len(model.links.stores)
    if model.dense_seconds and len(training) < 2:  # one worker has nobody to sum with
        model = replace(model, dense_seconds=0.0)
    seconds = []
    for plan, following in zip(plans, [*plans[1:], None], strict=True):
        rows_wait_for = "trained" if plan.all_reduce_bytes else "computed"
        phases = ["ready", "EARLY_FIRST", "EARLY_SECOND", rows_wait_for]
        phases += ["AFTER", "LATE_FIRST", "LATE_SECOND", "trained"]
        messages = messages_of(plan, (Phase.AFTER,))
        if plan is plans[0]:  # nothing runs yet beside which its moves could travel
            before = [Phase.EARLY_FIRST, Phase.EARLY_SECOND, Phase.LATE_FIRST, Phase.LATE_SECOND]
            phases = [*(f"{one.name} before" for one in before), *phases]
            messages += messages_of(plan, before, " before")
        if following is not None:
            messages += messages_of(following, [one for one in Phase if one is not Phase.AFTER])
        in_sum = list(training) if model.dense_seconds is None else []
        messages += messages_of_sum(model, model.dense_bytes + plan.all_reduce_bytes, in_sum)
        only_workers = ("ready", "computed", "trained")
        programs = {
            rank: [phase for phase in phases if rank < num_workers or phase not in only_workers]
            for rank in range(num_ranks)
        }
        samples = [plan.worker.tolist().count(worker) for worker in range(num_workers)]
        compute = [count * each for count, each in zip(samples, model.compute_seconds, strict=True)]
        seconds.append(run(model, messages, programs, compute, in_sum).run())
    return seconds
