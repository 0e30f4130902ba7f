"""The stream of a run: opening it where a checkpoint has left off, and what the run keeps of it.

::

    run/set_aside.jsonl   messages and files that could not be trained on, with the reason
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rowhaul.checkpoint import CheckpointReader
from rowhaul.data.schema import Schema
from rowhaul.data.sources.lines import STANDARD_INPUT
from rowhaul.data.sources.live import LiveStream
from rowhaul.data.sources.opening import open_source, stream_of
from rowhaul.data.sources.redis_stream import shown
from rowhaul.data.stream import SampleStream
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.pruning.config import parse_share
from rowhaul.train.cluster_config import AUTO
from rowhaul.train.config import TrainConfig

SET_ASIDE_FILE = "set_aside.jsonl"
_MOST_KEPT = 1000  # messages and files in memory, which a full disk cannot take
_POSITION, _SOURCE = "stream_position", "stream"  # facts of a checkpoint


def check_streamable(config: TrainConfig, is_rank: bool = False) -> None:
    """Refuse settings that need to know the end of the data, or to read it twice."""
    cluster, on_cluster = config.cluster, is_rank or config.cluster.workers > 0
    refused = {
        "epochs": (config.epochs != 1, "a stream is read once"),
        "shuffle_rows": (config.shuffle_rows > 0, "samples are learned from in the order in which they come"),
        "rates.decay": (
            config.rates.decay != "constant" and not config.max_steps,
            "rates decay towards an end, which a stream has only with max_steps",
        ),
        "prune.ratio": (
            config.prune.is_shared and parse_share(config.prune.ratio) > 0,
            "with a shared tail it is a share of what all ids would take, and nobody knows how many a stream "
            "has (give bytes instead, --memory-budget)",
        ),
        "cluster.hot_rows": (
            on_cluster and cluster.hot_rows != 0,
            "rows are chosen by counting ids beforehand",
        ),
        "cluster.shares": (
            on_cluster and cluster.shares == AUTO,
            "shares are tried on samples that are read beforehand; give weights such as 2,1,1",
        ),
        "eval_every": (
            on_cluster and config.eval_every > 0,
            "on several workers, rank 0 may be waiting for samples when it should send those to evaluate on; "
            "progressive validation measures without",
        ),
    }
    for name, (given, why) in refused.items():
        if given:
            raise ConfigError(f"{name} does not go together with a stream: {why}; leave out one of them")


def read_by_rank0(config: TrainConfig, data: Any) -> TrainConfig:
    """On several workers rank 0 reads a stream and shares it: a sample is read once."""
    if data and stream_of(data, config.stream.follow) == STANDARD_INPUT:
        raise ConfigError(
            "standard input (--data -) is read by one process, and ranks of a cluster have none; write lines "
            "to a Redis stream or files to a folder (--follow), or train without --workers"
        )
    return replace(config, cluster=replace(config.cluster, data_from="rank0"))


def open_stream(
    config: TrainConfig,
    schema: Schema,
    given: str,
    reader: CheckpointReader | None,
    samples: int,
    kinds: dict[str, str],
) -> LiveStream:
    """Open a stream, where the checkpoint has left off if there is one; ``kinds`` grows with what is read."""
    position = None
    if reader is not None:
        if _POSITION not in reader.facts:
            raise CheckpointError(
                f"{reader.path} was trained on files, and says nothing of a position in {shown(given)}; "
                "resume it on its files, or start a new run"
            )
        position = reader.facts[_POSITION]
    source = open_source(given, schema, kinds)
    if reader is not None and reader.facts[_SOURCE] != type(source).__name__:
        raise CheckpointError(
            f"{reader.path} was trained on another kind of stream ({reader.facts[_SOURCE]}) than "
            f"{shown(given)} ({type(source).__name__}), where its position means nothing; resume it on its "
            "own"
        )
    return LiveStream(
        source,
        schema,
        config.batch_size,
        position=position,
        samples=samples,
        kinds=kinds,
        seed=config.seed,
        max_wait=config.stream.max_wait_seconds,
        stop_when_idle=config.stream.idle_seconds,
    )


def stream_facts(stream: LiveStream) -> dict[str, Any]:
    """What a checkpoint keeps of a stream."""
    return {_POSITION: stream.position, _SOURCE: type(stream.source).__name__}


def acknowledging(stream: SampleStream | LiveStream) -> Callable[[], None]:
    """Return what to call when a checkpoint of this moment is complete."""
    return partial(stream.saved, stream.position) if isinstance(stream, LiveStream) else _nothing


def _nothing() -> None:
    """Files need not be told."""


def keep_set_aside(folder: Path | None, stream: LiveStream) -> None:
    """Append what was set aside to a file of the run's folder; while the disk is full, keep the newest."""
    if not stream.set_aside:
        return
    taken = [stream.set_aside.popleft() for _ in range(len(stream.set_aside))]
    if folder is not None:
        text = "".join(json.dumps(asdict(one)) + "\n" for one in taken)
        try:
            _append(folder / SET_ASIDE_FILE, text)
        except OSError:  # as with the log: training goes on, and the next call tries again
            stream.set_aside.extendleft(reversed(taken[-_MOST_KEPT:]))


def _append(path: Path, text: str) -> None:
    """Append all of a text, or nothing."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise
