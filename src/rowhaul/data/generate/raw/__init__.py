"""The generated log in the data set's own raw text, so that readers can be tried without the real files.

Reading it back gives the labels and ids of `LogGenerator.batches`. Output appears under its name only
when it is whole.
"""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowhaul._files import whole
from rowhaul.data.generate.generator import LabelledColumns, LogGenerator
from rowhaul.data.generate.raw.movielens import write_movielens
from rowhaul.data.generate.raw.taobao import write_taobao
from rowhaul.data.generate.raw.text import id_tokens, integers, lines, numbers
from rowhaul.errors import ConfigError, DataError

_AVAZU_FIRST_ID = 10**18
_AVAZU_FIRST_DAY = np.datetime64("2014-10-21")
_SEARCH_FIRST_SECOND = 1_596_439_471
_SEARCH_SECONDS = 90 * 24 * 3600


def write_raw(generator: LogGenerator, path: str | os.PathLike[str]) -> None:
    """Write the whole log as raw text.

    Args:
        generator: Of one of the named presets.
        path: A file for criteo, criteo-tb, criteo-search and avazu, compressed when it ends in ``.gz``;
            a folder for taobao; a folder, or a file that ends in ``.zip``, for movielens.
    """
    target = Path(path)
    if target.exists():
        raise DataError(f"{target} exists already; remove it or give another name")
    writers = {
        "criteo": _write_criteo,
        "criteo-tb": _write_criteo,
        "criteo-search": _write_search,
        "avazu": _write_avazu,
        "movielens": write_movielens,
        "taobao": write_taobao,
    }
    if generator.preset.name not in writers:
        raise ConfigError(
            f"preset {generator.preset.name!r} has no raw format; those with one are {', '.join(writers)}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole(target) as partial:
        writers[generator.preset.name](generator, partial)


def _write_criteo(generator: LogGenerator, path: Path) -> None:
    with _open(path) as file:
        for samples in generator.samples():
            columns = [integers(samples.labels), *numbers(generator, samples), *id_tokens(generator, samples)]
            file.write(lines(columns, "\t"))


def _write_avazu(generator: LogGenerator, path: Path) -> None:
    names = ["id", generator.preset.label, *(field.name for field in generator.preset.ids)]
    with _open(path) as file:
        file.write((",".join(names) + "\n").encode())
        for samples in generator.samples():
            rows = samples.columns.visits.rows
            hours = rows // generator.preset.ids[0].clock_rows
            days = _AVAZU_FIRST_DAY + (hours // 24).astype("timedelta64[D]")
            time = pc.binary_join_element_wise(
                pc.strftime(pa.array(days), "%y%m%d"), pc.utf8_lpad(integers(hours % 24), 2, "0"), ""
            )
            columns = [integers(rows + _AVAZU_FIRST_ID), integers(samples.labels), time]
            columns += id_tokens(generator, samples)[1:]
            file.write(lines(columns, ","))


def _write_search(generator: LogGenerator, path: Path) -> None:
    with _open(path) as file:
        for samples in generator.samples():
            clicks, price = numbers(generator, samples)
            seconds = samples.columns.visits.rows * _SEARCH_SECONDS // generator.preset.samples
            columns = [
                integers(samples.labels),
                *_sales(samples, price),
                integers(seconds + _SEARCH_FIRST_SECOND),
                clicks,
                price,
                *id_tokens(generator, samples),
            ]
            file.write(lines(columns, "\t", missing="-1"))


def _sales(samples: LabelledColumns, price: pa.Array) -> list[pa.Array]:
    """Amount and delay of a sale, missing where there was none: the outcome, not features."""
    no_sale = pa.array(~samples.labels)
    delay = integers(samples.columns.visits.rows * 7919 % (30 * 24 * 3600))
    nothing = pa.scalar(None, pa.string())
    return [pc.if_else(no_sale, nothing, column) for column in (price, delay)]


def _open(path: Path) -> BinaryIO | gzip.GzipFile:
    if path.name.endswith(".gz"):
        return gzip.open(path, "wb", compresslevel=3)
    return open(path, "wb")
