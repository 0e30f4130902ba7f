"""`rowhaul netcheck`: do the ranks of a cluster reach each other, over which interface, how fast?

It also lists what listens where, for firewalls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from rowhaul.cli.console import counted, plain_table
from rowhaul.cli.json_output import AS_JSON, print_json
from rowhaul.errors import ConfigError

if TYPE_CHECKING:
    from rowhaul.cluster import Cluster
    from rowhaul.transport.calibration import LinkMeasurements

_LOCAL_RANKS = 2


def netcheck(
    workers: int | None = typer.Option(
        None, help=f"Ranks to start on this machine if torchrun has not started any; default {_LOCAL_RANKS}."
    ),
    interface: str | None = typer.Option(
        None, help="Network interface to use; default: the one that leads to the master."
    ),
    secret_file: str | None = typer.Option(
        None, help="File with the secret that all ranks must prove; default: ROWHAUL_SECRET, if set."
    ),
    seconds_per_pair: float = typer.Option(0.3, help="About how long to measure each pair of ranks."),
    as_json: bool = AS_JSON,
) -> None:
    """Join the ranks that torchrun has started (or local ones), measure their links, list what listens."""
    from rowhaul.cluster import is_launched, launch
    from rowhaul.cluster.secret import load_secret

    if seconds_per_pair <= 0:
        raise ConfigError(f"--seconds-per-pair must be more than 0; got {seconds_per_pair}")
    if is_launched():
        if workers is not None:
            raise ConfigError("--workers starts ranks on this machine; torchrun has started them already")
        _check(interface, secret_file, seconds_per_pair, as_json)
        return
    if secret_file:
        load_secret(secret_file)
    arguments = ["netcheck", "--seconds-per-pair", str(seconds_per_pair), *(["--json"] if as_json else [])]
    arguments += ["--interface", interface] if interface else []
    launch(arguments, _LOCAL_RANKS if workers is None else workers, colocated=True)


def _check(interface: str | None, secret_file: str | None, seconds_per_pair: float, as_json: bool) -> None:
    from rowhaul.cluster import gather_texts, join
    from rowhaul.transport.calibration import measure_links

    with join(colocated=True, interface=interface, secret_file=secret_file) as cluster:
        texts = gather_texts(cluster, "netcheck", json.dumps(_facts(cluster)))
        ranks = [json.loads(text) for text in texts]
        links = _in_a_thread(
            cluster, lambda: measure_links(cluster.moves, cluster.control, seconds_per_pair=seconds_per_pair)
        )
        master, num_hosts = cluster.place.master, len(cluster.hosts)
    found = {
        "master": master,
        "num_hosts": num_hosts,
        "has_secret": cluster.secret is not None,
        "ranks": ranks,
        "pairs": _pairs(links),
    }
    if cluster.rank == 0 and as_json:
        print_json(found)
    elif cluster.rank == 0:
        _render(found, Console(emoji=False))


def _in_a_thread(cluster: Cluster, call: Any) -> LinkMeasurements:
    """Measure in a thread, so that a rank that dies meanwhile is named and nothing hangs."""
    from rowhaul._threads import SerialExecutor

    executor = SerialExecutor("netcheck", cluster.failure)
    links: LinkMeasurements = executor.submit(call).wait()
    executor.close()
    return links


def _facts(cluster: Cluster) -> dict[str, Any]:
    from rowhaul.cluster.listening import listeners

    mine = cluster.members[cluster.rank]
    return {
        "rank": cluster.rank,
        "host": mine.host_name,
        "process": mine.process,
        "interface": cluster.interface.name,
        "because": cluster.interface.chosen_by,
        "address": cluster.interface.address,
        "listens": [vars(one) for one in listeners(cluster)],
    }


def _pairs(links: LinkMeasurements) -> list[dict[str, Any]]:
    return [
        {
            "ranks": [low, high],
            "latency_ms": 1e3 * float(links.latency_seconds[low, high]),
            "mbit_per_s": _megabits(links.bytes_per_second[low, high]),
            "mbit_per_s_back": _megabits(links.bytes_per_second[high, low]),
            "mbit_per_s_both_ways": _megabits(links.both_ways_bytes_per_second[low, high]),
        }
        for low in range(links.num_ranks)
        for high in range(low + 1, links.num_ranks)
    ]


def _megabits(bytes_per_second: float) -> float:
    return float(bytes_per_second) * 8 / 1e6


def _render(found: Mapping[str, Any], console: Console) -> None:
    ranks, pairs, hosts = found["ranks"], found["pairs"], counted(found["num_hosts"], "host")
    title = f"{len(ranks)} ranks on {hosts}, master {found['master']}\n"
    console.print(title, highlight=False, markup=False)
    names = ("rank", "host", "process", "interface", "because", "address")
    places = plain_table(*names, justify="left")
    for one in ranks:
        places.add_row(*(escape(str(one[name])) for name in names))
    console.print(places)
    console.print()
    _render_listeners(ranks, found["has_secret"], console)
    if not pairs:
        console.print("\nOne rank has no links to measure.")
        return
    speeds = plain_table(
        "ranks", "latency ms", "there Mbit/s", "back Mbit/s", "both ways at once Mbit/s, each"
    )
    for pair in pairs:
        numbers = ("mbit_per_s", "mbit_per_s_back", "mbit_per_s_both_ways")
        low, high = pair["ranks"]
        speeds.add_row(
            f"{low} - {high}", f"{pair['latency_ms']:.2f}", *(f"{pair[number]:,.0f}" for number in numbers)
        )
    console.print()
    console.print(speeds)
    console.print("\n[green]All ranks reach each other.[/]")


def _render_listeners(ranks: Sequence[dict[str, Any]], has_secret: bool, console: Console) -> None:
    table = plain_table("rank", "what listens", "process", "address", "open to", "ports", justify="left")
    for rank in ranks:
        ports: dict[tuple[str, ...], list[str]] = {}
        for one in rank["listens"]:
            row = tuple(str(one[name]) for name in ("what", "process", "address", "reach"))
            ports.setdefault(row, []).append(str(one["port"]))
        for row, those in ports.items():
            table.add_row(str(rank["rank"]), *map(escape, row), ", ".join(those))
    console.print(table)
    if has_secret:
        console.print("\nThe ranks have proved the run's secret to each other.", highlight=False)
    else:
        console.print(
            "\n[yellow]No secret:[/] anyone who reaches the rendezvous store can join. Give every rank the "
            "same --secret-file.",
            highlight=False,
        )
