"""The table and the verdict of `rowhaul verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from rowhaul.cli.progress import console

if TYPE_CHECKING:
    from rowhaul.pruning.comparison import PrunedComparison
    from rowhaul.train import TrainConfig
    from rowhaul.verify.comparison import Comparison, Difference
    from rowhaul.verify.verify import Recorded


def print_report(
    config: TrainConfig, recorded: Recorded, plain: Comparison, replay: Comparison | None
) -> bool:
    """Print what was found; returns whether the cluster has passed."""
    _head(config, recorded)
    console.print(_differences(plain, replay))
    console.print()
    console.print(_details(recorded, plain))
    is_exact, verdict = _verdict(config, plain, replay)
    _say(f"\n{verdict}")
    return is_exact


def _head(config: TrainConfig, recorded: Recorded) -> None:
    """What was trained, on what."""
    steps = len(recorded.trained.losses)
    _say(f"\n{_cluster(config, recorded)}, {_number(steps, 'step')} in {config.precision}")
    if steps < config.max_steps:
        _say(
            f"The data has {_number(steps, 'batch', 'batches')} of {config.batch_size:,} samples, not the "
            f"{config.max_steps:,} asked for: give more data or epochs, or a smaller --batch-size"
        )
    console.print()


def print_pruned_report(
    config: TrainConfig, recorded: Recorded, plain: PrunedComparison, replay: PrunedComparison
) -> bool:
    """The same of pruned rows; pruned by gradients, they need not be the same."""
    _head(config, recorded)
    console.print(_differences(plain, replay))
    console.print()
    details = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    details.add_row("rows compared", f"{replay.chunks.count:,}, with {replay.num_same:,} chunks")
    for name, text in _traffic(recorded):
        details.add_row(name, text)
    console.print(details)
    if not config.prune.by_access:
        _say(f"\nnot exact, by design: {_by_gradients(plain)}")
        return True
    is_exact, verdict = _verdict(config, plain, replay)
    if plain.columns_differ or replay.columns_differ:
        is_exact, verdict = False, "NOT exact: rows keep other columns than in one process"
    _say(f"\n{verdict}")
    return is_exact


def _by_gradients(plain: PrunedComparison) -> str:
    """How far a run of one process is away where utilities are sums of norms, and why."""
    if plain.columns_differ:
        kept = "keeps other columns of its rows"
    else:
        every = plain.num_same + plain.num_other
        kept = f"has {plain.num_same / max(every, 1):.1%} of all chunks in common with the ranks"
    return (
        f"one process {kept}, and losses within {plain.losses.largest:.1e}; with prune.utility gradient each "
        "worker adds the norm of its own part of a gradient, one process that of their sum. Set it to access "
        "to have the same chunks everywhere"
    )


def _cluster(config: TrainConfig, recorded: Recorded) -> str:
    cluster = config.cluster
    stores = "co-located" if cluster.colocated else _number(recorded.num_stores, "store")
    return f"{_number(recorded.num_workers, 'worker')}, {stores}, {cluster.dispatcher}, {cluster.sync}"


def _number(count: int, one: str, several: str = "") -> str:
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def _differences(plain: Comparison, replay: Comparison | None) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("largest difference of")
    for title in ("from one process", "largest value", "replay of the same parts"):
        table.add_column(title, justify="right")
    for name, difference in plain.kinds().items():
        replayed = "-" if replay is None else _replayed(replay.kinds()[name])
        table.add_row(name, f"{difference.largest:.1e}", f"{difference.magnitude:.3g}", replayed)
    return table


def _replayed(difference: Difference) -> str:
    return "equal to the bit" if difference.is_none else f"{difference.largest:.1e}"


def _details(recorded: Recorded, plain: Comparison) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_row("rows compared", f"{plain.rows.count:,}")
    table.add_row("differs most", plain.rows.where or "none differs")
    one_side = (
        f"{plain.only_found:,} of the ranks, {plain.only_expected:,} of one process"
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
        return True, f"not exact, by design: with sync {sync} a worker may train on rows that lack late steps"
    troubles = [
        f"{name}: {one.largest:.1e} from the replay, at {one.where}"
        for name, one in replay.kinds().items()
        if not one.is_none
    ]
    tolerances = plain.tolerances(config.precision)
    troubles += [
        f"{name}: {one.largest:.1e} from one process, at {one.where}, where at most {tolerances[name]:.1e} "
        "would be rounding"
        for name, one in plain.beyond(config.precision).items()
    ]
    if troubles:
        return False, "\n  ".join(["NOT exact: the ranks trained another model", *troubles])
    return True, (
        "exact: the ranks trained the same model as one process, to the bit where sums are taken in the same "
        f"order, and {_apart(config, plain)} where they are not"
    )


def _apart(config: TrainConfig, plain: Comparison) -> str:
    if config.precision == "float64":
        return f"to {max(one.largest for one in plain.kinds().values()):.1e}"
    return f"with losses within {plain.losses.largest:.1e}"


def _say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
