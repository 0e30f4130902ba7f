"""What a reader should know of a run of `rowhaul simulate`: options that had no effect, or an unusual one."""

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
    """Options that are set, but change nothing beside the others."""
    look_ahead, sync = schedule.look_ahead, schedule.sync_mode.name
    if schedule.topology.peer_to_peer and sync != "on-demand":
        why = f"--sync {given['sync']}" if given["sync"] != "on-demand" else f"--look-ahead {look_ahead}"
        yield f"--peer-to-peer has no effect: with {why} rows always go home."
    if schedule.cache.policy == "belady" and not look_ahead:
        yield "--policy belady has no batches to look at with --look-ahead 0: it is the same as emark."
    if given["even_out"] and look_ahead < 2:
        yield f"--even-out has no effect with --look-ahead {look_ahead}: moves spread over 2 batches or more."
    if given["decision_budget"] and not any("laia-adaptive" in name.split(":") for name in mechanisms):
        yield "--decision-budget has no effect: of the mechanisms only laia-adaptive looks at it."


def notes_on_policies(schedule: ScheduleSettings, outcome: Outcome) -> Iterator[str]:
    """What the policies of tables did, which is the same whoever trains what."""
    if not all(one.keeps_all for one in schedule.row_policies):
        counts = outcome.row_counts
        yield (
            f"In an iteration {counts['admitted']:,.1f} rows are admitted, {counts['expired']:,.1f} expire "
            f"and {counts['over_limit']:,.1f} are over their table's limit, on average; of "
            f"{counts['gradients_dropped']:,.1f} others, not admitted, the gradient is dropped."
        )


def notes_on_data(
    asked: int, available: int, batch_size: int, hot: int | None, num_rows: int | None
) -> Iterator[str]:
    """What was asked for and is not there."""
    if asked > available:
        yield f"The data holds {available:,} batches of {batch_size:,} samples; {asked:,} were asked for."
    if hot and num_rows is not None and hot > num_rows:
        yield f"--hot {hot:,} is more than the {num_rows:,} rows of the files: all of them are replicated."


def notes_on_shares(
    shares: Shares | Literal["auto"] | None, batch_size: int, objective: object
) -> Iterator[str]:
    """How the batch is divided, where that is not plain."""
    from rowhaul.schedule.sizes import apportion
    from rowhaul.simulate.results import describe_shares

    if shares == "auto":
        yield f"Shares are chosen for the smallest {objective}; with none, a worker stays out."
    elif shares is not None and sum(shares) != batch_size:
        got = describe_shares(apportion(batch_size, shares).tolist())
        yield (
            f"--shares add up to {sum(shares):,}, not to the global batch of {batch_size:,} samples, so they "
            f"are taken as weights: the workers get {got}."
        )
