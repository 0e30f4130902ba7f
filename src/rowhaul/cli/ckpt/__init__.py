"""`rowhaul ckpt`: look into checkpoints, put them together, take them elsewhere."""

from __future__ import annotations

import typer

from rowhaul.cli.ckpt.cat import cat
from rowhaul.cli.ckpt.ls import ls
from rowhaul.cli.ckpt.merge import merge
from rowhaul.cli.export import export

ckpt = typer.Typer(no_args_is_help=True, help="Look into checkpoints, merge them, export them.")
ckpt.command()(ls)
# A key may be a negative number, which is no option.
ckpt.command(context_settings={"ignore_unknown_options": True})(cat)
ckpt.command()(merge)
ckpt.command()(export)
