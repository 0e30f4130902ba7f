"""The sum of dense gradients: bytes and seconds on shaped links, and what rounding them costs in AUC.

    python benchmarks/dense_wire.py            # needs root, for network namespaces
    python benchmarks/dense_wire.py --packing  # can float32 gradients be packed without loss?

*Links unknown*: the quickest of three plain ways. *By link*: parts in proportion to the links' measured
speeds, in buckets. *bfloat16*: the same with values rounded on their way, which is not exact. Bytes are the
kernel's, headers included, of the direction that carries more; the bound is the least time that any sum takes
over these links (`rowhaul.schedule.sum_plan`). All ways take turns in one run; medians. AUC: four workers
train on a generated Criteo-like log, float32 and bfloat16 with each of three seeds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import json
import statistics
import subprocess
import tempfile
import time
import zlib
from typing import Any

DEFAULT_DLRM, SMALL_NET = 192_000, 5_000  # values: 0.77 MB and 20 kB
CASES = (
    ("4 x 100 Mbit/s", "100mbit*4", DEFAULT_DLRM),
    ("4 x 80 + 4 x 8 Mbit/s", "80mbit*4,8mbit*4", SMALL_NET),
    ("4 x 80 + 4 x 8 Mbit/s", "80mbit*4,8mbit*4", DEFAULT_DLRM // 4),
)
TURNS, EACH = 4, 3  # turns of each way, sums in a turn
INTERFACE = "haul0"
WORKERS, SAMPLES, SEEDS = 4, 200_000, (0, 1, 2)  # for AUC


def counters() -> list[int]:
    folder = Path(f"/sys/class/net/{INTERFACE}/statistics")
    return [int((folder / f"{way}_bytes").read_text()) for way in ("tx", "rx")]


def rank_main(size: int) -> None:
    """One rank: all ways in turn."""
    import numpy as np
    import torch

    from rowhaul.cluster import join
    from rowhaul.schedule.sum_plan import plain_ways
    from rowhaul.transport.base import Wire
    from rowhaul.transport.sums.choice import try_ways
    from rowhaul.transport.sums.exchange import Exchange

    torch.set_num_threads(1)
    with join(0, True, False, interface=INTERFACE, side_interface=INTERFACE) as cluster:
        dense: Any = cluster.dense
        own = torch.randn(size, generator=torch.Generator().manual_seed(cluster.rank))
        total = torch.empty_like(own)

        def plainly(way: Any) -> None:
            Exchange(dense._links, way, own, total, dense._buffer).finish()

        plain = try_ways(plain_ways(dense.num_ranks), plainly, dense.all_gather)
        wire = Wire(torch.bfloat16, size)
        ways = {
            "links unknown": lambda: plainly(plain),
            "by link": lambda: dense.start_sum(own, total).finish(),
            "bfloat16 (not exact)": lambda: dense.start_sum(own, total, wire).finish(),
        }
        sums = []
        for run in ways.values():
            run()
            sums.append(total.clone())
        assert torch.equal(sums[0], sums[1])
        found: dict[str, Any] = {name: {"seconds": [], "cpu": [], "bytes": []} for name in ways}
        for _ in range(TURNS):
            for name, run in ways.items():
                dense.all_gather(np.zeros(1, np.uint8))
                time.sleep(0.05)  # what is left in the links' queues
                before, cpu, began = counters(), time.process_time(), time.perf_counter()
                for _ in range(EACH):
                    run()
                seconds, spent = time.perf_counter() - began, time.process_time() - cpu
                dense.all_gather(np.zeros(1, np.uint8))
                time.sleep(0.05)
                moved = [(now - then) / EACH for now, then in zip(counters(), before, strict=True)]
                found[name]["seconds"].append(seconds / EACH)
                found[name]["cpu"].append(spent / EACH)
                found[name]["bytes"].append(moved)
        found["plans"] = [str(plain), *(str(one) for one in dense._plans.values())]
        found["speeds"] = dense._speeds
        print(json.dumps(found))


def links_table() -> None:
    from report import console, print_table
    from rowhaul.schedule.sum_plan import least_seconds
    from testbed.cli import _links
    from testbed.cluster import run_cluster

    for title, text, size in CASES:
        links, _ = _links(text, None)
        speeds = [link.bytes_per_second for link in links]
        command = [sys.executable, str(Path(__file__)), "--rank", str(size)]
        done = run_cluster(lambda rank, command=command: command, links, timeout=230)
        ranks = [json.loads(one.stdout.strip().splitlines()[-1]) for one in done.outputs]
        rows = []
        for name in [one for one in ranks[0] if one not in ("plans", "speeds")]:
            wire_bytes = size * (2 if "bfloat16" in name else 4)
            carried = [
                max(statistics.median(turn[way] for turn in rank[name]["bytes"]) for way in (0, 1))
                for rank in ranks
            ]
            busiest = max(carried[rank] / speeds[rank] for rank in range(len(ranks)))
            seconds = statistics.median(
                max(rank[name]["seconds"][turn] for rank in ranks) for turn in range(TURNS)
            )
            cpu = statistics.median(statistics.median(rank[name]["cpu"]) for rank in ranks)
            bound = least_seconds(speeds, wire_bytes)
            rows.append(
                [
                    name,
                    carried[0] / 1e3,
                    carried[-1] / 1e3,
                    busiest * 1e3,
                    bound * 1e3,
                    seconds * 1e3,
                    cpu * 1e3,
                ]
            )
        columns = [
            "way", "kB, first link", "kB, last link", "ms, busiest link", "ms, bound", "ms, measured",
            "ms of CPU a rank",
        ]  # fmt: skip
        print_table(f"{title}, {4 * size / 1e3:,.0f} kB of dense gradients in float32", columns, rows)
        console.print(f"ways: {', '.join(ranks[0]['plans'])}")
        console.print(f"links measured, Mbit/s: {[round(one * 8 / 1e6, 1) for one in ranks[0]['speeds']]}")


def auc_of(folder: Path, data: Path, wire: str, seed: int) -> float:
    """Train on four workers of this machine; return the AUC on held-out samples."""
    out = folder / f"{wire}-{seed}"
    command = [
        sys.executable, "-m", "rowhaul", "train", "--data", f"{data}/*.parquet", "--out", str(out),
        "--workers", str(WORKERS), "--colocated", "--seed", str(seed), "--threads", "1",
        "--set", f"cluster.dense_wire={wire}",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return float([line for line in lines if "auc" in line][-1]["auc"])


def auc_table() -> None:
    from report import print_table

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "log"
        command = [sys.executable, "-m", "rowhaul", "generate", "--rows", str(SAMPLES), "--out", str(data)]
        subprocess.run(command, check=True, capture_output=True)
        aucs = {
            wire: [auc_of(folder, data, wire, seed) for seed in SEEDS] for wire in ("float32", "bfloat16")
        }
    rows = [
        [wire, *(f"{one:.5f}" for one in (*found, statistics.median(found)))] for wire, found in aucs.items()
    ]
    apart = [other - one for one, other in zip(*aucs.values(), strict=True)]
    rows.append(["difference", *(f"{one:+.5f}" for one in (*apart, statistics.median(apart)))])
    title = f"AUC, {WORKERS} workers, {SAMPLES:,} samples of a generated Criteo log; bfloat16 is not exact"
    print_table(title, ["dense wire", *(f"seed {seed}" for seed in SEEDS), "median"], rows)


def packing_table() -> None:
    """Bits of entropy in each byte of float32 gradients, and what zlib makes of them."""
    import numpy as np
    import torch

    from report import print_table
    from rowhaul.nn.layers import LayerFactory

    torch.manual_seed(0)
    layers = LayerFactory(0)
    net = layers.mlp(415, (256, 128))
    out = layers.linear(128, 1)
    optimizer = torch.optim.Adam([*net.parameters(), *out.parameters()])
    for _ in range(200):
        values = torch.randn(512, 415)
        logits = out(net(values, torch.arange(512))).squeeze(1)
        labels = (values[:, :20].sum(1) > 0).float()
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        optimizer.step()
    gradients = torch.cat([one.grad.reshape(-1) for one in net.parameters()]).numpy()
    planes = np.ascontiguousarray(gradients.view(np.uint8).reshape(-1, 4).T)
    rows = []
    for number, plane in zip(("lowest", "low", "high", "sign and exponent"), planes, strict=True):
        share = np.bincount(plane, minlength=256) / len(plane)
        entropy = float(-(share[share > 0] * np.log2(share[share > 0])).sum())
        began = time.process_time()
        packed = len(zlib.compress(plane.tobytes(), 1))
        seconds = time.process_time() - began
        rows.append([number, entropy, packed / len(plane), len(plane) / seconds / 1e6])
    print_table(
        f"{gradients.nbytes / 1e3:,.0f} kB of float32 gradients, byte by byte",
        ["byte", "bits of entropy", "zlib -1, of its size", "MB/s"],
        rows,
    )
    bits = sum(float(row[1]) for row in rows)
    print(f"an ideal coder leaves {bits / 32:.1%} of the bytes")


def main() -> None:
    from report import print_machine

    print_machine()
    if "--packing" in sys.argv:
        packing_table()
        return
    links_table()
    auc_table()


if __name__ == "__main__":
    if "--rank" in sys.argv:
        rank_main(int(sys.argv[-1]))
    else:
        main()
