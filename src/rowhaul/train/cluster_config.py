"""The settings of distributed training: ranks, dispatch, caches, links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rowhaul._field_types import check_fields
from rowhaul._quantities import parse_bytes, parse_number
from rowhaul.errors import ConfigError
from rowhaul.schedule import (
    CacheSettings,
    HotRows,
    RowPolicy,
    RowSizes,
    ScheduleSettings,
    Topology,
    link_prices,
)
from rowhaul.schedule.caches import policy_keys
from rowhaul.schedule.dispatch import make_dispatcher
from rowhaul.schedule.dispatch.task import is_blind
from rowhaul.schedule.sizes import check_shares
from rowhaul.schedule.sync import make_sync
from rowhaul.schedule.threads import MOST_THREADS
from rowhaul.simulate.links import parse_links
from rowhaul.transport.dense.overlapping import DENSE_WIRES, EXACT_WIRE

DATA_FROM = ("every_host", "rank0")
AUTO = "auto"
ON_DEMAND, AT_HOME = "on-demand", "at-home"


@dataclass(frozen=True)
class ClusterConfig:
    """How a run is spread over ranks; ``workers: 0`` means one process.

    None of this changes what is learned, except for rounding, ``sync: bounded:S`` and
    ``dense_wire: bfloat16``.

    Args:
        workers: ranks that train; under torchrun, all ranks but the stores.
        stores: ranks that only hold rows; not used when co-located.
        colocated: every worker also stores a part of the rows.
        peer_to_peer: workers send rows to each other, bypassing the stores.
        dispatcher: who trains which sample: joint, esd:ALPHA, laia, laia-adaptive, random, round-robin, ...;
            auto: round-robin, the quickest to decide, where all ranks share one host or rows stay at home,
            otherwise joint.
        sync: when trained rows go home: on-demand, full, static, or bounded:S, which is not exact; at-home:
            they never leave, ranks read them there and hand gradients over. auto: at-home where all ranks
            share one host, are co-located, and nothing else is asked of caches; otherwise on-demand.
        cache: size of a worker's cache: a number of rows, or bytes such as 512MiB.
        cache_policy: what a full cache evicts: lru, lfu, emark or belady.
        planning_threads: threads of each host that plan; 0: the cores that its ranks leave idle.
        look_ahead: batches known beyond the one being planned; 0 pushes rows after every iteration.
        shares: how samples are divided: equal, auto (by measured links and speed), or weights such as 2,1,1.
        links: speeds of the workers' links, for dispatchers and the dense sum: equal, measure, or such as
            50mbit*4,5mbit*4. With equal and measure the dense sum measures its own.
        hot_rows: how many of the most frequent rows to replicate on every worker (they are all-reduced);
            auto: as many as a model of the measured cluster finds best, revised at every checkpoint.
        hot_profile: batches at the start of the data that are counted to find them.
        share_device: whether several workers may train on one card.
        first_touch: create rows never trained before where they are needed, without a transfer.
        data_from: every_host reads the files on each host; rank0 reads them once and distributes the samples.
        dense_wire: how dense gradients travel: float32, as they are, or bfloat16, which is not exact.
        compare_every: iterations between two comparisons of the workers' dense weights; 0: only when saving.
        interface: network interface of row moves; empty: the one that leads to the master.
        side_interface: network interface of dense gradients and control; empty: the same.
        secret_file: file with the secret that every rank must prove; empty: ROWHAUL_SECRET, if set. Ranks
            that `rowhaul train --workers` starts have a secret of their own.
        grace: seconds that ranks on this machine have to save and end after SIGTERM.
        silence: seconds without a heartbeat after which a rank counts as lost.
        stall_after: seconds without progress after which the ranks that the others wait for are named.
        stuck_after: seconds without progress after which the run ends; 0: never.
        stacks: log the stacks of a rank's threads when it is named.
    """

    workers: int = 0
    stores: int = 1
    colocated: bool = False
    peer_to_peer: bool = False
    dispatcher: str = AUTO
    sync: str = AUTO
    cache: str = "1GiB"
    cache_policy: str = "lru"
    planning_threads: int = 0
    look_ahead: int = 2
    shares: str = "equal"
    links: str = "equal"
    hot_rows: int | str = 0
    hot_profile: int = 100
    share_device: bool = False
    first_touch: bool = True
    data_from: str = "every_host"
    dense_wire: str = EXACT_WIRE
    compare_every: int = 100
    interface: str = ""
    side_interface: str = ""
    secret_file: str = ""
    grace: float = 300.0
    silence: float = 8.0
    stall_after: float = 20.0
    stuck_after: float = 1800.0
    stacks: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.hot_is_auto:
            text = str(self.hot_rows).strip()
            if not text.isdecimal():
                raise ConfigError(
                    f"cluster.hot_rows must be a whole number, at least 0, or auto; got {self.hot_rows!r}"
                )
            object.__setattr__(self, "hot_rows", int(text))
        for name, least in (("workers", 0), ("stores", 0), ("hot_profile", 1), ("compare_every", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"cluster.{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.planning_threads <= MOST_THREADS:
            raise ConfigError(
                f"cluster.planning_threads must be 1 to {MOST_THREADS}, or 0 for the idle cores, at most 4; "
                f"got {self.planning_threads}"
            )
        for name in ("grace", "silence", "stall_after"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"cluster.{name} must be more than 0 seconds, got {getattr(self, name):g}")
        if not self.stuck_after >= 0:
            raise ConfigError(f"cluster.stuck_after must be at least 0 seconds, got {self.stuck_after:g}")
        if self.data_from not in DATA_FROM:
            raise ConfigError(f"cluster.data_from must be {' or '.join(DATA_FROM)}, got {self.data_from!r}")
        if self.dense_wire not in DENSE_WIRES:
            raise ConfigError(
                f"cluster.dense_wire must be {' or '.join(DENSE_WIRES)}, got {self.dense_wire!r}"
            )
        if self.dispatcher != AUTO:
            make_dispatcher(self.dispatcher)
        mode = make_sync(ON_DEMAND if self.sync == AUTO else self.sync)
        policy_keys(self.cache_policy)
        self._cache_amount()
        if not mode.plans_rows:
            self._check_at_home()
        if mode.name == "static" and not self.hot_rows:
            raise ConfigError(
                "cluster.sync is static, which keeps a set of hot rows on every worker, but cluster.hot_rows "
                "is 0; say how many, for example hot_rows: 10000"
            )

    def _check_at_home(self) -> None:
        """Refuse settings of caches, which are empty."""
        for name in _OF_CACHES:
            given, default = getattr(self, name), getattr(ONE_PROCESS, name)
            if given != default:
                raise ConfigError(
                    f"cluster.sync is {self.sync}, which moves no rows, but cluster.{name} is {given}: set "
                    f"it to {default}, the default, or choose another sync, such as on-demand"
                )

    @property
    def inexact(self) -> str:
        """Say which settings make what is learned depend on the cluster, and why; empty if none do."""
        reasons = []
        if self.sync.startswith("bounded") and self.sync != "bounded:0":
            reasons.append(f"with sync {self.sync} workers may train on rows that lack recent steps")
        if self.dense_wire != EXACT_WIRE:
            reasons.append(f"with dense_wire {self.dense_wire} dense gradients are rounded on their way")
        return "; ".join(reasons)

    @property
    def hot_is_auto(self) -> bool:
        """Whether a model chooses the number of hot rows."""
        return self.hot_rows == AUTO

    @property
    def num_hot_rows(self) -> int:
        """The number of hot rows given; 0 if a model chooses it."""
        return 0 if isinstance(self.hot_rows, str) else self.hot_rows

    def on_hosts(self, num_hosts: int) -> ClusterConfig:
        """Choose what is ``auto``; links that are given or measured cost what they say.

        Where ``sync`` stays ``auto``, the rows decide: see `sync_of_rows`.
        """
        links_are_free = num_hosts == 1 and self.links == "equal"
        chosen = "round-robin" if links_are_free or self.sync == AT_HOME else "joint"
        dispatcher = chosen if self.dispatcher == AUTO else self.dispatcher
        stays = links_are_free and self.colocated and is_blind(make_dispatcher(dispatcher))
        asked_for = (*_OF_CACHES, "planning_threads")
        stays = stays and all(getattr(self, name) == getattr(ONE_PROCESS, name) for name in asked_for)
        sync = ON_DEMAND if self.sync == AUTO and not stays else self.sync
        return replace(self, dispatcher=dispatcher, sync=sync)

    def sync_of_rows(self, policies: Sequence[RowPolicy], *, may_stay_home: bool) -> str:
        """How rows of tables with these policies are synchronised, once `on_hosts` has chosen."""
        if self.sync != AUTO:
            return self.sync
        return AT_HOME if may_stay_home and all(one.keeps_all for one in policies) else ON_DEMAND

    def topology(self, num_workers: int | None = None) -> Topology:
        """Workers and stores."""
        return Topology(num_workers or max(self.workers, 1), self.stores, self.colocated, self.peer_to_peer)

    def schedule(
        self,
        topology: Topology,
        sizes: RowSizes,
        *,
        seed: int = 0,
        hot: HotRows | None = None,
        speeds: Sequence[float] | None = None,
        policies: tuple[RowPolicy, ...] = (),
        may_stay_home: bool = False,
    ) -> ScheduleSettings:
        """The settings of the scheduler.

        Args:
            topology: workers and stores.
            sizes: of rows.
            seed: of dispatchers that draw random numbers.
            hot: replicated rows.
            speeds: measured bytes per second of the workers' links.
            policies: one for each table.
            may_stay_home: whether rows are of a kind that can be left at home, where ``sync`` is ``auto``.
        """
        return ScheduleSettings(
            topology=topology,
            sizes=sizes,
            prices=link_prices(speeds or self._speeds(topology.num_workers)),
            cache=self.cache_settings(sizes),
            dispatcher="joint" if self.dispatcher == AUTO else self.dispatcher,
            sync=self.sync_of_rows(policies, may_stay_home=may_stay_home),
            shares=self.given_shares(topology.num_workers),
            first_touch=self.first_touch,
            policies=policies,
            look_ahead=self.look_ahead,
            hot=hot,
            seed=seed,
        )

    def given_shares(self, num_workers: int) -> tuple[int, ...] | None:
        """The weights given; None if shares start out equal."""
        if self.shares in ("equal", "auto"):
            return None
        try:
            weights = tuple(int(text) for text in self.shares.split(","))
        except ValueError:
            raise ConfigError(
                f"cluster.shares must be equal, auto or one whole number per worker, such as 2,1,1; got "
                f"{self.shares!r}"
            ) from None
        check_shares(weights, num_workers)
        return weights

    def check_workers(self, num_workers: int) -> None:
        """Refuse shares or links for another number of workers."""
        self.given_shares(num_workers)
        self._speeds(num_workers)

    def given_speeds(self, num_workers: int) -> list[float] | None:
        """The bytes per second of the workers' links that were given; None if none were."""
        if self.links in ("equal", "measure"):
            return None
        return [one.bytes_per_second for one in parse_links(self.links, num_workers, "cluster.links")]

    def _speeds(self, num_workers: int) -> list[float]:
        return self.given_speeds(num_workers) or [1.0] * num_workers

    def _cache_amount(self) -> tuple[int, bool]:
        """The size of a cache, and whether it is in bytes."""
        text = str(self.cache).strip()
        if text[-1:].isalpha():
            return int(parse_bytes(text, "cluster.cache")), True
        amount = parse_number(text, "cluster.cache")
        if amount < 1 or amount != int(amount):
            raise ConfigError(
                f"cluster.cache must be a whole number of rows, or bytes such as 512MiB; got {self.cache!r}"
            )
        return int(amount), False

    def cache_settings(self, sizes: RowSizes) -> CacheSettings:
        """The workers' caches, of rows of these sizes."""
        amount, is_bytes = self._cache_amount()
        if is_bytes and len(set(sizes.records)) == 1:  # equivalent, and faster to decide
            return CacheSettings(amount // sizes.records[0], "rows", self.cache_policy)
        return CacheSettings(amount, "bytes" if is_bytes else "rows", self.cache_policy)


ONE_PROCESS = ClusterConfig()
_OF_CACHES = ("cache", "cache_policy", "hot_rows", "first_touch")  # where one is given, somebody wants caches
