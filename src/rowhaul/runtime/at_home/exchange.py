"""What ranks ask of each other's homes in an iteration: values of rows, for which they return gradients.

Each rank tells every home how many rows of each table its samples need, then their keys. The homes answer
with values, and get gradients once the rows are trained; they add up those of all ranks in the order of ranks
and take one step for each row. The rows of its own home a rank reads where they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul._activity import Activity, doing
from rowhaul.nn.features import FeatureGroup
from rowhaul.nn.jagged import KeyedJaggedTensor
from rowhaul.runtime.at_home.kernels import add_gradients, by_table, copy_values, sort_by_home
from rowhaul.runtime.batch_rows import BatchRows
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.schedule.topology import Topology
from rowhaul.store import TableGroup
from rowhaul.store.distinct import KnownRows, distinct_keys
from rowhaul.store.packing import RowNames
from rowhaul.transport.base import Bytes, Links

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[Any]

_NOTHING: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True)
class RowsRead(BatchRows):
    """The rows of a feature group that a rank's samples read: at home here, or copied from other homes."""

    features: KeyedJaggedTensor  # what they were looked up for
    found: FoundRows
    home: TableGroup  # where those are that are stored here
    copies: Floats  # the others x dim: what negative locations refer to


@dataclass(frozen=True)
class FoundRows:
    """The distinct rows of a batch in one feature group, table by table."""

    keys: Ints
    starts: Ints
    inverse: npt.NDArray[np.int32]  # ids of the batch
    entries: slice | Ints
    offsets: Ints


@dataclass
class Visit:
    """What one iteration reads and steps."""

    features: KeyedJaggedTensor
    found: list[FoundRows]  # by feature group
    asked: list[Asked]  # by group of tables, as all that follow
    served: list[Served] = field(default_factory=list)


@dataclass(frozen=True)
class Asked:
    """The rows of one size that a rank needs."""

    keys: Ints  # by home
    order: Ints  # which of the rows found each is
    bounds: Ints  # homes + 1
    counts: Ints  # homes x tables

    def of(self, home: int) -> slice:
        """The rows of one home."""
        return slice(int(self.bounds[home]), int(self.bounds[home + 1]))


@dataclass(frozen=True)
class Served:
    """The rows of one size that all ranks need of one home."""

    keys: Ints  # distinct, table by table
    starts: Ints
    locations: Ints
    rows: npt.NDArray[np.int32]  # what ranks ask for, rank by rank: which of the distinct rows
    bounds: Ints  # ranks + 1

    def of(self, rank: int) -> npt.NDArray[np.int32]:
        """The rows that a rank needs."""
        return self.rows[self.bounds[rank] : self.bounds[rank + 1]]


class HomeTables:
    """The tables of one row size at one home, and the feature groups that read them.

    Args:
        home: the tables.
        numbers: of the tables in plans.
        groups: numbers of the feature groups, whose tables follow one another as those at home do.
        topology: which rank is the home of a row.
    """

    def __init__(
        self, home: TableGroup, numbers: Sequence[int], groups: Sequence[int], topology: Topology
    ) -> None:
        self.home, self.groups, self._topology = home, list(groups), topology
        self._numbers = np.array(numbers, np.int32)
        self._num_ranks = topology.num_workers
        self._by_rank = np.repeat(np.arange(len(numbers)), self._num_ranks)

    @property
    def num_tables(self) -> int:
        """Tables of this size."""
        return len(self._numbers)

    def ask(self, found: Sequence[FoundRows]) -> Asked:
        """Sort the rows of this rank's samples by home."""
        keys, starts = _one_after_another(found)
        counts = np.zeros((self._num_ranks, self.num_tables), np.int64)
        order = sort_by_home(keys, starts, self._numbers, self._topology.sharding, counts)
        return Asked(keys[order], order, _bounds(counts.sum(axis=1)), counts)

    def serve(self, keys: Sequence[Ints], counts: Ints) -> Served:
        """Find the rows that ranks ask this home for, or make them.

        Args:
            keys: of each rank, table by table.
            counts: ranks x tables.
        """
        together, starts, places = by_table(np.concatenate(keys), counts)
        distinct, key_starts, inverse = distinct_keys(together, starts, self._by_rank, self.num_tables)
        locations = self.home.find_or_make(distinct, key_starts)
        return Served(distinct, key_starts, locations, inverse[places], _bounds(counts.sum(axis=1)))

    def values(self, served: Served, rank: int) -> Floats:
        """Copy the values of the rows that a rank needs."""
        home, locations = self.home, served.locations[served.of(rank)]
        out = np.empty((len(locations), home.dim), home.dtype)
        copy_values(home.arena.addresses, home.arena.shift, home.arena.record_bytes, locations, out)
        return out

    def step(self, served: Served, gradients: Sequence[Floats], rate: float, number: int) -> None:
        """Step each row by the sum of all ranks' gradients, added in the order of ranks."""
        sums = np.zeros((len(served.keys), self.home.dim), self.home.dtype)
        for rank, part in enumerate(gradients):
            add_gradients(served.of(rank), part, sums)
        self.home.update(served.locations, sums, rate, number)

    def tables_of(self, served: Served) -> Ints:
        """The number in plans of each distinct row's table."""
        return np.repeat(self._numbers.astype(np.int64), np.diff(served.starts))


