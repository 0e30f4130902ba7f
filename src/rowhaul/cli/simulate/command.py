"""`rowhaul simulate`: what each mechanism would cost on a user's own data and links."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from rowhaul.cli.console import console, say
from rowhaul.cli.progress import counting_bar, exit_when_interrupted
from rowhaul.cli.run import FEATURES, SCHEMA

if TYPE_CHECKING:
    from rowhaul.cli.simulate.data import IdFiles
    from rowhaul.schedule import ScheduleSettings
    from rowhaul.simulate.measure import MakeScheduler
    from rowhaul.simulate.results import Results
    from rowhaul.simulate.run import Progress

# Rich reads square brackets in help as markup.
DISPATCH_HELP = (
    "Mechanisms, comma-separated, each with its settings: random, round-robin, laia:THREADS, "
    "laia-adaptive:TABLES:REFRESH:THREADS, esd:ALPHA:CRITERION (esd:0.5:min3-min), "
    "joint:PASSES:FUTURE:OBJECTIVE (joint:objective=makespan), brute-force, and two-batch: before any of "
    "them (two-batch:laia). Settings may be left out or named: joint:passes=5."
)
POLICY_HELP = (
    "What leaves a full cache: lru, lfu, emark or belady; emark may be followed by the order of its keys, "
    "emark:mark,latest,frequency."
)
SHARES_HELP = "Samples per worker: equal, auto, or for each as 200*4,56*4 (weights, if not the batch's sum)."


def simulate(
    data: list[str] = typer.Argument(..., help="Parquet files, folders or globs."),
    workers: int = typer.Option(..., help="How many workers train, 1 to 64."),
    links: str = typer.Option(
        ...,
        help="Speed of the workers' links, per second: 5gbit for all, or for each as 5gbit*4,0.5gbit*4. "
        "Bits: bit, kbit, mbit, gbit, tbit; bytes: b, kb, mb, gb, tb, kib, mib, gib, tib. With seconds "
        "per message behind an @: 5gbit@0.2ms (s, ms, us, ns).",
    ),
    batch_per_worker: int = typer.Option(128, help="Samples per worker and iteration, if shares are equal."),
    dim: str = typer.Option("512", help="Values in a row: for all tables, or user=64,item=16,..."),
    optimizer: str = typer.Option(
        "sgd", help="sgd, adagrad, rowwise_adagrad or adam; its state travels too."
    ),
    cache: str = typer.Option(
        "10%", help="Each worker's cache: share of the rows (8%), rows (5000), bytes (2GiB)."
    ),
    policy: str = typer.Option("lru", help=POLICY_HELP),
    dispatch: str = typer.Option(
        "random,laia,esd:1,joint",
        help=DISPATCH_HELP,
    ),
    sync: str = typer.Option(
        "on-demand", help="When trained rows travel: on-demand, full, bounded:S (S updates late), static."
    ),
    look_ahead: int = typer.Option(
        1, help="Batches known beyond the one being planned; 0: rows are pushed at once."
    ),
    shares: str = typer.Option("equal", help=SHARES_HELP),
    compute: str = typer.Option("0", help="Seconds of compute per sample: 50us, or 50us*4,200us*4."),
    dense_bytes: str = typer.Option("0", help="Size of the dense model, all-reduced every iteration: 40mb."),
    stores: int | None = typer.Option(
        None, help="Parameter servers that store the rows, 1 to 1024; default 1."
    ),
    store_links: str | None = typer.Option(
        None, help="Speed of the stores' links, like --links; default: unlimited."
    ),
    colocated: bool = typer.Option(
        False, "--colocated", metavar="", help="Workers store the rows; no parameter servers."
    ),
    peer_to_peer: bool = typer.Option(
        False, "--peer-to-peer", metavar="", help="Workers send rows to each other (--sync on-demand)."
    ),
    decision_budget: str | None = typer.Option(
        None, help="Time for a decision, for laia-adaptive: 5ms; default: the compute of an iteration."
    ),
    even_out: bool = typer.Option(
        False, "--even-out", metavar="", help="Spread early moves over the look-ahead (2 or more)."
    ),
    first_touch: Literal["on", "off"] = typer.Option(
        "on", help="on: a row never trained before is created where it is needed; off: it is pulled."
    ),
    admit_after: int = typer.Option(1, help="Admit a row at its N-th sighting."),
    ttl: int | None = typer.Option(None, help="Forget rows that no batch has named for N iterations."),
    max_rows: int | None = typer.Option(None, help="Most rows of each table."),
    evict: str = typer.Option("lru", help="Which rows a full table forgets: lru or lfu."),
    prune: str | None = typer.Option(
        None, help="Prune this share of the rows' values, such as 90%, by how often they are read."
    ),
    prune_chunks: int = typer.Option(4, help="With --prune: chunks of a row."),
    prune_period: int = typer.Option(1000, help="With --prune: iterations between two prunings."),
    hot: int | None = typer.Option(
        None,
        help="Replicate the N most frequent rows on all workers; default 0; with --sync static: "
        "as many as the cache holds.",
    ),
    iterations: int = typer.Option(200, help="Iterations to run, the warm-up included; 0: the whole data."),
    warmup: int = typer.Option(10, help="First iterations, which averages leave out."),
    seed: int = typer.Option(0, help="Seed of all random choices."),
    reference: str | None = typer.Option(
        None,
        help="Mechanism to compare with, also laia@best-subset or, with --shares, laia@equal; "
        "default: the first.",
    ),
    subsets: bool = typer.Option(
        True,
        "--subsets/--no-subsets",
        metavar="",
        help="Also show the best subset of workers with equal shares.",
    ),
    schema: Path | None = SCHEMA,
    features: str | None = FEATURES,
    json_file: Path | None = typer.Option(None, "--json", help="Write all numbers to this file."),
    report: Path | None = typer.Option(None, "--report", help="Write a page with plots to this file."),
    overwrite: bool = typer.Option(
        False, "--overwrite", metavar="", help="Replace --json and --report files that exist."
    ),
) -> None:
    """Count what each mechanism would move on your data, and how long your links would take."""
    given = {
        name: value for name, value in locals().items() if name not in ("json_file", "report", "overwrite")
    }
    import json

    from rowhaul._files import write_text
    from rowhaul.cli.simulate.outputs import check_outputs
    from rowhaul.cli.simulate.table import print_results

    outputs = {option: path for option, path in (("--json", json_file), ("--report", report)) if path}
    check_outputs(outputs, data, schema, overwrite)
    with exit_when_interrupted("nothing was written"):
        results = _simulate(given)
        texts = {}
        if json_file:
            texts[json_file] = json.dumps(results.to_dict(), indent=1, allow_nan=False) + "\n"
        if report:
            from rowhaul.simulate.report import render

            texts[report] = render(results)
    print_results(results, console)
    for path, text in texts.items():
        write_text(path, text)
        say(f"written: {path}")


def _simulate(given: dict[str, Any]) -> Results:
    """Read the options, count the rows if a size depends on them, and run every mechanism."""
    from rowhaul.cli.simulate import notes, options
    from rowhaul.cli.simulate.data import IdFiles
    from rowhaul.schedule import CacheSettings, RowPolicy, Scheduler, ScheduleSettings, link_prices
    from rowhaul.simulate.results import Results
    from rowhaul.simulate.run import Simulation, names_compared
    from rowhaul.simulate.shares import Objective
    from rowhaul.simulate.trace import RememberedTrace

    topology = options.make_topology(
        given["workers"], given["stores"], given["colocated"], given["peer_to_peer"]
    )
    options.check_sync(given["sync"])
    model = options.time_model(
        topology,
        given["links"],
        given["store_links"],
        given["compute"],
        given["dense_bytes"],
        early_reach=max(1, given["look_ahead"]) if given["even_out"] else 1,
    )
    decision_budget = options.parse_budget(given["decision_budget"], model, given["batch_per_worker"])
    shares = options.parse_shares(given["shares"], topology.num_workers)
    mechanisms = options.parse_mechanisms(given["dispatch"])
    reference = given["reference"] or mechanisms[0]
    options.check_reference(reference, names_compared(mechanisms, shares, given["subsets"]))
    options.check_at_least("--batch-per-worker", given["batch_per_worker"], 1)
    options.check_at_least("--iterations", given["iterations"], 0)
    batch_size = topology.num_workers * given["batch_per_worker"]

    ids = IdFiles.find(given["data"], given["schema"], given["features"])
    available = ids.num_batches(batch_size)
    asked = given["iterations"] or available
    options.check_warmup(given["warmup"], asked, available, batch_size)
    if shares is None and available > 1:
        options.check_brute_force(mechanisms, topology.num_workers, batch_size)
    policy = (given[name] for name in ("admit_after", "ttl", "max_rows", "evict"))
    schedule = ScheduleSettings(
        topology=topology,
        sizes=options.row_sizes(options.parse_dims(given["dim"], ids.tables), given["optimizer"]),
        prices=link_prices(model.links.worker_speeds),
        cache=CacheSettings(0, policy=given["policy"]),  # its size may depend on the number of rows
        dispatcher=mechanisms[0],
        sync=given["sync"],
        first_touch=given["first_touch"] == "on",
        policies=(RowPolicy(*policy),) * len(ids.tables),
        look_ahead=given["look_ahead"],
        seed=given["seed"],
    )
    for name in mechanisms:
        schedule.with_dispatcher(name)  # complains before the pass over the data
    schedule, num_rows = _size_caches(schedule, ids, given["cache"], given["hot"])

    make_scheduler: MakeScheduler = Scheduler
    if given["prune"] is not None:
        from rowhaul.cli.simulate.pruning import prune

        dims = dict(zip(ids.tables, options.parse_dims(given["dim"], ids.tables), strict=True))
        how = {"ratio": given["prune"], "chunks": given["prune_chunks"], "period": given["prune_period"]}
        schedule, make_scheduler = prune(schedule, dims, given["optimizer"], **how)
    iterations = min(asked, available)
    trace = RememberedTrace(lambda: ids.batches(batch_size, iterations))
    with _bar() as progress:
        simulation = Simulation(
            trace,
            batch_size,
            schedule,
            model,
            iterations,
            given["warmup"],
            progress,
            decision_budget,
            make_scheduler,
        )
        with _options_named():
            outcomes = simulation.run(mechanisms, shares, compare=given["subsets"])
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    return Results(
        settings={**shown, **_resolved(schedule, ids, batch_size, num_rows)},
        links=model.links,
        outcomes=outcomes,
        reference=reference,
        assumptions=model.assumptions,
        notes=(
            *notes.notes_on_data(asked, available, batch_size, given["hot"], num_rows),
            *notes.notes_on_shares(shares, batch_size, Objective(model.computes)),
            *notes.notes_on_effects(given, schedule, mechanisms),
            *notes.notes_on_policies(schedule, outcomes[0]),
        ),
    )


def _size_caches(
    schedule: ScheduleSettings, ids: IdFiles, cache: str, hot: int | None
) -> tuple[ScheduleSettings, int | None]:
    """Set the sizes that depend on the number of rows; returns that number if rows were counted."""
    from dataclasses import replace

    from rowhaul.cli.simulate import options

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
def _options_named() -> Iterator[None]:
    """Name the options in the one error of a user's settings that shows up while running."""
    from rowhaul.errors import CacheTooSmallError

    try:
        yield
    except CacheTooSmallError as error:
        raise CacheTooSmallError(f"{error} (--cache, --batch-per-worker, --workers)") from None


@contextmanager
def _bar() -> Iterator[Progress]:
    """A progress bar whose title is the current stage."""
    with counting_bar() as bar:
        task = bar.add_task("starting", total=1, note="")

        def show(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield show
