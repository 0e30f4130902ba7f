"""Who appears in which sample: sessions, users with tastes, and the members of every entity.

Sessions run side by side in *lanes*. Step t of the log is one sample of every lane, in an order that
changes with the step, so that no arithmetic on sample numbers finds a session. A lane's session ends
at random, or when it gets long, and the lane goes to another user. All of it is a function of the
sample number: a block of samples needs only the flags of a few steps before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul.data.generate.counters import bits, stream, uniforms
from rowhaul.data.generate.spec import Entity, Preset

Int64s = npt.NDArray[np.int64]

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


@dataclass(frozen=True)
class Visits:
    """The hidden side of some consecutive samples."""

    rows: Int64s
    sessions: Int64s
    tastes: Int64s  # of the session
    members: dict[str, Members]


def longest_session(preset: Preset) -> int:
    """Samples after which a session ends in any case."""
    return int(np.ceil(preset.session_length * LONGEST_SESSION))


class Population:
    """Draws the hidden side of any run of samples."""

    def __init__(self, preset: Preset, seed: int) -> None:
        self._preset = preset
        self._seed = seed
        self._longest = longest_session(preset)

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
        for entity in others:
            ranks = self._members(entity, sessions if entity.per == "session" else rows, tastes)
            members[entity.name] = self.members_at(entity.name, ranks)
        return Visits(rows, sessions, tastes, members)

    def members_at(self, entity: str, ranks: Int64s) -> Members:
        """The members at these ranks, with the taste that users have and that others fit."""
        if entity == "user":
            return Members(ranks, self._any_taste("user taste", ranks))
        return Members(ranks, ranks % self._preset.tastes)

    def _members(self, entity: Entity, draws: Int64s, tastes: Int64s) -> Int64s:
        """Ranks by popularity; within a group of neighbouring ranks, taste or fashion chooses the member.

        A group has one member for every taste, and they are about equally popular: moving within it
        changes who gets what, hardly how often anything is seen.
        """
        ranks = entity.law.ranks(uniforms(self._stream(entity.name), draws))
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
        begins = (
            uniforms(self._stream("session end"), step_of * lanes + lane_of)
            < 1.0 / self._preset.session_length
        )
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
