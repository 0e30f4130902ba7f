"""Published facts about the real data sets beside the generator's, and how fast it generates.

    python benchmarks/generator_facts.py [--rows 1000000] [--seed 0]

Facts about whole data sets are computed from the presets' laws; the second table shows how well the
computation predicts generated logs.
"""

from __future__ import annotations

import argparse
import platform
import time
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from expectation import Popularity, expected_ids
from rowhaul.data.generate import LogGenerator, preset_named, preset_names

Counts = dict[str, np.ndarray]


@dataclass
class Fact:
    name: str
    published: str
    generated: str
    size: str


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, numpy {np.__version__}, pyarrow {pa.__version__}\n")

    facts = [*head_facts(arguments.seed), *cardinality_facts(), *criteo_facts(), *taobao_facts()]
    show(
        ["fact", "published", "generated", "size"],
        [[f.name, f.published, f.generated, f.size] for f in facts],
    )
    print()
    show(
        ["preset", "rows", "rows/s", "ids expected", "ids generated", "base rate", "Bayes AUC", "Bayes NE"],
        [generate(name, arguments.rows, arguments.seed) for name in preset_names()],
    )


def head_facts(seed: int) -> list[Fact]:
    facts = []
    for preset, rows, once, top in (("criteo", 10_000, 70, 63), ("avazu", 9_000, 74, 83)):
        per_column = counts(next(LogGenerator(preset, rows, seed).batches()))
        together = np.sort(np.concatenate(list(per_column.values())))[::-1]
        seen_once = np.mean(together == 1)
        share = together[: len(together) // 100].sum() / together.sum()
        size = f"first {rows:,} rows"
        facts.append(Fact(f"{preset}: ids seen once", f"{once} %", f"{seen_once:.1%}", size))
        facts.append(Fact(f"{preset}: accesses of the top 1 %", f"{top} %", f"{share:.1%}", size))
    return facts


def cardinality_facts() -> list[Fact]:
    published = {"criteo": 33.8, "criteo-tb": 882.8, "avazu": 9.45}
    return [
        Fact(
            f"{name}: distinct ids",
            f"{millions} M",
            f"{sum(expected_ids(preset_named(name), preset_named(name).samples).values()) / 1e6:.2f} M",
            f"{preset_named(name).samples:,} rows",
        )
        for name, millions in published.items()
    ]


def criteo_facts() -> list[Fact]:
    popularity = Popularity.of(preset_named("criteo")).folded(1_600_000, rows=36_000_000, numbers=13)
    frequent = popularity.seen_in_batches(95, 100, 65_536)
    seen = popularity.distinct(100 * 65_536)
    size = "100 batches of 65,536, folded"
    return [
        Fact("criteo: items in > 95 of 100 batches", "2.2 %", f"{frequent.ids.sum() / seen:.2%}", size),
        Fact("criteo: their accesses", "> 90 %", f"{frequent.accesses / popularity.accesses:.1%}", size),
        Fact("criteo: accesses of the top 64k", "96 %", f"{popularity.share_of_top(65_536):.1%}", size),
    ]


def taobao_facts() -> list[Fact]:
    preset = preset_named("taobao")
    four = [field for field in preset.ids if field.name in ("user", "campaign_id", "customer", "cate_id")]
    popularity = Popularity.of(preset, four)
    seen = popularity.distinct(100 * 262_144)
    frequent = popularity.seen_in_batches(95, 100, 262_144).ids.sum() / seen
    size = "100 batches of 262,144, 4 fields"
    return [
        Fact("taobao: items in > 95 of 100 batches", "0.6 %", f"{frequent:.2%}", size),
        Fact("taobao: accesses of the top 13 %", "86 %", f"{popularity.share_of_top(0.13 * seen):.1%}", size),
        Fact("taobao: accesses of the top 64k", "74 %", f"{popularity.share_of_top(65_536):.1%}", size),
    ]


def generate(name: str, rows: int, seed: int) -> list[str]:
    generator = LogGenerator(name, rows, seed)
    next(generator.batches())  # compile and warm up
    seconds, found = 0.0, {field: np.empty(0, np.int64) for field in generator.schema.features}
    began = time.perf_counter()
    for batch in generator.batches():
        seconds += time.perf_counter() - began
        for field in found:
            found[field] = np.union1d(found[field], ids(batch, field))
        began = time.perf_counter()
    expected = sum(expected_ids(generator.preset, rows).values())
    facts = generator.bayes
    return [
        name,
        f"{rows:,}",
        f"{rows / seconds:,.0f}",
        f"{expected:,.0f}",
        f"{sum(len(one) for one in found.values()):,}",
        f"{facts.base_rate:.4f}",
        f"{facts.auc:.4f}",
        f"{facts.normalised_entropy:.4f}",
    ]


def counts(batch: pa.RecordBatch) -> Counts:
    names = batch.schema.names[1:]
    integer = [name for name in names if not pa.types.is_floating(batch.schema.field(name).type)]
    return {name: np.unique(ids(batch, name), return_counts=True)[1] for name in integer}


def ids(batch: pa.RecordBatch, name: str) -> np.ndarray:
    column = batch.column(name)
    return (column.flatten() if pa.types.is_list(column.type) else column.drop_null()).to_numpy()


def show(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[place]) for row in [header, *rows]) for place in range(len(header))]
    for row in [header, ["-" * width for width in widths], *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
