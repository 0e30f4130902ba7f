"""Two co-located workers on this machine against two single-process trainers that share nothing.

Both sides use two processes of one thread each, the same model, the same log and the same samples a
worker. The independent trainers never talk: they learn two different models. The cluster learns one,
exactly. The ratio is what the exchange of rows, plans and gradients costs when the network costs nothing.

Rows go from worker to worker without a detour by their homes (peer to peer), and samples are dealt out in
turn: there is no network to save on. Two models: the default, whose layers are small, and one with the
layers of the DLRM that benchmarks of recommendation train (512-256 below, 1024-1024-512-256 above).

Beside the speeds stand the milliseconds that the processor spends on a step, all threads of both processes
together: on two cores nothing is hidden, so this is what decides, and it depends less on what else runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import statistics
import subprocess
import tempfile
import threading
import time

import numpy as np

from report import console, print_machine, print_table

WARM_UP, REPEATS = 8, 3
WORKERS = 2
MODELS = {
    "default": {},
    "benchmark": {"bottom": [512, 256], "top": [1024, 1024, 512, 256]},
}


def configured(model: str, batch_size: int):
    from rowhaul.train import TrainConfig
    from rowhaul.train.config import ModelConfig

    return TrainConfig(model=ModelConfig("dlrm", options=MODELS[model]), batch_size=batch_size)


def alone(folder: str, model: str, per_worker: int, steps: int, part: int) -> None:
    """One independent trainer; prints its samples per second."""
    import torch

    from rowhaul._environment import keep_freed_memory
    from rowhaul.data.schema import Schema
    from rowhaul.data.stream import SampleStream
    from rowhaul.nn import Batch
    from rowhaul.train import Trainer

    torch.set_num_threads(1)
    keep_freed_memory()
    schema = Schema.read(f"{folder}/schema.yaml")
    trainer = Trainer(configured(model, per_worker), schema)
    stream = SampleStream(folder, schema, per_worker, start=part * steps * per_worker, epochs=9)
    for number, samples in enumerate(stream):
        if number == WARM_UP:
            began, used = time.perf_counter(), time.process_time()
        if number == steps:
            break
        trainer.train_step(Batch.from_samples(samples))
    counted = steps - WARM_UP
    speed = counted * per_worker / (time.perf_counter() - began)
    print(json.dumps([speed, (time.process_time() - used) / counted]))


def threads_seconds() -> dict[str, float]:
    """What each thread of this process has used of a processor so far."""
    threads = {one.name.removeprefix("rowhaul-"): one.ident for one in threading.enumerate()}
    used = {
        name: time.clock_gettime(time.pthread_getcpuclockid(ident))
        for name, ident in threads.items()
        if ident is not None
    }
    return {**used, "network": time.process_time() - sum(used.values())}


def together(folder: str, model: str, per_worker: int, steps: int, dispatcher: str) -> None:
    """One rank of the cluster; rank 0 prints the samples per second of both."""
    import torch

    from rowhaul._environment import keep_freed_memory
    from rowhaul.cluster import join
    from rowhaul.data.schema import Schema
    from rowhaul.data.stream import SampleStream
    from rowhaul.train import Trainer
    from rowhaul.train.cluster_config import ClusterConfig
    from rowhaul.train.distributed import distribute
    from rowhaul.train.trainer import per_sample_loss

    torch.set_num_threads(1)
    keep_freed_memory()
    schema = Schema.read(f"{folder}/schema.yaml")
    config = configured(model, WORKERS * per_worker)
    trainer = Trainer(config, schema)
    stream = SampleStream(folder, schema, config.batch_size, epochs=9)
    jobs: list[tuple[dict[str, float], float]] = []  # not the jobs themselves: they keep their plans
    with join(colocated=True, peer_to_peer=True) as cluster:
        settings = ClusterConfig(colocated=True, peer_to_peer=True, dispatcher=dispatcher, cache="2000000")
        training = distribute(
            cluster,
            trainer.model,
            stream,
            settings,
            on_iteration=lambda job: jobs.append((dict(job.seconds), job.slack_seconds)),
        )
        for number, batch in enumerate(training.batches(steps)):
            if number == WARM_UP:
                began = time.perf_counter()
                before = threads_seconds()
            loss = batch.loss(per_sample_loss(trainer.model(batch), batch))
            loss.backward()
            training.step(loss)
            trainer.dense.step()
            trainer.dense.zero_grad()
        seconds, counted = time.perf_counter() - began, steps - WARM_UP
        threads = {name: (cpu - before.get(name, 0)) / counted for name, cpu in threads_seconds().items()}
        everyone = training.runtime.in_control(
            lambda control: control.all_gather(np.array([sum(threads.values())]).view(np.uint8))
        ).wait()
        training.close()
    if cluster.rank == 0:
        parts = {
            name: statistics.median(seconds.get(name, 0.0) for seconds, _ in jobs[WARM_UP:])
            for name in ("dispatch", "compute", "all_reduce", "waiting", "push", "pull", "early")
        }
        slack = statistics.median(slack for _, slack in jobs[WARM_UP:])
        cpu = float(np.ascontiguousarray(everyone).view(np.float64).sum())
        print(json.dumps([counted * config.batch_size / seconds, cpu, parts, slack, threads]))


def run(command: list[str], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})


def measure_alone(folder: str, model: str, per_worker: int, steps: int) -> tuple[float, float]:
    """Samples per second of both trainers at the same time, and the CPU seconds of a step of both."""
    children = [
        run(
            [sys.executable, __file__, "--as", "alone", folder, model, str(per_worker), str(steps), str(part)]
        )
        for part in range(WORKERS)
    ]
    found = [json.loads(child.communicate(timeout=600)[0]) for child in children]
    return sum(speed for speed, _ in found), sum(cpu for _, cpu in found)


def measure_together(folder: str, model: str, per_worker: int, steps: int, dispatcher: str):
    program = "from rowhaul.cluster import launch; import sys; launch([], 2, 0, True, command=sys.argv[1:])"
    command = [
        sys.executable,
        __file__,
        "--as",
        "together",
        folder,
        model,
        str(per_worker),
        str(steps),
        dispatcher,
    ]
    child = run([sys.executable, "-c", program, *command])
    return json.loads(child.communicate(timeout=600)[0].strip().splitlines()[-1])


def compare(folder: str, model: str, per_worker: int, dispatcher: str, repeats: int) -> list[object]:
    """A line of the table: both sides in turns, medians."""
    steps = WARM_UP + max(20, min(200, 120_000 // per_worker))
    apart, joined, details = [], [], None
    for _ in range(repeats):
        apart.append(measure_alone(folder, model, per_worker, steps))
        speed, cpu, *details = measure_together(folder, model, per_worker, steps, dispatcher)
        joined.append((speed, cpu))
    waits, slack, threads = details
    for what, each in (("ms an iteration", waits), ("CPU ms of rank 0", threads)):
        parts = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in each.items() if seconds > 5e-5)
        console.print(f"{model}, {per_worker:,} a worker, {what}: {parts}")
    console.print(f"{model}, {per_worker:,} a worker: slack of plans {slack * 1e3:.1f} ms")
    ratios = [
        statistics.median(one[0] / other[0] for one, other in zip(joined, apart, strict=True)),
        statistics.median(other[1] / one[1] for one, other in zip(joined, apart, strict=True)),
    ]
    medians = [statistics.median(run[place] for run in runs) for place in (0, 1) for runs in (apart, joined)]
    return [
        f"{model}, {per_worker:,}", *medians[:2], ratios[0], *(1e3 * cpu for cpu in medians[2:]), ratios[1]
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--as", dest="role", default="")
    parser.add_argument("--per-worker", default="2048,8192,128")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--dispatcher", default="round-robin", help="there is no network to save on")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("rest", nargs="*")
    given = parser.parse_args()
    if given.role:
        folder, model, per_worker, steps, last = given.rest
        if given.role == "alone":
            alone(folder, model, int(per_worker), int(steps), int(last))
        else:
            together(folder, model, int(per_worker), int(steps), last)
        return
    print_machine()
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(Path(temporary) / "log")
        command = [sys.executable, "-m", "rowhaul", "generate", "--rows", "400000", "--out", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = [
            compare(folder, model, int(per_worker), given.dispatcher, given.repeats)
            for model in given.models.split(",")
            for per_worker in given.per_worker.split(",")
        ]
    columns = [
        "model, samples a worker",
        "two that share nothing, samples/s",
        "one model, samples/s",
        "ratio",
        "CPU ms a step, two that share nothing",
        "one model",
        "ratio",
    ]
    print_table(f"{WORKERS} co-located workers, {given.dispatcher}, loopback", columns, rows)


if __name__ == "__main__":
    main()
