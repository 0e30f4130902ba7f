"""Runs the simulator with the options of `rowhaul simulate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rowhaul.cli.progress import counting_bar
from rowhaul.cli.simulate import notes, options
from rowhaul.cli.simulate.data import IdFiles
from rowhaul.errors import CacheTooSmallError, ConfigError
from rowhaul.schedule import CacheSettings, RowPolicy, Scheduler, ScheduleSettings, link_prices
from rowhaul.simulate.clock import TimeModel
from rowhaul.simulate.measure import MakeScheduler
from rowhaul.simulate.results import Results
from rowhaul.simulate.run import Progress, Simulation, names_compared
from rowhaul.simulate.shares import Objective
from rowhaul.simulate.trace import RememberedTrace
from rowhaul.store.packing import PLAIN

MOST_MEASURED = 1024  # samples of a step that is timed


def run_simulation(given: dict[str, Any]) -> Results:
    """Read the options, count the rows if a size depends on them, and run every mechanism."""
    chosen = SimpleNamespace(**given)
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    unused: tuple[str, ...] = ()  # notes on a pruning that never comes
    topology = options.make_topology(chosen.workers, chosen.stores, chosen.colocated, chosen.peer_to_peer)
    options.check_sync(chosen.sync)
    early_reach = max(1, chosen.look_ahead) if chosen.even_out else 1
    measures = chosen.compute == "measure"
    compute, dense_bytes = "0" if measures else chosen.compute, chosen.dense_bytes or "0"
    model = options.time_model(topology, chosen.links, chosen.store_links, compute, dense_bytes, early_reach)
    budget = options.parse_budget(chosen.decision_budget, model, chosen.batch_per_worker)
    shares = options.parse_shares(chosen.shares, topology.num_workers)
    mechanisms = options.parse_mechanisms(chosen.dispatch)
    reference = chosen.reference or mechanisms[0]
    options.check_reference(reference, names_compared(mechanisms, shares, chosen.subsets))
    options.check_at_least("--batch-per-worker", chosen.batch_per_worker, 1)
    options.check_at_least("--iterations", chosen.iterations, 0)
    if chosen.prune_period is not None:
        options.check_at_least("--prune-period", chosen.prune_period, 1)
    batch_size = topology.num_workers * chosen.batch_per_worker

    ids = IdFiles.find(chosen.data, chosen.schema, chosen.features)
    available = ids.num_batches(batch_size)
    wanted = chosen.iterations or available
    options.check_warmup(chosen.warmup, wanted, available, batch_size)
    if shares is None and available > 1:
        options.check_brute_force(mechanisms, topology.num_workers, batch_size)
    policy = RowPolicy(chosen.admit_after, chosen.ttl, chosen.max_rows, chosen.evict)
    schedule = ScheduleSettings(
        topology=topology,
        sizes=options.row_sizes(
            options.parse_dims(chosen.dim, ids.tables), chosen.optimizer, chosen.row_dtype
        ),
        prices=link_prices(model.links.worker_speeds),
        cache=CacheSettings(0, policy=chosen.policy),  # its size may depend on the number of rows
        dispatcher=mechanisms[0],
        sync=chosen.sync,
        first_touch=chosen.first_touch == "on",
        policies=(policy,) * len(ids.tables),
        look_ahead=chosen.look_ahead,
        seed=chosen.seed,
    )
    for name in mechanisms:
        schedule.with_dispatcher(name)  # complains before the pass over the data
    schedule, num_rows = _size_caches(schedule, ids, chosen.cache, chosen.hot)

    iterations = min(wanted, available)
    make_scheduler: MakeScheduler = Scheduler
    dims = dict(zip(ids.tables, options.parse_dims(chosen.dim, ids.tables), strict=True))
    if chosen.prune is not None and chosen.memory_budget is not None:
        raise ConfigError("--prune and --memory-budget exclude each other; leave out one of them")
    if chosen.memory_budget is not None:
        from rowhaul.cli.simulate.budget import keep_within  # imports PyTorch

        schedule, make_scheduler = keep_within(
            schedule, dims, chosen.optimizer, chosen.memory_budget, chosen.row_dtype
        )
    if chosen.prune is not None:
        if chosen.row_dtype != PLAIN:
            raise ConfigError(
                f"--row-dtype {chosen.row_dtype} and --prune exclude each other: pruned rows are sent in "
                "float32; leave one of the two out"
            )
        from rowhaul.cli.simulate.pruning import prune, pruned  # imports PyTorch

        config = pruned(chosen.prune, chosen.prune_chunks, chosen.prune_period, iterations)
        schedule, make_scheduler = prune(schedule, dims, chosen.optimizer, config)
        shown["prune_period"] = config.period
        unused = tuple(notes.notes_on_pruning(config, iterations, max(dims.values())))
    measured = None
    if measures:
        from rowhaul.cli.simulate.compute import measure_compute  # imports PyTorch

        measured = measure_compute(ids, max(dims.values()), min(chosen.batch_per_worker, MOST_MEASURED))
        model = replace(
            model,
            compute_seconds=(measured.seconds,) * topology.num_workers,
            dense_bytes=measured.dense_bytes if chosen.dense_bytes is None else model.dense_bytes,
        )
        budget = options.parse_budget(chosen.decision_budget, model, chosen.batch_per_worker)
    trace = RememberedTrace(lambda: ids.batches(batch_size, iterations))
    with _bar() as progress:
        simulation = Simulation(
            trace, batch_size, schedule, model, iterations, chosen.warmup, progress, budget, make_scheduler
        )
        with options_named():
            outcomes = simulation.run(mechanisms, shares, compare=chosen.subsets)
    return Results(
        settings={**shown, **_times(model), **_resolved(schedule, ids, batch_size, num_rows)},
        links=model.links,
        outcomes=outcomes,
        reference=reference,
        assumptions=model.assumptions,
        notes=(
            *([measured.note] if measured else []),
            *notes.notes_on_data(wanted, available, batch_size, chosen.hot, num_rows),
            *notes.notes_on_shares(shares, batch_size, Objective(model.computes)),
            *notes.notes_on_worker_0(model, shares, chosen.subsets),
            *notes.notes_on_effects(given, schedule, mechanisms),
            *unused,
            *notes.notes_on_policies(schedule, outcomes[0]),
        ),
    )


def _size_caches(
    schedule: ScheduleSettings, ids: IdFiles, cache: str, hot: int | None
) -> tuple[ScheduleSettings, int | None]:
    """Set the sizes that depend on the number of rows; returns that number if rows were counted."""
    options.check_at_least("--hot", hot or 0, 0)
    size = options.CacheSize.parse(cache)
    static = hot is None and schedule.sync_mode.name == "static"
    counts = ids.count_rows() if size.unit == "share" or hot or static else None
    num_rows = None if counts is None else int(counts.num_distinct().sum())
    settings = size.settings(num_rows or 0, schedule.cache.policy)
    if static:
        hot = options.rows_held(settings, schedule.sizes)
    hot_rows = counts.most_frequent(hot) if counts is not None and hot else None
    return replace(schedule, cache=settings, hot=hot_rows), num_rows


def _times(model: TimeModel) -> dict[str, Any]:
    """What compute and the dense model were counted as."""
    every = model.compute_seconds
    texts = [f"{one * 1e6:.4g}us" for one in (every[:1] if len(set(every)) == 1 else every)]
    return {"compute": ",".join(texts), "dense_bytes": model.dense_bytes}


def _resolved(
    schedule: ScheduleSettings, ids: IdFiles, batch_size: int, num_rows: int | None
) -> dict[str, Any]:
    """The values that options were resolved to, for the record."""
    return {
        "stores": 0 if schedule.topology.colocated else schedule.topology.num_stores,
        "batch_size": batch_size,
        "tables": list(ids.tables),
        "row_bytes": list(schedule.sizes.records),
        "distinct_rows": num_rows,
        "cache_capacity": schedule.cache.capacity,
        "cache_unit": schedule.cache.unit,
        "hot_rows": len(schedule.hot) if schedule.hot else 0,
    }


@contextmanager
def options_named() -> Iterator[None]:
    """Name the options in the one error of a user's settings that shows up while running."""
    try:
        yield
    except CacheTooSmallError as error:
        raise CacheTooSmallError(f"{error} (--cache, --batch-per-worker, --workers)") from None


@contextmanager
def _bar() -> Iterator[Progress]:
    """A progress bar whose title is the current stage."""
    with counting_bar() as bar:
        task = bar.add_task("starting", total=1, note="")
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total)
