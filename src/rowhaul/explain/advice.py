"""What would help, estimated from what a run has measured, each with what the estimate rests on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rowhaul._quantities import bytes_text, seconds_text
from rowhaul.explain.findings import Findings

_WORTH_SAYING = 0.03  # of all bytes, or of an iteration
_MOST_CACHE = 8  # times the cache there is
# Of what training waits for, besides other ranks: what it is called, what ends the wait, what that rests on.
_REMEDIES = {
    "plan": (
        "a quicker plan",
        "plans: a cheaper `--dispatcher` (`round-robin` is the cheapest)",
        "Measured: nothing else was missing at that time.",
    ),
    "data": (
        "faster data",
        "data to be read: faster disks, or data prepared once (`rowhaul prepare`),",
        "Measured: plans waited for ids at that time.",
    ),
}


@dataclass(frozen=True)
class Advice:
    """Something that would help."""

    what: str
    saves_seconds: float  # an iteration; an upper bound where bytes are what is saved
    text: str
    basis: str


def advise(found: Findings) -> list[Advice]:
    """Return what would help, that which saves most first."""
    every = (_fewer_workers, _leave_one_out, _cache, _hot, _rows_in_half, _prune, _dense, _waits)
    return sorted((one for make in every for one in make(found)), key=lambda one: -one.saves_seconds)


def one_machine_seconds(found: Findings) -> float:
    """Estimate an iteration of one worker that trains the whole batch alone, rather too high.

    A large batch takes less a sample than small ones, and processors are slower after they have waited.
    """
    return sum(found.step_cpu_seconds) + found.composition["data"]


def one_machine_text(found: Findings) -> str:
    """Compare with one machine, in a sentence."""
    alone, now = one_machine_seconds(found), found.iteration_seconds
    workers = f"these {len(found.training)} workers"
    if not alone or not now or len(found.training) < 2:
        return ""
    if alone < now:
        return (
            f"One worker alone would take about {seconds_text(alone)} an iteration, {workers} take "
            f"{seconds_text(now)}: stay with one while the rows fit in its memory."
        )
    return (
        f"{workers.capitalize()} take {seconds_text(now)} an iteration; one alone would take up to "
        f"{seconds_text(alone)}, and less where workers wait for links: `rowhaul plan` measures it."
    )


def _fewer_workers(found: Findings) -> Iterator[Advice]:
    alone, now = one_machine_seconds(found), found.iteration_seconds
    if len(found.training) > 1 and alone < now * (1 - _WORTH_SAYING):
        yield Advice(
            "one machine",
            now - alone,
            f"One worker alone would take about {seconds_text(alone)} an iteration instead of "
            f"{seconds_text(now)}, if all rows fit in its memory.",
            "The processor time that the workers' training threads have taken, one after the other. A large "
            "batch takes less a sample than small ones, and processors are slower after they have waited, so "
            "this overestimates.",
        )


def _leave_one_out(found: Findings) -> Iterator[Advice]:
    if len(found.training) < 3:
        return
    now = found.iteration_seconds
    slowest = max(found.training, key=found.waited_for)
    extra = found.seconds[slowest]["compute"] / (len(found.training) - 1) if found.seconds else 0.0
    stored = found.stored_share(slowest)
    saved = found.waited_for(slowest) * (1 - stored) - extra
    if saved > now * _WORTH_SAYING:
        yield Advice(
            "fewer workers",
            saved,
            f"Without {found.roles[slowest]} an iteration would take about {seconds_text(now - saved)} "
            f"instead of {seconds_text(now)}: give it a share of 0 (`--shares`).",
            f"The others waited {seconds_text(found.waited_for(slowest))} an iteration for its rows"
            + (f", {stored:.0%} of whose bytes it would still send, as their home" if stored else "")
            + f"; its samples would add {seconds_text(extra)} of compute to each of them. The dense sum is "
            "taken to stay as it is.",
        )


def _of_rows(found: Findings, saved_bytes: float) -> float:
    """The seconds of waiting for rows that go with these bytes, at most."""
    return found.composition["rows"] * saved_bytes / found.row_bytes if found.row_bytes else 0.0


def _amount(found: Findings, saved_bytes: float) -> str:
    seconds = _of_rows(found, saved_bytes)
    share = saved_bytes / found.all_bytes
    return (
        f"{bytes_text(saved_bytes)} an iteration, {share:.0%} of all that moves, and up to "
        f"{seconds_text(seconds)} of waiting"
    )


def _cache(found: Findings) -> Iterator[Advice]:
    detail = found.detail
    capacity = detail["cache_capacity"] / found.num_workers
    record = [sum(one) for one in zip(detail["value_bytes"], detail["state_bytes"], strict=True)]
    rows = capacity if detail["cache_unit"] == "rows" else capacity * len(record) / max(1, sum(record))
    repulled = {1 << distance: num_bytes for distance, _, num_bytes in detail["repulled"]}
    total = sum(repulled.values())
    factor, saved = 1, 0
    while factor < _MOST_CACHE and saved < 0.5 * total:
        factor *= 2
        saved = sum(count for needed, count in repulled.items() if needed <= rows * (factor - 1))
    per_iteration = saved / found.iterations
    if per_iteration > found.all_bytes * _WORTH_SAYING:
        yield Advice(
            "more cache",
            _of_rows(found, per_iteration),
            f"{factor} times the cache would save about {_amount(found, per_iteration)} (`--cache`).",
            f"Rows that a worker pulled again after evicting them, with the evictions' own pushes: "
            f"{bytes_text(total / found.iterations)} an iteration in all. A row counts as saved where its "
            "cache evicted no more rows in between than the added room would hold.",
        )


def _refuses(found: Findings, option: str) -> bool:
    """Whether the run's other settings do not go together with an option; early versions did not say."""
    return option in found.detail.get("refused", ())


