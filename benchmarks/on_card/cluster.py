"""Four ranks and a store that train on one card over loopback.

They learn what one process there learns, and send the bytes of their plans; it says nothing of speed. With
the name of a folder this is one of the ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from rowhaul.cluster import launch
from rowhaul.data.files import find_schema
from rowhaul.runtime.mover import Mover
from rowhaul.runtime.phases import Payloads
from rowhaul.train import ClusterConfig
from rowhaul.train.config import ModelConfig, OptimizerConfig, TrainConfig
from rowhaul.train.distributed.tables import layout_of, only_collection
from rowhaul.train.trainer import make_model
from rowhaul.verify.comparison import compare
from rowhaul.verify.verify import Recorded, train_alone, train_and_record

WORKERS, STEPS = 4, 30


def cluster_config() -> TrainConfig:
    """Workers with small caches, so that rows come and go."""
    return TrainConfig(
        model=ModelConfig("dlrm", 16, {"bottom": [], "top": [64, 32]}),
        rows=OptimizerConfig("rowwise_adagrad", 0.05),
        batch_size=1024,
        max_steps=STEPS,
        precision="float64",
        threads=1,
        device="cuda",
        cluster=ClusterConfig(
            workers=WORKERS, dispatcher="joint", cache="12000", hot_rows=50, share_device=True
        ),
    )


def share_card() -> None:
    """Four ranks that share the card, against one process on it: plain, and a replay of the same parts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ["--rows", str(1024 * STEPS), "--test-share", "0", "--out", str(folder / "logs")]
        generate = [sys.executable, "-m", "rowhaul", "generate", *options]
        subprocess.run(generate, check=True, capture_output=True)
        launch([], WORKERS, 1, command=[sys.executable, __file__, name])
        config, schema, logs = cluster_config(), find_schema(folder / "logs"), folder / "logs"
        layout = layout_of(only_collection(make_model(config, schema)))
        recorded = Recorded.read(folder, layout)
        plain = compare(layout, recorded.trained, train_alone(config, schema, logs))
        replay = compare(layout, recorded.trained, train_alone(config, schema, logs, recorded.workers))
        sent = sum(json.loads(path.read_text()) for path in folder.glob("sent-*.json"))
    planned = sum(size for kind, size in recorded.num_bytes.items() if kind != "all_reduce")
    apart = max(one.largest for one in plain.kinds.values())
    to_the_bit = "equal to the bit" if replay.is_equal else "DIFFERENT"
    print(
        f"{WORKERS} workers on one card and a store, {STEPS} steps in float64: {apart:.1e} from one process "
        f"on it, {to_the_bit} to its replay; {sent:,} bytes sent, {planned:,} planned, hit ratio "
        f"{recorded.hits / recorded.lookups:.0%}"
    )


def train_rank(folder: Path) -> None:
    """Train as one rank, and write down how many bytes its moves have sent."""
    sent, phase, swap = [0], Mover._phase, Mover.swap

    def counted(self: Mover, out_going: Payloads, coming: Payloads, out: np.ndarray) -> np.ndarray:
        sent[0] += sum(out[part].nbytes for peer, part in out_going.messages.items() if peer != self.rank)
        return swap(self, out_going, coming, out)

    def in_phase(self: Mover, *arguments: object) -> None:  # flushes are not counted
        Mover.swap = counted
        phase(self, *arguments)
        Mover.swap = swap

    Mover._phase = in_phase
    train_and_record(cluster_config(), find_schema(folder / "logs"), folder / "logs", folder)
    (folder / f"sent-{os.environ['RANK']}.json").write_text(json.dumps(sent[0]))


if __name__ == "__main__":
    train_rank(Path(sys.argv[1]))
