"""How many rows the policies of tables leave at most, and what it takes to know which those are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rowhaul.schedule.lifetimes.policy import RowPolicy

# By row that is known: see `rowhaul.schedule.lifetimes.Lifetimes`.
_KNOWN, _LFU, _WAITING, _ADMITTED = 96, 48, 64, 4


@dataclass(frozen=True)
class KeptRows:
    """The rows of one table under its policy."""

    rows: int  # that are held, at most
    of: int  # different ones that come
    why: str  # the bound that holds; empty: all are kept
    policy_bytes: int  # that keep account of them


def kept_rows(policy: RowPolicy, rows: int, ids_per_sample: float, batch_size: int, samples: int) -> KeptRows:
    """What a policy leaves of ``rows`` rows.

    Args:
        policy: of the table.
        rows: different ones that come.
        ids_per_sample: of the table's features together.
        batch_size: samples of an iteration.
        samples: of the whole run, all epochs; 0: not known.
    """
    in_a_batch = batch_size * ids_per_sample
    bounds: list[tuple[float, str]] = [(rows, "")]
    if policy.max_rows is not None:
        bounds.append((policy.max_rows + in_a_batch, f"max_rows {policy.max_rows:,}, and those of a batch"))
    if (ttl := policy.ttl_iterations) > 0:
        bounds.append(((ttl + 1) * in_a_batch, f"all that {ttl + 1:,} batches can name (ttl)"))
    if policy.admit_after > 1 and samples:
        sightings = samples * ids_per_sample
        bounds.append((sightings / policy.admit_after, f"seen {policy.admit_after} times (admit_after)"))
    most, why = min((bound for bound in bounds if math.isfinite(bound[0])), key=lambda bound: bound[0])
    held = round(most)
    return KeptRows(held, rows, why, _policy_bytes(policy, rows, held))


def _policy_bytes(policy: RowPolicy, rows: int, held: int) -> int:
    if policy.keeps_all:
        return 0
    if not policy.forgets:
        return _WAITING * (rows - held) + _ADMITTED * held
    each = _KNOWN + (_LFU if policy.evict == "lfu" and policy.max_rows is not None else 0)
    # Those that are not admitted are known, too, until they expire.
    known = rows if policy.admit_after > 1 and policy.ttl is None else held
    return each * known
