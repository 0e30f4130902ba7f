"""Notes on a run of `rowhaul simulate`: options that had no effect, or an unexpected one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rowhaul.pruning.config import PruneConfig
    from rowhaul.schedule import ScheduleSettings
    from rowhaul.simulate.clock import TimeModel
    from rowhaul.simulate.results import Outcome
    from rowhaul.simulate.shares import Shares

PRUNE_CHUNKS = 4  # where --prune-chunks says nothing else


def notes_on_effects(
    given: dict[str, Any], schedule: ScheduleSettings, mechanisms: Sequence[str]
) -> Iterator[str]:
    """Options that change nothing because of other options."""
    from rowhaul.simulate.measure import adapted_setting

    look_ahead, sync = schedule.look_ahead, schedule.sync_mode.name
    if schedule.topology.peer_to_peer and sync != "on-demand":
        why = f"--sync {given['sync']}" if given["sync"] != "on-demand" else f"--look-ahead {look_ahead}"
        yield f"--peer-to-peer has no effect: with {why} rows always go home."
    if schedule.cache.policy == "belady" and not look_ahead:
        yield "--policy belady sees no future batches with --look-ahead 0: it is the same as emark."
    if given["even_out"] and look_ahead < 2:
        yield f"--even-out has no effect with --look-ahead {look_ahead}: moves spread over 2 batches or more."
    if given["decision_budget"] and not any(map(adapted_setting, mechanisms)):
        yield (
            "--decision-budget has no effect: only laia-adaptive without a number of tables and joint:auto "
            "use it."
        )
    if given["evict"] != "lru" and given["max_rows"] is None:
        yield f"--evict {given['evict']} has no effect without --max-rows: no table is ever full."
    if given["prune"] is None and given["prune_chunks"] != PRUNE_CHUNKS:
        yield "--prune-chunks has no effect without --prune."
    if given["prune"] is None and given["prune_period"] is not None:
        yield "--prune-period has no effect without --prune."
    if given["policy"] != "lru" and not schedule.sync_mode.caches_rows:
        yield f"--policy {given['policy']} has no effect: with --sync {sync} nothing is cached."


def notes_on_pruning(config: PruneConfig, iterations: int, dim: int) -> Iterator[str]:
    """What `--prune` asks for and never comes in so many iterations."""
    for said in config.unused(iterations, dim):
        yield said.replace("prune.period", "--prune-period").replace("steps", "iterations")


def notes_on_worker_0(
    model: TimeModel, shares: Shares | Literal["auto"] | None, compare: bool
) -> Iterator[str]:
    """That the order of the workers matters, where subsets are looked for or worker 0 has no share."""
    has_no_share = shares is not None and shares != "auto" and not shares[0]
    first, *others = zip(model.links.workers, model.compute_seconds, strict=True)
    is_quicker = any(
        link.bytes_per_second > first[0].bytes_per_second
        or link.latency_seconds < first[0].latency_seconds
        or seconds < first[1]
        for link, seconds in others
    )
    if is_quicker and (compare or shares == "auto" or has_no_share):
        yield (
            "Worker 0 never leaves, as in training: it is in every best subset, and in every sum even "
            "without a share. Another worker has a faster link or computes faster; list the machine to keep "
            "first."
        )


def notes_on_policies(schedule: ScheduleSettings, outcome: Outcome) -> Iterator[str]:
    """What row policies did; it does not depend on who trains what."""
    if not all(one.keeps_all for one in schedule.row_policies):
        counts = outcome.row_counts
        yield (
            f"On average per iteration: {counts['admitted']:,.1f} rows are admitted, "
            f"{counts['expired']:,.1f} expire, {counts['over_limit']:,.1f} exceed their table's limit, and "
            f"the gradients of {counts['gradients_dropped']:,.1f} rows that are not admitted are dropped."
        )


def notes_on_data(
    asked: int, available: int, batch_size: int, hot: int | None, num_rows: int | None
) -> Iterator[str]:
    """What was asked for but is not in the data."""
    if asked > available:
        yield f"The data holds {available:,} batches of {batch_size:,} samples; {asked:,} were asked for."
    if hot and num_rows is not None and hot > num_rows:
        yield f"--hot {hot:,} is more than the {num_rows:,} rows of the files: all of them are replicated."


def notes_on_shares(
    shares: Shares | Literal["auto"] | None, batch_size: int, objective: object
) -> Iterator[str]:
    """How the batch is divided, if it is not obvious."""
    from rowhaul.schedule.sizes import apportion
    from rowhaul.simulate.results import describe_shares

    if shares == "auto":
        yield f"Shares are chosen for the smallest {objective}; a worker may get none."
    elif shares is not None and sum(shares) != batch_size:
        got = describe_shares(apportion(batch_size, shares).tolist())
        yield (
            f"--shares add up to {sum(shares):,}, not to the global batch of {batch_size:,} samples, so they "
            f"are taken as weights: the workers get {got}."
        )
