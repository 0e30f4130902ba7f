"""Starting the ranks of a command on this machine, and knowing that one is such a rank."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rowhaul.data.schema import Schema
    from rowhaul.train import TrainConfig


def is_first_rank() -> bool:
    """Whether this process talks to the user: the only one, or rank 0."""
    return os.environ.get("RANK", "0") == "0"


def launch_ranks(config: TrainConfig, schema: Schema, arguments: list[str] | None = None) -> None:
    """Run this very command as several processes; kernels are compiled before, once."""
    from rowhaul.cli.progress import console
    from rowhaul.cluster import launch
    from rowhaul.train.distributed.warm_up import compile_kernels

    cluster = config.cluster
    compile_kernels(config, schema, lambda: console.print("compiling kernels, once; this takes a minute"))
    given = sys.argv[1:] if arguments is None else arguments
    launch(given, cluster.workers, cluster.stores, cluster.colocated)
