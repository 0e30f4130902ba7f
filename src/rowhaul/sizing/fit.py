"""What would make a run fit that does not: each change alone, and how large it must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def suggestions(run: Run, memory: int, model_of: Callable[[int], ModelSize]) -> Iterator[Suggestion]:
    """Ways to fit into ``memory`` bytes a machine; ``model_of`` measures the model at another dim."""
    for way in (_less_state, _smaller_dim, _more_machines, _fewer_rows, _pruned):
        found = way(run, memory, model_of)
        if found is not None:
            yield found


def _less_state(run: Run, memory: int, model_of: Callable[[int], ModelSize]) -> Suggestion | None:
    shape = run.shape
    if shape.optimizer.state_width(shape.dim) <= 1:
        return None
    rows = replace(run.config.rows, name=SMALL_STATE, options={})
    needed = replace(run, config=replace(run.config, rows=rows)).estimate().needed
    if needed > memory:
        return None
    text = f"rows.name: {SMALL_STATE}, which keeps one number of state a row instead of "
    text += f"{shape.optimizer.state_width(shape.dim)}"
    return Suggestion("rows.name", SMALL_STATE, needed, text)


def _smaller_dim(run: Run, memory: int, model_of: Callable[[int], ModelSize]) -> Suggestion | None:
    def needed(dim: int) -> int:
        model = replace(run.config.model, embedding_dim=dim)
        smaller = replace(run, config=replace(run.config, model=model), model=model_of(dim))
        return smaller.estimate().needed

    dim = run.config.model.embedding_dim // 2
    while dim >= 1:
        if needed(dim) <= memory:
            return Suggestion("model.embedding_dim", str(dim), needed(dim), f"model.embedding_dim: {dim}")
        dim //= 2
    return None


def _more_machines(run: Run, memory: int, model_of: Callable[[int], ModelSize]) -> Suggestion | None:
    machines = max(2, 2 * run.machines)
    while machines <= MOST_MACHINES:
        config = replace(run.config, cluster=cluster_on(machines, run.config.cluster))
        needed = replace(run, config=config, machines=machines).estimate().needed
        if needed <= memory:
            text = f"{machines} machines with a worker each that stores its share: --colocated"
            return Suggestion("machines", str(machines), needed, text)
        machines *= 2
    return None


def _fewer_rows(run: Run, memory: int, model_of: Callable[[int], ModelSize]) -> Suggestion | None:
    """Find the largest share of the rows that fits, in percent."""
    total = sum(run.rows.values())
    low, high, best = 1, 99, 0
    needed = 0
    while low <= high:
        percent = (low + high) // 2
        rows = {name: count * percent // 100 for name, count in run.rows.items()}
        found = replace(run, rows=rows).estimate().needed
        if found <= memory:
            low, best, needed = percent + 1, percent, found
        else:
            high = percent - 1
    if not best:
        return None
    text = f"at most {total * best // 100:,} rows ({best} %): a limit (max_rows), fewer features, less data"
    return Suggestion("rows", str(total * best // 100), needed, text)


def _pruned(run: Run, memory: int, model_of: Callable[[int], ModelSize]) -> Suggestion | None:
    """A share to prune, where nothing is pruned yet, and nothing in the configuration speaks against it."""
    if run.format.name != run.unpruned.format.name:
        return None
    chunks = min(CHUNKS, run.shape.dim)
    for ratio in PRUNED:
        try:
            config = replace(run.config, prune=PruneConfig(ratio=str(ratio), chunks=chunks))
        except ConfigError:  # policies of tables, for instance
            return None
        needed = replace(run, config=config).estimate().needed
        if needed <= memory:
            text = f"pruning {ratio:.0%} of the values (--prune {ratio:.0%}), rows in {chunks} pieces"
            return Suggestion("prune", f"{ratio:g}", needed, text)
    return None
