"""The settings of a scheduler, checked when they are made; every rank has the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError
from rowhaul.schedule.arrays import digest
from rowhaul.schedule.caches import policy_keys
from rowhaul.schedule.dispatch import make_dispatcher, text_of
from rowhaul.schedule.dispatch.task import Dispatcher, is_blind
from rowhaul.schedule.lifetimes.policy import RowPolicy
from rowhaul.schedule.sizes import RowSizes, check_prices, check_shares
from rowhaul.schedule.sync import SyncMode, make_sync
from rowhaul.schedule.topology import Topology

MAX_LOOK_AHEAD = 1000
LONGEST_TEXT = 80  # characters; longer texts are cut and get a hash


@dataclass(frozen=True)
class CacheSettings:
    """The workers' caches: how much each holds, counted in rows or in bytes, and what leaves first."""

    capacity: int | Sequence[int]  # for every worker, or one for each
    unit: Literal["rows", "bytes"] = "rows"
    policy: str = "lru"

    def __post_init__(self) -> None:
        if self.unit not in ("rows", "bytes"):
            raise ConfigError(f"a cache is measured in 'rows' or 'bytes'; got {self.unit!r}")
        policy_keys(self.policy)

    def capacities(self, num_workers: int) -> npt.NDArray[np.int64]:
        """The capacity of each worker's cache."""
        given = np.asarray(self.capacity, np.int64)
        if given.ndim and given.shape != (num_workers,):
            raise ConfigError(f"{given.size} cache capacities were given for {num_workers} workers")
        if given.size and given.min() < 0:
            raise ConfigError(f"cache capacities must not be negative; got {given.min()}")
        return np.broadcast_to(given, num_workers).copy()


@dataclass(frozen=True)
class HotRows:
    """Rows that every worker holds: their gradients are all-reduced, and they never move."""

    tables: npt.NDArray[np.int32]
    keys: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        for name, kind in (("tables", np.int32), ("keys", np.int64)):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), kind))
        if self.tables.shape != self.keys.shape or self.tables.ndim != 1:
            raise ConfigError(
                f"hot rows need one table for each key; got {self.tables.shape} and {self.keys.shape}"
            )

    def __len__(self) -> int:
        return len(self.keys)

    def without(self, others: HotRows) -> HotRows:
        """The rows that are not among the others, ordered by (table, key), each once."""
        apart = np.setdiff1d(self._pairs(), others._pairs())
        return HotRows(apart["table"], apart["key"])

    def _pairs(self) -> npt.NDArray[np.void]:
        pairs = np.empty(len(self), [("table", np.int32), ("key", np.int64)])
        pairs["table"], pairs["key"] = self.tables, self.keys
        return pairs


NO_ROWS = HotRows(np.zeros(0, np.int32), np.zeros(0, np.int64))


