"""`rowhaul verify`: do several ranks, or a card, train what one process trains? Try it on a few steps."""

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

from rowhaul.cli.json_output import AS_JSON
from rowhaul.cli.progress import EXIT_INTERRUPTED, StopOnSignal, counting_bar, exit_when_interrupted
from rowhaul.cli.run import RunOptions, is_first_rank, launch_ranks, with_run_options
from rowhaul.errors import ConfigError

if TYPE_CHECKING:
    from rowhaul.data.schema import Schema
    from rowhaul.train import TrainConfig

_WORKERS, _PRECISION = 2, "float64"  # float64 shows mistakes best
_NOT_EXACT = 1  # exit code


@with_run_options
def verify(
    options: RunOptions,
    steps: int = typer.Option(50, help="Steps to train; at most --max-steps and what the data has."),
    work: Path | None = typer.Option(
        None, "--work", help="Folder for temporary files; under torchrun on several hosts, one they share."
    ),
    as_json: bool = AS_JSON,
    records: Path | None = typer.Option(None, "--records", hidden=True),  # given by the launching process
) -> None:
    """Train a few steps on several ranks and in one process, and print the largest difference.

    Takes the options of `rowhaul train`; defaults: --workers 2, --precision float64 (float32 with another
    --row-dtype). With --device cuda and no --workers, one process on the card is compared with one on the
    CPU. Exits with 0 if both trained the same model, with 1 if not.
    """
    from rowhaul.cluster import is_launched

    if steps < 1:
        raise ConfigError(f"--steps must be at least 1; got {steps}")
    if work is not None and not work.is_dir():
        raise ConfigError(f"--work {work}: no such folder; make it first, or leave out --work")
    read = options.read_config()
    if read.row_dtype in ("auto", "float32"):  # others are trained in float32 only
        read = options.read_config(precision=_PRECISION)
    is_alone = read.device != "cpu" and not read.cluster.workers and not is_launched()
    workers = 0 if is_alone else read.cluster.workers or _WORKERS
    cluster = replace(read.cluster, workers=workers)
    config = replace(read, max_steps=min(steps, read.max_steps or steps), threads=1, cluster=cluster)
    if is_alone:
        options.refuse_cluster_settings()
    task = _Task(config, options.find_schema(), options.data, work, as_json)
    with exit_when_interrupted("temporary files were removed"), _sigterm_like_sigint():
        if is_alone:
            is_exact = task.compare_devices()
        else:
            is_exact = task.train_and_compare(records) if is_launched() else task.launch_and_compare()
    if not is_exact:
        raise typer.Exit(_NOT_EXACT)


@dataclass(frozen=True)
class _Task:
    """What to verify."""

    config: TrainConfig
    schema: Schema
    data: list[str]
    work: Path | None
    as_json: bool

    def launch_and_compare(self) -> bool:
        """Start the ranks on this machine, then compare with one process."""
        import torch

        from rowhaul.verify.verify import open_stream

        torch.set_num_threads(1)
        self.config.cluster.check_workers(self.config.cluster.workers)
        open_stream(self.config, self.schema, self.data)  # report bad data once, not from every rank
        with self._folder() as folder:
            launch_ranks(self.config, self.schema, ["verify", "--records", str(folder), *sys.argv[2:]])
            return self._compare(folder)

    def train_and_compare(self, records: Path | None) -> bool:
        """Train as one rank; rank 0 compares, unless the launching process does."""
        from rowhaul._environment import keep_freed_memory
        from rowhaul.verify.verify import train_and_record

        keep_freed_memory()
        compares = is_first_rank() and records is None
        with self._folder() if compares else nullcontext(records) as folder:
            with StopOnSignal() as should_stop, self._bar("several ranks", is_first_rank()) as stepped:
                is_done = train_and_record(
                    self.config, self.schema, self.data, folder, stepped=stepped, should_stop=should_stop
                )
            if not is_done:
                raise typer.Exit(EXIT_INTERRUPTED)
            return self._compare(folder) if compares and folder is not None else True

    def compare_devices(self) -> bool:
        """Train on the card twice and on the CPU once, all in this process."""
        from rowhaul.cli.verify.report import print_devices
        from rowhaul.verify.comparison import compare

        on_card = self._train_alone(title="the card")
        again = compare(self._layout(), self._train_alone(title="the card, again"), on_card)
        on_cpu = replace(self, config=replace(self.config, device="cpu"))._train_alone(title="the CPU")
        plain = compare(self._layout(), on_card, on_cpu)
        return print_devices(self.config, on_card, plain, again, as_json=self.as_json)

    def _layout(self) -> Any:
        from rowhaul.train.distributed.tables import layout_of, only_collection
        from rowhaul.train.trainer import make_model

        return layout_of(only_collection(make_model(self.config, self.schema)))

    def _compare(self, folder: Path) -> bool:
        from rowhaul.cli.verify.report import print_report
        from rowhaul.verify.comparison import compare
        from rowhaul.verify.verify import Recorded

        layout = self._layout()
        recorded = Recorded.read(folder, layout)
        plain, replay = compare(layout, recorded.trained, self._train_alone()), None
        cluster = self.config.cluster
        # Which rows were hot when is not recorded, and their gradients alone are not rounded on the way.
        is_unknown = bool(plain.inexact) and plain.replays and cluster.hot_is_auto
        if not cluster.inexact and not cluster.sync.startswith("bounded") and not is_unknown:
            replay = compare(layout, recorded.trained, self._train_alone(recorded.workers))
        return print_report(self.config, recorded, plain, replay, as_json=self.as_json)

    def _train_alone(self, workers: Any = None, title: str = "") -> Any:
        """Train in this process: whole batches, or the parts that ``workers`` had, one after the other."""
        from rowhaul.verify.verify import train_alone

        title = title or ("one process" if workers is None else "one process, same parts")
        with self._bar(title) as stepped:
            return train_alone(self.config, self.schema, self.data, workers, stepped=stepped)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="rowhaul-verify-", dir=self.work) as folder:
            yield Path(folder)

    @contextmanager
    def _bar(self, title: str, is_shown: bool = True) -> Iterator[Any]:
        """Show a bar over the steps; yields a function of the steps taken."""
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
def _sigterm_like_sigint() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that temporary files are removed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
