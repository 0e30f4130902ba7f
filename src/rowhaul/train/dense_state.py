"""The state of a dense optimizer, the same whatever the device: what a checkpoint holds of it."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor

_OF_A_DEVICE = {"capturable": False, "fused": None}  # options that follow from the device, as on a CPU


def options_for_device(
    kind: type, options: dict[str, Any], parameters: list[torch.nn.Parameter]
) -> dict[str, Any]:
    """Add the options of an optimizer that suit where its weights are.

    Adam steps each weight in one pass, unless the options say otherwise. On a card steps become ones that can
    be recorded and replayed at any rate, where the optimizer can; in float64 it cannot: PyTorch then counts
    steps, and corrects by them, in float32.
    """
    if not parameters:
        return options
    on_card, dtype = parameters[0].is_cuda, parameters[0].dtype
    records = on_card and dtype == torch.float32 and "capturable" in signature(kind).parameters
    if issubclass(kind, torch.optim.Adam) and not {"fused", "foreach", "differentiable"} & {*options}:
        options = {**options, "fused": True} if records or not on_card else options
    if not records:
        return options
    # The fused kernel reads a rate of float32.
    rate_dtype = torch.float32 if options.get("fused") else torch.float64
    rate = torch.tensor(options["lr"], dtype=rate_dtype, device=parameters[0].device)
    return {**options, "lr": rate, "capturable": True}


def portable_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's ``state_dict`` as it would be on a CPU."""
    state = optimizer.state_dict()
    groups = [{name: _plain(name, value) for name, value in group.items()} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def load_portable(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what `portable_state` returned; rates and counts go where this optimizer has them."""
    ours = optimizer.param_groups
    groups = [
        group | {name: own[name] for name in _OF_A_DEVICE if name in own}
        for group, own in zip(state["param_groups"], ours, strict=True)
    ]
    rates = [own["lr"] for own in ours]
    optimizer.load_state_dict({**state, "param_groups": groups})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(rate, Tensor):
            group["lr"] = rate.fill_(group["lr"])


def _plain(name: str, value: Any) -> Any:
    if name in _OF_A_DEVICE:
        return _OF_A_DEVICE[name]
    return value.item() if isinstance(value, Tensor) else value
