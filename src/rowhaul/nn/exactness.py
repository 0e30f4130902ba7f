"""What distributed training refuses, because it could not equal one process.

Rows and dense gradients are exact by construction. What remains is in the user's model: layers whose result
depends on which samples a worker happens to have, or on a worker's own random numbers. They are refused
before training, all at once, each with the reason and with what to use instead.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from rowhaul.errors import ConfigError
from rowhaul.nn.batch_norm import BatchNorm1d
from rowhaul.nn.optimizer import RowOptimizer

_SAMPLE_DROPOUT = "rowhaul.nn.SampleDropout(p, seed, layer)(x, batch.index)"
SEVERAL_LOSSES = "needs the loss of a batch several times a step, while its rows are there once; use another"
_MAX_NAMES = 3  # of layers with the same trouble, in a message


def check_trainable(model: nn.Module, dense_optimizer: torch.optim.Optimizer | None = None) -> None:
    """Raise a `ConfigError` that names whatever of a model keeps several workers from equalling one process.

    Layers are looked at, not code: a ``forward`` that calls ``torch.nn.functional.dropout`` is not noticed.
    """
    troubles: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        trouble = _trouble_of(module)
        if trouble is not None:
            named = f"{type(module).__module__.partition('.')[0]}'s {type(module).__name__}"
            troubles.setdefault(f"({named}) {trouble}", []).append(name or "the model itself")
    lines = [f"{_listed(names)} {trouble}" for trouble, names in troubles.items()]
    if dense_optimizer is not None:
        trouble = _trouble_of_optimizer(model, dense_optimizer)
        lines += (
            [] if trouble is None else [f"the dense optimizer ({type(dense_optimizer).__name__}) {trouble}"]
        )
    if lines:
        raise ConfigError(
            f"{type(model).__name__} would not train on several workers as in one process:\n"
            + "\n".join(f"  - {line}" for line in lines)
        )


def refuse_clipping(setting: str = "clipping by the global norm") -> NoReturn:
    """Refuse to clip by a norm that goes over rows; ``setting`` is what asked for it."""
    raise ConfigError(
        f"{setting} cannot be exact over embedding rows: their norm needs every row's gradient in one place "
        "before any row may step, while rows that several workers trained step later, when they are next "
        "needed. Clip the dense gradients alone, after training.step() has summed them: "
        "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm); for the rows use adagrad, "
        "rowwise_adagrad or adam, whose steps do not grow with the gradient"
    )


def refuse_scaler(setting: str = "GradScaler") -> NoReturn:
    """Refuse to scale the loss by something that may skip a step; ``setting`` is what asked for it."""
    raise ConfigError(
        f"{setting} cannot be exact: it decides after backward, from the gradients one worker has, whether a "
        "step is skipped, while other workers may step, and rows have stepped by then, by scaled gradients. "
        "Use torch.autocast(device_type, dtype=torch.bfloat16), which needs no scaler, or train in float32"
    )


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _trouble_of(module: nn.Module) -> str | None:
    """The reason why a layer is refused, and what to use instead; children are asked for themselves."""
    for find in (_trouble_of_wrapper, _trouble_of_normalisation, _trouble_of_randomness, _trouble_of_table):
        trouble = find(module)
        if trouble is not None:
            return trouble
    return None


def _trouble_of_wrapper(module: nn.Module) -> str | None:
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return (
            "averages gradients by itself, and over equal parts; training.step() sums them: use the module "
            "inside it"
        )
    if any(is_lazy(one) for one in module.parameters(recurse=False)):
        return (
            "has no weights yet, and would draw them from each worker's own generator; run one batch through "
            "the model first, after torch.manual_seed, or give the sizes"
        )
    return None


def _trouble_of_normalisation(module: nn.Module) -> str | None:
    if isinstance(module, BatchNorm1d):
        if module.track_running_stats:
            return None
        return (
            "would evaluate by the samples that each worker has at hand; use "
            "rowhaul.nn.BatchNorm1d(..., track_running_stats=True)"
        )
    if isinstance(module, nn.BatchNorm1d):
        return (
            "normalises by the samples of one worker; use rowhaul.nn.BatchNorm1d, or "
            "rowhaul.nn.convert_batch_norm(model) if it is torch's own class"
        )
    if isinstance(module, nn.SyncBatchNorm):
        return (
            "sums over a process group of its own, in no fixed order, and needs a GPU and a sample on every "
            "worker; use rowhaul.nn.BatchNorm1d"
        )
    if isinstance(module, _BatchNorm):
        return (
            "normalises by the samples of one worker; use rowhaul.nn.BatchNorm1d with the places in one "
            "axis: norm(x.flatten(2)).view_as(x)"
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return "averages statistics over the samples of one worker; use track_running_stats=False"
    return None


def _trouble_of_randomness(module: nn.Module) -> str | None:
    if isinstance(module, _DropoutNd) and module.p > 0:
        return f"drops by each worker's own random numbers; use {_SAMPLE_DROPOUT}"
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0:
        return (
            f"drops by each worker's own random numbers; use dropout=0, and outside of it {_SAMPLE_DROPOUT}"
        )
    if isinstance(module, nn.RReLU) and module.lower < module.upper:
        return "draws slopes from each worker's own random numbers; use torch.nn.LeakyReLU or PReLU"
    if isinstance(module, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return "draws regions from each worker's own random numbers; use torch.nn.MaxPool2d or MaxPool3d"
    return None


def _trouble_of_table(module: nn.Module) -> str | None:
    """Tables outside the collection are dense parameters: right, if their gradients are dense sums."""
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return None
    if module.sparse:
        return (
            "has sparse gradients, which are not summed over the workers; put the table into the "
            "EmbeddingBagCollection or, if it is small, use sparse=False"
        )
    if module.max_norm is not None:
        return (
            "rescales, in each worker's copy, the rows of that worker's samples (max_norm), so that copies "
            "differ; use max_norm=None"
        )
    if module.scale_grad_by_freq:
        return (
            "divides gradients by how often an id occurs among one worker's samples (scale_grad_by_freq); "
            "use scale_grad_by_freq=False"
        )
    return None


def _trouble_of_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    if isinstance(optimizer, RowOptimizer):
        return "steps rows, which training.step() does; give the optimizer of model.parameters()"
    if isinstance(optimizer, torch.optim.LBFGS):
        return SEVERAL_LOSSES
    if isinstance(optimizer, torch.optim.SparseAdam):
        return "needs sparse gradients, while summed dense gradients are dense; use torch.optim.Adam"
    known = {id(one) for one in model.parameters()}
    held = [one for group in optimizer.param_groups for one in group["params"]]
    foreign = [tuple(one.shape) for one in held if id(one) not in known]
    if foreign:
        return (
            f"has {len(foreign)} of {len(held)} parameters that are not the model's (the first of shape "
            f"{foreign[0]}); their gradients would not be summed over the workers: make them part of "
            "the model"
        )
    return None
