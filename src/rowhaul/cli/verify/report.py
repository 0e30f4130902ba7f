"""The table and the verdict of `rowhaul verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from rowhaul.cli.console import console, counted, facts_table, plain_table, say

if TYPE_CHECKING:
    from rowhaul.pruning.comparison import PrunedComparison
    from rowhaul.train import TrainConfig
    from rowhaul.verify.comparison import Comparison, Difference
    from rowhaul.verify.verify import Recorded


def print_report(
    config: TrainConfig, recorded: Recorded, plain: Comparison, replay: Comparison | None
) -> bool:
    """Print what was found; returns whether the cluster passed."""
    _head(config, recorded)
    console.print(_differences(plain, replay))
    console.print()
    console.print(_details(recorded, plain))
    is_exact, verdict = _verdict(config, plain, replay)
    say(f"\n{verdict}")
    return is_exact


def _head(config: TrainConfig, recorded: Recorded) -> None:
    """Print what was trained, and on what."""
    steps = len(recorded.trained.losses)
    say(f"\n{_cluster(config, recorded)}, {counted(steps, 'step')} in {config.precision}")
    if steps < config.max_steps:
        say(
            f"The data has {counted(steps, 'batch', 'batches')} of {config.batch_size:,} samples, not the "
            f"{config.max_steps:,} asked for: give more data or epochs, or a smaller --batch-size"
        )
    console.print()


def print_pruned_report(
    config: TrainConfig, recorded: Recorded, plain: PrunedComparison, replay: PrunedComparison
) -> bool:
    """The same for pruned rows, which only the replay must equal; returns whether it does."""
    _head(config, recorded)
    table = plain_table("largest difference of", "replay of the same parts", "largest value")
    for name, difference in replay.kinds().items():
        value = "" if difference is replay.chunks else f"{difference.magnitude:.3g}"
        table.add_row(name, _replayed(difference), value)
    console.print(table)
    console.print()
    details = facts_table()
    details.add_row("rows compared", f"{replay.chunks.count:,}, with {replay.num_same:,} chunks")
    for name, text in _traffic(recorded):
        details.add_row(name, text)
    console.print(details)
    say(f"\n{_by_itself(plain)}")
    troubles = ["rows keep different columns than in the replay"] if replay.columns_differ else []
    troubles += [
        f"{name}: {one.largest:.1e} from the replay, at {one.where}"
        for name, one in replay.kinds().items()
        if not one.is_none
    ]
    if troubles:
        say("\n" + "\n  ".join(["NOT exact: the ranks trained or pruned a different model", *troubles]))
        return False
    say(
        "\nexact: the ranks keep the same chunks, trained to the same bits, as one process that trains the "
        "same parts one after the other"
    )
    return True


def _by_itself(plain: PrunedComparison) -> str:
    """How far one process on whole batches is away, and why it may be."""
    why = (
        "it may keep different chunks: each worker adds the norm of its own part of a row's gradient to the "
        "utility, one process the norm of the sum"
    )
    if plain.columns_differ:
        kept = "keeps different columns"
    else:
        every = plain.num_same + plain.num_other
        kept = f"shares {plain.num_same / max(every, 1):.1%} of all chunks with the ranks"
    return f"One process by itself {kept}, with losses within {plain.losses.largest:.1e}; {why}."


def _cluster(config: TrainConfig, recorded: Recorded) -> str:
    cluster = config.cluster
    stores = "co-located" if cluster.colocated else counted(recorded.num_stores, "store")
    return f"{counted(recorded.num_workers, 'worker')}, {stores}, {cluster.dispatcher}, {cluster.sync}"


def _differences(plain: Comparison, replay: Comparison | None) -> Table:
    titles = ("from one process", "largest value", "replay of the same parts")
    table = plain_table("largest difference of", *titles)
    for name, difference in plain.kinds().items():
        replayed = "-" if replay is None else _replayed(replay.kinds()[name])
        table.add_row(name, f"{difference.largest:.1e}", f"{difference.magnitude:.3g}", replayed)
    return table


def _replayed(difference: Difference) -> str:
    return "equal to the bit" if difference.is_none else f"{difference.largest:.1e}"


def _details(recorded: Recorded, plain: Comparison) -> Table:
    table = facts_table()
    table.add_row("rows compared", f"{plain.rows.count:,}")
    table.add_row("largest difference at", plain.rows.where or "none")
    one_side = (
        f"{plain.only_found:,} by the ranks, {plain.only_expected:,} by one process"
        if plain.only_found or plain.only_expected
        else "none"
    )
    table.add_row("rows trained on one side only", one_side)
    for name, text in _traffic(recorded):
        table.add_row(name, text)
    return table


def _traffic(recorded: Recorded) -> list[tuple[str, str]]:
    moved = [f"{name.replace('_', ' ')} {size:,}" for name, size in recorded.num_bytes.items() if size]
    hits = f"{recorded.hits / max(recorded.lookups, 1):.1%}"
    return [("bytes moved", ", ".join(moved) or "none"), ("hit ratio", hits)]


def _verdict(config: TrainConfig, plain: Comparison, replay: Comparison | None) -> tuple[bool, str]:
    if replay is None:
        sync = config.cluster.sync
        return (
            True,
            f"not exact, by design: with sync {sync} workers may train on rows that lack recent steps",
        )
    troubles = [
        f"{name}: {one.largest:.1e} from the replay, at {one.where}"
        for name, one in replay.kinds().items()
        if not one.is_none
    ]
    tolerances = plain.tolerances(config.precision)
    troubles += [
        f"{name}: {one.largest:.1e} from one process, at {one.where}; rounding explains at most "
        f"{tolerances[name]:.1e}"
        for name, one in plain.beyond(config.precision).items()
    ]
    if troubles:
        return False, "\n  ".join(["NOT exact: the ranks trained a different model", *troubles])
    return True, (
        "exact: the ranks trained the same model as one process, to the bit where sums are taken in the same "
        f"order, and {_apart(config, plain)} where they are not"
    )


def _apart(config: TrainConfig, plain: Comparison) -> str:
    if config.precision == "float64":
        return f"to {max(one.largest for one in plain.kinds().values()):.1e}"
    return f"with losses within {plain.losses.largest:.1e}"
