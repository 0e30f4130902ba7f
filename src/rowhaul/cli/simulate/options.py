"""Parses the options of `rowhaul simulate` into settings of the library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rowhaul._quantities import parse_bytes, parse_for_each, parse_number, parse_seconds
from rowhaul.errors import ConfigError
from rowhaul.optim import row_optimizer
from rowhaul.schedule import CacheSettings, RowSizes, Topology
from rowhaul.schedule.dispatch.brute_force import MOST_ASSIGNMENTS, num_assignments
from rowhaul.schedule.sizes import apportion
from rowhaul.schedule.sync import make_sync
from rowhaul.simulate.clock import TimeModel
from rowhaul.simulate.links import Links, parse_links
from rowhaul.store.packing import PLAIN, check_row_dtype
from rowhaul.store.row_format import row_format

FLOAT_BYTES = 4
MAX_DIM = 65_536
MAX_STORES = 1024
MAX_STALENESS = 1_000_000
MAX_NUMBER = 10**15  # of anything else


@dataclass(frozen=True)
class CacheSize:
    """What `--cache` says: a share of all rows, a number of rows, or a number of bytes."""

    amount: float
    unit: Literal["share", "rows", "bytes"]

    @classmethod
    def parse(cls, text: str) -> CacheSize:
        """Read ``8%``, ``5000`` or ``2GiB``."""
        if text.endswith("%"):
            percent = parse_number(text.removesuffix("%"), "--cache")
            if percent > 100:
                raise ConfigError(f"--cache {text}: a cache holds at most 100% of the rows")
            if not percent:
                raise ConfigError(
                    f"--cache {text}: a cache needs room; give it more, such as 8%, 5000 or 2GiB"
                )
            return cls(percent / 100, "share")
        if text[-1:].isalpha():
            return cls(parse_bytes(text, "--cache"), "bytes")
        return cls(whole_number(text, "--cache"), "rows")

    def settings(self, num_rows: int, policy: str) -> CacheSettings:
        """The cache of each worker, where there are ``num_rows`` rows in all."""
        if self.unit == "bytes":
            return CacheSettings(int(self.amount), "bytes", policy)
        rows = max(1, round(self.amount * num_rows)) if self.unit == "share" else int(self.amount)
        return CacheSettings(rows, "rows", policy)


def rows_held(cache: CacheSettings, sizes: RowSizes) -> int:
    """How many rows a cache is certain to hold."""
    assert isinstance(cache.capacity, int)
    return cache.capacity if cache.unit == "rows" else cache.capacity // max(sizes.records)


def make_topology(workers: int, stores: int | None, colocated: bool, peer_to_peer: bool) -> Topology:
    """Who trains and who stores, from `--workers`, `--stores`, `--colocated` and `--peer-to-peer`."""
    if colocated and stores is not None:
        raise ConfigError(
            f"--stores {stores} and --colocated exclude each other: with --colocated the workers store the "
            "rows; leave one of the two out"
        )
    if stores is not None and not 1 <= stores <= MAX_STORES:
        raise ConfigError(
            f"--stores is {stores}; it must be 1 to {MAX_STORES:,} (with --colocated there are none, the "
            "workers store the rows)"
        )
    return Topology(workers, stores or 1, colocated, peer_to_peer)


def check_sync(text: str) -> None:
    """Refuse values of `--sync` that the library would take."""
    if text.endswith(":") and not text.startswith("bounded"):
        raise ConfigError(f"--sync {text}: {text.rstrip(':')} takes no settings; write it without the colon")
    if make_sync(text).staleness > MAX_STALENESS:
        raise ConfigError(f"--sync {text}: rows may be at most {MAX_STALENESS:,} updates late")


def time_model(
    topology: Topology, links: str, store_links: str | None, compute: str, dense_bytes: str, early_reach: int
) -> TimeModel:
    """Links and compute speed from `--links`, `--store-links`, `--compute` and `--dense-bytes`."""
    stores = None
    if store_links is not None:
        stores = parse_links(store_links, topology.num_stores, "--store-links", "stores")
    return TimeModel(
        links=Links.make(topology, parse_links(links, topology.num_workers, "--links"), stores),
        compute_seconds=parse_for_each(compute, topology.num_workers, "--compute", parse_seconds),
        dense_bytes=parse_bytes(dense_bytes, "--dense-bytes"),
        early_reach=early_reach,
    )


def parse_shares(text: str, num_workers: int) -> tuple[int, ...] | Literal["auto"] | None:
    """`--shares`: None for equal ones, "auto", or a weight per worker."""
    if text == "equal":
        return None
    if text == "auto":
        return "auto"
    if text[:1].isalpha():
        raise ConfigError(f"--shares {text}: known are equal, auto, or samples per worker such as 200*4,56*4")
    shares = parse_for_each(text, num_workers, "--shares", whole_number)
    if not any(shares):
        raise ConfigError(f"--shares {text}: at least one worker must train")
    return shares


def parse_budget(text: str | None, model: TimeModel, batch_per_worker: int) -> float | None:
    """`--decision-budget`, or else the compute that a decision runs beside; None: unlimited."""
    if text is not None:
        return parse_seconds(text, "--decision-budget")
    return batch_per_worker * max(model.compute_seconds) or None


def parse_dims(text: str, tables: Sequence[str]) -> tuple[int, ...]:
    """`--dim`: one for all tables, or ``table=dim`` for each."""
    if "=" not in text:
        dims = (whole_number(text, "--dim", MAX_DIM),) * len(tables)
    else:
        by_table = {}
        for item in text.split(","):
            table, _, dim = (part.strip() for part in item.partition("="))
            if table in by_table:
                raise ConfigError(f"--dim {text}: table {table!r} is named twice; name each table once")
            by_table[table] = whole_number(dim, "--dim", MAX_DIM)
        wrong = [table for table in by_table if table not in tables]
        missing = [table for table in tables if table not in by_table]
        if wrong or missing:
            problem = f"there is no table {wrong[0]!r}" if wrong else f"table {missing[0]!r} has no dimension"
            raise ConfigError(f"--dim {text}: {problem}; the tables are {', '.join(tables)}")
        dims = tuple(by_table[table] for table in tables)
    if min(dims) < 1:
        raise ConfigError(f"--dim {text}: a row has at least 1 value")
    return dims


def row_sizes(dims: Sequence[int], optimizer: str, row_dtype: str = PLAIN) -> RowSizes:
    """Bytes of a row of each table, whose values are sent in ``row_dtype``; state is float32."""
    check_row_dtype(row_dtype)
    rule = row_optimizer(optimizer, lr=0.0)
    wire_bytes = row_format("whole" if row_dtype == PLAIN else row_dtype).wire_bytes
    sizes = [wire_bytes(dim, rule.state_width(dim), "float32") for dim in dims]
    return RowSizes(
        values=tuple(values for values, _ in sizes),
        state=tuple(state for _, state in sizes),
        summed=tuple(dim * FLOAT_BYTES for dim in dims),
    )


def parse_mechanisms(text: str) -> list[str]:
    """`--dispatch`: names of dispatchers, in order."""
    mechanisms = [name.strip() for name in text.split(",") if name.strip()]
    if not mechanisms:
        raise ConfigError("--dispatch names no mechanism; try random,laia,esd:1,joint")
    repeated = next((name for name in mechanisms if mechanisms.count(name) > 1), None)
    if repeated:
        raise ConfigError(f"--dispatch names {repeated} twice; name each mechanism once")
    return mechanisms


def check_brute_force(mechanisms: Sequence[str], num_workers: int, batch_size: int) -> None:
    """Refuse brute-force if a batch has too many assignments in equal shares to try all."""
    samples = min(batch_size, 64)  # 64 are too many for any 2 workers
    shares = apportion(samples, (1,) * num_workers).tolist()
    if num_assignments(samples, shares, MOST_ASSIGNMENTS) <= MOST_ASSIGNMENTS:
        return
    for name in mechanisms:
        if "brute-force" in name.split(":"):
            raise ConfigError(
                f"--dispatch {name} tries all assignments of {batch_size:,} samples to {num_workers} "
                f"workers, more than {MOST_ASSIGNMENTS:,}; lower --batch-per-worker or --workers, or "
                "leave it out"
            )


def check_reference(reference: str, names: Sequence[str]) -> None:
    """Refuse a reference that is not run."""
    if reference not in names:
        raise ConfigError(f"--reference {reference} is not among what is compared: {', '.join(names)}")


def check_warmup(warmup: int, iterations: int, available: int, batch_size: int) -> None:
    """Refuse a warm-up that leaves nothing to measure."""
    check_at_least("--warmup", warmup, 0)
    if warmup >= iterations:
        raise ConfigError(
            f"--warmup {warmup} leaves none of {iterations} iterations to measure; "
            "lower it or raise --iterations"
        )
    if warmup >= available:
        raise ConfigError(
            f"--warmup {warmup} leaves nothing to measure: the data holds {available} batches of "
            f"{batch_size} samples; lower it or --batch-per-worker, or give more data"
        )


def whole_number(text: str, option: str, most: int = MAX_NUMBER) -> int:
    """A whole number from 0 to ``most``."""
    number = parse_number(text, option)
    if number != int(number):
        raise ConfigError(f"{option}: {text!r} must be a whole number")
    if number > most:
        raise ConfigError(f"{option}: {text!r} is too large; it must be at most {most:,}")
    return int(number)


def check_at_least(option: str, given: int, least: int) -> None:
    """Refuse a number that is too small."""
    if given < least:
        raise ConfigError(f"{option} is {given}; it must be at least {least}")
