"""`wrap`: replace the embedding modules of an existing model by ones whose tables are rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from rowhaul._nearest import did_you_mean
from rowhaul.errors import ConfigError
from rowhaul.nn.collection import TableCollection
from rowhaul.nn.config import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from rowhaul.nn.embedding import EmbeddingBagCollection
from rowhaul.nn.exactness import SEVERAL_LOSSES
from rowhaul.nn.optimizer import RowOptimizer
from rowhaul.nn.unpooled import EmbeddingCollection
from rowhaul.nn.wrapping.row_modules import FEATURE, RowEmbedding, RowEmbeddingBag
from rowhaul.optim import RowOptimizerRule

Model = TypeVar("Model", bound=nn.Module)
_BLOCK = 1 << 16  # rows copied at a time
_DTYPES = (torch.float32, torch.float64)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_WEIGHT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def wrap(
    model: Model,
    optimizer: RowOptimizerRule | None = None,
    *,
    modules: Sequence[str] | None = None,
    seed: int = 0,
    on_unknown: str = "init",
) -> Model:
    """Replace embedding modules of a model, in place, by ones whose tables are rows; returns the model.

    ``forward`` stays as it is. Weights become the first values of the rows; a table on the ``meta`` device
    has none, and its rows are made when first seen. ``model.parameters()`` then has dense weights alone:
    `step_rows_with` lets an optimizer of those step the rows, too.

    Args:
        model: with ``nn.Embedding`` or ``nn.EmbeddingBag`` modules, in one process.
        optimizer: of the rows, such as `rowhaul.optim.Adagrad`; its state is kept with each row.
        modules: names of those to replace, as in ``model.named_modules()``; by default all.
        seed: with a table's name and a key it determines the first values of rows that have no weights.
        on_unknown: what unknown keys read in ``eval()`` mode, see `EmbeddingBagCollection`.

    Example:
        >>> model = rowhaul.wrap(model, rowhaul.optim.Adagrad(lr=0.05))
        >>> dense = torch.optim.Adam(model.parameters())
        >>> rows = rowhaul.nn.step_rows_with(dense, model)
    """
    chosen = _chosen(model, modules)
    for name, module in chosen.items():
        _check(name, module)
    _check_shared(model, chosen)
    made = {
        id(module): _replacement(name, module, optimizer, seed, on_unknown) for name, module in chosen.items()
    }
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children() leaves out what is there twice
            if id(child) in made:
                setattr(parent, name, made[id(child)])
    return model


def step_rows_with(optimizer: torch.optim.Optimizer, model: nn.Module) -> RowOptimizer:
    """Step a model's rows whenever an optimizer steps; returns what does, whose ``lr`` schedulers may change.

    For loops that others own, such as Lightning's or Accelerate's. Gradients that no step has used stay, as
    in accumulation; ``zero_grad()`` of what is returned drops them. Steps by a `torch.amp.GradScaler` are
    refused: it would leave the gradients of rows scaled. So is LBFGS, which runs backward several times.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(f"the optimizer ({type(optimizer).__name__}) {SEVERAL_LOSSES}")
    rows = RowOptimizer(model)

    def refuse_scaled(*_: Any) -> None:
        if _in_scaler():
            raise ConfigError(
                "a GradScaler unscales the gradients of this optimizer's weights alone, so rows of the "
                "wrapped model would step by gradients many times too large; use torch.autocast(device_type, "
                'dtype=torch.bfloat16) (Lightning and Accelerate: "bf16-mixed", "bf16"), which needs no '
                "scaler, or train in float32"
            )

    def step(*_: Any) -> None:
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ConfigError(
                f"rows of a wrapped model are in one process, but {torch.distributed.get_world_size()} train "
                "here, and each would learn rows of its own; use rowhaul.distribute, see docs/own-loop.md"
            )
        rows.step()

    optimizer.register_step_pre_hook(refuse_scaled)
    optimizer.register_step_post_hook(step)
    return rows


def _in_scaler() -> bool:
    """Whether a gradient scaler is what steps; it leaves no trace on an optimizer, nor on its gradients."""
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back
    return False