class HomeExchange:
    """The reads and steps of one rank; every rank makes the same calls, with its own samples.

    Args:
        rank: this one.
        links: to the others.
        topology: co-located workers.
        home: the rows that this rank stores.
        groups: the features that its model reads.
    """

    def __init__(
        self, rank: int, links: Links, topology: Topology, home: RowMemory, groups: Sequence[FeatureGroup]
    ) -> None:
        self.links = links
        self._rank, self._groups = rank, list(groups)
        self._peers = [other for other in range(topology.num_workers) if other != rank]
        numbers = {spec.name: number for number, spec in enumerate(home.layout.specs)}
        self.tables = []
        for there in home.groups:
            readers = [number for number, group in enumerate(self._groups) if group.dim == there.dim]
            names = [spec.name for number in readers for spec in self._groups[number].specs]
            assert names == [spec.name for spec in there.tables]
            self.tables.append(HomeTables(there, [numbers[name] for name in names], readers, topology))

    def ask(self, features: KeyedJaggedTensor) -> Visit:
        """Tell homes which rows this rank's samples need; find those that others need of this one."""
        found = []
        for group in self._groups:
            ids, entries, offsets = group.ids_of(features)
            found.append(FoundRows(*distinct_keys(*ids, len(group.specs)), entries, offsets))
        visit = Visit(
            features, found, [one.ask([found[number] for number in one.groups]) for one in self.tables]
        )
        widths = [one.num_tables for one in self.tables]
        heard = {peer: np.empty(sum(widths), np.int64) for peer in self._peers}
        mine = [np.concatenate([one.counts[home] for one in visit.asked]) for home in range(self._num_ranks)]
        self._swap([heard], [{peer: mine[peer] for peer in self._peers}])
        ends = np.cumsum(widths)[:-1]
        every = [np.split(heard.get(rank, mine[rank]), ends) for rank in range(self._num_ranks)]
        counts = [np.stack([every[rank][place] for rank in range(self._num_ranks)]) for place in self._places]
        keys = [
            {rank: np.empty(int(asked[rank].sum()), np.int64) for rank in self._peers} for asked in counts
        ]
        self._swap(keys, [{peer: one.keys[one.of(peer)] for peer in self._peers} for one in visit.asked])
        for place, one in enumerate(self.tables):
            keys[place][self._rank] = visit.asked[place].keys[visit.asked[place].of(self._rank)]
            ordered = [keys[place][rank] for rank in range(self._num_ranks)]
            visit.served.append(one.serve(ordered, counts[place]))
        return visit

    def read(self, visit: Visit) -> list[RowsRead]:
        """Give the others the values that they need; return the rows of this rank's samples."""
        copies = []
        receives: list[dict[int, Floats]] = []
        for tables, asked in zip(self.tables, visit.asked, strict=True):
            sizes = [int(asked.counts[peer].sum()) for peer in self._peers]
            copies.append(np.empty((sum(sizes), tables.home.dim), tables.home.dtype))
            receives.append(dict(zip(self._peers, np.split(copies[-1], np.cumsum(sizes)[:-1]), strict=False)))
        sends = [
            {peer: tables.values(served, peer) for peer in self._peers}
            for tables, served in zip(self.tables, visit.served, strict=True)
        ]
        self._swap(receives, sends)
        rows: dict[int, RowsRead] = {}
        for place, tables in enumerate(self.tables):
            locations = self._locations(visit.asked[place], visit.served[place])
            first = 0
            for number in tables.groups:
                found = visit.found[number]
                some = locations[first : first + len(found.keys)]
                rows[number] = rows_read(number, visit.features, found, some, tables.home, copies[place])
                first += len(found.keys)
        return [rows[number] for number in sorted(rows)]

    def counts(self, visit: Visit) -> dict[str, int]:
        """Count what an iteration reads, by the names of `rowhaul.schedule.plan.ROW_COUNTS`.

        As many bytes as are read return as gradients.
        """
        found = Counter[str]()
        for tables, asked, served in zip(self.tables, visit.asked, visit.served, strict=True):
            needed, here = len(asked.order), int(asked.counts[self._rank].sum())
            found["rows_needed"] += needed
            found["rows_here"] += here
            found["bytes_read"] += (needed - here) * tables.home.value_bytes
            found["bytes_served"] += (len(served.rows) - here) * tables.home.value_bytes
        return found

    def step(self, visit: Visit, gradients: Mapping[int, Floats], rate: float, number: int) -> None:
        """Hand gradients over to the homes of their rows; step the rows that are stored here.

        Args:
            visit: of the iteration.
            gradients: of the rows of each feature group; those without rows may be left out.
            rate: learning rate.
            number: of the step.
        """
        sends: list[dict[int, Floats]] = []
        receives: list[dict[int, Floats]] = []
        for tables, asked, served in zip(self.tables, visit.asked, visit.served, strict=True):
            home = tables.home
            none = np.empty((0, home.dim), home.dtype)
            parts = [gradients.get(one, none) for one in tables.groups]
            mine = np.asarray(parts[0] if len(parts) == 1 else np.concatenate(parts), home.dtype)
            sends.append(
                {rank: mine.take(asked.order[asked.of(rank)], axis=0) for rank in range(self._num_ranks)}
            )
            receives.append(
                {peer: np.empty((len(served.of(peer)), home.dim), home.dtype) for peer in self._peers}
            )
        own = [one.pop(self._rank) for one in sends]
        self._swap(receives, sends)
        for place, tables in enumerate(self.tables):
            receives[place][self._rank] = own[place]
            ordered = [receives[place][rank] for rank in range(self._num_ranks)]
            tables.step(visit.served[place], ordered, rate, number)

    @property
    def _num_ranks(self) -> int:
        return len(self._peers) + 1

    @property
    def _places(self) -> range:
        return range(len(self.tables))

    def _locations(self, asked: Asked, served: Served) -> Ints:
        """Where the rows of this rank's samples are: here, or among those copied."""
        locations, here = np.empty(len(asked.order), np.int64), asked.of(self._rank)
        locations[asked.order[here]] = served.locations[served.of(self._rank)]
        elsewhere = np.concatenate([asked.order[: here.start], asked.order[here.stop :]])
        locations[elsewhere] = -1 - np.arange(len(elsewhere))
        return locations

    def _swap(self, receives: Sequence[Mapping[int, Any]], sends: Sequence[Mapping[int, Any]]) -> None:
        """Exchange arrays with the other ranks, one after the other."""
        if not self._peers:
            return
        transfers = []
        for arriving, leaving in zip(receives, sends, strict=True):
            buffers = ({peer: as_bytes(array) for peer, array in one.items()} for one in (arriving, leaving))
            transfers.append(self.links.post(*buffers))
        with doing(Activity.AWAITING_ROWS):
            for transfer in transfers:
                transfer.wait_received()
            for transfer in transfers:
                transfer.wait_sent()


