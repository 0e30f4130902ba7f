"""`rowhaul netcheck`: do the ranks of a cluster reach each other, over which interface, how fast?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from rowhaul.cli.console import counted, plain_table
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
    seconds_per_pair: float = typer.Option(0.3, help="About how long to measure each pair of ranks."),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Join the ranks that torchrun has started (or local ones) and measure the links between them."""
    from rowhaul.cluster import is_launched, launch

    if seconds_per_pair <= 0:
        raise ConfigError(f"--seconds-per-pair must be more than 0; got {seconds_per_pair}")
    if is_launched():
        if workers is not None:
            raise ConfigError("--workers starts ranks on this machine; torchrun has started them already")
        _check(interface, seconds_per_pair, as_json)
        return
    arguments = ["netcheck", "--seconds-per-pair", str(seconds_per_pair), *(["--json"] if as_json else [])]
    arguments += ["--interface", interface] if interface else []
    launch(arguments, _LOCAL_RANKS if workers is None else workers, colocated=True)


def _check(interface: str | None, seconds_per_pair: float, as_json: bool) -> None:
    from rowhaul.cluster import gather_texts, join
    from rowhaul.transport.calibration import measure_links

    with join(colocated=True, interface=interface) as cluster:
        texts = gather_texts(cluster, "netcheck", json.dumps(_facts(cluster)))
        ranks = [json.loads(text) for text in texts]
        links = _in_a_thread(
            cluster, lambda: measure_links(cluster.moves, cluster.control, seconds_per_pair=seconds_per_pair)
        )
        master, num_hosts = cluster.place.master, len(cluster.hosts)
    if cluster.rank == 0 and as_json:
        typer.echo(json.dumps({"master": master, "ranks": ranks, "pairs": _pairs(links)}, indent=2))
    elif cluster.rank == 0:
        _render(ranks, _pairs(links), master, num_hosts, Console(emoji=False))


def _in_a_thread(cluster: Cluster, call: Any) -> LinkMeasurements:
    """Measure in a thread, so that a rank that dies meanwhile is named and nothing hangs."""
    from rowhaul._threads import SerialExecutor

    executor = SerialExecutor("netcheck", cluster.failure)
    links: LinkMeasurements = executor.submit(call).wait()
    executor.close()
    return links


def _facts(cluster: Cluster) -> dict[str, Any]:
    import psutil

    process = psutil.Process()
    connections = getattr(process, "net_connections", None) or process.connections
    ports = {one.laddr.port for one in connections(kind="tcp") if one.status == psutil.CONN_LISTEN}
    mine = cluster.members[cluster.rank]
    return {
        "rank": cluster.rank,
        "host": mine.host_name,
        "process": mine.process,
        "interface": cluster.interface.name,
        "because": cluster.interface.chosen_by,
        "address": cluster.interface.address,
        "ports": sorted(ports),
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


def _render(
    ranks: Sequence[dict[str, Any]],
    pairs: Sequence[dict[str, Any]],
    master: str,
    num_hosts: int,
    console: Console,
) -> None:
    hosts = counted(num_hosts, "host")
    console.print(f"{len(ranks)} ranks on {hosts}, master {master}\n", highlight=False, markup=False)
    names = ("rank", "host", "process", "interface", "because", "address")
    places = plain_table(*names, "listens at ports", justify="left")
    for one in ranks:
        ports = ", ".join(map(str, one["ports"])) or "-"
        places.add_row(*(escape(str(one[name])) for name in names), ports)
    console.print(places)
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
