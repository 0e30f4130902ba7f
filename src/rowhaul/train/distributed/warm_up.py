"""Compiles the kernels of a run once, before several processes would each do so at the same time.

A tiny cluster of threads trains a few made-up samples with the optimizer, type, dispatcher and caches of the
run. A stamp beside Numba's cache remembers that it was done, until a file of this package changes. There is
none if training failed or a kernel could not be saved: the next run tries again.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rowhaul._kernels import num_not_cached
from rowhaul._threads import Failure
from rowhaul.data.samples import Samples
from rowhaul.data.schema import Schema
from rowhaul.planning.feed import LeaderFeed
from rowhaul.planning.planner import Planner
from rowhaul.runtime.at_home.mover import make_mover
from rowhaul.runtime.phase_kernels import sort_moves
from rowhaul.runtime.runtime import Runtime
from rowhaul.schedule import ScheduleSettings
from rowhaul.store import snapshot
from rowhaul.train.cluster_config import ONE_PROCESS
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed.tables import layout_of, may_stay_home, only_collection, tables_of_features
from rowhaul.train.distributed.training import DistributedTraining
from rowhaul.train.trainer import backward, make_model
from rowhaul.transport.in_process import InProcessNetwork

_SAMPLES, _BATCHES, _KEYS = 64, 6, 40


def compile_kernels(config: TrainConfig, schema: Schema, on_start: Callable[[], None] = lambda: None) -> None:
    """Compile and cache all kernels of a run on this host; call ``on_start`` first if there is work to do."""
    config = replace(config, cluster=config.cluster.on_hosts(1), device="cpu")
    stamp = _stamp(config, schema)
    if stamp is not None and stamp.exists():
        return
    on_start()
    topology = replace(config.cluster.topology(2), num_stores=1)
    collection = only_collection(make_model(config, schema))
    layout = layout_of(collection)
    given_policies = config.row_policies([one.name for one in collection.table_configs()])
    policies = tuple(  # short enough to expire rows within these few batches
        replace(one, ttl=one.ttl and 1, max_rows=one.max_rows and 3) for one in given_policies
    )
    plain = replace(config.cluster, shares="equal", links="equal", cache=ONE_PROCESS.cache)
    stays = may_stay_home(collection)
    given = layout.schedule_settings(plain, topology, policies=policies, may_stay_home=stays)
    network = InProcessNetwork(topology.num_ranks)
    errors: list[BaseException] = []
    threads = [
        threading.Thread(target=_train, args=(config, schema, given, network, rank, errors), daemon=True)
        for rank in range(topology.num_ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if stamp is not None and not errors and not num_not_cached():
        with contextlib.suppress(OSError):  # a disk that is full by now
            stamp.touch()


def _train(
    config: TrainConfig,
    schema: Schema,
    settings: ScheduleSettings,
    network: InProcessNetwork,
    rank: int,
    errors: list[BaseException],
) -> None:
    topology = settings.topology
    try:
        model = make_model(config, schema)
        collection = only_collection(model)
        trains, failure = rank < topology.num_workers, Failure()
        layout = layout_of(collection)
        cache = layout.make_cache(collection.feature_groups) if trains else None
        home = layout.make_home(topology, rank) if topology.colocated or not trains else None
        batches = _batches(schema)
        planner = Planner(
            lambda ids: layout.make_scheduler(settings, ids),
            batches,
            failure,
            tables_of_features=tables_of_features(collection, batches[0].features),
        )
        runtime = Runtime(
            rank,
            make_mover(
                settings,
                rank,
                network.links(rank),
                lambda iteration: 0.1,
                cache,
                home,
                collection.feature_groups,
            ),
            LeaderFeed(planner, None, failure),
            network.collective(rank),
            network.collective(rank, range(topology.num_workers)) if trains else None,
            failure,
            trains=trains,
        )
        training = DistributedTraining(model, runtime, lambda iteration: 0.1, settings)
        for batch in training.batches():
            training.step(backward(model, batch))
        training.flushed()
        snapshot.compile_kernels()
        training.close()
    except BaseException as error:  # the run itself will report it
        errors.append(error)
        network.fail(error)


def _batches(schema: Schema) -> list[Samples]:
    generator = np.random.default_rng(0)
    features = tuple(schema.features)
    lengths = np.ones((len(features), _SAMPLES), np.int32)
    return [
        Samples(
            features,
            generator.integers(0, _KEYS, lengths.size),
            lengths,
            np.zeros((_SAMPLES, len(schema.dense)), np.float32),
            np.zeros((_SAMPLES, len(schema.labels)) if schema.labels else _SAMPLES, np.float32),
            np.arange(_SAMPLES) + number * _SAMPLES,
        )
        for number in range(_BATCHES)
    ]


def _stamp(config: TrainConfig, schema: Schema) -> Path | None:
    """Return the file that marks the kernels of such a run as cached; None without a cache."""
    folder = getattr(getattr(sort_moves, "_cache", None), "cache_path", None)
    if folder is None:
        return None
    package = Path(__file__).parents[2]
    contents = sorted((path.stat().st_mtime_ns, str(path)) for path in package.rglob("*.py"))
    cluster = config.cluster
    what = (
        config.rows, config.precision, cluster.dispatcher, cluster.sync, cluster.cache_policy,
        bool(cluster.hot_rows), cluster.colocated, cluster.peer_to_peer, config.tables,
        cluster.look_ahead > 0, config.prune, config.row_dtype, torch.__version__,
    )  # fmt: skip
    digest = hashlib.blake2b(repr((what, contents)).encode(), digest_size=12).hexdigest()
    return Path(folder) / f"rowhaul-{digest}.compiled"
