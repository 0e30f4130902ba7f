"""Two co-located ranks of Rowhaul against two of TorchRec on Gloo: the same tables, ids, batches and model.

26 tables of 100,000 rows of 16, one layer above them, row-wise Adagrad in the tables. TorchRec holds every
table sharded over the two ranks, table by table or row by row, and steps rows in its fused backward.
Rowhaul has two ways: its embedding database, which every rank asks for the rows of its own samples, located
while the batch before is trained; and scheduled training, which moves rows to where they are trained, peer
to peer, and plans that in one of the two processes. All use two processes of one thread on this machine,
take turns, and get their ids from memory.

Ids come in two kinds: drawn evenly over each table, the hardest case for who moves rows; and with a few
frequent ones, as logs have them. Before the clock starts most rows have been seen.

TorchRec lives in an environment of its own, ``.venv-torchrec``, made on the first run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import socket
import statistics
import subprocess
import tempfile
import time
import venv

import numpy as np

from report import console, print_machine, print_table

FOLDER = Path(__file__).resolve().parent
ENVIRONMENT = FOLDER.parent / ".venv-torchrec"
# TorchRec asks for the GPU build of fbgemm, hence without dependencies; what it imports follows.
PACKAGES = (
    ["torch==2.13.0", "numpy"],
    ["--no-deps", "fbgemm-gpu-cpu==1.8.0", "torchrec==1.8.0"],
    ["tensordict", "torchmetrics==1.0.3"],
    ["--no-deps", "pyre-extensions", "typing-inspect", "mypy-extensions"],
)
RANKS, TABLES, ROWS, DIM, REPEATS = 2, 26, 100_000, 16, 3
LR = 0.05
AHEAD = 2  # batches whose rows the database has been asked for before they are trained
WAYS = ("table", "row")


def peers_python() -> Path:
    """The interpreter of TorchRec's environment, made if it is not there."""
    python, stamp = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "installed"
    wanted = json.dumps(PACKAGES)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    console.print(f"making {ENVIRONMENT.name} (about 1 GB, a few minutes)")
    try:
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        for packages in PACKAGES:
            subprocess.run(
                [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages],
                check=True,
            )
        subprocess.run([str(python), "-c", "import torchrec.distributed"], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pinned = [name for some in PACKAGES for name in some if "==" in name]
        sys.exit(
            f"{ENVIRONMENT} could not be made: {error}\nThis benchmark needs TorchRec beside it: let pip "
            f"reach an index that has {', '.join(pinned)}, or make the environment by hand."
        )
    stamp.write_text(wanted)
    return python


def draw_ids(kind: str, steps: int, global_batch: int) -> np.ndarray:
    """Steps x samples x tables."""
    random = np.random.default_rng(7)
    shape = steps, global_batch, TABLES
    if kind == "even":
        return random.integers(0, ROWS, shape)
    # A power law over ranks, exponent 1.05, by its inverse; frequent ids are spread over the table.
    exponent = -0.05
    top = 1 - (ROWS + 1.0) ** exponent
    ranks = ((1 - top * random.random(shape)) ** (1 / exponent)).astype(np.int64) - 1
    return np.minimum(ranks, ROWS - 1) * 48_271 % ROWS


def rowhaul_rank(path: str, warm_up: int, dispatcher: str, hot_rows: int) -> None:
    """One rank; prints seconds a step, and those of its processor."""
    import torch
    from torch import nn

    from rowhaul import optim
    from rowhaul._environment import keep_freed_memory
    from rowhaul.cluster import join
    from rowhaul.data.samples import Samples
    from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig
    from rowhaul.schedule import HotRows
    from rowhaul.train.cluster_config import ClusterConfig
    from rowhaul.train.distributed import distribute
    from rowhaul.train.distributed.tables import layout_of

    torch.set_num_threads(1)
    keep_freed_memory()
    every = np.load(path, mmap_mode="r")
    steps, global_batch, num_tables = every.shape
    names = tuple(f"f{n}" for n in range(num_tables))
    configs = [
        EmbeddingBagConfig(name=f"t{n}", embedding_dim=DIM, feature_names=[f"f{n}"])
        for n in range(num_tables)
    ]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.tables = EmbeddingBagCollection(configs, optimizer=optim.RowwiseAdagrad(lr=LR))
            self.top = nn.Linear(num_tables * DIM, 1)

        def forward(self, batch):
            return self.top(self.tables(batch.ids).values()).squeeze(1)

    labels = np.random.default_rng(0).integers(0, 2, global_batch).astype(np.float32)
    lengths = np.ones((num_tables, global_batch), np.int32)
    nothing = np.empty((global_batch, 0), np.float32)
    batches = [
        Samples(
            names, np.ascontiguousarray(every[step].T).reshape(-1), lengths, nothing, labels,
            np.arange(step * global_batch, (step + 1) * global_batch),
        )
        for step in range(steps)
    ]  # fmt: skip
    model = Model()
    dense = torch.optim.SGD(model.top.parameters(), lr=LR)
    with join(colocated=True, peer_to_peer=True) as cluster:
        config = ClusterConfig(
            colocated=True, peer_to_peer=True, dispatcher=dispatcher, cache=str(2 * TABLES * ROWS)
        )
        hot = most_frequent(every[:100], hot_rows) if hot_rows else None
        settings = config.schedule(
            cluster.topology, layout_of(model.tables).sizes(), hot=HotRows(*hot) if hot else None
        )
        training = distribute(cluster, model, batches, settings=settings)
        for number, batch in enumerate(training.batches(steps)):
            if number == warm_up:
                began, used = time.perf_counter(), time.process_time()
            loss = batch.loss(
                nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels, reduction="none")
            )
            loss.backward()
            training.step()
            dense.step()
            dense.zero_grad()
        seconds, cpu = time.perf_counter() - began, time.process_time() - used
        training.close()
    print(json.dumps([one / (steps - warm_up) for one in (seconds, cpu)]), flush=True)


