"""`rowhaul ckpt`: inspect, merge, convert and export checkpoints."""

from __future__ import annotations

import typer

from rowhaul.cli.ckpt.cat import cat
from rowhaul.cli.ckpt.convert import convert
from rowhaul.cli.ckpt.ls import ls
from rowhaul.cli.ckpt.merge import merge
from rowhaul.cli.export import export

ckpt = typer.Typer(no_args_is_help=True, help="Inspect, merge, convert and export checkpoints.")
ckpt.command()(ls)
# A key may be a negative number, which is not an option.
ckpt.command(context_settings={"ignore_unknown_options": True})(cat)
ckpt.command()(merge)
ckpt.command()(convert)
ckpt.command()(export)
