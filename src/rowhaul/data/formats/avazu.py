"""Avazu's click log: a CSV file with a header, ids as integers and hexadecimal tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from rowhaul.data.formats.header import split_header, with_header
from rowhaul.data.formats.source import BadRows, Options, TextSource
from rowhaul.data.schema import IdColumn, LabelColumn, Schema
from rowhaul.data.text.blocks import TextFile, first_line
from rowhaul.data.text.layout import Field

_HEX = (
    *("site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model"),
)
_FEATURES = (
    *("hour", "C1", "banner_pos", *_HEX, "device_type", "device_conn_type"),
    *(f"C{number}" for number in range(14, 22)),
)


def open_avazu(inputs: Sequence[Path], options: Options) -> TextSource:
    """``train`` or ``test``; the time YYMMDDHH becomes the hour of the day, 0 to 23."""
    files = [TextFile(path) for path in inputs]
    labelled = "click" in split_header(first_line(files[0]).text, ",", files[0])
    fields = {"click": Field("click", "label")} if labelled else {}
    fields |= {name: Field(name, "hex" if name in _HEX else "integer") for name in _FEATURES}
    schema = Schema(
        label=LabelColumn("click") if labelled else None,
        dense=(),
        ids=tuple(IdColumn(name, type=fields[name].kind) for name in _FEATURES),
    )
    return TextSource(
        tuple(with_header(file, fields) for file in files),
        schema,
        make_derive=lambda seed: _hour_of_day,
    )


def _hour_of_day(columns: dict[str, pa.Array]) -> tuple[dict[str, pa.Array], BadRows]:
    times = columns["hour"].fill_null(-1).to_numpy(zero_copy_only=False)
    hour, day, month = times % 100, times // 100 % 100, times // 10_000 % 100
    bad = (
        (times < 0) | (times > 99_999_999) | (hour > 23) | (day < 1) | (day > 31) | (month < 1) | (month > 12)
    )
    reason = BadRows(bad, lambda row: f"column hour: {columns['hour'][row]} is not a time YYMMDDHH")
    return {**columns, "hour": pa.array(hour)}, reason
