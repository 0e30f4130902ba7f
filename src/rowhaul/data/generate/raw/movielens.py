"""The MovieLens 1M layout: `ratings.dat`, `users.dat`, `movies.dat`, fields separated by `::`."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rowhaul.data.generate.counters import stream, uniforms
from rowhaul.data.generate.generator import LabelledColumns, LogGenerator
from rowhaul.data.generate.population import Members
from rowhaul.data.generate.raw.text import integers, lines

_FIRST_SECOND = 956_703_932
_SECONDS_BETWEEN = 89  # as many as make a million ratings last three years
_FOLDER = "ml-1m"


def write_movielens(generator: LogGenerator, path: Path) -> None:
    """Write a zip as GroupLens publishes it, or the same three files into a folder."""
    files = {
        "users.dat": _users(generator),
        "movies.dat": _movies(generator),
        "ratings.dat": _ratings(generator),
    }
    if path.name.endswith(".zip"):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, parts in files.items():
                with archive.open(f"{_FOLDER}/{name}", "w") as file:
                    file.writelines(parts)
        return
    path.mkdir()
    for name, parts in files.items():
        with open(path / name, "wb") as file:
            file.writelines(parts)


def _users(generator: LogGenerator) -> Iterator[bytes]:
    members = _everyone(generator, "user")
    by_name = {field.name: field for field in generator.preset.ids}
    columns = [
        by_name[name].naming.tokens(generator.attributes.ranks_of(by_name[name], members))
        for name in ("user", "gender", "age", "occupation", "zip")
    ]
    yield lines(columns, "::")


def _movies(generator: LogGenerator) -> Iterator[bytes]:
    members = _everyone(generator, "movie")
    by_name = {field.name: field for field in generator.preset.ids}
    movie, genres = by_name["movie"], by_name["genres"]
    ids = movie.naming.tokens(members.ranks)
    first = generator.attributes.ranks_of(genres, members)
    offsets, values = generator.attributes.more_values(genres, first, members.ranks)
    names = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), genres.naming.tokens(values)), "|")
    yield lines([ids, pc.binary_join_element_wise("Movie ", ids, " (2000)", ""), names], "::")


def _ratings(generator: LogGenerator) -> Iterator[bytes]:
    for samples in generator.samples():
        rows = samples.columns.visits.rows
        users, movies = (
            field.naming.tokens(ranks)
            for field, ranks in zip(generator.preset.ids[:2], samples.columns.ranks[:2], strict=True)
        )
        seconds = integers(rows * _SECONDS_BETWEEN + _FIRST_SECOND)
        yield lines([users, movies, integers(_stars(generator, samples)), seconds], "::")


def _stars(generator: LogGenerator, samples: LabelledColumns) -> npt.NDArray[np.int64]:
    """4 or 5 where the label is 1, else 1 to 3, in the shares of the real ratings."""
    at = uniforms(stream(generator.seed, "stars"), samples.columns.visits.rows)
    liked = np.where(at < 0.61, 4, 5)
    disliked = np.where(at < 0.62, 3, np.where(at < 0.87, 2, 1))
    return np.where(samples.labels, liked, disliked)


def _everyone(generator: LogGenerator, name: str) -> Members:
    entity = next(entity for entity in generator.preset.entities if entity.name == name)
    return generator.population.members_at(name, np.arange(entity.law.support))
