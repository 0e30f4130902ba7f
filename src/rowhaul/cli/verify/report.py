"""The table and the verdict of `rowhaul verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from rowhaul.cli.console import console, counted, facts_table, plain_table, say
from rowhaul.cli.json_output import print_json

if TYPE_CHECKING:
    from rowhaul.train import TrainConfig
    from rowhaul.verify.comparison import Comparison, Difference, Trained
    from rowhaul.verify.verify import Recorded

# What is equal to what, and what float32 does.
_MEANING = {
    "float64": (
        "One process adds up whole batches in another order than the workers' parts. In float64 both stay "
        "within 1e-9.\n"
        "In float32, the default of `rowhaul train`, they drift apart by rounding, as one thread and two of "
        "one process do:\n"
        "single scores differ after some epochs, the quality of the model does not."
    ),
    "float32": (
        "One process adds up whole batches in another order than the workers' parts. In float32 both drift "
        "apart by rounding,\n"
        "as one thread and two of one process do: single scores differ after some epochs, the quality of the "
        "model does not.\n"
        "Numbers can be compared in float64 (--precision float64)."
    ),
}


def print_report(
    config: TrainConfig,
    recorded: Recorded,
    plain: Comparison,
    replay: Comparison | None,
    *,
    as_json: bool = False,
) -> bool:
    """Print what was found; returns whether the cluster passed."""
    is_exact, verdict = _verdict(config, plain, replay)
    if as_json:
        moved = {"bytes_moved": recorded.num_bytes, "hits": recorded.hits, "lookups": recorded.lookups}
        cluster = {
            "workers": recorded.num_workers,
            "stores": recorded.num_stores,
            "dispatcher": recorded.dispatcher,
            "sync": recorded.sync,
        }
        found = _numbers(config, recorded.trained, plain, verdict)
        replayed = replay.kinds if replay is not None else None
        print_json({"passed": is_exact, **found, "from_the_replay": replayed, **cluster, **moved})
        return is_exact
    _head(config, recorded.trained, _cluster(config, recorded))
    console.print(_differences(plain, replay))
    console.print()
    console.print(_details(recorded, plain))
    if is_exact and replay is not None and not plain.inexact:
        say(f"\n{_MEANING[config.precision]}")
    say(f"\n{verdict}")
    return is_exact


def _numbers(config: TrainConfig, trained: Trained, plain: Comparison, verdict: str) -> dict[str, Any]:
    """What both kinds of comparison have, for `--json`."""
    return {
        "verdict": verdict,
        "steps": len(trained.losses),
        "precision": config.precision,
        "from_one_process": plain.kinds,
        "rows_here_only": plain.only_found,
        "rows_in_one_process_only": plain.only_expected,
    }


def print_devices(
    config: TrainConfig, trained: Trained, plain: Comparison, again: Comparison, *, as_json: bool = False
) -> bool:
    """Print how a card compares with a CPU, and with itself; returns whether it passed."""
    is_exact, verdict = _verdict_on_devices(config, plain, again)
    if as_json:
        found = _numbers(config, trained, plain, verdict)
        print_json({"passed": is_exact, **found, "from_a_second_run": again.kinds, "device": config.device})
        return is_exact
    _head(config, trained, f"one process on {config.device}")
    console.print(_differences(plain, again, ("from the CPU", "largest value", "second run on the card")))
    console.print()
    console.print(_compared(plain, ("the card", "the CPU")))
    say(f"\n{verdict}")
    return is_exact


def _verdict_on_devices(config: TrainConfig, plain: Comparison, again: Comparison) -> tuple[bool, str]:
    troubles = [
        f"{name}: {one.largest:.1e} between two runs on the card, at {one.where}"
        for name, one in again.kinds.items()
        if not one.is_none
    ]
    troubles += _beyond(config, plain, "the CPU")
    if troubles:
        return False, "\n  ".join(["NOT exact: the card trained a different model", *troubles])
    apart = _apart(config, plain)
    return True, f"exact: the card trained the same model as the CPU, {apart}, and twice the same to the bit"


def _head(config: TrainConfig, trained: Trained, where: str) -> None:
    """Print what was trained, and on what."""
    steps = len(trained.losses)
    say(f"\n{where}, {counted(steps, 'step')} in {config.precision}")
    if steps < config.max_steps:
        say(
            f"The data has {counted(steps, 'batch', 'batches')} of {config.batch_size:,} samples, not the "
            f"{config.max_steps:,} asked for: give more data or epochs, or a smaller --batch-size"
        )
    console.print()


def _by_itself(plain: Comparison) -> str:
    """Say how far one process is away, where it may be."""
    kind, first = next(iter(plain.kinds.items()))
    same = 1 - first.num_different / max(first.num_nonzero, 1)
    losses = f"losses within {plain.kinds['losses'].largest:.1e}"
    has = f"has {same:.1%} of the {kind} in common with the ranks, and {losses}"
    return f"not exact, by design: one process {has}; {plain.inexact}"


def _cluster(config: TrainConfig, recorded: Recorded) -> str:
    cluster = config.cluster
    stores = "co-located" if cluster.colocated else counted(recorded.num_stores, "store")
    workers = counted(recorded.num_workers, "worker")
    if config.device != "cpu":
        workers += f" on {config.device}"
    return f"{workers}, {stores}, {recorded.dispatcher}, {recorded.sync}"


def _differences(
    plain: Comparison,
    replay: Comparison | None,
    titles: tuple[str, ...] = ("from one process", "largest value", "replay of the same parts"),
) -> Table:
    table = plain_table("largest difference of", *titles)
    replays = {} if replay is None else replay.kinds
    for name in dict.fromkeys([*plain.kinds, *replays]):
        alone = plain.kinds.get(name)
        found = (f"{alone.largest:.1e}", f"{alone.magnitude:.3g}") if alone is not None else ("-", "-")
        table.add_row(name, *found, _replayed(replays.get(name)))
    return table


def _replayed(difference: Difference | None) -> str:
    if difference is None:
        return "-"
    return "equal to the bit" if difference.is_none else f"{difference.largest:.1e}"


def _details(recorded: Recorded, plain: Comparison) -> Table:
    table = _compared(plain, ("the ranks", "one process"))
    moved = [f"{name.replace('_', ' ')} {size:,}" for name, size in recorded.num_bytes.items() if size]
    table.add_row("bytes moved", ", ".join(moved) or "none")
    table.add_row("hit ratio", f"{recorded.hits / max(recorded.lookups, 1):.1%}")
    return table


def _compared(plain: Comparison, sides: tuple[str, str]) -> Table:
    """How many rows were compared, and where they differ most."""
    table = facts_table()
    first = next(iter(plain.kinds.values()))
    table.add_row("rows compared", f"{first.count:,}")
    table.add_row("largest difference at", first.where or "none")
    one_side = (
        f"{plain.only_found:,} by {sides[0]}, {plain.only_expected:,} by {sides[1]}"
        if plain.only_found or plain.only_expected
        else "none"
    )
    table.add_row("rows trained on one side only", one_side)
    return table


def _beyond(config: TrainConfig, plain: Comparison, other: str) -> list[str]:
    """What differs from another training by more than rounding explains."""
    tolerances = plain.tolerances(config.precision)
    return [
        f"{name}: {one.largest:.1e} from {other}, at {one.where}; rounding explains at most "
        f"{tolerances[name]:.1e}"
        for name, one in plain.beyond(config.precision).items()
    ]


def _verdict(config: TrainConfig, plain: Comparison, replay: Comparison | None) -> tuple[bool, str]:
    if replay is None:
        apart = ", ".join(f"{name} by up to {one.largest:.1e}" for name, one in plain.kinds.items())
        why = config.cluster.inexact or plain.inexact
        if config.cluster.sync.startswith("bounded"):
            why = f"with sync {config.cluster.sync} rows take their steps later"
        return True, f"not exact, by design: {why}. From one process differ {apart}"
    if plain.inexact and not plain.replays:
        return True, _by_itself(plain)
    troubles = [
        f"{name}: {one.largest:.1e} from the replay, at {one.where}"
        for name, one in replay.kinds.items()
        if not one.is_none
    ]
    troubles += _beyond(config, plain, "one process") if not plain.inexact else []
    if troubles:
        return False, "\n  ".join(["NOT exact: the ranks trained a different model", *troubles])
    if plain.inexact:
        return True, f"equal to the bit to the replay of the same parts; {_by_itself(plain)}"
    return True, (
        "exact: the ranks trained the same model as one process, to the bit where sums are taken in the same "
        f"order, and {_apart(config, plain)} where they are not"
    )


def _apart(config: TrainConfig, plain: Comparison) -> str:
    if config.precision == "float64":
        return f"to {max(one.largest for one in plain.kinds.values()):.1e}"
    return f"with losses within {plain.kinds['losses'].largest:.1e}"