@dataclass(frozen=True)
class ScheduleSettings:
    """Everything that decides a schedule, besides the ids.

    Args:
        topology: workers and stores.
        sizes: bytes of a row of each table.
        prices: integer cost of a byte on each worker's link (see `link_prices`).
        cache: the workers' caches.
        dispatcher: a dispatcher, or its name: ``"random"``, ``"laia"``, ``"esd:0.5"``, ``"joint"``, ...
        sync: ``"on-demand"``, ``"full"``, ``"bounded:S"``, ``"static"`` or ``"at-home"``.
        shares: a weight per worker; ``None`` divides batches equally. 0 leaves a worker out.
        first_touch: rows never trained before are created where they are needed, without a transfer.
        admit_after: sightings before a row is trained at all, where no policies are given.
        policies: how rows are admitted and forgotten, one for each table; see `RowPolicy`.
        look_ahead: batches known beyond the one that is planned; 0 pushes rows after every iteration.
        hot: rows replicated on every worker.
        seed: of all random choices.
    """

    topology: Topology
    sizes: RowSizes
    prices: tuple[int, ...]
    cache: CacheSettings
    dispatcher: str | Dispatcher = "joint"
    sync: str = "on-demand"
    shares: tuple[int, ...] | None = None
    first_touch: bool = True
    admit_after: int = 1
    policies: tuple[RowPolicy, ...] = ()
    look_ahead: int = 1
    hot: HotRows | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_prices(self.prices, self.topology.num_workers)
        if self.shares is not None:
            check_shares(self.shares, self.topology.num_workers)
        for name in ("look_ahead", "admit_after", "seed"):
            if not isinstance(getattr(self, name), int | np.integer):
                raise ConfigError(f"{name} must be a whole number; got {getattr(self, name)!r}")
        if not 0 <= self.look_ahead <= MAX_LOOK_AHEAD:
            raise ConfigError(f"look_ahead must be 0 to {MAX_LOOK_AHEAD} batches; got {self.look_ahead}")
        if self.admit_after < 1:
            raise ConfigError(f"admit_after must be at least 1 sighting; got {self.admit_after}")
        if self.seed < 0:
            raise ConfigError(f"seed must not be negative; got {self.seed}")
        num_tables = len(self.sizes.values)
        if self.policies and (len(self.policies) != num_tables or self.admit_after > 1):
            raise ConfigError(
                f"{len(self.policies)} row policies were given for {num_tables} tables, with admit_after "
                f"{self.admit_after}: give one policy per table, and set admit_after there"
            )
        if self.hot and not 0 <= self.hot.tables.min() <= self.hot.tables.max() < num_tables:
            raise ConfigError(
                f"hot rows name tables {self.hot.tables.min()} to {self.hot.tables.max()}, "
                f"but sizes are given for {num_tables} tables (0 to {num_tables - 1})"
            )
        self.cache.capacities(self.topology.num_workers)
        dispatcher = make_dispatcher(self.dispatcher) if isinstance(self.dispatcher, str) else self.dispatcher
        if not make_sync(self.sync).plans_rows:
            self._check_at_home(dispatcher)

    def _check_at_home(self, dispatcher: Dispatcher) -> None:
        """Refuse what needs a plan of rows."""
        needs = {
            "workers that store rows themselves (colocated: true)": not self.topology.colocated,
            "a dispatcher that does not look at rows (round-robin or random)": not is_blind(dispatcher),
            "no hot rows (hot_rows: 0)": bool(self.hot),
            "tables without admission, ttl and max_rows": not all(one.keeps_all for one in self.row_policies),
        }
        wrong = [need for need, is_missing in needs.items() if is_missing]
        if wrong:
            raise ConfigError(
                f"sync: at-home plans no rows, so it needs {', and '.join(wrong)}; or choose another sync, "
                "such as on-demand"
            )

    @property
    def sync_mode(self) -> SyncMode:
        """The synchronisation in effect: without look-ahead, rows are always pushed at once."""
        mode = make_sync(self.sync)
        if self.look_ahead == 0 and mode.name == "on-demand":
            return make_sync("full")
        return mode

    @property
    def row_policies(self) -> tuple[RowPolicy, ...]:
        """The policy of each table."""
        return self.policies or (RowPolicy(int(self.admit_after)),) * len(self.sizes.values)

    def describe(self) -> dict[str, str]:
        """Every setting as a short text; schedulers whose texts are equal make equal plans of equal ids.

        An unregistered dispatcher is described by its name and class only.
        """
        topology, mode = self.topology, make_sync(self.sync)
        return {
            "num_workers": str(topology.num_workers),
            "num_stores": "beside the workers" if topology.colocated else str(topology.num_stores),
            "peer_to_peer": str(topology.peer_to_peer),
            **({"tables_per_row": str(topology.tables_per_row)} if topology.tables_per_row > 1 else {}),
            "sizes.values": _numbers_text(self.sizes.values),
            "sizes.state": _numbers_text(self.sizes.state),
            "sizes.summed": _numbers_text(self.sizes.summed),
            "prices": _numbers_text(self.prices),
            "cache.capacity": _numbers_text(self.cache.capacities(topology.num_workers)),
            "cache.unit": self.cache.unit,
            "cache.policy": self.cache.policy,
            "dispatcher": _dispatcher_text(self.dispatcher),
            "sync": f"bounded:{mode.staleness}" if mode.name == "bounded" else mode.name,
            "shares": _numbers_text(self.shares or (1,) * topology.num_workers),
            "first_touch": str(self.first_touch),
            "policies": _policies_text(self.row_policies),
            "look_ahead": str(self.look_ahead),
            "hot": "none" if self.hot is None else _rows_text(self.hot),
            "seed": str(self.seed),
        }

    def with_dispatcher(self, dispatcher: str | Dispatcher) -> ScheduleSettings:
        """The same settings with another dispatcher."""
        return replace(self, dispatcher=dispatcher)


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """What two descriptions of settings say differently, one line each: ``name: ours here, theirs there``."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return [
        f"{name}: {ours.get(name, 'unknown')} here, {theirs.get(name, 'unknown')} there" for name in names
    ]


def _numbers_text(numbers: Sequence[int] | npt.NDArray[np.int64]) -> str:
    """Numbers, runs of equal ones counted: ``64x3, 128``."""
    runs = [(number, len(list(run))) for number, run in groupby(int(number) for number in numbers)]
    return _shortened(", ".join(f"{number}x{times}" if times > 1 else str(number) for number, times in runs))


def _policies_text(policies: Sequence[RowPolicy]) -> str:
    """The policies of all tables, in order, runs of equal ones counted."""
    runs = [(text, len(list(run))) for text, run in groupby(policy.text() for policy in policies)]
    return _shortened("; ".join(f"{text} x{times}" if times > 1 else text for text, times in runs))


def _rows_text(rows: HotRows) -> str:
    """The number of distinct rows and a hash of them."""
    distinct = rows.without(NO_ROWS)
    hashed = digest("", (distinct.tables, distinct.keys)).hex()[:16]
    return f"{len(distinct)} rows, hash {hashed}" if len(distinct) else "none"


def _dispatcher_text(dispatcher: str | Dispatcher) -> str:
    """The text that makes the dispatcher, all settings included; of an unregistered one, name and class."""
    made = make_dispatcher(dispatcher) if isinstance(dispatcher, str) else dispatcher
    return text_of(made) or f"{made.name} ({type(made).__module__}.{type(made).__qualname__})"


def _shortened(text: str) -> str:
    """The text, or its beginning and a hash of it."""
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[: LONGEST_TEXT - 25]}... hash {digest(text, ()).hex()[:16]}"
