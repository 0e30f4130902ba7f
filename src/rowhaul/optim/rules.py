"""Row optimizers with stated semantics.

All of them are *lazy*: a step moves only the rows that the batch touched. Precisely, for a row
touched in iteration ``t``, with ``g`` the sum of its gradients over the global batch:

* its step uses the learning rate and the step number of iteration ``t``. A row that was not seen for
  a while does not catch up on the steps, the momentum or the schedule that it missed;
* ``weight_decay`` adds ``weight_decay * w`` to ``g`` in those steps only, so a row that is never
  seen is never decayed;
* a row seen twice in a batch takes one step with the summed gradient.

For rows that every batch touches this is what ``torch.optim`` does; `Adam` is `torch.optim.SparseAdam`,
`Adagrad` is `torch.optim.Adagrad` on sparse gradients, `RowwiseAdagrad` is the row-wise
variant common in recommendation (one accumulator a row, fed with the mean of the squares).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError
from rowhaul.optim import step_kernels as kernels


class RecordMemory(Protocol):
    """Where records are: ``2**shift`` of them, each of ``width`` elements, at each of ``addresses``."""

    addresses: npt.NDArray[np.int64]
    shift: int
    width: int


_OF_WHOLE_ROWS: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class RowOptimizerRule(ABC):
    """What a row's record holds beside its values, and how a step changes both."""

    lr: float
    weight_decay: float = 0.0

    name: ClassVar[str]
    kernel: ClassVar[Any]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or not np.isfinite(value) or value < 0:
                raise ConfigError(f"{self.name}: {field.name} must be a number of at least 0, got {value!r}")

    @abstractmethod
    def state_width(self, dim: int) -> int:
        """Elements of state in the record of a row of ``dim`` values."""

    @property
    def initial_state(self) -> float:
        """What every element of a new row's state starts as."""
        return 0.0

    @abstractmethod
    def settings(self, lr: float, number: int) -> tuple[float, ...]:
        """The scalars of step ``number`` (counted from 1) at rate ``lr``, as the kernel takes them."""

    def step(
        self,
        memory: RecordMemory,
        records: npt.NDArray[np.int64],
        gradients: npt.NDArray[Any],
        lr: float,
        number: int,
    ) -> None:
        """Move the given records, all different, by one step; a row of ``gradients`` each."""
        self.step_parts(memory, records, gradients, _OF_WHOLE_ROWS, gradients.shape[1], lr, number)

    def step_parts(
        self,
        memory: RecordMemory,
        records: npt.NDArray[np.int64],
        gradients: npt.NDArray[Any],
        firsts: npt.NDArray[np.int64],
        dim: int,
        lr: float,
        number: int,
    ) -> None:
        """The same for records of ``dim`` values whose gradients begin at ``firsts`` among ``gradients``."""
        gradients = np.ascontiguousarray(gradients)
        settings = np.array(self.settings(lr, number), dtype=gradients.dtype)
        type(self).kernel(
            memory.addresses, memory.shift, memory.width, records, gradients, firsts, dim, settings
        )


@dataclass(frozen=True)
class SGD(RowOptimizerRule):
    """``w -= lr * g``. No state."""

    name = "sgd"
    kernel = kernels.sgd_step

    def state_width(self, dim: int) -> int:
        """None."""
        return 0

    def settings(self, lr: float, number: int) -> tuple[float, ...]:
        """Rate and decay."""
        return lr, self.weight_decay


@dataclass(frozen=True)
class Adagrad(RowOptimizerRule):
    """``s += g²``, then ``w -= lr * g / (sqrt(s) + eps)``. State: ``s``, as wide as the row."""

    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_eps(self)

    name = "adagrad"
    kernel = kernels.adagrad_step

    def state_width(self, dim: int) -> int:
        """A sum of squares for each value."""
        return dim

    @property
    def initial_state(self) -> float:
        """The accumulator's first value."""
        return self.initial_accumulator_value

    def settings(self, lr: float, number: int) -> tuple[float, ...]:
        """Rate, decay and eps."""
        return lr, self.weight_decay, self.eps


@dataclass(frozen=True)
class RowwiseAdagrad(Adagrad):
    """``s += mean(g²)``, then ``w -= lr * g / (sqrt(s) + eps)``. State: ``s``, one number a row."""

    eps: float = 1e-8

    name = "rowwise_adagrad"
    kernel = kernels.rowwise_adagrad_step

    def state_width(self, dim: int) -> int:
        """One sum for the whole row."""
        return 1


@dataclass(frozen=True)
class Adam(RowOptimizerRule):
    """Adam on the touched rows, bias-corrected by the global step number. State: both moments."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    name = "adam"
    kernel = kernels.adam_step

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_eps(self)
        if np.float32(max(self.beta1, self.beta2)) >= 1:  # the moments would stay zero
            raise ConfigError(
                f"adam: beta1 and beta2 must be below 1 in float32, got {self.beta1} and {self.beta2}; "
                "use 0.9999999 at most"
            )

    def state_width(self, dim: int) -> int:
        """Two moments for each value."""
        return 2 * dim

    def settings(self, lr: float, number: int) -> tuple[float, ...]:
        """Rate with both corrections folded in, decay, eps and the betas."""
        corrected = lr * (1 - self.beta2**number) ** 0.5 / (1 - self.beta1**number)
        return corrected, self.weight_decay, self.eps, self.beta1, self.beta2


def _check_eps(rule: Adagrad | Adam) -> None:
    if np.float32(rule.eps) <= 0:
        raise ConfigError(
            f"{rule.name}: eps must be above 0 in float32, got {rule.eps}: a zero gradient would divide by it"
        )


ROW_OPTIMIZERS: dict[str, type[RowOptimizerRule]] = {
    rule.name: rule for rule in (SGD, Adagrad, RowwiseAdagrad, Adam)
}


def row_optimizer(name: str, **settings: float) -> RowOptimizerRule:
    """The rule called ``name``, e.g. ``row_optimizer("adagrad", lr=0.05)``."""
    if name not in ROW_OPTIMIZERS:
        raise ConfigError(f"unknown row optimizer {name!r}; known are {', '.join(ROW_OPTIMIZERS)}")
    rule = ROW_OPTIMIZERS[name]
    known = [field.name for field in fields(rule)]
    for setting in settings:
        if setting not in known:
            raise ConfigError(f"{name}: unknown setting {setting!r}; known are {', '.join(known)}")
    return rule(**settings)
