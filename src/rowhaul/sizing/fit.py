"""What would make a run fit that does not: each change alone, and how large it must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from rowhaul.errors import ConfigError
from rowhaul.pruning.config import PruneConfig
from rowhaul.sizing.model import ModelSize
from rowhaul.sizing.sizing import Run, cluster_on

MOST_MACHINES = 64
PRUNED = (0.5, 0.75, 0.9, 0.95, 0.99)
CHUNKS = 4
SMALL_STATE = "rowwise_adagrad"


@dataclass(frozen=True)
class Suggestion:
    """A change after which the run fits."""

    setting: str
    value: str
    needed: int  # bytes of a machine then
    text: str


_Change = tuple[str, str, str, Run]  # setting, value, text and the run with it


def suggestions(run: Run, memory: int, model_of: Callable[[int], ModelSize]) -> Iterator[Suggestion]:
    """Yield ways to fit into ``memory`` bytes a machine; ``model_of`` measures the model at another dim."""
    ways = (
        _less_state(run),
        _smaller_dims(run, model_of),
        _more_machines(run),
        _fewer_rows(run),
        _pruned(run),
    )
    for changes in ways:
        if (found := _smallest(changes, memory)) is not None:
            yield found


def _smallest(changes: Iterator[_Change], memory: int) -> Suggestion | None:
    """The first change that is enough, if any is; the run's other settings may refuse some, and end it."""
    with suppress(ConfigError):
        for setting, value, text, changed in changes:
            if (needed := changed.estimate().needed) <= memory:
                return Suggestion(setting, value, needed, text)
    return None


def _less_state(run: Run) -> Iterator[_Change]:
    width = run.shape.optimizer.state_width(run.shape.dim)
    if width > 1:
        rows = replace(run.config.rows, name=SMALL_STATE, options={})
        text = f"rows.name: {SMALL_STATE}, which keeps one number of state a row instead of {width}"
        yield "rows.name", SMALL_STATE, text, replace(run, config=replace(run.config, rows=rows))


def _smaller_dims(run: Run, model_of: Callable[[int], ModelSize]) -> Iterator[_Change]:
    dim = run.config.model.embedding_dim // 2
    while dim >= 1:
        config = replace(run.config, model=replace(run.config.model, embedding_dim=dim))
        smaller = replace(run, config=config, model=model_of(dim))
        yield "model.embedding_dim", str(dim), f"model.embedding_dim: {dim}", smaller
        dim //= 2


def _more_machines(run: Run) -> Iterator[_Change]:
    machines = max(2, 2 * run.machines)
    while machines <= MOST_MACHINES:
        config = replace(run.config, cluster=cluster_on(machines, run.config.cluster))
        text = f"{machines} machines with a worker each that stores its share: --colocated"
        yield "machines", str(machines), text, replace(run, config=config, machines=machines)
        machines *= 2


def _fewer_rows(run: Run) -> Iterator[_Change]:
    total = sum(run.rows.values())
    for percent in range(99, 0, -1):
        most = total * percent // 100
        rows = {name: count * percent // 100 for name, count in run.rows.items()}
        text = f"at most {most:,} rows ({percent} %): a limit (max_rows), fewer features, less data"
        yield "rows", str(most), text, replace(run, rows=rows)


def _pruned(run: Run) -> Iterator[_Change]:
    """Prune, where nothing is pruned yet."""
    if run.format.name != run.unpruned.format.name:
        return
    chunks = min(CHUNKS, run.shape.dim)
    for ratio in PRUNED:
        config = replace(run.config, prune=PruneConfig(ratio=str(ratio), chunks=chunks))
        text = f"pruning {ratio:.0%} of the values (--prune {ratio:.0%}), rows in {chunks} pieces"
        yield "prune", f"{ratio:g}", text, replace(run, config=config)
