"""Progress bars, and Ctrl-C that lets the step under way finish."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from rowhaul.cli.interruption import is_interruption

if TYPE_CHECKING:  # PyTorch takes a second to import, and most commands do without
    from rowhaul.train.metrics import MetricValues

console = Console(emoji=False)  # esd:1:... is a name, whatever rich sees in it


def counting_bar() -> Bar:
    """A bar over a known number of things."""
    return _bar(TextColumn("{task.completed:,.0f} of {task.total:,.0f}"))


def share_bar() -> Bar:
    """A bar over a share of the input, where the number of rows is not known beforehand."""
    return _bar(TaskProgressColumn())


class Bar(Progress):
    """A progress bar that leaves nothing on the screen when what it shows has failed."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            for task in self.task_ids:
                self.remove_task(task)
        super().__exit__(kind, error, trace)


def _bar(amount: ProgressColumn) -> Bar:
    # Narrow enough for a terminal of 80 columns; nothing is cut off.
    return Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        amount,
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
    )


class TrainingProgress:
    """A run's listener: one bar for training with a smoothed loss, a line for each evaluation."""

    def __init__(self) -> None:
        self._bar = counting_bar()
        self._loss = 0.0
        self._weight = 0.0

    def __enter__(self) -> TrainingProgress:
        self._bar.__enter__()
        self._task = self._bar.add_task("training", total=0, note="starting")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def started(self, samples: int, total_samples: int) -> None:
        """The first step may compile kernels."""
        note = "first step (kernels compile once)"
        self._bar.update(self._task, total=total_samples, completed=samples, note=note)

    def stepped(self, samples: int, loss: float) -> None:
        """Move the bar; the loss shown is a mean over the last few dozen steps."""
        self._loss = 0.98 * self._loss + 0.02 * loss
        self._weight = 0.98 * self._weight + 0.02
        self._bar.update(self._task, completed=samples, note=f"loss {self._loss / self._weight:.4f}")

    def evaluating(self, total_samples: int) -> None:
        """Say that training waits."""
        self._bar.update(self._task, note="evaluating")

    def evaluated(self, step: int, metrics: MetricValues) -> None:
        """Print a line above the bar."""
        self._bar.console.print(
            f"step {step:,}: AUC {metrics.auc:.4f}, log loss {metrics.log_loss:.4f} "
            f"on {metrics.num_samples:,} samples",
            highlight=False,
        )
        self._bar.update(self._task, note="")


class StopOnSignal:
    """Callable that turns true at Ctrl-C or SIGTERM; a second Ctrl-C interrupts at once.

    A signal that the process ignores, as a background job does SIGINT, stays ignored.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._asked = False

    def __enter__(self) -> StopOnSignal:
        self._before = {
            number: signal.signal(number, self._handle)
            for number in self._SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        """Whether somebody wants an end."""
        return self._asked

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        console.print("stopping after this step; press Ctrl-C again to stop at once")


@contextmanager
def told_when_interrupted(what_next: str) -> Iterator[None]:
    """At Ctrl-C, say what the user can do next and end with the exit code that shells expect."""
    try:
        yield
    except (KeyboardInterrupt, SystemError) as error:
        if not is_interruption(error):
            raise
        console.print(f"interrupted; {what_next}", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