def database_rank(path: str, warm_up: int) -> None:
    """One rank of the embedding database; prints the same."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from rowhaul._environment import keep_freed_memory, switch_threads_sooner
    from rowhaul.database import DatabaseBags, DenseSum, DistributedEmbeddingDatabase

    torch.set_num_threads(1)
    keep_freed_memory()
    switch_threads_sooner()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    every = np.load(path, mmap_mode="r")
    steps, global_batch, num_tables = every.shape
    mine = slice(rank * global_batch // ranks, (rank + 1) * global_batch // ranks)
    batches = [np.ascontiguousarray(every[step, mine].T) for step in range(steps)]  # as a reader has them
    names = [f"t{n}" for n in range(num_tables)]
    labels = torch.from_numpy(np.random.default_rng(0).integers(0, 2, global_batch)).float()[mine]
    torch.manual_seed(0)
    top = nn.Linear(num_tables * DIM, 1)
    dense = torch.optim.SGD(top.parameters(), lr=LR)
    with DistributedEmbeddingDatabase(dict.fromkeys(names, DIM), "rowwise_adagrad", lr=LR) as database:
        bags, sums = DatabaseBags(database), DenseSum(top.parameters())
        tickets = [database.prefetch(dict(zip(names, batch, strict=True))) for batch in batches[:AHEAD]]
        for step in range(steps):
            if step == warm_up:
                dist.barrier()
                began, used = time.perf_counter(), time.process_time()
            if step + AHEAD < steps:
                tickets.append(database.prefetch(dict(zip(names, batches[step + AHEAD], strict=True))))
            logits = top(bags(tickets.pop(0))).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
            (loss / global_batch).backward()
            sums.start()
            bags.step()
            sums.finish()
            dense.step()
            dense.zero_grad()
        seconds, cpu = time.perf_counter() - began, time.process_time() - used
        dist.barrier()
    print(json.dumps([one / (steps - warm_up) for one in (seconds, cpu)]), flush=True)
    dist.destroy_process_group()


def most_frequent(ids: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Tables and keys of the most frequent rows."""
    rows = ids.reshape(-1, TABLES) + np.arange(TABLES) * ROWS
    counts = np.bincount(rows.reshape(-1), minlength=TABLES * ROWS)
    chosen = np.sort(np.argsort(-counts, kind="stable")[:count])
    return chosen // ROWS, chosen % ROWS


