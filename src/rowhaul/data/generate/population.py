"""Who appears in which sample: sessions, users with tastes and markets, and the members of every entity.

Sessions run side by side in *lanes*. Step t of the log is one sample of every lane, in an order that
changes with the step, so that no arithmetic on sample numbers finds a session. A lane's session ends
at random, or when it gets long, and the lane goes to another user; in some lanes sessions are long. All
of it is a function of the sample number: a block of samples needs only the flags of a few steps before it.

A market has one slice of every local entity's law, each of the same weight. Which slice is a permutation
of the markets that differs from entity to entity, so all slices together are drawn as the law says, and
what a market has in common is a combination of slices: a few popular pages with part of the ads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul.data.generate.counters import bits, stream, uniforms
from rowhaul.data.generate.spec import Entity, Preset

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LONGEST_SESSION = 8  # in mean lengths
MAIN_TASTE = 0.8  # share of a user's sessions that follow the user's own taste
UNMOVED_GROUPS = 4  # the most popular members are for every taste
FASHION_SHARE = 0.08  # of an entity's draws follow what is in fashion, apart from those of taste
FASHION_PERIODS = 2  # how often fashion goes through all tastes over the real data set's size


@dataclass(frozen=True)
class Members:
    """Which member of an entity each sample has."""

    ranks: Int64s
    tastes: Int64s  # the taste that each member fits
    markets: Int64s  # the market that each member belongs to; of the most popular ones, one of several


@dataclass(frozen=True)
class Visits:
    """The hidden side of some consecutive samples."""

    rows: Int64s
    sessions: Int64s
    tastes: Int64s  # of the session
    members: dict[str, Members]


def longest_session(preset: Preset) -> int:
    """Samples after which a session ends in any case."""
    longest = max(preset.session_length, preset.long_session if preset.long_lanes else 1.0)
    return int(np.ceil(longest * LONGEST_SESSION))


def slices(preset: Preset, seed: int, name: str) -> Int64s:
    """Which slice of the law of an entity or a column each market has."""
    return np.argsort(bits(stream(seed, "slices", name), np.arange(preset.markets)), kind="stable")


class Population:
    """Draws the hidden side of any run of samples."""

    def __init__(self, preset: Preset, seed: int) -> None:
        self._preset = preset
        self._seed = seed
        self._longest = longest_session(preset)
        self._laws = {entity.name: entity.law for entity in preset.entities}
        self._market_columns = {field.entity for field in preset.ids if field.link == "market"}
        self._slices = {
            entity.name: slices(preset, seed, entity.name) for entity in preset.entities if entity.local
        }

    def visits(self, first: int, last: int) -> Visits:
        """Sessions and members of the samples ``first`` to ``last`` (exclusive)."""
        rows = np.arange(first, last)
        sessions = self._sessions(rows)
        user, *others = self._preset.entities
        users = user.law.ranks(uniforms(self._stream(user.name), sessions))
        members = {user.name: self.members_at(user.name, users)}
        tastes = np.where(
            uniforms(self._stream("session taste"), sessions) < MAIN_TASTE,
            members[user.name].tastes,
            self._any_taste("other taste", sessions),
        )
        markets = self._markets_of_users(users) if self._preset.markets > 1 else np.zeros_like(users)
        drawn: dict[str, Floats] = {}
        for entity in others:
            draws = self._draws(entity, sessions, rows)
            if entity.opposite:
                drawn[entity.name] = 1.0 - drawn[entity.opposite]
            else:
                drawn[entity.name] = self._quantiles(entity, draws, markets)
            ranks = self._members(entity, drawn[entity.name], draws, tastes)
            members[entity.name] = self.members_at(entity.name, ranks)
        return Visits(rows, sessions, tastes, members)

    def members_at(self, entity: str, ranks: Int64s) -> Members:
        """The members at these ranks, with the taste and market that users have and that others fit."""
        markets = ranks[:0]
        if entity in self._market_columns:
            markets = self._markets_of_users(ranks) if entity == "user" else self._markets_of(entity, ranks)
        if entity == "user":
            return Members(ranks, self._any_taste("user taste", ranks), markets)
        return Members(ranks, ranks % self._preset.tastes, markets)

    def _draws(self, entity: Entity, sessions: Int64s, rows: Int64s) -> Int64s:
        """The number of each sample's draw; samples with the same number have the same member."""
        if entity.per == "session" or not entity.kept:
            return sessions if entity.per == "session" else rows
        return np.where(uniforms(self._stream(entity.name, "kept"), rows) < entity.kept, sessions, rows)

    def _quantiles(self, entity: Entity, draws: Int64s, markets: Int64s) -> Floats:
        """Where in the entity's law each draw falls."""
        anywhere = uniforms(self._stream(entity.name), draws)
        if not entity.local:
            return anywhere
        local = (self._slices[entity.name][markets] + anywhere) / self._preset.markets
        return np.where(uniforms(self._stream("local"), draws) < entity.local, local, anywhere)

    def _markets_of_users(self, users: Int64s) -> Int64s:
        return (bits(self._stream("market"), users) % np.uint64(self._preset.markets)).astype(np.int64)

    def _markets_of(self, entity: str, ranks: Int64s) -> Int64s:
        """The market whose slice has the middle of each member."""
        place = (self._laws[entity].cumulative(ranks + 0.5) * self._preset.markets).astype(np.int64)
        return np.argsort(self._slices[entity])[np.minimum(place, self._preset.markets - 1)]

    def _members(self, entity: Entity, quantiles: Floats, draws: Int64s, tastes: Int64s) -> Int64s:
        """Ranks by popularity; within a group of neighbouring ranks, taste or fashion chooses the member.

        A group has one member for every taste, and they are about equally popular: moving within it
        changes who gets what, hardly how often anything is seen.
        """
        ranks = entity.law.ranks(quantiles)
        if not entity.loyalty:
            return ranks
        num_tastes = self._preset.tastes
        group = ranks - ranks % num_tastes
        movable = (group >= UNMOVED_GROUPS * num_tastes) & (group + num_tastes <= entity.law.support)
        motive = uniforms(self._stream(entity.name, "motive"), draws)
        loyal = motive < entity.loyalty
        fashionable = ~loyal & (motive < entity.loyalty + FASHION_SHARE)
        steps = FASHION_PERIODS * num_tastes
        in_fashion = draws * steps // self._preset.samples % num_tastes
        ranks = np.where(movable & loyal, group + tastes, ranks)
        return np.where(movable & fashionable, group + in_fashion, ranks)

    def _sessions(self, rows: Int64s) -> Int64s:
        """A number for each sample's session: the position of its first sample."""
        lanes = self._preset.lanes
        steps = rows // lanes
        first_step = max(0, int(steps[0]) - self._longest + 1)
        step_of = np.arange(first_step, int(steps[-1]) + 1)[:, None]
        lane_of = np.arange(lanes)
        lengths = np.where(
            lane_of < self._preset.long_lanes * lanes, self._preset.long_session, self._preset.session_length
        )
        begins = uniforms(self._stream("session end"), step_of * lanes + lane_of) < 1.0 / lengths
        phase = bits(self._stream("lane phase"), lane_of).astype(np.int64) % self._longest
        begins |= (step_of + phase) % self._longest == 0
        begun = np.maximum.accumulate(np.where(begins, step_of, 0), axis=0)
        turn = bits(self._stream("lane order"), steps)
        odd = (turn | np.uint64(1)).astype(np.int64)
        shift = (turn >> np.uint64(32)).astype(np.int64)
        lane = (rows % lanes * odd + shift) & (lanes - 1)
        sessions: Int64s = begun[steps - first_step, lane] * lanes + lane
        return sessions

    def _any_taste(self, name: str, counters: Int64s) -> Int64s:
        return (bits(self._stream(name), counters) % np.uint64(self._preset.tastes)).astype(np.int64)

    def _stream(self, *names: str) -> np.uint64:
        return stream(self._seed, "population", *names)
