"""Taobao's three files: `raw_sample.csv`, and one line per user and ad that appears in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rowhaul.data.formats.taobao import AD, PROFILE
from rowhaul.data.generate.generator import BATCH_ROWS, LabelledColumns, LogGenerator
from rowhaul.data.generate.population import Members
from rowhaul.data.generate.raw.text import decimal, integers, lines, where_present

_FIRST_SECOND = 1_494_000_000
_SECONDS = 8 * 24 * 3600
_SAMPLE = ("user", "time_stamp", "adgroup_id", "pid", "nonclk", "clk")
_PROFILE_HEADER = ("userid", *PROFILE[:-1], f"{PROFILE[-1]} ")  # the blank is in the real file
_AD = ("adgroup_id", *AD)


def write_taobao(generator: LogGenerator, path: Path) -> None:
    """Write the three files into a new folder."""
    path.mkdir()
    seen = {entity.name: np.zeros(entity.law.support, np.bool_) for entity in generator.preset.entities}
    with open(path / "raw_sample.csv", "wb") as file:
        file.write(_header(_SAMPLE))
        for samples in generator.samples():
            for name, members in samples.columns.visits.members.items():
                seen[name][members.ranks] = True
            file.write(_sample_lines(generator, samples))
    profile = ("user", *PROFILE)
    _write_members(generator, path / "user_profile.csv", "user", seen["user"], profile, _PROFILE_HEADER)
    _write_members(generator, path / "ad_feature.csv", "ad", seen["ad"], _AD, (*_AD, "price"))


def _sample_lines(generator: LogGenerator, samples: LabelledColumns) -> bytes:
    tokens = {
        field.name: field.naming.tokens(ranks)
        for field, ranks in zip(generator.preset.ids[:3], samples.columns.ranks[:3], strict=True)
    }
    rows = samples.columns.visits.rows
    tokens["time_stamp"] = integers(rows * _SECONDS // generator.preset.samples + _FIRST_SECOND)
    tokens["clk"] = integers(samples.labels)
    tokens["nonclk"] = integers(~samples.labels)
    return lines([tokens[name] for name in _SAMPLE], ",")


def _write_members(
    generator: LogGenerator,
    path: Path,
    entity_name: str,
    seen: npt.NDArray[np.bool_],
    names: tuple[str, ...],
    header: tuple[str, ...],
) -> None:
    everyone = np.flatnonzero(seen)
    with open(path, "wb") as file:
        file.write(_header(header))
        for first in range(0, len(everyone), BATCH_ROWS):
            ranks = everyone[first : first + BATCH_ROWS]
            members = generator.population.members_at(entity_name, ranks)
            columns = [_tokens(generator, name, members) for name in names]
            columns += [
                decimal(generator.attributes.numbers(dense, ranks), dense.decimals)
                for dense in generator.preset.dense
                if dense.entity == entity_name
            ]
            file.write(lines(columns, ",", missing="NULL" if entity_name == "ad" else ""))


def _tokens(generator: LogGenerator, name: str, members: Members) -> pa.Array:
    field = next(field for field in generator.preset.ids if field.name == name)
    tokens = field.naming.tokens(generator.attributes.ranks_of(field, members))
    return where_present(tokens, generator.attributes.missing(field, members.ranks))


def _header(names: tuple[str, ...]) -> bytes:
    return (",".join(names) + "\n").encode()
