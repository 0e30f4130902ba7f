"""`rowhaul simulate`: what each mechanism would cost on a user's own data and links."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer

from rowhaul.cli.console import console, say
from rowhaul.cli.progress import exit_when_interrupted
from rowhaul.cli.run import FEATURES, SCHEMA
from rowhaul.cli.simulate.notes import PRUNE_CHUNKS

# Rich reads square brackets in help as markup.
DISPATCH_HELP = (
    "Mechanisms, comma-separated, each with its settings: random, round-robin, laia:THREADS, "
    "laia-adaptive:TABLES:REFRESH:THREADS, esd:ALPHA:CRITERION (esd:0.5:min3-min), "
    "joint:PASSES:FUTURE:OBJECTIVE (joint:objective=makespan), brute-force, and two-batch: before any of "
    "them (two-batch:laia). Settings may be left out or named: joint:passes=5."
)
POLICY_HELP = (
    "What leaves a full cache: lru, lfu, emark or belady; emark may be followed by the order of its keys, "
    "emark:mark,latest,frequency."
)
SHARES_HELP = "Samples per worker: equal, auto, or for each as 200*4,56*4 (weights, if not the batch's sum)."


def simulate(
    data: list[str] = typer.Argument(..., help="Parquet files, folders or globs."),
    workers: int = typer.Option(..., help="How many workers train, 1 to 64."),
    links: str = typer.Option(
        ...,
        help="Speed of the workers' links, per second: 5gbit for all, or for each as 5gbit*4,0.5gbit*4. "
        "Bits: bit, kbit, mbit, gbit, tbit; bytes: b, kb, mb, gb, tb, kib, mib, gib, tib. With seconds "
        "per message behind an @: 5gbit@0.2ms (s, ms, us, ns).",
    ),
    batch_per_worker: int = typer.Option(128, help="Samples per worker and iteration, if shares are equal."),
    dim: str = typer.Option("512", help="Values in a row: for all tables, or user=64,item=16,..."),
    row_dtype: str = typer.Option(
        "float32", help="What rows are held and sent in: float32, bfloat16, float16 or int8."
    ),
    optimizer: str = typer.Option(
        "sgd", help="sgd, adagrad, rowwise_adagrad or adam; its state travels too."
    ),
    cache: str = typer.Option(
        "10%", help="Each worker's cache: share of the rows (8%), rows (5000), bytes (2GiB)."
    ),
    policy: str = typer.Option("lru", help=POLICY_HELP),
    dispatch: str = typer.Option("random,laia,esd:1,joint", help=DISPATCH_HELP),
    sync: str = typer.Option(
        "on-demand", help="When rows travel: on-demand, full, bounded:S (S updates late), static, at-home."
    ),
    look_ahead: int = typer.Option(
        1, help="Batches known beyond the one being planned; 0: rows are pushed at once."
    ),
    shares: str = typer.Option("equal", help=SHARES_HELP),
    compute: str = typer.Option(
        "measure",
        help="Seconds of compute per sample: 50us, or 50us*4,200us*4; 0: transfers alone; measure: train a "
        "little here, one core.",
    ),
    dense_bytes: str | None = typer.Option(
        None, help="Size of the dense model, all-reduced every iteration: 40mb; default: as measured, or 0."
    ),
    stores: int | None = typer.Option(
        None, help="Parameter servers that store the rows, 1 to 1024; default 1."
    ),
    store_links: str | None = typer.Option(
        None, help="Speed of the stores' links, like --links; default: as fast as all workers together."
    ),
    colocated: bool = typer.Option(
        False, "--colocated", metavar="", help="Workers store the rows; no parameter servers."
    ),
    peer_to_peer: bool = typer.Option(
        False, "--peer-to-peer", metavar="", help="Workers send rows to each other (--sync on-demand)."
    ),
    decision_budget: str | None = typer.Option(
        None,
        help="Time for a decision, for laia-adaptive and joint:auto: 5ms; default: an iteration's compute.",
    ),
    even_out: bool = typer.Option(
        False, "--even-out", metavar="", help="Spread early moves over the look-ahead (2 or more)."
    ),
    first_touch: Literal["on", "off"] = typer.Option(
        "on", help="on: a row never trained before is created where it is needed; off: it is pulled."
    ),
    admit_after: int = typer.Option(1, help="Admit a row at its N-th sighting."),
    ttl: int | None = typer.Option(None, help="Forget rows that no batch has named for N iterations."),
    max_rows: int | None = typer.Option(None, help="Most rows of each table."),
    evict: str = typer.Option("lru", help="Which rows a full table forgets: lru or lfu."),
    prune: str | None = typer.Option(
        None, help="Prune this share of the rows' values, such as 90%, by how often they are read."
    ),
    prune_chunks: int = typer.Option(PRUNE_CHUNKS, help="With --prune: chunks of a row."),
    prune_period: int | None = typer.Option(
        None, help="With --prune: iterations between two prunings; default: as training over so many."
    ),
    memory_budget: str | None = typer.Option(
        None,
        help="Keep rows within this memory, such as 2GiB: ids read most have rows of their own, others "
        "share some.",
    ),
    hot: int | None = typer.Option(
        None,
        help="Replicate the N most frequent rows on all workers; default 0; with --sync static: "
        "as many as the cache holds.",
    ),
    iterations: int = typer.Option(200, help="Iterations to run, the warm-up included; 0: the whole data."),
    warmup: int = typer.Option(10, help="First iterations, which averages leave out."),
    seed: int = typer.Option(0, help="Seed of all random choices."),
    reference: str | None = typer.Option(
        None,
        help="Mechanism to compare with, also laia@best-subset or, with --shares, laia@equal; "
        "default: the first.",
    ),
    subsets: bool = typer.Option(
        True,
        "--subsets/--no-subsets",
        metavar="",
        help="Also show the best subset of workers with equal shares.",
    ),
    schema: Path | None = SCHEMA,
    features: str | None = FEATURES,
    json_file: Path | None = typer.Option(
        None, "--json", help="Write all numbers to this file; -: print them."
    ),
    report: Path | None = typer.Option(None, "--report", help="Write a page with plots to this file."),
    overwrite: bool = typer.Option(
        False, "--overwrite", metavar="", help="Replace --json and --report files that exist."
    ),
    assumptions: bool = typer.Option(
        False, "--assumptions", metavar="", help="Also print what the model of time assumes."
    ),
) -> None:
    """Count what each mechanism would move on your data, and how long your links would take."""
    not_settings = ("json_file", "report", "overwrite", "assumptions")
    given = {name: value for name, value in locals().items() if name not in not_settings}
    import json

    from rowhaul._files import write_text
    from rowhaul.cli.json_output import talk_on_stderr
    from rowhaul.cli.simulate.outputs import check_outputs
    from rowhaul.cli.simulate.run import run_simulation
    from rowhaul.cli.simulate.table import print_results

    printed = talk_on_stderr(json_file is not None and str(json_file) == "-")
    files = (("--json", None if printed else json_file), ("--report", report))
    outputs = {option: path for option, path in files if path}
    check_outputs(outputs, data, schema, overwrite)
    with exit_when_interrupted("nothing was written"):
        results = run_simulation(given)
        texts = {}
        numbers = json.dumps(results.to_dict(), indent=1, allow_nan=False) + "\n"
        if "--json" in outputs:
            texts[outputs["--json"]] = numbers
        if report:
            from rowhaul.simulate.report import render

            texts[report] = render(results)
    if printed:
        typer.echo(numbers, nl=False)
    else:
        print_results(results, console, assumptions)
    for path, text in texts.items():
        write_text(path, text)
        say(f"written: {path}")