def rows_read(
    number: int,
    features: KeyedJaggedTensor,
    found: FoundRows,
    locations: Ints,
    home: TableGroup,
    copies: Floats,
) -> RowsRead:
    """Describe the rows of a feature group: this worker hands all their gradients over."""
    count = len(found.keys)
    tables = np.repeat(np.arange(len(found.starts) - 1), np.diff(found.starts))
    return RowsRead(
        number=number,
        rows=KnownRows(found.keys, tables, locations, np.arange(count), found.keys, found.starts),
        own=slice(0, 0),
        shared=slice(0, count),
        replicated=slice(count, count),
        replicated_locations=_NOTHING,
        replicated_here=_NOTHING,
        replicated_names=RowNames(_NOTHING, _NOTHING),
        features=features,
        found=found,
        home=home,
        copies=copies,
    )


def as_bytes(array: npt.NDArray[Any]) -> Bytes:
    """The memory of an array."""
    return array.reshape(-1).view(np.uint8)


def _one_after_another(found: Sequence[FoundRows]) -> tuple[Ints, Ints]:
    """The keys of feature groups whose tables follow one another, and where each table's begin."""
    if len(found) == 1:
        return found[0].keys, found[0].starts
    ends = np.cumsum([len(one.keys) for one in found])
    starts = [one.starts[:-1] + end - len(one.keys) for one, end in zip(found, ends, strict=True)]
    return np.concatenate([one.keys for one in found]), np.append(np.concatenate(starts), ends[-1])


def _bounds(sizes: Ints) -> Ints:
    return np.append(0, np.cumsum(sizes))
