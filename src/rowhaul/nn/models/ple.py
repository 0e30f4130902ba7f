"""PLE (Tang et al., 2020): experts of each task beside shared ones, level over level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from rowhaul.nn.layers import LayerFactory
from rowhaul.nn.models.base import MLPOptions, checked_sizes
from rowhaul.nn.models.mmoe import check_count
from rowhaul.nn.models.multi_task import Experts, Mixtures, MultiTaskModel, Towers


@dataclass(frozen=True)
class PLEOptions(MLPOptions):
    """Options of `PLE`.

    Args:
        num_levels: of experts; 1 is the paper's CGC.
        num_own: experts of each task and level, MLPs with ``hidden`` layers.
        num_shared: experts of each level that all tasks share.
        tower: sizes of the hidden layers of a task's own MLP.
    """

    hidden: tuple[int, ...] = (128,)
    num_levels: int = 2
    num_own: int = 2
    num_shared: int = 2
    tower: tuple[int, ...] = (64,)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "tower", checked_sizes("tower", self.tower))
        for name in ("num_levels", "num_own", "num_shared"):
            check_count(name, getattr(self, name))


class PLE(MultiTaskModel):
    """logit_t = w_t · tower_t(x_t), with x_t of the last level; level by level

    x_t' = Σ_e softmax(G_t x_t)_e E_e over task t's own and the shared experts, and, but for the last level,
    x_s' = Σ_e softmax(G_s x_s)_e E_e over all experts. Own experts read x_t, shared ones x_s; both first x.
    """

    Options = PLEOptions

    def __init__(
        self,
        collection: nn.Module,
        num_dense: int,
        options: PLEOptions = PLEOptions(),
        seed: int = 0,
        num_tasks: int = 2,
    ) -> None:
        super().__init__(collection, num_dense, num_tasks)
        layers, inputs = LayerFactory(seed), self.num_inputs
        levels = []
        for number in range(options.num_levels):
            is_last = number == options.num_levels - 1
            levels.append(_Level(layers, options, inputs, num_tasks, is_last))
            inputs = (inputs, *options.hidden)[-1]
        self.levels = nn.ModuleList(levels)
        self.towers = Towers(layers, num_tasks, inputs, options.tower, options.dropout)

    def task_logits(self, inputs: Tensor, index: Tensor) -> Tensor:
        """Logits, samples x tasks, from embeddings and dense columns."""
        of_tasks, shared = [inputs] * self.num_tasks, inputs
        for level in self.levels:
            of_tasks, shared = level(of_tasks, shared, index)
        logits: Tensor = self.towers(of_tasks, index)
        return logits


class _Level(nn.Module):
    def __init__(
        self, layers: LayerFactory, options: PLEOptions, inputs: int, num_tasks: int, is_last: bool
    ) -> None:
        super().__init__()

        def experts(count: int) -> Experts:
            return Experts(layers, count, inputs, options.hidden, options.dropout)

        def gate(count: int) -> nn.Linear:
            return layers.linear(inputs, count, bias=False)

        self.own = nn.ModuleList(experts(options.num_own) for _ in range(num_tasks))
        self.shared = experts(options.num_shared)
        self.gates = nn.ModuleList(gate(options.num_own + options.num_shared) for _ in range(num_tasks))
        of_tasks, every = num_tasks * options.num_own, num_tasks * options.num_own + options.num_shared
        self.shared_gate = None if is_last else gate(every)
        common = range(of_tasks, every)  # own experts come first, task by task
        members: list[Sequence[int]] = [
            [*range(first, first + options.num_own), *common] for first in range(0, of_tasks, options.num_own)
        ]
        self.mixtures = Mixtures(members if is_last else [*members, range(every)])

    def forward(
        self, of_tasks: Sequence[Tensor], shared: Tensor, index: Tensor
    ) -> tuple[Sequence[Tensor], Tensor]:
        experts = [one for some, x in zip(self.own, of_tasks, strict=True) for one in some(x, index)]
        experts += self.shared(shared, index)
        gates = [gate(x) for gate, x in zip(self.gates, of_tasks, strict=True)]
        if self.shared_gate is None:
            return self.mixtures(gates, experts), shared
        *following, last = self.mixtures([*gates, self.shared_gate(shared)], experts)
        return following, last
