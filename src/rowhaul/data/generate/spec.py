"""The parts of a preset: hidden entities and the columns that describe them.

Hidden *entities* (a user, a page, an ad) are drawn by popularity, once per session or once per
sample. Columns are attributes of an entity, so columns of one entity occur together. Users have a
taste; an entity with ``loyalty`` is often drawn from the part of its population that fits the taste.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rowhaul.data.generate.laws import SkewLaw
from rowhaul.data.generate.naming import Naming
from rowhaul.errors import ConfigError

Per = Literal["session", "row"]
Link = Literal["popularity", "independent", "taste", "row", "clock"]


@dataclass(frozen=True)
class Entity:
    """A hidden population.

    Args:
        name: What columns refer to; one entity of a preset is called ``user``.
        law: Popularity of its members.
        per: Whether a session keeps its member or every sample draws its own.
        loyalty: Share of the draws that follow the session's taste.
    """

    name: str
    law: SkewLaw
    per: Per
    loyalty: float = 0.0


@dataclass(frozen=True)
class IdField:
    """A column of ids.

    Args:
        name: Of the column.
        law: Popularity of its values.
        naming: What the values look like as keys and as text.
        entity: The entity it belongs to; empty for links ``row`` and ``clock``.
        link: ``popularity``: popular members of the entity have popular values (with the entity's own
            law: one value per member). ``independent``: a value per member, whatever its popularity.
            ``taste``: the value reveals the member's taste. ``row``: drawn for every sample.
            ``clock``: the value moves on every ``clock_rows`` samples.
        missing: Share of members (or samples) without a value.
        weight: Strength of its effect on the label, relative to the other columns.
        values: The most values a sample can have; more than 1 makes a column of lists.
        clock_rows: See ``link``.
    """

    name: str
    law: SkewLaw
    naming: Naming
    entity: str = ""
    link: Link = "row"
    missing: float = 0.0
    weight: float = 0.3
    values: int = 1
    clock_rows: int = 0


@dataclass(frozen=True)
class DenseField:
    """A column of numbers: log-logistic around ``median``, rounded to ``decimals``.

    Args:
        name: Of the column.
        median: Half of the numbers are smaller.
        shape: Spread in the logarithm; about 1 is heavy-tailed.
        lowest: Subtracted from all, for columns that can be a little negative.
        missing: Share of samples (or members) without a number.
        weight: Strength of its effect on the label.
        entity: The entity it is an attribute of; empty: drawn for every sample.
        decimals: Digits after the point.
        transform: What the schema asks the reader to do with it.
    """

    name: str
    median: float
    shape: float
    lowest: float = 0.0
    missing: float = 0.0
    weight: float = 0.3
    entity: str = ""
    decimals: int = 0
    transform: str = "log1p"


@dataclass(frozen=True)
class Preset:
    """A data set's shape.

    Args:
        name: The name that users give.
        samples: Size of the real data set, at which the cardinalities were published.
        label: Name of the label column.
        base_rate: Share of positive labels.
        signal: Standard deviation of the true logit; sets the Bayes AUC.
        affinity: Weight of the taste x item interaction in the logit, relative to ``weight``.
        tastes: How many tastes there are, a power of two.
        lanes: Sessions going on at a time, a power of two: consecutive samples of a session are about
            this many samples apart.
        session_length: Samples in a session, on average.
        entities: The populations; the first is ``user`` and defines the taste, the last is what is
            shown and meets it in the label.
        ids: Columns of ids, in order.
        dense: Columns of numbers, in order.
    """

    name: str
    samples: int
    label: str
    base_rate: float
    signal: float
    affinity: float
    tastes: int
    lanes: int
    session_length: float
    entities: tuple[Entity, ...]
    ids: tuple[IdField, ...]
    dense: tuple[DenseField, ...] = ()

    def __post_init__(self) -> None:
        names = [entity.name for entity in self.entities]
        if not names or names[0] != "user" or self.entities[0].per != "session":
            raise ConfigError(f"preset {self.name!r}: the first entity must be `user`, one per session")
        columns: list[IdField | DenseField] = [*self.ids, *self.dense]
        for column in columns:
            if column.entity and column.entity not in names:
                raise ConfigError(
                    f"preset {self.name!r}: column {column.name!r} belongs to entity {column.entity!r}; "
                    f"known are {', '.join(names)}"
                )
        for what, number in (("tastes", self.tastes), ("lanes", self.lanes)):
            if number < 1 or number & (number - 1):
                raise ConfigError(f"preset {self.name!r}: {what} must be a power of two, got {number}")
        if not 0 < self.base_rate < 1 or self.session_length < 1:
            raise ConfigError(
                f"preset {self.name!r}: 0 < base_rate < 1 and session_length >= 1 are needed, "
                f"got {self.base_rate} and {self.session_length}"
            )
