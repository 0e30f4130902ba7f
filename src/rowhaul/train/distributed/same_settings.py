"""The settings that must be the same on all ranks."""

from __future__ import annotations

from dataclasses import replace

from rowhaul.train.config import TrainConfig


def settings_of_all(config: TrainConfig) -> dict[str, str]:
    """Return each setting as text, by its name in messages; those that hosts may choose are left out."""
    # Hosts may keep the secret at different places, and have other numbers of cores.
    common = replace(config.cluster, secret_file="", planning_threads=0)
    settings = replace(config, cluster=common).to_dict()
    monitoring = settings.pop("monitoring")  # hosts may keep their logs in different places
    settings["monitoring.explain"] = monitoring["explain"]  # but all exchange what they measure, or none
    return {f"configuration {name}": repr(value) for name, value in settings.items()}
