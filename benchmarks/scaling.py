"""Ranks with a core each against one rank on one core: the default DLRM, trained as `rowhaul train` does.

Each rank is pinned to a core of its own, so that "twice as many machines" means twice as many processors and
nothing else. The ranks are co-located and send rows to each other; they talk over shared memory, or with
``--link 1gbit`` over a shaped link between two network namespaces (needs root). On one host rows stay at
home, over a link they move as plans say; ``--sync`` chooses, and ``--against on-demand`` measures another way
beside it. All sides take turns; the table has medians of samples per second, and what a step costs the
processor: milliseconds by thread, and in a run of its own by part of the work. The latter can be trusted
where other programs run, too. On a virtual machine, turns in which its host took processor time for others
are made again, up to twice as many; the calmest count.

One rank trains N samples a step, two train 2 N, and so does one process with two threads, which is what one
would use on a single machine. Two single processes that share nothing but the machine, and learn two models,
show how much of a ratio of 2 the processor allows: cores share caches and memory.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import functools
import importlib
import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from report import console, print_machine, print_table

WARM_UP = 30  # steps: until then buffers grow, and most rows are new
CALM = 0.01  # of the processors' time, taken by the host
CORE = "SCALING_CORE"  # of a process that trains alone
ROOT = Path(__file__).resolve().parents[1]

_SUM = "transport.dense.overlapping:OverlappingSum"
_SUMMING = ("begin", "_finished", "complete", "send_rest", "wait", "spread", "_send_bucket", "_finish_sum")
# What a step consists of: functions as modules know them. A call inside another counts as its own part only.
PARTS = {
    "forward, backward": ["train.trainer:backward"],
    "find rows": ["nn.local_rows:TableRows._read", "runtime.at_home.rows:HomeRows._read"],
    "ask homes": ["runtime.at_home.exchange:HomeExchange.ask"],
    "read at homes": ["runtime.at_home.exchange:HomeExchange.read"],
    "step at homes": ["runtime.at_home.exchange:HomeExchange.step"],
    "pool rows": ["nn.pooled:PooledRead.pool", "nn.pooled:PooledRead.keep_gradients"],
    "step rows": ["nn.local_rows:LocalRows.step", "runtime.worker_rows:CachedRows.step_own"],
    "dense step": ["torch.optim:Adam.step", "torch.optim:Adam.zero_grad"],
    "check finite": ["train.trainer:check_step", "train.distributed.training:find_nonfinite"],
    "take gradients": ["runtime.worker_rows:CachedRows.take"],
    "dense sum": [f"{_SUM}.{name}" for name in _SUMMING],
    "own samples": ["train.distributed.training:DistributedTraining._part"],
    "log": [
        "train.distributed.session:ClusterSession.iterated",
        "train.log:TrainingLog.stepped",
        "runtime.runtime:Runtime.note_measures",
    ],
    "locate rows": ["runtime.mover:Mover._look_up"],
    "pack": ["runtime.mover:pack_payloads"],
    "send, receive": ["runtime.mover:Mover.swap"],
    "unpack, step": ["runtime.mover:unpack_payloads"],
    "change cache": ["runtime.mover:Mover._change_cache", "runtime.mover:batch_rows"],
    "buffer gradients": ["runtime.mover:Mover.finish"],
    "agree": ["runtime.runtime:agree"],
    "sort moves": ["runtime.mover:RankPhases.__init__"],
    "get plan": ["planning.feed:LeaderFeed.next", "planning.feed:FollowerFeed.next"],
    "read data": ["planning.planner:Planner._read"],
    "plan": ["schedule.scheduler:Scheduler.fill", "schedule.scheduler:Scheduler.plan"],
    "digests": ["planning.planner:samples_digest", "schedule.plan:Plan.digest"],
    "share plan": ["planning.sharing:PlanServer.send"],
}
PLANNING = ("read data", "plan", "digests", "share plan")  # on one rank of a host; the samples are read there


class PartTimer:
    """Processor time by part of the work and thread; what no part covers counts as "rest"."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._of_thread = threading.local()
        for part, names in PARTS.items():
            for name in names:
                module, _, path = name.partition(":")
                owner = importlib.import_module(module if module[:5] == "torch" else f"rowhaul.{module}")
                *outer, last = path.split(".")
                for one in outer:
                    owner = getattr(owner, one)
                setattr(owner, last, self._timed(getattr(owner, last), part))

    def _timed(self, function, part: str):
        @functools.wraps(function)
        def timed(*args, **kwargs):
            inside = getattr(self._of_thread, "inside", 0.0)
            self._of_thread.inside = 0.0
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.thread_time() - began
                self.seconds[part] += taken - self._of_thread.inside
                self._of_thread.inside = inside + taken

        return timed


