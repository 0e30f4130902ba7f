"""`rowhaul ckpt cat`: the rows of some keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from rowhaul.cli.ckpt.ls import CHECKPOINT
from rowhaul.cli.console import say
from rowhaul.cli.json_output import AS_JSON, print_json
from rowhaul.cli.progress import counting_bar, exit_when_interrupted

if TYPE_CHECKING:
    from rowhaul.checkpoint import CheckpointReader
    from rowhaul.cli.ckpt.keys import Reading
    from rowhaul.store.row_parts import FoundRow

EXIT_ABSENT = 1  # as grep
_WORTH_A_BAR = 8  # files


def cat(
    path: str = CHECKPOINT,
    keys: list[str] = typer.Argument(..., metavar="KEY...", help="Ids as they are in the data."),
    table: list[str] = typer.Option([], "--table", help="Search only this table; repeatable."),
    state: bool = typer.Option(False, "--state", help="Also show the optimizer state."),
    raw: bool = typer.Option(False, "--raw", help="KEY is a stored 64-bit key, even in tables of text ids."),
    as_json: bool = AS_JSON,
) -> None:
    """Print the rows of keys in all tables that have them; exits with 1 if a key is in none."""
    from rowhaul.cli.ckpt.keys import check_raw
    from rowhaul.export.export import chosen_tables
    from rowhaul.train.run_folder import open_saved

    if raw:
        check_raw(keys)
    reader = open_saved(path)
    searched = chosen_tables(reader, table)
    found = _search(reader, keys, searched, raw)
    absent = [typed for typed in keys if not any(hit.reading.typed == typed for hit in found.hits)]
    if as_json:
        rows = [hit.to_dict(state) for hit in found.hits]
        print_json({"checkpoint": str(reader.path), "rows": rows, "absent": absent})
    else:
        _print(found, absent, searched, reader.tables, state)
    if absent:
        raise typer.Exit(EXIT_ABSENT)


class Hit(NamedTuple):
    """A row that was found."""

    table: str
    reading: Reading
    row: FoundRow

    def to_dict(self, with_state: bool) -> dict[str, Any]:
        """For JSON."""
        row = {"id": self.reading.typed, "ids": self.reading.kind, "key": self.reading.key}
        found = self.row
        vectors = {"values": found.values.tolist()} | ({"state": found.state.tolist()} if with_state else {})
        return {"table": self.table, **row, **vectors, **found.details}


class Found(NamedTuple):
    """Rows that were found, and those that other readings of the keys would have found."""

    hits: list[Hit]
    near: list[Hit]


def _search(reader: CheckpointReader, keys: list[str], tables: list[str], raw: bool) -> Found:
    from rowhaul._id_kinds import HEX
    from rowhaul.checkpoint.finding import find_rows
    from rowhaul.cli.ckpt.keys import meant, readings
    from rowhaul.export.export import ids_of_tables

    found, ids = Found([], []), ids_of_tables(reader)
    wanted = [reading.key for typed in keys for reading in readings(typed)]
    num_files = sum(len(reader.tables[name].files) for name in tables)
    bar = counting_bar(num_files < _WORTH_A_BAR)
    with exit_when_interrupted("not all files were searched"), bar:
        task = bar.add_task("searching files", total=num_files, note="")
        for name in tables:
            records = find_rows(reader, name, wanted, lambda file: bar.advance(task))
            for typed in dict.fromkeys(keys):
                asked = meant(typed, ids[name], raw)
                for reading in readings(typed):
                    if reading.key in records:
                        hit = Hit(name, reading, records[reading.key])
                        if reading in asked:
                            found.hits.append(hit)
                        elif reading.kind != HEX:
                            found.near.append(hit)
    return found


def _print(
    found: Found, absent: list[str], searched: list[str], tables: Iterable[str], with_state: bool
) -> None:
    for hit in found.hits:
        key = f"key {hit.reading.key}"
        is_typed = hit.reading.kind == "integer" and int(hit.reading.typed) == hit.reading.key
        say(f"{hit.table}: {key}" if is_typed else f"{hit.table}: {hit.reading} ({key})")
        say(f"  values {_values(hit.row)}")
        for name, note in hit.row.notes.items():
            say(f"  {name} {note}")
        if with_state:
            say(f"  state  {_numbers(hit.row.state)}")
    others = [name for name in tables if name not in searched]
    not_searched = f" (without --table also: {', '.join(others)})" if others else ""
    for typed in absent:
        say(f"{typed!r} is in none of the tables searched: {', '.join(searched)}{not_searched}")
        for hit in found.near:
            if hit.reading.typed == typed:
                say(f"  but table {hit.table!r} holds {hit.reading}: {_explained(hit)}")


def _explained(hit: Hit) -> str:
    if hit.reading.kind == "integer":
        return "its ids are not integers, so this is a stored key; add --raw to see it"
    return "its ids are not text, so this may be the key of another id"


def _values(row: FoundRow) -> str:
    """The values, and a dot where one is not stored."""
    values = zip(row.values.tolist(), row.stored.tolist(), strict=True)
    return " ".join(f"{value:.6g}" if is_stored else "·" for value, is_stored in values)


def _numbers(array: Any) -> str:
    return " ".join(f"{value:.6g}" for value in array.tolist()) or "none"
