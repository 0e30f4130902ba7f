"""The state of a dense optimizer, the same whatever the device: what a checkpoint holds of it."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor

_OF_A_DEVICE = {"capturable": False, "fused": None}  # options that follow from the device, as on a CPU


def make_recordable(
    kind: type, options: dict[str, Any], parameters: list[torch.nn.Parameter]
) -> dict[str, Any]:
    """Make steps on a card ones that can be recorded and replayed at any rate, where the optimizer can.

    In float64 it cannot: PyTorch then counts steps, and corrects by them, in float32. Adam steps all weights
    in one kernel, unless the options say otherwise.
    """
    can = "capturable" in signature(kind).parameters
    if not can or not parameters or not parameters[0].is_cuda or parameters[0].dtype != torch.float32:
        return options
    fuses = issubclass(kind, torch.optim.Adam) and not {"fused", "foreach", "differentiable"} & {*options}
    # The fused kernel reads a rate of float32.
    dtype = torch.float32 if fuses or options.get("fused") else torch.float64
    rate = torch.tensor(options["lr"], dtype=dtype, device=parameters[0].device)
    return {**options, "lr": rate, "capturable": True, **({"fused": True} if fuses else {})}


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
