"""`rowhaul plan`: how fast one, two or more machines would train, before any is bought."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rowhaul._cores import usable_cores
from rowhaul.cli.checks import PAGE, check_replaceable
from rowhaul.cli.json_output import AS_JSON, print_json
from rowhaul.cli.progress import counting_bar, exit_when_interrupted
from rowhaul.cli.run import RunOptions, is_first_rank, with_run_options
from rowhaul.errors import ConfigError

if TYPE_CHECKING:
    from rowhaul.advising.costs import Costs
    from rowhaul.advising.predict import Prediction
    from rowhaul.advising.results import MemoryKey
    from rowhaul.advising.trace import Trace
    from rowhaul.data.schema import Schema
    from rowhaul.simulate.links import Link
    from rowhaul.train import TrainConfig
    from rowhaul.train.cluster_config import ClusterConfig

COMPARED = ("round-robin", "joint")  # dispatchers, unless others are named
STATIC = "static"  # the way to synchronise that needs hot rows
AT_HOME = "at-home"  # the one without plans of moves
_INTERRUPTED = "nothing was written; fewer --machines, --dispatchers or --batches take less time"


@with_run_options
def plan(
    options: RunOptions,
    machines: str | None = typer.Option(
        None,
        help="Numbers of machines to compare, e.g. 1,2,4,8; default: 1, 2, 4, ... up to the number of links.",
    ),
    dispatchers: str | None = typer.Option(
        None,
        help="Dispatchers to compare, comma-separated; default: round-robin, joint and the configuration's.",
    ),
    hot_rows: int | None = typer.Option(
        None, min=0, help="Compare with this many rows replicated everywhere, too; default: cluster.hot_rows."
    ),
    batches: int = typer.Option(60, help="Batches of the data to predict from, the first ones."),
    compute: str | None = typer.Option(
        None, help="Time of a sample, such as 12us, instead of measuring this machine."
    ),
    cores: int = typer.Option(0, min=0, help="Cores of a machine; default: as many as this one has."),
    share_cores: bool = typer.Option(
        False, "--share-cores", help="All machines share these cores, as on a testbed."
    ),
    memory: str | None = typer.Option(None, help="Memory of a machine; default: that of this one."),
    out: Path | None = typer.Option(None, "--out", help="Write a page with plots, such as plan.html."),
    as_json: bool = AS_JSON,
) -> None:
    """Predict samples per second on one machine and on several, and say how many to take.

    Takes the model, data and cache options of `rowhaul train`. Give the speed of the links (--links 1gbit),
    or run it under torchrun with --links measure. Trains briefly on this machine to time it.
    """
    _refuse_cluster_flags(options)
    given: dict[str, Any] = {} if hot_rows is None else {"hot": str(hot_rows)}
    config = options.read_config(**given)
    names = _dispatchers(dispatchers, config.cluster)
    config, hot_rows = _without_hot_rows(config)
    _check(config, batches, out, memory, compute)
    with exit_when_interrupted(_INTERRUPTED):
        links = _links(config, machines)
        if links is None:  # another rank than 0 of the machines that were measured
            return
        schema = options.find_schema()
        task = _Task(config, schema, options.data, links, cores, share_cores, as_json)
        task.run(_counts(machines, len(links)), names, hot_rows, batches, compute, memory, out)


class _Task:
    """What to predict, and for whom."""

    def __init__(
        self,
        config: TrainConfig,
        schema: Schema,
        data: list[str],
        links: tuple[Link, ...],
        cores: int,
        share_cores: bool,
        as_json: bool,
    ) -> None:
        from rowhaul.advising.predict import Machines

        self.config, self.schema, self.data, self.as_json = config, schema, data, as_json
        self.machines = Machines(links, cores or usable_cores(), share_cores)

    def run(
        self,
        counts: list[int],
        dispatchers: list[str],
        hot_rows: int,
        batches: int,
        compute: str | None,
        memory: str | None,
        out: Path | None,
    ) -> None:
        """Measure, predict, advise, print."""
        from rowhaul._files import write_text
        from rowhaul.advising.advice import advise
        from rowhaul.advising.page import render
        from rowhaul.advising.results import Results, memory_key
        from rowhaul.advising.trace import Trace
        from rowhaul.cli.plan.report import print_report
        from rowhaul.cli.size.command import machine_memory
        from rowhaul.pruning.config import UNPRUNED

        configs = [self.config]
        if self.config.prune.is_used:
            configs.insert(0, replace(self.config, prune=UNPRUNED))
        # First, for it looks at what this process holds: traces and measurements would count.
        needed = self._memory(configs[0], counts, hot_rows)
        for config in configs[1:]:
            needed |= self._memory(config, counts, 0)  # pruned rows are never replicated
        traces = [Trace.read(config, self.schema, self.data, batches) for config in configs]
        costs = self._costs(compute, batches)
        predictions = self._predict(traces, counts, dispatchers, hot_rows, costs)
        available = machine_memory(memory)
        trace = traces[0]
        results = Results(
            trace.batch_size,
            len(trace.batches),
            trace.is_whole,
            self.machines,
            costs,
            tuple(predictions),
            needed,
            available,
            advise(
                predictions,
                self.machines.links,
                lambda one: needed[memory_key(one)] <= available,
            ),
        )
        if self.as_json:
            print_json(results.plain())
        else:
            print_report(results)
        if out is not None:
            write_text(out, render(results))

    def _costs(self, compute: str | None, batches: int) -> Costs:
        from rowhaul._environment import keep_freed_memory
        from rowhaul._quantities import parse_seconds
        from rowhaul.advising import costs
        from rowhaul.advising.predict import planning_seconds
        from rowhaul.advising.trace import Trace

        if compute is not None:
            return costs.given(parse_seconds(compute, "--compute"))

        def planning(config: TrainConfig) -> float:
            trace = Trace.read(config, self.schema, self.data, batches)
            return planning_seconds(trace, config.cluster)

        keep_freed_memory()  # as `train` does, so that page faults are not taken for training
        with counting_bar() as bar:
            task = bar.add_task("measuring", total=4, note="")

            def progress(text: str) -> None:
                bar.update(task, advance=1, description=text)

            found = costs.measure(self.config, self.schema, self.data, planning, progress)
            bar.update(task, completed=4)  # kernels are compiled only where they are not yet
            return found

    def _predict(
        self, traces: list[Trace], counts: list[int], dispatchers: list[str], hot_rows: int, costs: Costs
    ) -> list[Prediction]:
        from rowhaul.advising.predict import predict, predict_alone

        plain = traces[0]
        hot = [plain.most_frequent(hot_rows)] if hot_rows else []
        ways = [
            (count, name, trace, rows)
            for count in counts
            if count > 1
            for name in dispatchers
            for trace in traces
            # Pruned rows are never replicated; with static there is nothing else to compare with.
            for rows in (*([] if self._is_static else [None]), *(hot if trace is plain else []))
        ]
        found = [predict_alone(trace, costs) for trace in traces]
        with counting_bar() as bar:
            task = bar.add_task("predicting", total=max(len(ways), 1) * len(plain.batches), note="")
            for number, (count, name, trace, rows) in enumerate(ways):

                def progress(
                    done: int, number: int = number, title: str = f"{count} machines, {name}"
                ) -> None:
                    bar.update(task, completed=number * len(plain.batches) + done, description=title)

                found.append(
                    predict(trace, self.config.cluster, count, name, rows, self.machines, costs, progress)
                )
        return found

    def _memory(self, config: TrainConfig, counts: list[int], hot_rows: int) -> dict[MemoryKey, int]:
        """Bytes that a machine needs, by `MemoryKey`."""
        from rowhaul.cli.size.command import describe_run
        from rowhaul.sizing.row_counts import count_rows
        from rowhaul.train.cluster_config import ONE_PROCESS

        limit = config.max_steps * config.batch_size or None
        found = count_rows(self.data, self.schema, limit=limit, sample=None)
        pruned, hot_rows = config.prune.is_used, min(hot_rows, sum(found.rows.values()))
        needed = {}
        for count in counts:
            cluster = ONE_PROCESS
            if count > 1:
                cluster = replace(
                    config.cluster, workers=count, colocated=True, peer_to_peer=True, links="equal"
                )
            run, _ = describe_run(replace(config, cluster=cluster), self.schema, self.data, found, count)
            if count == 1 or not self._is_static:
                needed[count, pruned, False] = run.estimate().needed
            if count > 1 and hot_rows:
                hot = replace(run.config, cluster=replace(cluster, hot_rows=hot_rows))
                needed[count, pruned, True] = replace(run, config=hot).estimate().needed
        return needed

    @property
    def _is_static(self) -> bool:
        """Whether there are hot rows in any case."""
        return self.config.cluster.sync == STATIC


def _without_hot_rows(config: TrainConfig) -> tuple[TrainConfig, int]:
    """Return the settings to compare with, and how many rows to replicate; only static has none without."""
    cluster = config.cluster
    if cluster.hot_is_auto:
        raise ConfigError(
            "cluster.hot_rows is auto, which is decided from what machines take while they train; a "
            "prediction needs a number: give --hot-rows 10000, or 0 for none"
        )
    if cluster.sync == AT_HOME:
        raise ConfigError(
            "cluster.sync is at-home, which plans no moves, so there is nothing to predict; leave it out: "
            "between machines rows move by plans"
        )
    if cluster.sync != STATIC:
        config = replace(config, cluster=replace(cluster, hot_rows=0))
    elif config.prune.is_used:
        raise ConfigError(
            "cluster.sync is static, which keeps hot rows on every worker, but pruned rows are never "
            "replicated; leave out one of them"
        )
    return config, cluster.num_hot_rows


def _dispatchers(text: str | None, cluster: ClusterConfig) -> list[str]:
    from rowhaul.schedule.dispatch import make_dispatcher
    from rowhaul.train.cluster_config import AUTO

    if text is None:
        return list(dict.fromkeys([*COMPARED, *({cluster.dispatcher} - {AUTO})]))
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("--dispatchers names none; try round-robin,joint")
    for name in names:
        make_dispatcher(name)
    return list(dict.fromkeys(names))


def _refuse_cluster_flags(options: RunOptions) -> None:
    """Refuse flags of `rowhaul train` that a prediction would ignore."""
    instead = {"dispatcher": "--dispatchers", "hot": "--hot-rows", "workers": "--machines"}
    for name in ("workers", "stores", "dispatcher", "hot", "shares", "topology", "colocated", "peer_to_peer"):
        if name in options.flags:
            use = f"; use {instead[name]}" if name in instead else ""
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect on a prediction: machines store the rows "
                f"themselves, send them to each other and train equal shares{use}"
            )


def _check(
    config: TrainConfig, batches: int, out: Path | None, memory: str | None, compute: str | None
) -> None:
    from rowhaul._quantities import parse_seconds
    from rowhaul.advising.trace import FEWEST_BATCHES
    from rowhaul.cli.size.command import machine_memory

    machine_memory(memory)
    if compute is not None and not parse_seconds(compute, "--compute"):
        raise ConfigError(f"--compute is {compute}; the time of a sample must be more than 0, such as 12us")
    if batches < FEWEST_BATCHES:
        raise ConfigError(f"--batches is {batches}; a prediction needs at least {FEWEST_BATCHES}")
    if out is not None and out.is_dir():
        raise ConfigError(f"--out {out} is a folder; give the name of a file in it, such as {out}/plan.html")
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: no such folder; make {out.absolute().parent} first")
    if out is not None:
        check_replaceable(out, PAGE, "--out")
    if config.cluster.links == "equal":
        raise ConfigError(
            "say how fast the machines' links are: --links 1gbit, or one for each as in --links "
            "1gbit*2,100mbit*2, or --links measure under torchrun on your machines"
        )


def _counts(text: str | None, num_links: int) -> list[int]:
    """`--machines`: one machine is always among them."""
    if text is None:
        return sorted({1, *(count for count in (2, 4, 8, 16, 32, 64) if count <= num_links), num_links})
    counts = [_whole(word) for word in text.split(",")]
    if max(counts) > num_links:
        raise ConfigError(f"--machines {text} needs {max(counts)} links, but there are {num_links}")
    return sorted({1, *counts})


def _whole(text: str) -> int:
    if not text.strip().isdecimal() or not int(text) or int(text) > 64:
        raise ConfigError(f"--machines: {text!r} must be a number of machines from 1 to 64, as in 1,2,4")
    return int(text)


def _links(config: TrainConfig, machines: str | None) -> tuple[Link, ...] | None:
    """The machines' links, as given or as measured; None on other ranks than 0 once they are measured."""
    from rowhaul.cluster import is_launched
    from rowhaul.simulate.links import Link, parse_links

    given = config.cluster.links
    if given != "measure":
        if is_launched() and not is_first_rank():
            return None
        count = max([_whole(word) for word in machines.split(",")], default=1) if machines else _named(given)
        return parse_links(given, count, "--links", "machines")
    if not is_launched():
        raise ConfigError(
            "--links measure needs the machines: start this under torchrun on each of them, "
            "or give the speeds, as in --links 1gbit"
        )
    from rowhaul.train.distributed.run import join_as_configured
    from rowhaul.tuning.shares import MeasuredLinks

    settings = replace(config.cluster, colocated=True, peer_to_peer=True)
    with join_as_configured(settings) as cluster:
        measured = MeasuredLinks.measure(cluster)
        if cluster.rank:
            return None
    return tuple(map(Link, measured.bytes_per_second, measured.latency_seconds))


def _named(links: str) -> int:
    """How many machines `--links` speaks of; one speed for all: up to four."""
    if "," not in links and "*" not in links:
        return 4
    return sum(
        int(times or 1) if (times := item.partition("*")[2]).isdecimal() or not times else 1
        for item in links.split(",")
    )
