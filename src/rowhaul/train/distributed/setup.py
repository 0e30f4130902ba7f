"""`distribute`: set up training of a model on a cluster; every rank gets its rows, threads and plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from rowhaul._activity import Activity, doing
from rowhaul._cores import usable_cores
from rowhaul._threads import in_thread
from rowhaul.cluster.checks import check_same, version_facts
from rowhaul.cluster.cluster import Cluster
from rowhaul.cluster.waiting import until
from rowhaul.data.samples import Samples
from rowhaul.data.stream import SampleStream
from rowhaul.errors import ConfigError
from rowhaul.nn import Batch
from rowhaul.nn.batch_norm import set_reducer
from rowhaul.nn.exactness import check_trainable
from rowhaul.planning.agreement import Postbox
from rowhaul.planning.feed import FollowerFeed, LeaderFeed, PlanFeed
from rowhaul.planning.planner import Planner
from rowhaul.planning.rank0_data.sharing import AHEAD, READER, DataReceiver, DataSource
from rowhaul.planning.reading_together import ColumnServer, near_ranks, read_together
from rowhaul.planning.sharing import ARRIVAL_SECONDS, LeaderLostError, PlanClient, PlanServer
from rowhaul.runtime.at_home.mover import make_mover
from rowhaul.runtime.layout import TableLayout
from rowhaul.runtime.mover import Job
from rowhaul.runtime.row_memory import Rates
from rowhaul.runtime.runtime import Runtime
from rowhaul.schedule import IdBatch, Plan, Scheduler, ScheduleSettings
from rowhaul.schedule.lifetimes import policies_by_table
from rowhaul.train.cluster_config import AUTO, ClusterConfig
from rowhaul.train.distributed.samples import as_samples
from rowhaul.train.distributed.tables import layout_of, may_stay_home, only_collection, tables_of_features
from rowhaul.train.distributed.training import DistributedTraining
from rowhaul.transport.local_sockets import new_address

if TYPE_CHECKING:
    from rowhaul.train.distributed.checkpointing import Saved

MOST_IDLE_CORES = 4  # that plan by default: beyond them the parts that one thread does take longest


@dataclass(frozen=True)
class Start:
    """The state that a run starts from."""

    iteration: int = 0
    next_record: int = 0  # number of the next control record
    restore: Callable[[Scheduler], None] = lambda scheduler: None  # sets the state of a new scheduler


def distribute(
    cluster: Cluster,
    model: nn.Module,
    samples: Iterable[Samples | Batch] | None,
    config: ClusterConfig | None = None,
    *,
    policies: Mapping[str, Any] | None = None,
    settings: ScheduleSettings | None = None,
    data_from: str | None = None,
    rates: Rates | None = None,
    seed: int = 0,
    saved: Saved | None = None,
    on_iteration: Callable[[Job], None] = lambda job: None,
    on_prune: Callable[[Any], None] = lambda note: None,
    on_left_out: Callable[[str], None] = lambda note: None,
    optimizer: Optimizer | None = None,
    compare_every: int | None = None,
    dense_wire: str | None = None,
    counts_rows: bool = False,
) -> DistributedTraining:
    """Spread a model's rows over a cluster; every rank calls it with the same arguments.

    Args:
        cluster: from `rowhaul.cluster.join`.
        model: with one `EmbeddingBagCollection`; its dense weights must be the same on all workers.
        samples: the *global* batches, the same on every rank, as `Samples` or `Batch`; with
            ``data_from="rank0"`` only rank 0 reads them, and other ranks may pass None.
        config: dispatcher, caches and so on; the defaults suit most models.
        policies: how rows are admitted and expire, by table name or "default", as ``tables`` in a
            configuration file: ``{"default": {"admit_after": 2}, "user": {"ttl": 10_000}}``; by default
            all are kept.
        settings: the scheduler's settings, instead of config and policies.
        data_from: ``every_host`` or ``rank0``, as in `ClusterConfig`; by default that of config.
        rates: the rows' learning rate in each iteration, counted from 0, since stores take steps, too; by
            default the constant rate of the collection's optimizer.
        seed: of dispatchers that draw random numbers.
        saved: a checkpoint to resume from.
        on_iteration: called after every iteration that this worker has trained.
        on_prune: called after every pruning, where the collection prunes its rows.
        on_left_out: called on rank 0 with a line when workers get a share of 0, and when they return.
        optimizer: of the dense weights; if given, its state is compared between workers as weights are, and
            workers with a share of 0 leave the sums: they can be brought up to date again.
        compare_every: iterations between these comparisons, as in `ClusterConfig`; by default that of config.
        dense_wire: ``bfloat16`` rounds dense gradients when they travel, which is not exact, as in
            `ClusterConfig`; by default that of config.
        counts_rows: whether plans tell which rows are read and stepped where they stay at home, which takes
            time and is only looked at: in plans of other ways to synchronise, rows always are.

    Example:
        >>> with rowhaul.cluster.join(num_stores=1) as cluster:
        ...     training = rowhaul.distribute(cluster, model, rowhaul.SampleStream(files, schema, 4096))
        ...     for batch in training.batches():
        ...         loss = batch.loss(per_sample_loss(model(batch), batch))
        ...         loss.backward()
        ...         training.step(loss)
        ...         optimizer.step(); optimizer.zero_grad()
    """
    collection = only_collection(model)
    layout = layout_of(collection)
    check_trainable(model)
    config = replace(config or ClusterConfig(), colocated=cluster.topology.colocated)  # as it was joined
    config = config.on_hosts(len(cluster.hosts))
    if settings is None:
        tables = [one.name for one in collection.table_configs()]
        by_table = policies_by_table(policies or {}, tables)
        settings = layout.schedule_settings(
            config,
            cluster.topology,
            seed=seed,
            policies=by_table,
            may_stay_home=may_stay_home(collection),
        )
        if saved is not None and config.sync == AUTO:
            settings = saved.keep_sync(settings, may_stay_home=may_stay_home(collection))
    if not settings.sync_mode.plans_rows and not may_stay_home(collection):
        raise ConfigError(
            f"sync: at-home reads whole rows in host memory; these are {layout.row_format}, for a model on "
            f"{collection.device}: choose another sync, such as on-demand"
        )
    if saved is not None:  # the row size may have changed
        layout = saved.layout(layout)
        settings = replace(settings, sizes=layout.sizes())
    data_from = data_from or config.data_from
    compare_every = config.compare_every if compare_every is None else compare_every
    dense_wire = config.dense_wire if dense_wire is None else dense_wire
    constant = collection.optimizer.lr
    rates = rates or (lambda iteration: constant)
    start = saved.start if saved is not None else Start()
    facts = {**_facts(cluster, model, settings, repr(layout)), "data from": data_from}
    facts |= {"compare_every": str(compare_every), "optimizer": type(optimizer).__name__}
    facts |= {"dense_wire": dense_wire, "links": config.links}
    check_same(cluster, {**version_facts(cluster.is_worker), **facts})
    use_given_links(cluster, config)
    if cluster.is_worker:
        layout = layout.on(collection.device)
    cache = layout.make_cache(collection.feature_groups) if cluster.is_worker else None
    home = None
    if cluster.topology.colocated or not cluster.is_worker:
        home = layout.make_home(cluster.topology, cluster.rank)
    if cache is not None and settings.hot is not None:
        cache.make(settings.hot.tables, settings.hot.keys)
    runtime = Runtime(
        cluster.rank,
        make_mover(settings, cluster.rank, cluster.moves, rates, cache, home, collection.feature_groups),
        _Feeding(cluster, settings, model, layout, start, config.planning_threads, counts_rows).feed(
            samples, data_from
        ),
        cluster.control,
        cluster.dense,
        cluster.failure,
        trains=cluster.is_worker,
        first=start.iteration,
        postbox=Postbox(start.next_record),
        # Workers of one host have no link to keep busy while they train, and no processor to spare for it.
        early=len(cluster.hosts) > 1 or not cluster.topology.colocated,
    )
    if collection.device.type == "cuda":  # threads choose their card one by one
        runtime.in_moves(lambda mover: torch.cuda.set_device(collection.device)).wait()
    if cluster.is_worker:
        set_reducer(model, lambda values: training.sum_over_workers(values))
    training = DistributedTraining(
        model,
        runtime,
        rates,
        settings,
        on_iteration=on_iteration,
        on_prune=on_prune,
        on_left_out=on_left_out,
        optimizer=optimizer,
        compare_every=compare_every,
        dense_wire=dense_wire,
    )
    if saved is not None:
        runtime.samples = saved.samples
        with doing(Activity.LOADING):
            saved.load_rows(training)
    return training


def use_given_links(cluster: Cluster, config: ClusterConfig) -> None:
    """Pass the speeds of links that were given on to the dense sum, where it uses the links of rows."""
    speeds = config.given_speeds(cluster.topology.num_workers)
    if speeds is not None and cluster.dense is not None and cluster.interface == cluster.side_interface:
        cluster.dense.choose_again(speeds)


@dataclass(frozen=True)
class _Feeding:
    """Makes a rank's feed of plans; the leader of a host also plans, from the data."""

    cluster: Cluster
    settings: ScheduleSettings
    model: nn.Module
    layout: TableLayout
    start: Start
    planning_threads: int = 0
    counts_rows: bool = False

    def feed(self, samples: Iterable[Samples | Batch] | None, data_from: str) -> PlanFeed:
        """Make plans here, if this rank leads its host, or take them from the leader."""
        if data_from == "rank0":
            return self._fed_by_rank0(samples)
        if samples is None:
            raise ConfigError('samples may be None only with data_from="rank0", on ranks other than 0')
        # Files are read once per host. The batches of a user's own loader are read everywhere and compared.
        stream, cluster = samples if isinstance(samples, SampleStream) else None, self.cluster
        near = near_ranks(cluster.data, cluster.local_ranks)
        if self._leads:
            batches = (as_samples(one) for one in samples)

            def begin() -> tuple[tuple[str, ...], Iterator[Samples]]:
                # Not in this thread: waiting for a rank that is stuck could not be ended. But a loader of
                # one's own may need it.
                failure = cluster.failure
                if near:
                    in_thread(lambda: read_together(stream, cluster.data, near, failure), failure)
                return _peek(batches) if stream is None else in_thread(lambda: _peek(batches), failure)

            return self._leader_feed(begin, compares=stream is None)
        feed = FollowerFeed(self._client(), None if stream is not None else map(as_samples, samples))
        if near:
            feed.columns = ColumnServer(stream, cluster.data, cluster.leader, cluster.failure)
        return feed

    def _fed_by_rank0(self, samples: Iterable[Samples | Batch] | None) -> PlanFeed:
        data = self._data(samples)
        try:
            feed: PlanFeed
            if (inbox := data.inbox) is None:
                feed = FollowerFeed(self._client())
            else:
                feed = self._leader_feed(
                    lambda: (inbox.description().features, inbox.batches()), inbox.complete
                )
            feed.attach_data(data, self.start.iteration)
            return feed
        except BaseException as error:
            self.cluster.failure.set(error)
            data.close()
            raise

    def _data(self, samples: Iterable[Samples | Batch] | None) -> DataSource | DataReceiver:
        """Make this rank's end of the data that rank 0 sends."""
        cluster, look_ahead = self.cluster, self.settings.look_ahead
        workers = range(cluster.topology.num_workers)
        hosts = {max(host): [rank for rank in host if rank in workers] for host in cluster.hosts}
        ahead = 1 if getattr(samples, "is_live", False) else AHEAD
        if cluster.rank != READER:
            shares_reader = READER in cluster.local_ranks
            mine = hosts[cluster.rank] if self._leads else None
            return DataReceiver(
                cluster.data, mine, look_ahead, cluster.failure, shares_reader=shares_reader, ahead=ahead
            )
        if samples is None:
            raise ConfigError('samples is None on rank 0, which reads them for all with data_from="rank0"')
        batches = (as_samples(one) for one in samples)
        end_waiting = getattr(samples, "end_waiting", lambda: None)
        return DataSource(
            cluster.data, batches, hosts, cluster.leader, look_ahead, cluster.failure, ahead, end_waiting
        )

    @property
    def _leads(self) -> bool:
        return self.cluster.rank == self.cluster.leader

    def _key(self) -> str:
        """The key of the leader's address, which the other ranks of its host read."""
        return f"plans/{self.cluster.next_meeting('plans')}/{self.cluster.leader}"

    def _client(self) -> PlanClient:
        cluster, key = self.cluster, self._key()
        # Asked again and again: a request that waits could not be ended by the loss of a rank.
        if not until(lambda: cluster.store.check([key]), ARRIVAL_SECONDS, cluster.failure.check):
            planner = f"rank {cluster.leader}, which plans for this host,"
            raise LeaderLostError(f"{planner} has not begun within {ARRIVAL_SECONDS:g} s")
        address = cluster.store.get(key).decode()
        return PlanClient(address, cluster.rank, cluster.leader, cluster.failure, secret=cluster.secret)

    def _leader_feed(
        self,
        begin: Callable[[], tuple[tuple[str, ...], Iterator[Samples]]],
        complete: Callable[[Samples, Plan], Samples] = lambda samples, plan: samples,
        *,
        compares: bool = False,
    ) -> LeaderFeed:
        """Start a planner; ``begin`` returns the features of the data, and the batches.

        What it plans is compared with what other hosts plan and, with ``compares``, other ranks read.
        """
        cluster = self.cluster
        others = [rank for rank in cluster.local_ranks if rank != cluster.rank]
        key = self._key()
        server = None
        if others:
            address = new_address(abstract=cluster.has_abstract_sockets)
            server = PlanServer(cluster.rank, others, cluster.failure, address, cluster.secret)
            cluster.store.set(key, server.address)
            with doing(Activity.WAITING):
                server.accept()
        try:
            features, batches = begin()
            planner = Planner(
                self._scheduler,
                batches,
                cluster.failure,
                tables_of_features=tables_of_features(only_collection(self.model), features),
                audience=server,
                complete=complete,
                compares=compares or len(cluster.hosts) > 1,
            )
        except BaseException as error:
            if server is not None:
                server.fail(error)
                server.close()
            raise
        return LeaderFeed(planner, server, cluster.failure)

    @property
    def _num_computing(self) -> int:
        """Workers of this host; stores compute next to nothing."""
        return sum(rank < self.cluster.topology.num_workers for rank in self.cluster.local_ranks)

    def _scheduler(self, ids: Iterator[IdBatch]) -> Scheduler:
        scheduler = self.layout.make_scheduler(self.settings, ids)
        scheduler.use_threads(self.planning_threads or _idle_cores(self._num_computing))
        if not self.counts_rows:
            scheduler.count_no_rows()
        self.start.restore(scheduler)
        return scheduler


def _idle_cores(num_workers: int) -> int:
    """The cores of this host that its workers leave idle, at least one; more than a few bring little."""
    cores = usable_cores()
    return min(max(cores - num_workers * torch.get_num_threads(), 1), MOST_IDLE_CORES)


def _peek(batches: Iterator[Samples]) -> tuple[tuple[str, ...], Iterator[Samples]]:
    """Return the features of the data, and all batches."""
    with doing(Activity.READING):
        first = next(batches, None)
    return ((), iter(())) if first is None else (first.features, _all(first, batches))


def _all(first: Samples, others: Iterator[Samples]) -> Iterator[Samples]:
    """Yield all batches; a generator, since closing it closes the others, and ends the thread that reads."""
    yield first
    yield from others


def _facts(cluster: Cluster, model: nn.Module, settings: ScheduleSettings, layout: str) -> dict[str, str]:
    """Collect what must be equal on all ranks."""
    digest = xxhash.xxh3_64()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(name.encode())
        values = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().tobytes())  # NumPy has no bfloat16
    described = {f"setting {name}": text for name, text in settings.describe().items()}
    return {**described, "tables": layout, "dense weights (seed them alike)": digest.hexdigest()}
