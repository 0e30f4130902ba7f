"""Options that have been renamed and still work: `--to` of `export` and `ckpt merge` became `--out`."""

from __future__ import annotations

import typer

from rowhaul.errors import ConfigError

TO = typer.Option(None, "--to", hidden=True, help="The old name of --out.")


def out_or_to(command: str, out: str | None, to: str | None) -> str:
    """Return what ``--out`` or its old name gives; say which name to use from now on."""
    if out is not None:
        return out
    if to is None:
        raise ConfigError(f"{command} needs --out: the folder to write")
    typer.echo("--to is now called --out, as in the other commands", err=True)
    return to