def threads_seconds() -> dict[str, float]:
    """What each thread of this process has used of a processor so far."""
    threads = {one.name.removeprefix("rowhaul-"): one.ident for one in threading.enumerate()}
    used: defaultdict[str, float] = defaultdict(float)
    for name, ident in threads.items():
        if ident is not None:
            used["main" if name == "MainThread" else name.split("-")[0]] += time.clock_gettime(
                time.pthread_getcpuclockid(ident)
            )
    return {**used, "others": time.process_time() - sum(used.values())}


def context_switches() -> int:
    """How often threads of this process have given up their core so far."""
    count = 0
    for status in Path("/proc/self/task").glob("*/status"):
        lines = status.read_text().splitlines()
        count += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))
    return count


class StepClock:
    """Wall and processor time between the end of warm-up and the last steps; follows a run on every rank."""

    def __init__(self, steps: int, parts: PartTimer | None) -> None:
        self._steps, self._parts, self._calls = steps, parts, 0
        self._notes: list[tuple[float, dict[str, float], dict[str, float]]] = []
        self._switches: list[int] = []

    def tick(self) -> bool:
        """Count a step; serves as ``should_stop``, which a run asks once a step on every rank."""
        self._calls += 1
        if self._calls in (WARM_UP, self._steps - 2):
            parts = dict(self._parts.seconds) if self._parts else {}
            self._notes.append((time.perf_counter(), threads_seconds(), parts))
            self._switches.append(context_switches())
        return False

    def result(self) -> dict[str, object]:
        (first, threads0, parts0), (last, threads1, parts1) = self._notes
        count = self._steps - 2 - WARM_UP
        return {
            "seconds": (last - first) / count,
            "switches": (self._switches[1] - self._switches[0]) / count,
            "threads": {name: (cpu - threads0.get(name, 0.0)) / count for name, cpu in threads1.items()},
            "parts": {name: (cpu - parts0.get(name, 0.0)) / count for name, cpu in parts1.items()},
        }


def train(
    folder: str, per_rank: int, steps: int, threads: int, settings: dict[str, Any], by_part: bool
) -> None:
    """Train as one rank, pinned to a core for each thread; write down what its `StepClock` has measured."""
    rank, num_ranks = int(os.environ.get("RANK", os.environ.get(CORE, "0"))), settings["workers"]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[rank : rank + threads])
    from rowhaul._environment import keep_freed_memory, set_passive_waiting, switch_threads_sooner

    set_passive_waiting()
    import torch

    from rowhaul.data.schema import Schema
    from rowhaul.train import TrainConfig, train_run
    from rowhaul.train.cluster_config import ClusterConfig

    torch.set_num_threads(threads)
    keep_freed_memory()
    cluster = ClusterConfig()
    if num_ranks > 1:
        switch_threads_sooner()
        cluster = ClusterConfig(colocated=True, peer_to_peer=True, **settings)
    config = TrainConfig(batch_size=num_ranks * per_rank, max_steps=steps, epochs=99, cluster=cluster)
    clock = StepClock(steps, PartTimer() if by_part else None)
    schema = Schema.read(f"{folder}/schema.yaml")
    if num_ranks > 1:
        from rowhaul.train.distributed.run import train_on_cluster

        train_on_cluster(config, schema, folder, should_stop=clock.tick)
    else:
        train_run(config, schema, folder, should_stop=clock.tick)
    Path(os.environ["SCALING_RESULTS"], f"{rank}.json").write_text(json.dumps(clock.result()))


