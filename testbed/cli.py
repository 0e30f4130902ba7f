"""The commands: a cluster for experiments, one command on all its ranks, a check of its links."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

from rowhaul.errors import ConfigError, RowhaulError
from rowhaul.simulate.links import Link, parse_links
from testbed import layout, names, network, tables
from testbed.chaos.command import chaos
from testbed.cluster import run_in
from testbed.following import Following
from testbed.layout import Network
from testbed.measure import measure_links

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

LINKS = typer.Option(None, help="Speed of each worker's link: 50mbit*4,5mbit*4 is eight workers.")
STORES = typer.Option(None, help="Speed of each store's link: 500mbit is one store, 500mbit*2 are two.")
NAME = typer.Option("default", help="Which network, where several are up.")

app.command()(chaos)


@app.command()
def up(links: str = LINKS, stores: str = STORES, name: str = NAME) -> None:
    """Leave a cluster up until `down`."""
    if links is None:
        raise ConfigError("--links is missing: give each worker's speed, e.g. --links 50mbit*4,5mbit*4")
    made = network.bring_up(name, *_links(links, stores))
    typer.echo(tables.ranks_table(made))
    option = "" if name == "default" else f" --name {name}"
    entered = " ".join(made.inside(0, ["bash"]))
    typer.echo(
        f"\nenter a rank:         {entered}\n"
        f"run on all ranks:     python -m testbed run{option} -- rowhaul netcheck\n"
        f"measure the links:    python -m testbed check{option}\n"
        f"take it down:         python -m testbed down{option}"
    )


@app.command()
def down(name: str = NAME) -> None:
    """Take down a cluster that `up` left up; what runs inside is ended."""
    network.check_available()
    network.remove(layout.find(name))
    typer.echo(f"network {name} is down")


@app.command()
def clean(all_kept: bool = typer.Option(False, "--all", help="Take down what `up` left up, too.")) -> None:
    """Remove the networks of runs that were killed."""
    network.check_available()
    removed = network.remove_leftovers()
    for name in names.kept_networks() if all_kept else []:
        network.remove(names.kept_name(name))
        removed.append(names.kept_name(name))
    typer.echo("\n".join(f"removed {name}" for name in removed) or "nothing was left over")


@app.command()
def run(
    command: list[str] = typer.Argument(..., help="One command, after --; every rank runs it."),
    links: str = LINKS,
    stores: str = STORES,
    name: str = NAME,
    timeout: float = typer.Option(600.0, help="Seconds after which ranks are ended."),
    output: Path = typer.Option(None, help="Folder for each rank's output; a new one in /tmp otherwise."),
) -> None:
    """Run one command per rank, in a network that is up or, with --links, in one of its own."""
    with _network(links, stores, name) as used:
        following = Following(used, output)
        done = run_in(
            used, lambda rank: command, timeout, folder=following.folder, meanwhile=following.show_new_lines
        )
    typer.echo(f"\n{tables.traffic_table(used, done.counters)}\n")
    typer.echo(f"{done.seconds:.1f} s; each rank's output is in {following.folder}")


@app.command()
def check(
    links: str = LINKS,
    stores: str = STORES,
    name: str = NAME,
    seconds: float = typer.Option(1.0, min=0.05, max=600, help="How long each link is measured, twice."),
) -> None:
    """Measure every link, both directions at once: shaped against achieved."""
    with _network(links, stores, name) as used:
        alone = measure_links(used, seconds, together=False)
        together = measure_links(used, seconds, together=True)
    typer.echo(tables.speeds_table(used, alone, together))


@contextmanager
def _network(links: str | None, stores: str | None, name: str) -> Iterator[Network]:
    """A network of its own where links are given, otherwise the one that is up."""
    if links is not None:
        with network.ShapedNetwork(*_links(links, stores)) as made:
            yield made
    elif stores is not None:
        raise ConfigError("--stores makes a network of its own, with --links only")
    else:
        network.check_available()
        yield layout.existing(name)


def _links(links: str, stores: str | None) -> tuple[tuple[Link, ...], tuple[Link, ...]]:
    return _parse(links, "--links", "workers"), _parse(stores, "--stores", "stores") if stores else ()


def _parse(text: str, option: str, nodes: str) -> tuple[Link, ...]:
    """As `rowhaul simulate --links`, but the text itself says how many there are."""
    counts = [item.partition("*")[2].strip() or "1" for item in text.split(",")]
    count = sum(int(times) for times in counts if times.isdecimal() and len(times) <= 4)
    return parse_links(text, count, option, nodes)


def main() -> None:
    """Run the command line; show a user's mistakes as one clear message, without a traceback."""
    try:
        app()
    except RowhaulError as error:
        Console(stderr=True).print(
            f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