def outputs(commands: list[list[str]], environments: list[dict[str, str]]) -> list[object]:
    """What each of several processes that run at the same time prints last, as JSON."""
    children = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **more}
        )
        for command, more in zip(commands, environments, strict=True)
    ]
    texts = [child.communicate(timeout=600)[0] for child in children]
    if any(child.returncode for child in children):
        raise RuntimeError(f"{' '.join(commands[0])} failed; run it by hand to see why")
    return [json.loads(text.strip().splitlines()[-1]) for text in texts]


def as_ranks(command: list[str]) -> list[object]:
    """Run a command as all ranks of a cluster; what each of them prints."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    common = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    ranks = [
        {**common, "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)
    ]
    return outputs([command] * RANKS, ranks)


def torchrec_seconds(python: Path, path: str, warm_up: int) -> dict[str, list[float]]:
    """By way of sharding: seconds a step, and those of both processors."""
    arguments = [path, str(ROWS), str(DIM), str(warm_up), "rowwise_adagrad", *WAYS]
    found = as_ranks([str(python), str(FOLDER / "torchrec_peer.py"), *arguments])
    return {way: [max(one[way][0] for one in found), sum(one[way][1] for one in found)] for way in WAYS}


def rowhaul_seconds(path: str, warm_up: int, *how: str) -> list[float]:
    """Seconds a step, and those of both processors: of the database, or by dispatcher and hot rows."""
    found = as_ranks([sys.executable, __file__, "--rank", path, str(warm_up), *how])
    return [max(one[0] for one in found), sum(one[1] for one in found)]


def compare(python: Path, kind: str, per_rank: int, given: argparse.Namespace) -> list[list[object]]:
    """Lines of the table: all sides in turns, medians."""
    warm_up = max(30, given.warm_up * 512 // per_rank)
    steps = warm_up + max(40, given.steps * 512 // per_rank)
    seconds: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "ids.npy")
        np.save(path, draw_ids(kind, steps, RANKS * per_rank))
        for _ in range(given.repeats):
            for way, taken in torchrec_seconds(python, path, warm_up).items():
                seconds.setdefault(f"TorchRec, {way}-wise", []).append(taken)
            seconds.setdefault("Rowhaul's database", []).append(rowhaul_seconds(path, warm_up))
            for dispatcher in filter(None, given.dispatchers.split(",")):
                for hot in [0] if kind == "even" else map(int, given.hot_rows.split(",")):
                    name = f"Rowhaul, {dispatcher}" + (f", {hot:,} hot rows" if hot else "")
                    taken = rowhaul_seconds(path, warm_up, dispatcher, str(hot))
                    seconds.setdefault(name, []).append(taken)
    medians = {
        name: [statistics.median(one) for one in zip(*runs, strict=True)] for name, runs in seconds.items()
    }
    best = min(taken[0] for name, taken in medians.items() if name.startswith("TorchRec"))
    return [
        [
            f"{kind} ids, {per_rank:,} a rank: {name}",
            RANKS * per_rank / taken[0],
            taken[0] * 1e3,
            taken[1] * 1e3,
            best / taken[0],
        ]
        for name, taken in medians.items()
    ]


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        path, warm_up, *how = sys.argv[2:]
        if how:
            rowhaul_rank(path, int(warm_up), how[0], int(how[1]))
        else:
            database_rank(path, int(warm_up))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-rank", default="512,2048")
    parser.add_argument("--ids", default="even,skewed")
    parser.add_argument("--dispatchers", default="round-robin", help="of scheduled training; '' for none")
    parser.add_argument("--hot-rows", default="0,2000")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--steps", type=int, default=200, help="of 512 samples a rank; fewer of larger ones")
    parser.add_argument("--warm-up", type=int, default=250, help="the same")
    given = parser.parse_args()
    python = peers_python()
    print_machine()
    lines = [
        line
        for kind in given.ids.split(",")
        for per_rank in given.per_rank.split(",")
        for line in compare(python, kind, int(per_rank), given)
    ]
    columns = ["", "samples/s", "ms a step", "CPU ms a step, both ranks", "of TorchRec's best"]
    print_table(f"{TABLES} tables x {ROWS:,} x {DIM}, {RANKS} ranks on this machine", columns, lines)


if __name__ == "__main__":
    main()
