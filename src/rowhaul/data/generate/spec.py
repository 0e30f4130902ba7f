"""The parts of a preset: hidden entities and the columns that describe them.

Hidden *entities* (a user, a page, an ad) are drawn by popularity, once per session or once per
sample. Columns are attributes of an entity, so columns of one entity occur together. Users have a
taste; an entity with ``loyalty`` is often drawn from the part of its population that fits the taste.
Users also live in a market (a country and a language, say); an entity that is ``local`` is mostly drawn
from the market's own part of its population, so whole combinations of ids come back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rowhaul.data.generate.laws import SkewLaw
from rowhaul.data.generate.naming import Naming
from rowhaul.errors import ConfigError

Per = Literal["session", "row"]
Link = Literal["popularity", "independent", "taste", "market", "row", "clock"]


@dataclass(frozen=True)
class Entity:
    """A hidden population.

    Args:
        name: What columns refer to; one entity of a preset is called ``user``.
        law: Popularity of its members.
        per: Whether a session keeps its member or every sample draws its own.
        loyalty: Share of the draws that follow the session's taste.
        local: Share of the draws that are made among the members of the session's market.
        kept: Share of a session's samples that show the session's own member, for ``per`` sample.
        opposite: An entity before this one that is drawn from the other end of its law: where one has
            a common member the other has a rare one, as a site and an app of which a sample has one.
    """

    name: str
    law: SkewLaw
    per: Per
    loyalty: float = 0.0
    local: float = 0.0
    kept: float = 0.0
    opposite: str = ""


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
            ``taste``: the value reveals the member's taste. ``market``: it reveals the market.
            ``row``: drawn for every sample. ``clock``: the value moves on every ``clock_rows`` samples.
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
        markets: How many markets there are, all of the same size.
        long_lanes: Share of the lanes whose sessions are long.
        long_session: Samples in a long session, on average.
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
    markets: int = 1
    long_lanes: float = 0.0
    long_session: float = 1.0

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
        self._check_links()
        for what, number in (("tastes", self.tastes), ("lanes", self.lanes)):
            if number < 1 or number & (number - 1):
                raise ConfigError(f"preset {self.name!r}: {what} must be a power of two, got {number}")
        if not 0 < self.base_rate < 1 or self.session_length < 1:
            raise ConfigError(
                f"preset {self.name!r}: 0 < base_rate < 1 and session_length >= 1 are needed, "
                f"got {self.base_rate} and {self.session_length}"
            )
        if self.markets < 1 or not 0 <= self.long_lanes <= 1 or self.long_session < 1:
            raise ConfigError(
                f"preset {self.name!r}: markets >= 1, 0 <= long_lanes <= 1 and long_session >= 1 are needed, "
                f"got {self.markets}, {self.long_lanes} and {self.long_session}"
            )

    def _check_links(self) -> None:
        with_market = {"user", *(entity.name for entity in self.entities if entity.local)}
        for field in self.ids:
            if field.link == "market" and field.entity not in with_market:
                raise ConfigError(
                    f"preset {self.name!r}: column {field.name!r} reveals the market of entity "
                    f"{field.entity!r}, which must be `user` or local"
                )
        known = ["user"]
        for entity in self.entities[1:]:
            if entity.opposite and entity.opposite not in known[1:]:
                raise ConfigError(
                    f"preset {self.name!r}: entity {entity.name!r} is opposite {entity.opposite!r}, "
                    f"which must be an entity between `user` and it"
                )
            known.append(entity.name)
