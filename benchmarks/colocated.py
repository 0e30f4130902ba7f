"""Two co-located workers on this machine against two single-process trainers that share nothing.

Both sides use two processes of one thread each, the same model, the same log and the same samples a
worker. The independent trainers never talk: they learn two different models. The cluster learns one,
exactly. The ratio is what the exchange of rows, plans and gradients costs when the network costs nothing.

Two models: the default, whose layers are small, and one with the layers of the DLRM that benchmarks
of recommendation train (512-256 below, 1024-1024-512-256 above).
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
import time

from report import console, print_machine, print_table

WARM_UP, REPEATS = 8, 3
WORKERS = 2
MODELS = {
    "default": {},
    "large": {"bottom": [512, 256], "top": [1024, 1024, 512, 256]},
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
            began = time.perf_counter()
        if number == steps:
            break
        trainer.train_step(Batch.from_samples(samples))
    print(json.dumps((steps - WARM_UP) * per_worker / (time.perf_counter() - began)))


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
    jobs = []
    with join(colocated=True) as cluster:
        settings = ClusterConfig(colocated=True, dispatcher=dispatcher, cache="2000000")
        training = distribute(cluster, trainer.model, stream, settings, on_iteration=jobs.append)
        for number, batch in enumerate(training.batches(steps)):
            if number == WARM_UP:
                began = time.perf_counter()
            loss = batch.loss(per_sample_loss(trainer.model(batch), batch))
            loss.backward()
            training.step(loss)
            trainer.dense.step()
            trainer.dense.zero_grad()
        seconds = time.perf_counter() - began
        training.close()
    if cluster.rank == 0:
        parts = {
            name: statistics.median(job.seconds[name] for job in jobs[WARM_UP:])
            for name in ("dispatch", "compute", "all_reduce", "waiting", "push", "pull", "early")
        }
        slack = statistics.median(job.slack_seconds for job in jobs[WARM_UP:])
        print(json.dumps([(steps - WARM_UP) * config.batch_size / seconds, parts, slack]))


def run(command: list[str], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})


def measure_alone(folder: str, model: str, per_worker: int, steps: int) -> float:
    """Samples per second of both trainers, running at the same time."""
    children = [
        run(
            [sys.executable, __file__, "--as", "alone", folder, model, str(per_worker), str(steps), str(part)]
        )
        for part in range(WORKERS)
    ]
    return sum(json.loads(child.communicate(timeout=300)[0]) for child in children)


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
    return json.loads(child.communicate(timeout=300)[0].strip().splitlines()[-1])


def compare(folder: str, model: str, per_worker: int, dispatcher: str) -> list[object]:
    """A line of the table: both sides in turns, medians."""
    steps = min(400_000 // per_worker // WORKERS, 40 if per_worker > 1000 else 200)
    ratios, apart, joined, details = [], [], [], None
    for _ in range(REPEATS):
        apart.append(measure_alone(folder, model, per_worker, steps))
        speed, *details = measure_together(folder, model, per_worker, steps, dispatcher)
        joined.append(speed)
        ratios.append(speed / apart[-1])
    parts = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in details[0].items())
    console.print(f"{model}, {per_worker:,} a worker, ms an iteration: {parts}; slack {details[1] * 1e3:.1f}")
    medians = [statistics.median(one) for one in (apart, joined, ratios)]
    return [f"{model}, {per_worker:,}", *medians]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--as", dest="role", default="")
    parser.add_argument("--per-worker", default="2048,4096,128")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--dispatcher", default="round-robin", help="there is no network to save on")
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
            compare(folder, model, int(per_worker), given.dispatcher)
            for model in given.models.split(",")
            for per_worker in given.per_worker.split(",")
        ]
    columns = [
        "model, samples a worker",
        "two that share nothing, samples/s",
        "one model, samples/s",
        "ratio",
    ]
    print_table(f"{WORKERS} co-located workers, {given.dispatcher}, loopback", columns, rows)


if __name__ == "__main__":
    main()
