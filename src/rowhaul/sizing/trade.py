"""What memory buys: short trainings with whole rows and within several budgets, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rowhaul.data.schema import Schema
from rowhaul.errors import ConfigError
from rowhaul.train import TrainConfig, train_run
from rowhaul.train.fitting import fitted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 1 << 20


@dataclass(frozen=True)
class Probe:
    """A short training: its budget (0: whole rows), how rows are held, their bytes, and how good it is."""

    budget: int
    dim: int
    row_dtype: str
    row_bytes: int
    auc: float
    log_loss: float
    rmse: Mapping[str, float] = field(default_factory=dict)  # of labels that are numbers

    @property
    def quality(self) -> tuple[str, float]:
        """What probes are compared by: the AUC, or the RMSE of the first label where none is of 0 and 1."""
        if isnan(self.auc) and self.rmse:
            name, value = next(iter(self.rmse.items()))
            return f"RMSE of {name}", value
        return "AUC", self.auc


def probes(
    config: TrainConfig,
    schema: Schema,
    data: Any,
    eval_data: Any,
    budgets: Sequence[int],
    steps: int,
    *,
    choose_dim: bool = True,
    started: Callable[[str], None] = lambda text: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Probe]:
    """Train ``steps`` steps with whole rows, then within each budget, from the largest on.

    Rows are held as the whole run would hold them within that budget.

    Args:
        config: of the run, without pruning.
        schema: of the data.
        data: files to train on.
        eval_data: files that are scored.
        budgets: in bytes.
        steps: of each training.
        choose_dim: whether budgets may have smaller rows.
        started: called as each begins.
        should_stop: ends everything.
    """
    if config.prune.is_used:
        raise ConfigError("--budgets tries budgets itself; leave out --prune, --memory-budget and prune")
    found: list[Probe] = []
    for budget in (0, *sorted(budgets, reverse=True)):
        started(f"{budget / _MIB:,.4g} MiB" if budget else "whole rows")
        tried = _shortened(config, config, steps)
        if budget:
            given = replace(config, prune=replace(config.prune, budget=f"{budget}b"))
            run = fitted(given, schema, data, choose_dim=choose_dim).config
            tried = fitted(_shortened(run, config, steps), schema, data).config
        result = train_run(tried, schema, data, eval_data=eval_data, should_stop=should_stop)
        if result.metrics is None:
            return found  # it was stopped
        metrics, dim = result.metrics, tried.model.embedding_dim
        rmse = {name: one["rmse"] for name, one in metrics.tasks.items() if "rmse" in one}
        found.append(Probe(budget, dim, tried.held_in, result.row_bytes, metrics.auc, metrics.log_loss, rmse))
    return found


def _shortened(run: TrainConfig, given: TrainConfig, steps: int) -> TrainConfig:
    """Return a run's settings for a few steps; how often rows change hands follows their number."""
    prune = replace(run.prune, period=given.prune.period)
    whole = replace(run, eval_every=0, patience=0, checkpoint_every=0, checkpoints="")
    return replace(whole, prune=prune, max_steps=steps)


def draw(found: Sequence[Probe], path: Path) -> None:
    """Draw how good probes are against the memory of rows."""
    from matplotlib.figure import Figure

    whole, within = found[0], found[1:]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    title, best = whole.quality
    memory, reached = [one.row_bytes / _MIB for one in within], [one.quality[1] for one in within]
    axes.semilogx(memory, reached, "o-", color="C0")
    for one in within:  # beside the line, which rises to the right
        _label(axes, one, f"{one.budget / _MIB:,.4g} MiB, rows of {one.dim}", "left", (7, -10))
    axes.semilogx([whole.row_bytes / _MIB], [best], "s", color="black")
    _label(axes, whole, f"all rows, {whole.dim} values each", "center", (0, -14))
    axes.set(xlabel="memory of rows, optimizer state and all that finds them (MiB)", ylabel=title)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.margins(x=0.2, y=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _label(axes: Axes, one: Probe, text: str, side: str, offset: tuple[float, float]) -> None:
    place = one.row_bytes / _MIB, one.quality[1]
    axes.annotate(text, place, offset, textcoords="offset points", ha=side, fontsize=8)
