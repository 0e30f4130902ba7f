"""Notes on a run of `rowhaul simulate`: options that had no effect, or an unexpected one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rowhaul.schedule import ScheduleSettings
    from rowhaul.simulate.results import Outcome
    from rowhaul.simulate.shares import Shares


def notes_on_effects(
    given: dict[str, Any], schedule: ScheduleSettings, mechanisms: Sequence[str]
) -> Iterator[str]:
    """Options that change nothing because of other options."""
    look_ahead, sync = schedule.look_ahead, schedule.sync_mode.name
    if schedule.topology.peer_to_peer and sync != "on-demand":
        why = f"--sync {given['sync']}" if given["sync"] != "on-demand" else f"--look-ahead {look_ahead}"
        yield f"--peer-to-peer has no effect: with {why} rows always go home."
    if schedule.cache.policy == "belady" and not look_ahead:
        yield "--policy belady sees no future batches with --look-ahead 0: it is the same as emark."
    if given["even_out"] and look_ahead < 2:
        yield f"--even-out has no effect with --look-ahead {look_ahead}: moves spread over 2 batches or more."
    if given["decision_budget"] and not any(_adapts(name.split(":")) for name in mechanisms):
        yield "--decision-budget has no effect: only laia-adaptive and joint:auto use it."


def _adapts(mechanism: Sequence[str]) -> bool:
    return "laia-adaptive" in mechanism or (
        "joint" in mechanism and any(part.rpartition("=")[2] == "auto" for part in mechanism)
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
