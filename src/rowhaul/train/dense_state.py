"""The state of a dense optimizer, the same whatever the device: what a checkpoint holds of it."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor


def make_recordable(kind: type, options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """On a card, let steps of an optimizer be recorded and replayed at any rate, where it can."""
    if device.type != "cuda" or "capturable" not in signature(kind).parameters:
        return options
    return {**options, "lr": torch.tensor(options["lr"], device=device), "capturable": True}


def portable_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's ``state_dict`` as it would be on a CPU."""
    state = optimizer.state_dict()
    groups = [{name: _plain(name, value) for name, value in group.items()} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def load_portable(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what `portable_state` returned; rates and counts go where this optimizer has them."""
    ours = optimizer.param_groups
    groups = [
        group | ({"capturable": own["capturable"]} if "capturable" in own else {})
        for group, own in zip(state["param_groups"], ours, strict=True)
    ]
    rates = [own["lr"] for own in ours]
    optimizer.load_state_dict({**state, "param_groups": groups})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(rate, Tensor):
            group["lr"] = rate.fill_(group["lr"])


def _plain(name: str, value: Any) -> Any:
    if name == "capturable":
        return False
    return value.item() if isinstance(value, Tensor) else value
