"""The user's door: ``rowhaul COMMAND``. Every command is a thin layer over the library."""

from rowhaul.cli.app import main

__all__ = ["main"]
