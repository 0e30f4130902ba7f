"""`rowhaul verify`: do several ranks train the same model as one process? Tries it on a few steps."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rowhaul.errors import ConfigError

if TYPE_CHECKING:
    from rowhaul.data.schema import Schema
    from rowhaul.train import TrainConfig

_WORKERS, _PRECISION = 2, "float64"
_NOT_EXACT = 1  # exit code
_INTERRUPTED = 130


def verify(
    config: Path | None = typer.Argument(
        None, help="YAML or TOML settings, as of `rowhaul train`; none is needed for the defaults."
    ),
    data: list[str] = typer.Option(..., "--data", help="Parquet files, a folder or a glob; repeatable."),
    steps: int = typer.Option(50, help="Steps to train; no more than the data has."),
    schema: Path | None = typer.Option(
        None, "--schema", help="Schema file; default: schema.yaml beside the data."
    ),
    features: str | None = typer.Option(
        None, "--features", help="Id columns, comma-separated, of data without a schema."
    ),
    label: str | None = typer.Option(None, "--label", help="Label column of data without a schema."),
    precision: str = typer.Option(
        _PRECISION, help="float64 shows mistakes best; float32 is what a run would use."
    ),
    batch_size: int | None = typer.Option(None, help="Samples in the global batch."),
    workers: int | None = typer.Option(
        None, help=f"Ranks that train; default: the configuration's, or {_WORKERS}."
    ),
    stores: int | None = typer.Option(None, help="Ranks that only hold rows."),
    colocated: bool | None = typer.Option(None, "--colocated", help="Workers store the rows themselves."),
    dispatcher: str | None = typer.Option(None, help="Who trains what: joint, esd:1, laia, random, ..."),
    sync: str | None = typer.Option(None, help="on-demand, full, static or bounded:S (not exact)."),
    cache: str | None = typer.Option(None, help="What a worker may hold: rows, or bytes such as 512MiB."),
    prune: str | None = typer.Option(None, "--prune", help="Prune this share of the values, such as 90%."),
    settings: list[str] = typer.Option(
        [], "--set", metavar="NAME=VALUE", help="Any other setting, e.g. --set cluster.peer_to_peer=true"
    ),
    work: Path | None = typer.Option(
        None, "--work", help="Folder for temporary files; under torchrun on several hosts, one they share."
    ),
    records: Path | None = typer.Option(None, "--records", hidden=True),  # given by the launching process
) -> None:
    """Train a few steps on several ranks and in one process, and print the largest difference.

    Ends with exit code 0 if both trained the same model, 1 if not.
    """
    flags = {
        "precision": precision,
        "batch_size": batch_size,
        "workers": workers,
        "stores": stores,
        "colocated": colocated,
        "dispatcher": dispatcher,
        "sync": sync,
        "cache": cache,
        "prune": prune,
    }
    from rowhaul.cli.progress import told_when_interrupted
    from rowhaul.cli.train import read_config
    from rowhaul.cluster import is_launched
    from rowhaul.data.files import find_schema

    if steps < 1:
        raise ConfigError(f"--steps must be at least 1; got {steps}")
    if work is not None and not work.is_dir():
        raise ConfigError(f"--work {work}: no such folder; make it first, or leave out --work")
    given = {name: value for name, value in flags.items() if value is not None}
    read = read_config(config, given, settings, None)
    cluster = replace(read.cluster, workers=read.cluster.workers or _WORKERS)
    run_config = replace(read, max_steps=steps, threads=1, cluster=cluster)
    found = find_schema(data, schema, features.split(",") if features else None, label)
    task = _Task(run_config, found, data, work)
    with told_when_interrupted("nothing is left behind"), _terminated_like_interrupted():
        is_exact = task.train_and_compare(records) if is_launched() else task.launch_and_compare()
    if not is_exact:
        raise typer.Exit(_NOT_EXACT)


@dataclass(frozen=True)
class _Task:
    """What is to be verified."""

    config: TrainConfig
    schema: Schema
    data: list[str]
    work: Path | None

    def launch_and_compare(self) -> bool:
        """Start the ranks on this machine, then do what one process does."""
        import torch

        from rowhaul.cli.ranks import launch_ranks
        from rowhaul.verify.verify import open_stream

        torch.set_num_threads(1)
        open_stream(self.config, self.schema, self.data)  # what is wrong with the data is told once
        with self._folder() as folder:
            launch_ranks(self.config, self.schema, ["verify", "--records", str(folder), *sys.argv[2:]])
            return self._compare(folder)

    def train_and_compare(self, records: Path | None) -> bool:
        """Train as one rank; the first compares, unless it was launched by a process that does."""
        from rowhaul._environment import keep_freed_memory
        from rowhaul.cli.progress import StopOnSignal
        from rowhaul.cli.ranks import is_first_rank
        from rowhaul.verify.verify import train_and_record

        keep_freed_memory()
        compares = is_first_rank() and records is None
        with self._folder() if compares else nullcontext(records) as folder:
            with StopOnSignal() as should_stop, self._bar("several ranks", is_first_rank()) as stepped:
                is_done = train_and_record(
                    self.config, self.schema, self.data, folder, stepped=stepped, should_stop=should_stop
                )
            if not is_done:
                raise typer.Exit(_INTERRUPTED)
            return self._compare(folder) if compares and folder is not None else True

    def _compare(self, folder: Path) -> bool:
        from rowhaul.cli.verify_report import print_report
        from rowhaul.train.distributed.training import layout_of, only_collection
        from rowhaul.train.trainer import make_model
        from rowhaul.verify.comparison import compare
        from rowhaul.verify.verify import Recorded, train_alone

        layout = layout_of(only_collection(make_model(self.config, self.schema)))
        recorded = Recorded.read(folder, layout)
        what = self.config, self.schema, self.data
        with self._bar("one process") as stepped:
            plain = compare(layout, recorded.trained, train_alone(*what, stepped=stepped))
        replay = None
        if not self.config.cluster.sync.startswith("bounded"):
            with self._bar("one process, same parts") as stepped:
                alone = train_alone(*what, recorded.workers, stepped=stepped)
            replay = compare(layout, recorded.trained, alone)
        return print_report(self.config, recorded, plain, replay)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="rowhaul-verify-", dir=self.work) as folder:
            yield Path(folder)

    @contextmanager
    def _bar(self, title: str, is_shown: bool = True) -> Iterator[Any]:
        """A bar over the steps; gives what is to be told of each."""
        from rowhaul.cli.progress import counting_bar
        from rowhaul.verify.verify import open_stream

        if not is_shown:
            yield lambda steps: None
            return
        batches = open_stream(self.config, self.schema, self.data).num_batches
        with counting_bar() as bar:
            total = min(batches, self.config.max_steps)
            task = bar.add_task(f"steps of {title}", total=total, note="")
            yield lambda steps: bar.update(task, completed=steps)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Have SIGTERM end this process in order, as Ctrl-C does: temporary files go."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
