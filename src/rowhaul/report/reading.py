"""Reads what a run has left in its folder: settings, log, and what `--explain` has measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rowhaul._yaml import load_yaml
from rowhaul.errors import ConfigError
from rowhaul.explain.explain_file import EXPLAIN_FILE, Line, read_lines
from rowhaul.explain.findings import Findings

_CONFIG_FILE, _METRICS_FILE, _LOCK_FILE = "config.yaml", "metrics.jsonl", ".lock"


@dataclass(frozen=True)
class RunRecord:
    """What is known of a run; any part may be missing."""

    folder: Path
    config: dict[str, Any]
    metrics: list[Line]
    explained: list[Line]
    is_open: bool  # a process works in the folder, or was killed while it did

    def lines(self, kind: str) -> list[Line]:
        """Return the log's lines of a kind."""
        return [line for line in self.metrics if line["kind"] == kind]

    @cached_property
    def detail(self) -> Line | None:
        """The latest line that says everything since its process began to train."""
        return self._latest("detail")

    @cached_property
    def intervals(self) -> list[Line]:
        """What `--explain` has measured, interval by interval."""
        return [line for line in self.explained if line["kind"] == "interval"]

    @cached_property
    def latest_intervals(self) -> list[Line]:
        """Those of the process that the findings are of: a run may be resumed on another number of ranks."""
        if self.findings is None:
            return self.intervals
        first, ranks = self.findings.detail["first_step"], len(self.findings.roles)
        return [one for one in self.intervals if one["step"] > first and len(one["ranks"]) == ranks]

    @cached_property
    def timeline(self) -> Line | None:
        """The latest timeline."""
        return self._latest("timeline")

    @cached_property
    def findings(self) -> Findings | None:
        """What the detail says; None of a run in one process, or without `--explain`."""
        detail = self.detail
        return Findings(detail) if detail is not None and "num_workers" in detail else None

    def _latest(self, kind: str) -> Line | None:
        return next((line for line in reversed(self.explained) if line["kind"] == kind), None)

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return max((int(line["step"]) for line in (*self.metrics, *self.explained)), default=0)

    @property
    def is_cluster(self) -> bool:
        """Whether several ranks trained."""
        return bool(self.lines("cluster")) or self.findings is not None

    @property
    def is_finished(self) -> bool:
        """Whether the run has come to an end, as far as its folder shows."""
        if self.detail is not None and not self.is_open and self.explained_step == self.step:
            return bool(self.detail["final"])
        return not self.is_open

    @property
    def explained_step(self) -> int:
        """The last step that was explained: of a run resumed without `--explain` not the last of all."""
        return max((int(line["step"]) for line in self.explained), default=0)


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder.

    Raises:
        ConfigError: there is no run, or it has logged nothing yet.
    """
    if not folder.is_dir():
        what = "is a file, not the folder of a run" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}; give the --out of a `rowhaul train`")
    if not (folder / _CONFIG_FILE).is_file() and not (folder / _METRICS_FILE).is_file():
        raise ConfigError(
            f"{folder} holds no run: it has neither {_CONFIG_FILE} nor {_METRICS_FILE}; give the --out of a "
            "`rowhaul train`"
        )
    metrics = read_lines(folder / _METRICS_FILE)
    explained = read_lines(folder / EXPLAIN_FILE)
    if not metrics and not explained:
        raise ConfigError(
            f"{folder} has logged nothing yet: a line comes every log_every steps; try again after the "
            "first, or train with --set log_every=1"
        )
    return RunRecord(folder, _config(folder), metrics, explained, (folder / _LOCK_FILE).exists())


def _config(folder: Path) -> dict[str, Any]:
    path = folder / _CONFIG_FILE
    try:
        found = load_yaml(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    return found if isinstance(found, dict) else {}
