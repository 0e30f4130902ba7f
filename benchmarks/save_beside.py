"""What a checkpoint costs training: written beside it, and with training stopped.

One process, and two co-located workers of one thread each. Tables are filled with rows first, so that a save
takes a while. Then iterations are timed in turns: some without a save, those while a save beside training
lasts, and a save that training waits for.

    slowed by    how much longer an iteration takes while a save lasts: medians, and means, which have the
                 pauses in which a snapshot is taken and the rare slow iterations; and in CPU time, which
                 has all threads of a process, and depends less on what else runs
    stopped      seconds that training stops for when it waits for the save

python benchmarks/save_beside.py [--rows 200000] [--repeats 3]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from report import print_machine, print_table

BATCH, SEGMENT, WARM_UP = 4096, 5, 20  # a save begins between two segments
BETWEEN = 60  # iterations without a save, before each


def configured(workers: int) -> Any:
    from rowhaul.train import TrainConfig
    from rowhaul.train.config import ModelConfig, OptimizerConfig

    rows = OptimizerConfig("rowwise_adagrad", 0.01)
    return TrainConfig(
        model=ModelConfig("dlrm", 32, options={"bottom": [256], "top": [512, 256]}),
        rows=rows,
        batch_size=BATCH,
    )


class Timed:
    """Times iterations, by what happens beside them."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step
        self.seconds: dict[str, list[float]] = {"without": [], "beside": []}
        self.cpu: dict[str, list[float]] = {"without": [], "beside": []}
        self.pauses: list[float] = []
        self.lasted: list[float] = []
        self.stopped: list[float] = []

    def segment(self, what: str) -> None:
        """Take a few steps; each gets an equal part of what their segment takes."""
        began, used = time.perf_counter(), time.process_time()
        self._step()
        self.seconds[what].append((time.perf_counter() - began) / SEGMENT)
        self.cpu[what].append((time.process_time() - used) / SEGMENT)

    def run(
        self, repeats: int, save: Callable[[], None], beside: Callable[[], None], is_busy: Callable[[], bool]
    ) -> dict[str, float]:
        """Measure in turns; every save has a folder of its own."""
        for _ in range(WARM_UP // SEGMENT):
            self._step()
        for _ in range(repeats):
            for _ in range(BETWEEN // SEGMENT):
                self.segment("without")
            began = time.perf_counter()
            beside()
            self.pauses.append(time.perf_counter() - began)
            while is_busy():
                self.segment("beside")
            self.lasted.append(time.perf_counter() - began)
            began = time.perf_counter()
            save()
            self.stopped.append(time.perf_counter() - began)
        without, during = self.seconds["without"], self.seconds["beside"]
        paused = sum(self.pauses) / SEGMENT  # a part of the segments' time
        return {
            "iteration": statistics.median(without),
            "median": statistics.median(during) / statistics.median(without) - 1,
            "mean": (sum(during) + paused) / len(during) / statistics.mean(without) - 1,
            "cpu": statistics.mean(self.cpu["beside"]) / statistics.mean(self.cpu["without"]) - 1,
            "pause": statistics.median(self.pauses),
            "lasts": statistics.median(self.lasted),
            "stopped": statistics.median(self.stopped),
            "iterations": len(during) * SEGMENT / repeats,
        }


def filling(num_rows: int, width: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(0)
    for first in range(0, num_rows, 1 << 16):
        keys = np.arange(first, min(first + (1 << 16), num_rows))
        yield keys, random.random((len(keys), width), np.float32)


def alone(folder: str, num_rows: int, repeats: int, out: str) -> dict[str, float]:
    """One process."""
    import torch

    from rowhaul._environment import keep_freed_memory
    from rowhaul.data.schema import Schema
    from rowhaul.data.stream import SampleStream
    from rowhaul.train import Trainer, snapshot
    from rowhaul.train.save_thread import SaveThread

    torch.set_num_threads(1)
    keep_freed_memory()
    schema = Schema.read(f"{folder}/schema.yaml")
    trainer = Trainer(configured(0), schema)
    for config in trainer.collection.embedding_bag_configs():
        for keys, records in filling(num_rows, config.embedding_dim + 1):
            trainer.collection.load_rows(config.name, keys, records)
    batches = SampleStream(folder, schema, BATCH, epochs=1000).prepared(trainer.prepare)
    saving, paths = SaveThread(), (Path(out) / str(number) for number in range(1000))

    def steps() -> None:
        for _ in range(SEGMENT):
            trainer.train_step(next(batches))

    def beside() -> None:
        taken, path = snapshot.Snapshot(trainer), next(paths)

        def write(pacer: Any) -> None:
            taken.write(path, pacer)
            taken.close()
            shutil.rmtree(path)

        def done(error: Exception | None) -> None:
            if error is not None:
                print(error, file=sys.stderr)

        saving.start(write, done)

    def save() -> None:
        path = next(paths)
        snapshot.save(trainer, path)
        shutil.rmtree(path)

    found = Timed(steps).run(repeats, save, beside, lambda: saving.is_busy)
    batches.close()
    return found


def together(folder: str, num_rows: int, repeats: int, out: str) -> dict[str, float]:
    """One rank of two."""
    import torch

    from rowhaul._environment import keep_freed_memory, switch_threads_sooner
    from rowhaul.cluster import join
    from rowhaul.data.schema import Schema
    from rowhaul.data.stream import SampleStream
    from rowhaul.schedule import homes_of
    from rowhaul.train import Trainer
    from rowhaul.train.cluster_config import ClusterConfig
    from rowhaul.train.distributed import checkpointing, distribute, sidecar
    from rowhaul.train.distributed.beside_training import BesideTraining
    from rowhaul.train.trainer import per_sample_loss

    torch.set_num_threads(1)
    keep_freed_memory()
    switch_threads_sooner()
    schema = Schema.read(f"{folder}/schema.yaml")
    trainer = Trainer(configured(2), schema)
    stream = SampleStream(folder, schema, BATCH, epochs=1000)
    with join(colocated=True, peer_to_peer=True) as cluster:
        settings = ClusterConfig(colocated=True, peer_to_peer=True, dispatcher="round-robin", cache="2000000")
        training = distribute(cluster, trainer.model, stream, settings)
        home = training.runtime.mover.home
        for number, spec in enumerate(training.layout.specs):
            for keys, records in filling(num_rows, spec.dim + 1):
                here = homes_of(np.full(len(keys), number), keys, cluster.topology) == cluster.rank
                sidecar.load(home, number, keys[here], records[here])
        saving = BesideTraining(cluster)

        def steps() -> None:
            for batch in training.batches(SEGMENT):
                loss = batch.loss(per_sample_loss(trainer.model(batch), batch))
                loss.backward()
                training.step(loss)
                trainer.dense.step()
                trainer.dense.zero_grad()
                trainer.step += 1

        def is_busy() -> bool:
            return any(saving._gathered(training, int(saving._thread.is_busy)))

        def beside() -> None:
            checkpointing.save_beside(cluster, training, trainer, out, {}, saving)

        def save() -> None:
            steps()  # there is a checkpoint of this step already
            checkpointing.save(cluster, training, trainer, out)
            if cluster.rank == 0:
                for path in Path(out).iterdir():
                    shutil.rmtree(path)

        found = Timed(steps).run(repeats, save, beside, is_busy)
        saving.close()
        training.close()
    return found if cluster.rank == 0 else {}


def measure(role: str, *arguments: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--as", role, *arguments]
    if role == "together":
        program = (
            "from rowhaul.cluster import launch; import sys; launch([], 2, 0, True, command=sys.argv[1:])"
        )
        command = [sys.executable, "-c", program, *command]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--as", dest="role", default="")
    parser.add_argument("--rows", type=int, default=100_000, help="of each table, before training begins")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("rest", nargs="*")
    given = parser.parse_args()
    if given.role:
        folder, rows, repeats, out = given.rest
        found = (alone if given.role == "alone" else together)(folder, int(rows), int(repeats), out)
        if found:
            print(json.dumps(found))
        return
    print_machine()
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        log = str(Path(temporary) / "log")
        command = [sys.executable, "-m", "rowhaul", "generate", "--rows", "200000", "--out", log]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for role, title in (("alone", "one process"), ("together", "two workers")):
            out = str(Path(temporary) / role)
            found = measure(role, log, str(given.rows), str(given.repeats), out)
            slowed = [f"{found[name]:+.1%}" for name in ("median", "mean", "cpu")]
            numbers = [1e3 * found["iteration"], *slowed, 1e3 * found["pause"], found["iterations"]]
            lines.append([title, *numbers, found["lasts"], found["stopped"]])
    columns = [
        "", "ms an iteration", "slowed by, median", "mean", "CPU", "pause, ms", "iterations", "save lasts, s",
        "stopped, s",
    ]  # fmt: skip
    print_table(f"saving beside training, {given.rows:,} rows a table and more", columns, lines)


if __name__ == "__main__":
    main()