def _hot(found: Findings) -> Iterator[Advice]:
    rows, moved, summed = (found.detail["replicable"][name] for name in ("rows", "moved", "summed"))
    net = (moved - summed) / found.iterations
    if rows and net > found.all_bytes * _WORTH_SAYING and not _refuses(found, "--hot"):
        already = f" beside the {found.detail['hot_rows']:,} there are" if found.detail["hot_rows"] else ""
        yield Advice(
            "hot rows",
            _of_rows(found, net),
            f"Replicating about {rows:,} rows on every worker{already} would save about "
            f"{_amount(found, net)} (`--hot`).",
            f"The rows that moved more than sums of their gradients would: they moved "
            f"{bytes_text(moved / found.iterations)} an iteration, sums over all workers would move "
            f"{bytes_text(summed / found.iterations)} instead.",
        )


def _value_share(found: Findings) -> float:
    values, state = int(sum(found.detail["value_bytes"])), int(sum(found.detail["state_bytes"]))
    return values / max(1, values + state)


def _rows_in_half(found: Findings) -> Iterator[Advice]:
    saved = found.row_bytes * _value_share(found) / 2
    if saved > found.all_bytes * _WORTH_SAYING and not _refuses(found, "--row-dtype"):
        yield Advice(
            "rows in half precision",
            _of_rows(found, saved),
            f"Values of rows in 16 bits would save about {_amount(found, saved)} (`--row-dtype bfloat16`); "
            "the model learned is another one.",
            "Half of the bytes of values; optimizer state stays as it is.",
        )


def _prune(found: Findings) -> Iterator[Advice]:
    saved = found.row_bytes / 2
    if saved > found.all_bytes * _WORTH_SAYING and not _refuses(found, "--prune"):
        yield Advice(
            "pruning",
            _of_rows(found, saved),
            f"Pruning half of the rows' values would save about {_amount(found, saved)} (`--prune 50%`); the "
            "model learned is another one.",
            "Pruned values do not travel: bytes of rows in proportion to what is kept.",
        )


def _dense(found: Findings) -> Iterator[Advice]:
    saved = found.dense_bytes / 2 if found.detail["exact_dense_sum"] else 0.0
    if found.all_bytes and saved > found.all_bytes * _WORTH_SAYING:
        seconds = found.composition["dense"] / 2
        yield Advice(
            "dense gradients in half precision",
            seconds,
            f"Dense gradients in 16 bits would save about {bytes_text(saved)} an iteration, "
            f"{saved / found.all_bytes:.0%} of all that moves, and up to {seconds_text(seconds)} of waiting "
            "(`--dense-wire bfloat16`); not exact.",
            f"Half of the {bytes_text(found.dense_bytes)} that the dense sum moved an iteration, and half of "
            "the wait for it.",
        )


def _waits(found: Findings) -> Iterator[Advice]:
    for part, (what, remedy, basis) in _REMEDIES.items():
        seconds = found.composition[part]
        if seconds > found.iteration_seconds * _WORTH_SAYING:
            text = f"Training waited {seconds_text(seconds)} an iteration for {remedy} would save up to that."
            yield Advice(what, seconds, text, basis)
