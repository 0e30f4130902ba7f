"""The settings of a run that publishes what it learns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rowhaul._field_types import check_fields
from rowhaul.checkpoint.location import Url, as_place
from rowhaul.errors import ConfigError
from rowhaul.train.checkpoint_pace import Pace, pace_of

_KINDS = ("onnx", "pt2")


@dataclass(frozen=True)
class PublishConfig:
    """Where a run publishes versions of its model for servers, and how often; see docs/deltas.md.

    Args:
        to: the folder; empty: nothing is published.
        every: steps between two versions, or time, such as ``5s``; 0: at the beginning and the end only.
        dense: kinds of graphs of the dense part: onnx, pt2, or both with a comma between.
        compact_after: deltas after which they are folded into a new base, in the background.
    """

    to: str = ""
    every: int | str = "1min"
    dense: str = "onnx"
    compact_after: int = 100

    def __post_init__(self) -> None:
        check_fields(self)
        pace_of(self.every, "publish.every")  # or raises
        if isinstance(as_place(self.to), Url):
            raise ConfigError(
                f"publish.to: {self.to}: servers map rows into memory from a folder of their machine; "
                "publish to a folder, and copy it with served.json last"
            )
        for kind in self.kinds:
            if kind not in _KINDS:
                raise ConfigError(f"publish.dense must be of {' and '.join(_KINDS)}, got {self.dense!r}")
        if self.compact_after < 2:
            raise ConfigError(f"publish.compact_after must be at least 2, got {self.compact_after}")

    @property
    def is_used(self) -> bool:
        """Whether anything is published."""
        return bool(self.to)

    @property
    def path(self) -> Path:
        """The folder."""
        place = as_place(self.to)
        assert isinstance(place, Path)  # URLs are refused above
        return place

    @property
    def pace(self) -> Pace:
        """How often versions are published."""
        return pace_of(self.every, "publish.every")

    @property
    def kinds(self) -> list[str]:
        """Kinds of graphs."""
        return [one.strip() for one in self.dense.split(",")]


UNPUBLISHED = PublishConfig()
