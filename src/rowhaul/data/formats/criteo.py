"""Criteo's logs: the Kaggle challenge, the Terabyte days and the Sponsored Search conversions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rowhaul.data.formats.header import without_header
from rowhaul.data.formats.source import Options, TextSource
from rowhaul.data.schema import DenseColumn, IdColumn, LabelColumn, Schema
from rowhaul.data.text.blocks import TextFile, first_line
from rowhaul.data.text.layout import TextLayout, fields
from rowhaul.errors import DataError

_COUNTS = tuple(f"I{number}" for number in range(1, 14))
_TOKENS = tuple(f"C{number}" for number in range(1, 27))

# In the order of the file. The sale's amount and delay are known only after the sale: using them to
# predict it would leak the answer. The time orders the rows.
_SEARCH_NUMBERS = ("nb_clicks_1week", "product_price")
_SEARCH_IDS = (
    *("product_age_group", "device_type", "audience_id", "product_gender", "product_brand"),
    *(f"product_category{number}" for number in range(1, 8)),
    *("product_country", "product_id", "product_title", "partner_id", "user_id"),
)
_SEARCH_COLUMNS = {
    **{"Sale": "label", "SalesAmountInEuro": "skip", "time_delay_for_conversion": "skip"},
    "click_timestamp": "integer",
    **dict.fromkeys(_SEARCH_NUMBERS, "number"),
    **dict.fromkeys(_SEARCH_IDS, "string"),
}


def open_kaggle(inputs: Sequence[Path], options: Options) -> TextSource:
    """``train.txt``, or ``test.txt`` without the label: 13 counts, 26 hexadecimal tokens."""
    files = [TextFile(path) for path in inputs]
    num_columns = {str(file): first_line(file).text.count(b"\t") + 1 for file in files}
    if len(set(num_columns.values())) > 1:
        raise DataError(f"the files differ in their number of columns: {num_columns}")
    labelled = set(num_columns.values()) != {len(_COUNTS) + len(_TOKENS)}
    columns = {"label": "label"} if labelled else {}
    columns |= dict.fromkeys(_COUNTS, "count") | dict.fromkeys(_TOKENS, "hex")
    schema = Schema(
        label=LabelColumn("label") if labelled else None,
        dense=tuple(DenseColumn(name, transform="log1p") for name in _COUNTS),
        ids=tuple(IdColumn(name, type="hex") for name in _TOKENS),
    )
    layout = TextLayout(fields(**columns))
    return TextSource(tuple(without_header(file, layout) for file in files), schema)


def open_terabyte(inputs: Sequence[Path], options: Options) -> TextSource:
    """``day_0.gz`` to ``day_23.gz``, the days in order however they are named on the command line."""
    return open_kaggle(sorted(inputs, key=_day), options)


def open_search(inputs: Sequence[Path], options: Options) -> TextSource:
    """``CriteoSearchData``: a sale or none, 2 numbers, 17 ids; -1 is missing."""
    schema = Schema(
        label=LabelColumn("Sale"),
        dense=tuple(DenseColumn(name, "log1p") for name in _SEARCH_NUMBERS),
        ids=tuple(IdColumn(name, type="string") for name in _SEARCH_IDS),
    )
    layout = TextLayout(fields(**_SEARCH_COLUMNS), missing="-1")
    return TextSource(
        tuple(without_header(TextFile(path), layout) for path in inputs),
        schema,
        time_column="click_timestamp",
    )


def _day(path: Path) -> tuple[int, str]:
    number = re.search(r"[0-9]+", path.name)
    return (int(number[0]) if number else 0, path.name)
