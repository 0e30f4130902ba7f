"""Taobao's UserBehavior log: user, item, category, what the user did (pv, fav, cart, buy) and when.

The label says whether an event was more than a look (fav, cart or buy), for click-like models; models of the
next item read each event's item and, with ``history``, what came before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from rowhaul.data.formats.header import one_path, without_header
from rowhaul.data.formats.source import BadRows, Derive, Histories, Options, TextSource
from rowhaul.data.keys import hash_strings
from rowhaul.data.schema import IdColumn, LabelColumn, Schema
from rowhaul.data.text.blocks import TextFile
from rowhaul.data.text.layout import TextLayout, fields

_LOOK, _ACTS = "pv", ("fav", "cart", "buy")
_EVENT = fields(user="integer", item="integer", category="integer", behavior="string", time="integer")


def open_userbehavior(inputs: Sequence[Path], options: Options) -> TextSource:
    """One CSV file without a header; histories are of items and of their categories."""
    path = one_path(inputs, "userbehavior", "the file UserBehavior.csv")
    return TextSource(
        (without_header(TextFile(path), TextLayout(_EVENT, ",")),),
        Schema(
            label=LabelColumn("acted"),
            dense=(),
            ids=tuple(IdColumn(name, type="integer") for name in ("user", "item", "category")),
        ),
        make_derive=_make_label,
        time_column="time",
        histories=Histories("user", {"history": "item", "category_history": "category"}),
    )


def _make_label(seed: int) -> Derive:
    acts = hash_strings(pa.array(_ACTS), seed)
    known = np.append(acts, hash_strings(pa.array([_LOOK]), seed))

    def derive(columns: dict[str, pa.Array]) -> tuple[dict[str, pa.Array], BadRows]:
        behavior = columns["behavior"].fill_null(0).to_numpy(zero_copy_only=False)
        missing = [
            columns[name].is_null().to_numpy(zero_copy_only=False) for name in ("user", "item", "category")
        ]
        bad = ~np.isin(behavior, known) | np.any(missing, axis=0)
        reason = f"needs a user, an item, a category and one of {', '.join((_LOOK, *_ACTS))}"
        return columns | {"acted": pa.array(np.isin(behavior, acts).astype(np.int8))}, BadRows(
            bad, lambda row: reason
        )

    return derive