def _chosen(model: nn.Module, names: Sequence[str] | None) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {
        name: one for name, one in model.named_modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)
    }
    if "" in found:
        raise ConfigError(
            f"the model is itself an {type(model).__name__}, which cannot be replaced in place; make it a "
            "part of a module, or use EmbeddingCollection"
        )
    if names is None:
        if not found:
            raise ConfigError(f"{type(model).__name__} has no nn.Embedding and no nn.EmbeddingBag to replace")
        return found
    every = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        if not isinstance(every.get(name), nn.Embedding | nn.EmbeddingBag):
            kind = f"a {type(every[name]).__name__}" if name in every else "not there"
            raise ConfigError(
                f"module {name!r} is {kind}{did_you_mean(name, found)}; modules that can be replaced are "
                f"{', '.join(found)}"
            )
    return {name: every[name] for name in names}


def _check_shared(model: nn.Module, chosen: dict[str, nn.Module]) -> None:
    """Refuse weights that something else computes with: rows are no parameter."""
    weights = {id(one.weight): name for name, one in chosen.items()}
    owners = {id(one) for one in chosen.values()}
    for name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in weights and id(module) not in owners:
                raise ConfigError(
                    f"the weight of {weights[id(parameter)]!r} is also {name}.{parameter_name}; rows are not "
                    "a matrix to multiply by: leave it out (modules=...), or untie them"
                )
    if len(weights) < len(owners):
        raise ConfigError("two embedding modules share a weight; use one module in both places")


def _check(name: str, module: Any) -> None:
    wrong = None
    kind = nn.Embedding if isinstance(module, nn.Embedding) else nn.EmbeddingBag
    if is_parametrized(module):
        wrong = "a parametrization, which makes weights from others"
    elif any(getattr(module, hooks) for hooks in _HOOKS) or any(
        getattr(module.weight, hooks, None) for hooks in _WEIGHT_HOOKS
    ):
        wrong = "hooks, which nothing would call"
    elif getattr(module.forward, "__func__", None) is not kind.forward:
        wrong = f"a forward of its own ({type(module).__name__}), not that of nn.{kind.__name__}"
    elif module.max_norm is not None:
        wrong = "max_norm, which changes rows when they are read"
    elif module.scale_grad_by_freq:
        wrong = "scale_grad_by_freq"
    elif getattr(module, "mode", "sum") == "max":
        wrong = 'mode="max"; rows are pooled by sum or mean'
    elif module.weight.dtype not in _DTYPES:
        wrong = f"weights of {module.weight.dtype}; rows are float32 or float64"
    if wrong is not None:
        raise ConfigError(f"module {name!r} has {wrong}: leave it out (modules=...), or change it")


def _replacement(
    name: str, module: Any, optimizer: RowOptimizerRule | None, seed: int, on_unknown: str
) -> nn.Module:
    weight: torch.Tensor = module.weight
    table: dict[str, Any] = {
        "num_embeddings": module.num_embeddings,
        "embedding_dim": module.embedding_dim,
        "name": name,
        "data_type": weight.dtype,
        "feature_names": [FEATURE],
        "frozen": not weight.requires_grad,
    }
    how: dict[str, Any] = {"optimizer": optimizer, "seed": seed, "on_unknown": on_unknown}
    device = None if weight.is_meta else weight.device
    if isinstance(module, nn.Embedding):
        rows: TableCollection = EmbeddingCollection([EmbeddingConfig(**table)], device=device, **how)
    else:
        is_sum = module.mode == "sum"
        config = EmbeddingBagConfig(**table, pooling=PoolingType.SUM if is_sum else PoolingType.MEAN)
        rows = EmbeddingBagCollection([config], is_weighted=is_sum, device=device, **how)
    if not weight.is_meta:
        _copy_rows(rows, name, weight.detach())
    made: nn.Module
    if isinstance(rows, EmbeddingCollection):
        made = RowEmbedding(rows, _padding(module))
    else:
        assert isinstance(rows, EmbeddingBagCollection)
        made = RowEmbeddingBag(rows, module.include_last_offset, module.padding_idx)
    return made.train(module.training)


def _padding(module: nn.Embedding) -> tuple[int, torch.Tensor] | None:
    if module.padding_idx is None:
        return None
    if module.weight.is_meta:
        return module.padding_idx, torch.zeros(module.embedding_dim, dtype=module.weight.dtype)
    return module.padding_idx, module.weight.detach()[module.padding_idx].clone()


def _copy_rows(rows: TableCollection, table: str, weight: torch.Tensor) -> None:
    dim, rule = weight.shape[1], rows.optimizer
    for first in range(0, len(weight), _BLOCK):
        values = weight[first : first + _BLOCK].cpu().numpy()
        records = np.full((len(values), dim + rule.state_width(dim)), rule.initial_state, values.dtype)
        records[:, :dim] = values
        rows.load_rows(table, np.arange(first, first + len(values)), records)
