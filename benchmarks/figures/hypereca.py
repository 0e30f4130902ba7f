"""HypeReca's figures about the data: frequent items (5), a hot set that lasts (16), what it covers (18)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from expectation import Popularity
from figures import plots
from figures.published import HYPERECA
from figures.sections import Section, Table, percent, span
from figures.traces import Trace
from rowhaul.data.generate import preset_named

KAGGLE_ITEMS, KAGGLE_SAMPLES, KAGGLE_NUMBERS = 1_600_000, 36_000_000, 13
TAOBAO_COLUMNS = ("user", "campaign_id", "customer", "cate_id")
BATCHES, FREQUENT = 100, 95
BATCH = {"criteo": 65_536, "taobao": 262_144}  # the paper gives none: see docs/generator.md
SIZES = (1_024, 4_096, 16_384, 32_265, 65_536, 227_058)
SKETCHED = 100  # batches from which the hot set is chosen
BATCH_HERE = 1_024
PARTS = 3


def popularities() -> dict[str, Popularity]:
    """The paper's two inspected logs as it seems to have prepared them, and Terabyte as it is."""
    taobao = preset_named("taobao")
    four = [field for field in taobao.ids if field.name in TAOBAO_COLUMNS]
    kaggle = Popularity.of(preset_named("criteo"))
    return {
        "criteo": kaggle.folded(KAGGLE_ITEMS, KAGGLE_SAMPLES, KAGGLE_NUMBERS),
        "taobao": Popularity.of(taobao, four),
        "criteo-tb": Popularity.of(preset_named("criteo-tb")),
    }


def figure_5() -> Section:
    """Items by the number of batches that have them."""
    rows, frequent_share, covered = [], {}, {}
    logs = popularities()
    for name, batch in BATCH.items():
        log = logs[name]
        seen = log.distinct(BATCHES * batch)
        frequent = log.seen_in_batches(FREQUENT, BATCHES, batch)
        rare = seen - log.seen_in_batches(5, BATCHES, batch).ids.sum()
        frequent_share[name] = frequent.ids.sum() / seen
        covered[name] = frequent.accesses / log.accesses
        rows.append(
            [
                name,
                f"{seen:,.0f}",
                percent(frequent_share[name], 2),
                percent(covered[name]),
                percent(rare / seen),
            ]
        )
    top = logs["taobao"].share_of_top(0.13 * logs["taobao"].distinct(BATCHES * BATCH["taobao"]))
    return Section(
        "hypereca-05",
        "HypeReca, figure 5: frequent items",
        f"Computed from the laws of the generated logs: {BATCHES} batches, of criteo of {BATCH['criteo']:,} "
        "samples with rare ids folded into one a column and numbers as ids, of taobao of "
        f"{BATCH['taobao']:,} with four columns.",
        [
            Table(
                ["", "items", f"in more than {FREQUENT} batches", "their accesses", "in at most 5 batches"],
                rows,
            )
        ],
        [
            (HYPERECA["frequent criteo"], percent(frequent_share["criteo"], 2)),
            (HYPERECA["accesses criteo"], percent(covered["criteo"])),
            (HYPERECA["frequent taobao"], percent(frequent_share["taobao"], 2)),
            (HYPERECA["accesses taobao"], percent(top)),
        ],
    )


def figure_16(traces: Sequence[Trace], out: Path) -> Section:
    """Whether the rows that were hot in the first batches stay so."""
    lines: dict[str, list[float]] = {}
    spread = []
    for trace in traces:
        for size in SIZES[:3]:
            shares = coverage(trace, size)
            lines[f"{trace.name}, {size:,} rows"] = shares
            spread.append(max(shares[1:]) - min(shares[1:]))
    header = [
        "hot rows",
        f"first {SKETCHED} batches",
        *(f"part {part + 1} of the rest" for part in range(PARTS)),
    ]
    panel = plots.Panel(
        "HypeReca, figure 16: accesses to the rows hot at first",
        range(PARTS + 1),
        lines,
        "part of the log",
        "share of accesses",
        kind="lines",
        share=True,
    )
    return Section(
        "hypereca-16",
        "HypeReca, figure 16: a hot set that lasts",
        f"The most frequent rows of the first {SKETCHED} batches of {BATCH_HERE:,} samples, and their share "
        f"of the accesses there and in {PARTS} parts of the rest of the log, measured.",
        [Table(header, [[name, *map(percent, line)] for name, line in lines.items()])],
        [(HYPERECA["lasting"], f"between parts of the rest it moves by {span(spread)} of all accesses")],
        plots=[plots.save(out / "hypereca-16.png", [panel])],
    )


def coverage(trace: Trace, size: int) -> list[float]:
    """Share of the accesses to the rows that were the most frequent at first: there, then part by part."""
    first = min(SKETCHED * BATCH_HERE, len(trace) // (PARTS + 1))
    bounds = [0, first, *np.linspace(first, len(trace), PARTS + 1).astype(int)[1:]]
    tables = [number_rows(keys, has) for keys, has in zip(trace.keys, trace.present, strict=True)]
    counts = [
        np.bincount(rows[:first][has[:first]], minlength=rows.max() + 1)
        for rows, has in zip(tables, trace.present, strict=True)
    ]
    cut = np.sort(np.concatenate(counts))[::-1][: size + 1][-1]
    shares = []
    for start, end in pairwise(bounds):
        part = slice(start, end)
        hot = sum(
            int((count[rows[part]] > cut)[has[part]].sum())
            for rows, has, count in zip(tables, trace.present, counts, strict=True)
        )
        shares.append(hot / sum(int(has[part].sum()) for has in trace.present))
    return shares


def number_rows(keys: npt.NDArray[np.int64], has: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """The keys of a table as numbers from 0 on."""
    return np.unique(np.where(has, keys, keys[0]), return_inverse=True)[1]


def figure_18(out: Path) -> Section:
    """The share of accesses that the most popular rows take."""
    lines = {name: [log.share_of_top(size) for size in SIZES] for name, log in popularities().items()}
    at = dict(zip(SIZES, range(len(SIZES)), strict=True))
    panel = plots.Panel(
        "HypeReca, figure 18: accesses of the most popular rows",
        SIZES,
        lines,
        "rows replicated",
        "share of accesses",
        kind="lines",
        share=True,
    )
    return Section(
        "hypereca-18",
        "HypeReca, figures 10 and 18: what a hot set covers",
        "Computed as for figure 5; criteo-tb with its raw ids. Figure 10's speed-ups follow from these "
        "shares and the speed of two collectives on 32 GPUs.",
        [
            Table(
                ["rows", *(f"{size:,}" for size in SIZES)],
                [[n, *map(percent, line)] for n, line in lines.items()],
            )
        ],
        [
            (HYPERECA["rho 64k"], ", ".join(f"{n} {percent(line[at[65_536]])}" for n, line in lines.items())),
            (HYPERECA["rho criteo"], percent(lines["criteo"][at[32_265]])),
            (HYPERECA["rho taobao"], percent(lines["taobao"][at[227_058]])),
        ],
        plots=[plots.save(out / "hypereca-18.png", [panel])],
    )
