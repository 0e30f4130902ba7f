"""How long a lost rank costs: torchrun restarts all ranks, which resume from the last checkpoint.

Kills a rank with SIGKILL while two workers and a store train, and measures the seconds until a step beyond
the one of the loss is trained, the work since the checkpoint included. Then kills one of two agents with its
ranks: the other goes on with the ranks that it has.

    python benchmarks/return_after_loss.py --losses 3
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil

PATIENCE = 300.0  # seconds
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "100"]
OPTIONS = [
    *("--batch-size", "64", "--epochs", "1000", "--stores", "1", "--cache", "800", "--embedding-dim", "4"),
    *("--checkpoint-every", "1s", "--set", "log_every=1"),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", type=int, default=3, help="ranks to kill")
    losses = parser.parse_args().losses
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        generate = ["generate", "--rows", "20000", "--out", str(folder / "data")]
        subprocess.run([sys.executable, "-m", "rowhaul", *generate], check=True, stdout=subprocess.DEVNULL)
        one_host = [*TORCHRUN, "--standalone", "--nproc-per-node", "3"]
        with agents(folder, "restarts", [one_host]) as (agent,):
            out = folder / "restarts"
            seconds = [lose(out, partial(rank_of, agent, number % 3)) for number in range(losses)]
        print(f"a rank killed, restarted by torchrun: {statistics.median(seconds):.1f} s to go on (median of")
        print(f"  {', '.join(f'{one:.1f}' for one in seconds)})")
        with socket.create_server(("127.0.0.1", 0)) as server:
            endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        elastic = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "x"]
        elastic += ["--rdzv-conf", "last_call_timeout=3", "--nproc-per-node", "2"]
        with agents(folder, "fewer", [[*TORCHRUN, *elastic]] * 2) as (_, second):
            seconds = [lose(folder / "fewer", lambda: [*psutil.Process(second.pid).children(True), second])]
        print(f"one of two agents killed with its ranks, the other goes on alone: {seconds[0]:.1f} s")


@contextmanager
def agents(folder: Path, name: str, commands: list[list[str]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start torchrun's agents, and end them and their ranks."""
    train = [
        "-m",
        "rowhaul",
        "train",
        "--data",
        str(folder / "data"),
        "--out",
        str(folder / name),
        "--resume",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = []
    try:
        for number, command in enumerate(commands):
            with (folder / f"{name}-{number}.txt").open("w") as output:
                whole = [*command, *train, *OPTIONS]
                started.append(subprocess.Popen(whole, stdout=output, stderr=output, env=environment))
            time.sleep(2.0)  # the first one is the host of the rendezvous
        yield started
    finally:
        for agent in started:
            agent.send_signal(signal.SIGINT)
        for agent in started:
            agent.wait(PATIENCE)


def rank_of(agent: subprocess.Popen[bytes], number: int) -> list[psutil.Process]:
    """The process of a rank."""
    found = []
    for process in psutil.Process(agent.pid).children(recursive=True):
        try:
            if process.environ().get("RANK") == str(number) and "train" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found[:1]


def lose(out: Path, victims: Callable[[], list[psutil.Process]]) -> float:
    """Kill processes once training is under way; return the seconds until it is beyond where it was."""
    wait(lambda begin=last_step(out): last_step(out) > begin + 50, out)
    step, began = last_step(out), time.monotonic()
    for process in victims():
        process.send_signal(signal.SIGKILL)
    wait(lambda: last_step(out) > step + 2, out)
    return time.monotonic() - began


def wait(happened: Callable[[], bool], out: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        if time.monotonic() > deadline:
            sys.exit("".join(path.read_text() for path in out.parent.glob(f"{out.name}-*.txt")))
        time.sleep(0.02)


def last_step(out: Path) -> int:
    """The last step in the log."""
    try:
        lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    return max((json.loads(line)["step"] for line in lines[-50:] if line.endswith("\n")), default=0)


if __name__ == "__main__":
    main()
