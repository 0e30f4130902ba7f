"""MMoE (Ma et al., 2018): shared experts, mixed by a gate for each task."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from rowhaul.errors import ConfigError
from rowhaul.nn.layers import LayerFactory
from rowhaul.nn.models.base import MLPOptions, checked_sizes
from rowhaul.nn.models.multi_task import Experts, Mixtures, MultiTaskModel, Towers


@dataclass(frozen=True)
class MMoEOptions(MLPOptions):
    """Options of `MMoE`.

    Args:
        num_experts: MLPs with ``hidden`` layers, which all tasks share.
        tower: sizes of the hidden layers of a task's own MLP.
    """

    num_experts: int = 4
    tower: tuple[int, ...] = (64,)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "tower", checked_sizes("tower", self.tower))
        check_count("num_experts", self.num_experts)


def check_count(name: str, given: int) -> None:
    """Refuse what is no number of things."""
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ConfigError(f"{name} must be at least 1, got {given!r}")


class MMoE(MultiTaskModel):
    """logit_t = w_t · tower_t(Σ_e softmax(G_t x)_e expert_e(x)), x = [embeddings, dense]."""

    Options = MMoEOptions

    def __init__(
        self,
        collection: nn.Module,
        num_dense: int,
        options: MMoEOptions = MMoEOptions(),
        seed: int = 0,
        num_tasks: int = 2,
    ) -> None:
        super().__init__(collection, num_dense, num_tasks)
        layers, inputs = LayerFactory(seed), self.num_inputs
        self.experts = Experts(layers, options.num_experts, inputs, options.hidden, options.dropout)
        self.gates = nn.ModuleList(
            layers.linear(inputs, options.num_experts, bias=False) for _ in range(num_tasks)
        )
        self.mixtures = Mixtures([range(options.num_experts)] * num_tasks)
        outputs = (inputs, *options.hidden)[-1]
        self.towers = Towers(layers, num_tasks, outputs, options.tower, options.dropout)

    def task_logits(self, inputs: Tensor, index: Tensor) -> Tensor:
        """Logits, samples x tasks, from embeddings and dense columns."""
        mixed = self.mixtures([gate(inputs) for gate in self.gates], self.experts(inputs, index))
        logits: Tensor = self.towers(mixed, index)
        return logits
