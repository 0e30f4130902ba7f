"""Progress bars, and Ctrl-C that lets the current step finish."""

from __future__ import annotations

import faulthandler
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, Task, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from rowhaul.cli.console import console, facts_table, say
from rowhaul.cluster import is_launched

if TYPE_CHECKING:  # PyTorch takes a second to import, and most commands do without
    from rowhaul.train.metrics import MetricValues
    from rowhaul.train.progressive import ProgressiveValues

EXIT_INTERRUPTED = 130  # as shells report SIGINT
COUNTING = "counting ids"

Advance = Callable[..., None]
"""Called with what is done, the total and, where there is one, a ``note``."""


@contextmanager
def progress_bar(
    title: str, interrupted: str, *, total: float = 0, quiet: bool = False, as_share: bool = False
) -> Iterator[Advance]:
    """Show a bar that counts things, or their share; at Ctrl-C say ``interrupted`` and exit."""
    with exit_when_interrupted(interrupted), counting_bar(quiet, as_share) as bar:
        task = bar.add_task(title, total=1.0 if as_share else total, note="")
        yield lambda done, total, **note: bar.update(task, completed=done, total=total, **note)


def counting_bar(quiet: bool = False, as_share: bool = False) -> Bar:
    """A bar over a known number of things, or over a share of the input where it is not known."""
    counts = _Counts("")
    # Narrow enough for a terminal of 80 columns; nothing is cut off.
    return Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        TaskProgressColumn() if as_share else counts,
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
        disable=quiet,
    )


class _Counts(TextColumn):
    """What is done, and of how many where that is known."""

    def render(self, task: Task) -> Text:
        """Format the numbers."""
        return Text(f"{task.completed:,.0f}" + (f" of {task.total:,.0f}" if task.total else ""))


class Bar(Progress):
    """A progress bar that leaves nothing on the screen when its work has failed."""

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            for task in self.task_ids:
                self.remove_task(task)
        super().__exit__(*error)


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

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def counting(self, done: int, total: int) -> None:
        """Show that ids are counted before training begins."""
        note = COUNTING if done < total else ""
        self._bar.update(self._task, completed=done, total=total, note=note)

    def started(self, samples: int, total_samples: int) -> None:
        """Announce the first step, which may compile kernels; a stream has a total of 0."""
        note = "first step (kernels compile once)"
        self._bar.update(self._task, total=total_samples, completed=samples, note=note)

    def stepped(self, samples: int, loss: float) -> None:
        """Move the bar; the loss shown is a mean over the last few dozen steps."""
        self._loss = 0.98 * self._loss + 0.02 * loss
        self._weight = 0.98 * self._weight + 0.02
        self._bar.update(self._task, completed=samples, note=f"loss {self._loss / self._weight:.4f}")

    def evaluating(self, total_samples: int) -> None:
        """Show that training waits for an evaluation."""
        self._bar.update(self._task, note="evaluating")

    def evaluated(self, step: int, metrics: MetricValues) -> None:
        """Print a line above the bar."""
        say(
            f"step {step:,}: AUC {metrics.auc:.4f}, log loss {metrics.log_loss:.4f} "
            f"on {metrics.num_samples:,} samples{_more(metrics)}"
        )
        self._bar.update(self._task, note="")

    def scored(self, step: int, values: ProgressiveValues) -> None:
        """Print a line above the bar."""
        say(f"step {step:,}: {values.text()}")

    def noted(self, text: str) -> None:
        """Print a line above the bar."""
        say(text)

    def explained(self, detail: dict[str, Any]) -> None:
        """Print a summary above the bar."""
        from rowhaul.explain.summary import summarise

        table = facts_table()
        for name, text in summarise(detail):
            table.add_row(escape(name), escape(text), style="dim" if name == "would help" else None)
        console.print(table, highlight=False)


class StopOnSignal:
    """Callable that turns true at Ctrl-C or SIGTERM; a second Ctrl-C interrupts at once.

    A second SIGTERM does nothing: a service manager sends it to all processes, and launchers forward it.
    torchrun forwards Ctrl-C, too, to ranks that have received it from the terminal: on a rank, one that
    follows within `_ONE_PRESS` seconds is the same one. A signal that the process ignores, as a background
    job does SIGINT, stays ignored. Until it is called for the first time nothing is trained that could be
    saved, and ranks may wait for each other: a signal interrupts at once.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)
    _ONE_PRESS = 2.0

    def __init__(self) -> None:
        self._asked = self._is_heeded = False
        self._interrupted_at: float | None = None
        self._one_press = self._ONE_PRESS if is_launched() else 0.0

    def __enter__(self) -> StopOnSignal:
        self._before = {
            number: signal.signal(number, self._handle)
            for number in self._SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        """Whether the run was asked to stop."""
        self._is_heeded = True
        return self._asked

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_heeded:
            raise KeyboardInterrupt
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is None:
                self._interrupted_at = now
            elif now >= self._interrupted_at + self._one_press:
                raise KeyboardInterrupt
        if self._asked:
            return
        self._asked = True
        how = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else " (SIGTERM)"
        with suppress(RuntimeError):  # the signal has interrupted this thread while it was printing
            console.print(f"stopping after this step{how}")


def print_stacks_on_request() -> None:
    """Print the stacks of all threads at SIGUSR1, even while one of them holds the GIL."""
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and sys.__stderr__ is not None:
        with suppress(OSError):  # without a descriptor
            faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)


@contextmanager
def exit_when_interrupted(what_next: str) -> Iterator[None]:
    """At Ctrl-C, say what the user can do next and end with the exit code that shells expect."""
    try:
        yield
    except (KeyboardInterrupt, SystemError) as error:
        if not is_interruption(error):
            raise
        say(f"interrupted; {what_next}")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def is_interruption(error: BaseException | None) -> bool:
    """Whether an error is Ctrl-C, or what a compiled kernel makes of it.

    A signal that arrives while a kernel runs surfaces as ``SystemError: ... returned a result with an
    exception set``, caused by the `KeyboardInterrupt`.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        if not isinstance(error, SystemError):
            return False
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def _more(metrics: MetricValues) -> str:
    """Metrics within groups, and of labels after the first, in a few words."""
    shown = dict(metrics.in_groups)
    for task, values in list(metrics.tasks.items())[1:]:
        shown |= {f"{task} {name}": values[name] for name in ("auc", "rmse") if name in values}
    return "".join(f", {name.replace('auc', 'AUC')} {value:.4f}" for name, value in shown.items())
