"""`rowhaul index`: vectors of a two-tower model's items, an index of them, and how good it is."""

from __future__ import annotations

from pathlib import Path

import typer

from rowhaul.cli.console import console, facts_table, say
from rowhaul.cli.json_output import AS_JSON, print_json
from rowhaul.cli.progress import progress_bar


def index(
    run: str = typer.Argument(..., help="The --out of a `train --model two_tower`, or a checkpoint."),
    out: Path = typer.Option(..., "--out", help="New folder to write: vectors, and the index."),
    kind: str = typer.Option("exact", "--kind", help="exact (no FAISS), flat or hnsw."),
    items: list[str] = typer.Option(
        [], "--items", help="Parquet files that list the items; by default all in the item's table."
    ),
    data: list[str] = typer.Option(
        [], "--data", help="Samples whose users are searched for, to measure the index."
    ),
    k: int = typer.Option(100, "--k", min=1, help="Items that are searched for each user."),
    users: int = typer.Option(1000, "--users", min=1, help="Samples of --data to measure with, at most."),
    as_json: bool = AS_JSON,
) -> None:
    """Write item vectors for retrieval; with --data, recall@k against comparing all items."""
    from dataclasses import asdict

    from rowhaul.data.files import expand_files
    from rowhaul.retrieval import item_vectors, write_index
    from rowhaul.retrieval.index import check_new_index
    from rowhaul.retrieval.measure import measure_index
    from rowhaul.retrieval.vectors import open_users
    from rowhaul.train import load_trained

    check_new_index(out, kind)  # before the run is loaded, which takes longer
    if data:
        expand_files(data)
    trainer = load_trained(run)
    if data:
        open_users(trainer, data)  # what is wrong with them is said before an index is written
    with progress_bar("indexing", "nothing was written"):
        keys, vectors = item_vectors(trainer, items or None)
        made = write_index(out, keys, vectors, kind, trainer.step)
    measured = measure_index(made, trainer, data, k, users) if data else None
    if as_json:
        print_json({**asdict(made.facts), **(asdict(measured) if measured else {})})
        return
    say(f"{len(keys):,} items, vectors of {vectors.shape[1]}, in {out} ({kind})")
    if measured is not None:
        table = facts_table()
        rate = measured.hit_rate
        table.add_row(f"recall@{measured.k} against all items", f"{measured.recall:.4f}")
        liked = "no sample with label 1" if rate is None else f"{rate:.4f}"
        table.add_row(f"users whose own item is in the {measured.k}", liked)
        table.add_row("users", f"{measured.users:,}")
        console.print(table, highlight=False)