def measure(
    given: argparse.Namespace,
    folder: str,
    per_rank: int,
    num_ranks: int,
    by_part: bool = False,
    num_apart: int = 1,
    threads: int = 1,
):
    """Run one side, or processes that train alone at the same time; return what each has measured."""
    steps = WARM_UP + 2 + max(20, min(300, 150_000 // per_rank))
    with tempfile.TemporaryDirectory() as results:
        environment = {**os.environ, "SCALING_RESULTS": results, "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, "--as", "rank", folder, str(per_rank), str(steps), str(threads)]
        command += [str(num_ranks), given.dispatcher, given.sync, given.data_from, str(int(by_part))]
        if num_ranks == 1:
            children = [
                subprocess.Popen(command, env={**environment, CORE: str(core)}) for core in range(num_apart)
            ]
            codes = [child.wait(600) for child in children]
            if any(codes):
                sys.exit("a process that trains alone has failed")
        elif given.link:
            sys.path.insert(0, str(ROOT))
            from rowhaul.simulate.links import parse_links
            from testbed.cluster import run_cluster

            links = parse_links(f"{given.link}*{num_ranks}", num_ranks, "--link")
            with tempfile.TemporaryDirectory() as outputs:
                run_cluster(lambda rank: command, links, folder=Path(outputs), environment=environment)
        else:
            launch = "from rowhaul.cluster import launch; import sys; launch([], int(sys.argv[1]), 0, True, "
            launch += "command=sys.argv[2:])"
            whole = [sys.executable, "-c", launch, str(num_ranks), *command]
            subprocess.run(whole, check=True, env=environment, timeout=600)
        count = max(num_ranks, num_apart)
        return [json.loads(Path(results, f"{rank}.json").read_text()) for rank in range(count)]


def calm_turns(turn, count: int) -> list[Any]:
    """Take turns until enough of them were calm, or twice as many were made; return the calmest."""
    made = []
    while len(made) < 2 * count and sum(share <= CALM for share, _ in made) < count:
        began, before = time.monotonic(), stolen_seconds()
        measured = turn()
        cores = (time.monotonic() - began) * (os.cpu_count() or 1)
        made.append(((stolen_seconds() - before) / cores, measured))
    kept = sorted(made, key=lambda one: one[0])[:count]
    shares = ", ".join(f"{100 * share:.1f} %" for share, _ in kept)
    console.print(f"turns: {len(made)}; of the {count} calmest the host took {shares}", highlight=False)
    return [measured for _, measured in kept]


def stolen_seconds() -> float:
    """What the host of a virtual machine has taken of its processors so far."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def compare(given: argparse.Namespace, folder: str, per_rank: int) -> list[object]:
    """Measure both sides in turns; return a line of the table, and print the threads' times."""
    count = given.ranks
    other = argparse.Namespace(**{**vars(given), "sync": given.against})

    def turn() -> list[Any]:
        sides = [[measure(given, folder, per_rank, 1)[0]], measure(given, folder, per_rank, count)]
        sides += [measure(other, folder, per_rank, count)] if given.against else []
        sides += [measure(given, folder, count * per_rank, 1, threads=count)]
        return [*sides, measure(given, folder, per_rank, 1, num_apart=count)]

    alone, both, *others = zip(*calm_turns(turn, given.repeats), strict=True)
    alone = [one for (one,) in alone]
    ratios = [
        statistics.median(
            count * one["seconds"] / max(rank["seconds"] for rank in several)
            for one, several in zip(alone, side, strict=True)
        )
        for side in (both, *others)
    ]
    console.print(f"\n{per_rank:,} samples a rank, CPU ms a step by thread")
    sides = {"one rank": alone}
    for rank in (0, count - 1):  # the last one plans
        sides[f"rank {rank} of {count}"] = [one[rank] for one in both]
    for side, runs in sides.items():
        names = dict.fromkeys(name for run in runs for name in run["threads"])
        middle = {name: statistics.median(run["threads"].get(name, 0.0) for run in runs) for name in names}
        texts = [f"{name} {1e3 * one:.2f}" for name, one in middle.items() if one > 2e-5]
        switches = statistics.median(run["switches"] for run in runs)
        total = f"{1e3 * sum(middle.values()):.2f} = {', '.join(texts)}"
        console.print(f"  {side}: {total}; {switches:.0f} waits", highlight=False)
    if given.parts:
        print_parts(given, folder, per_rank)
    used = [statistics.median(sum(run["threads"].values()) for run in runs) for runs in sides.values()]
    speeds = [
        statistics.median(per_rank / one["seconds"] for one in alone),
        statistics.median(count * per_rank / one[0]["seconds"] for one in both),
    ]
    return [f"{per_rank:,}", *speeds, *ratios, *(1e3 * one for one in used)]


def print_parts(given: argparse.Namespace, folder: str, per_rank: int) -> None:
    """Print CPU milliseconds of each part of a step, timed from inside."""
    several = measure(given, folder, per_rank, given.ranks, True)
    runs = [*measure(given, folder, per_rank, 1, True), several[0], several[-1]]
    rows: list[list[object]] = []
    for part in PARTS:
        times = [1e3 * run["parts"].get(part, 0.0) for run in runs]
        if max(times) >= 0.01:
            rows.append([part, *(f"{one:.2f}" for one in times)])
    totals = [1e3 * sum(run["threads"].values()) for run in runs]
    known = [1e3 * sum(run["parts"].values()) for run in runs]
    planning = [1e3 * sum(run["parts"].get(part, 0.0) for part in PLANNING) for run in runs]
    sums = {"rest": known, "all": [0.0] * len(runs), "all but planning": planning}
    for what, less in sums.items():
        rows.append([what, *(f"{total - one:.2f}" for total, one in zip(totals, less, strict=True))])
    print_table(
        f"{per_rank:,} samples a rank, CPU ms a step by part",
        ["part", "one rank", "first rank", "last rank"],
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--as", dest="role", default="")
    parser.add_argument("--per-rank", default="2048,512,128")
    parser.add_argument("--ranks", type=int, default=2, help="how many, against one")
    parser.add_argument("--link", default="", help="such as 1gbit: over shaped links, not shared memory")
    parser.add_argument("--dispatcher", default="", help="instead of the default")
    parser.add_argument("--sync", default="", help="instead of the default, such as on-demand")
    parser.add_argument("--against", default="", help="another way to synchronise rows, in the same turns")
    parser.add_argument("--data-from", default="every_host", help="as of rowhaul train")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-parts", dest="parts", action="store_false", help="leave out times by part")
    parser.add_argument("--data", default="", help="a prepared folder; by default a log is generated")
    parser.add_argument("rest", nargs="*")
    given = parser.parse_args()
    if given.role:
        folder, per_rank, steps, threads, num_ranks, dispatcher, sync, data_from, by_part = given.rest
        cluster = {"workers": int(num_ranks), "data_from": data_from}
        chosen = {"dispatcher": dispatcher, "sync": sync}
        cluster |= {name: value for name, value in chosen.items() if value}
        train(folder, int(per_rank), int(steps), int(threads), cluster, bool(int(by_part)))
        return
    if given.ranks < 2:
        sys.exit(f"--ranks is how many are compared with one, 2 or more; got {given.ranks}")
    if (cores := len(os.sched_getaffinity(0))) < given.ranks:
        sys.exit(f"this benchmark pins {given.ranks} ranks to a core each; cores here: {cores}")
    print_machine()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.data or str(Path(temporary) / "log")
        if not given.data:
            generate = [sys.executable, "-m", "rowhaul", "generate", "--rows", "400000", "--out", folder]
            subprocess.run(generate, check=True, stdout=subprocess.DEVNULL)
        rows = [compare(given, folder, int(per_rank)) for per_rank in given.per_rank.split(",")]
    several = f"{given.ranks} ranks"
    columns = ["samples a rank", "one rank, samples/s", f"{several}, samples/s", f"{several}: ratio"]
    columns += [f"{several}, {given.against}: ratio"] if given.against else []
    columns += [f"one process, {given.ranks} threads: ratio", f"{given.ranks} apart: ratio"]
    columns += ["CPU ms a step: one rank", "first of them", "last"]
    where = f"over links of {given.link}" if given.link else "over shared memory"
    print_table(f"default DLRM, co-located {where}, a core a rank", columns, rows)


if __name__ == "__main__":
    main()
