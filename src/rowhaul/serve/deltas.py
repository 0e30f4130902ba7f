"""Published changes of a served model: which there are, and opening one.

::

    served/
      served.json                the base, and under ``published`` the deltas that follow it, in order; last
      base-000000000/rows.bin    as in `rowhaul.serve.folder`
      delta-000000001/
        delta.json               from which version to which; step, files with checksums; written after them
        rows-r0000.bin           changed rows and deleted keys, in the format of `rowhaul.serve.row_file`;
                                 of a cluster one for each rank that has some
        dense.onnx               the graph with its new weights

A version is named ``CHAIN.NUMBER``; a delta applies to the version in its ``from`` and to no other. A new
base takes the place of an old one and of the deltas up to its version. Everything is complete before
``served.json`` names it, which is replaced in one step, so that a reader sees all of a change or nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rowhaul._manifest import checksum_agrees
from rowhaul.errors import CheckpointError
from rowhaul.serve.files import file_entry, inside
from rowhaul.serve.row_file import RowFile

DELTA_FILE = "delta.json"
DELTA_FORMAT, DELTA_VERSION = "rowhaul-delta", 1
_INSTEAD = "the model before it stays in use"


@dataclass(frozen=True)
class Moment:
    """How far training had come when a version was published.

    Args:
        step: training steps.
        samples: samples learned from.
        published_at: seconds since 1970.
        event_time: of the newest event learned from, in seconds since 1970, where the stream knows it.
    """

    step: int
    samples: int
    published_at: float
    event_time: float | None = None

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Moment:
        """Read what `entry` returned."""
        event = entry.get("event_time")
        return cls(
            int(entry["step"]),
            int(entry["samples"]),
            float(entry["published_at"]),
            None if event is None else float(event),
        )

    def entry(self) -> dict[str, Any]:
        """Return it as a part of a manifest."""
        return asdict(self)


@dataclass(frozen=True)
class DeltaName:
    """A delta as ``served.json`` names it; ``base`` is the version that it applies to."""

    folder: str
    base: str
    to: str
    step: int
    bytes: int = 0  # of its files

    def entry(self) -> dict[str, Any]:
        """Return it as a part of a manifest."""
        names = {"folder": self.folder, "from": self.base, "to": self.to}
        return {**names, "step": self.step, "bytes": self.bytes}

    def check_follows(self, version: str, folder: Path) -> None:
        """Refuse a delta that does not apply to a version.

        Raises:
            CheckpointError: it names the gap.
        """
        if self.base != version:
            raise CheckpointError(
                f"{folder}: there is a gap before {self.folder}, which applies to version {self.base}, but "
                f"follows {version}; {_INSTEAD}"
            )


@dataclass(frozen=True)
class Published:
    """What ``served.json`` says of versions.

    Args:
        run: the run that publishes here.
        version: of the base.
        moment: of the base.
        deltas: that follow it.
    """

    run: str
    version: str
    moment: Moment
    deltas: tuple[DeltaName, ...] = ()

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Published:
        """Read what `entry` returned; raises `KeyError`, `TypeError` or `ValueError` on anything else."""
        deltas = [
            DeltaName(
                inside(one["folder"]), str(one["from"]), str(one["to"]), int(one["step"]), int(one["bytes"])
            )
            for one in entry["deltas"]
        ]
        return cls(str(entry["run"]), str(entry["version"]), Moment.read(entry), tuple(deltas))

    def entry(self) -> dict[str, Any]:
        """Return it as a part of a manifest."""
        deltas = [one.entry() for one in self.deltas]
        return {"run": self.run, "version": self.version, **self.moment.entry(), "deltas": deltas}

    @property
    def newest(self) -> str:
        """The newest version."""
        return self.deltas[-1].to if self.deltas else self.version

    @property
    def newest_step(self) -> int:
        """Training steps behind the newest version."""
        return self.deltas[-1].step if self.deltas else self.moment.step

    def position(self, version: str) -> int:
        """Count the deltas that lead to a version; -1: none do."""
        names = [self.version, *(one.to for one in self.deltas)]
        return names.index(version) if version in names else -1

    def after(self, version: str) -> tuple[DeltaName, ...] | None:
        """Return the deltas after a version; None where only a new base leads on from it."""
        place = self.position(version)
        return self.deltas[place:] if place >= 0 else None


@dataclass(frozen=True)
class Delta:
    """An open delta, its files compared with their checksums."""

    name: DeltaName
    moment: Moment
    schema: str  # checksum of the schema
    key_kinds: dict[str, str]
    rows: list[RowFile]
    dense: dict[str, Path] = field(default_factory=dict)  # graphs by kind

    @classmethod
    def open(cls, folder: Path, name: DeltaName) -> Delta:
        """Open a delta of a served folder.

        Raises:
            CheckpointError: it is missing, cut off, damaged, or applies to another version.
        """
        place = folder / name.folder
        about = read_delta(place)
        try:
            there = str(about["from"]), str(about["to"])
            moment, schema = Moment.read(about), str(about["schema"])
            kinds = {str(key): str(kind) for key, kind in about["key_kinds"].items()}
            rows = [(file_entry(one), str(one["header"])) for one in about["rows"]]
            dense = {kind: file_entry(one) for kind, one in about["dense"].items()}
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{place / DELTA_FILE} is damaged: {type(error).__name__} {error}; {_INSTEAD}"
            ) from None
        if there != (name.base, name.to):
            raise CheckpointError(
                f"{place} leads from version {there[0]} to {there[1]}, but is needed from {name.base} to "
                f"{name.to}; {_INSTEAD}"
            )
        opened = [RowFile(one.path(place), header) for one, header in rows]
        return cls(
            name, moment, schema, kinds, opened, {kind: one.path(place) for kind, one in dense.items()}
        )


def read_delta(place: Path) -> dict[str, Any]:
    """Read the manifest of a delta.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = place / DELTA_FILE
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is missing; {_INSTEAD}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}; {_INSTEAD}") from None
    if not isinstance(about, dict) or about.get("format") != DELTA_FORMAT:
        raise CheckpointError(f"{path} is no manifest of a delta; {_INSTEAD}")
    if about.get("version") != DELTA_VERSION:
        raise CheckpointError(
            f"{path}: version {about.get('version')!r}, but this Rowhaul reads version {DELTA_VERSION}; "
            f"{_INSTEAD}"
        )
    if not checksum_agrees(about):
        raise CheckpointError(f"{path} is damaged: its checksum differs; {_INSTEAD}")
    return about
