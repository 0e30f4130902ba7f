"""The raw formats that `prepare` reads, by name. A new one is a module here and a line in `FORMATS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rowhaul.data.formats.avazu import open_avazu
from rowhaul.data.formats.criteo import open_kaggle, open_search, open_terabyte
from rowhaul.data.formats.generic import open_csv
from rowhaul.data.formats.movielens import open_movielens
from rowhaul.data.formats.parquet import open_parquet
from rowhaul.data.formats.source import Options, Source
from rowhaul.data.formats.taobao import open_taobao
from rowhaul.data.formats.userbehavior import open_userbehavior
from rowhaul.errors import ConfigError, DataError

__all__ = ["FORMATS", "Options", "Source", "open_format"]


@dataclass(frozen=True)
class Format:
    """How to open a format, and which of the `Options` it has."""

    open: Callable[[Sequence[Path], Options], Source]
    options: tuple[str, ...] = ()


FORMATS = {
    "criteo": Format(open_kaggle),
    "criteo-tb": Format(open_terabyte),
    "criteo-search": Format(open_search, ("time_order",)),
    "avazu": Format(open_avazu),
    "movielens": Format(open_movielens, ("time_order", "positive_from", "history", "history_of")),
    "taobao": Format(open_taobao, ("time_order",)),
    "userbehavior": Format(open_userbehavior, ("time_order", "history", "history_of")),
    "csv": Format(open_csv, ("schema",)),
    "parquet": Format(open_parquet, ("schema",)),
}


def open_format(name: str, inputs: Sequence[Path], options: Options) -> Source:
    """Open raw files, look at their first lines, and refuse what cannot be read."""
    if name not in FORMATS:
        raise ConfigError(f"unknown format {name!r}; known are {', '.join(FORMATS)}")
    known = FORMATS[name].options
    for option in ("schema", "positive_from", "time_order", "history", "history_of"):
        if getattr(options, option) is not None and option not in known:
            able = ", ".join(other for other, one in FORMATS.items() if option in one.options)
            raise ConfigError(f"format {name} has no option {option}; it is for {able}")
    if "schema" in known and options.schema is None:
        raise ConfigError(f"format {name} needs a schema file that says what the columns mean")
    if not inputs:
        raise DataError("no input file was given")
    return FORMATS[name].open(inputs, options)
