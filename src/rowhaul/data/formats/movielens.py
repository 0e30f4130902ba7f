"""MovieLens: the ``::`` files of 1M and 10M, the CSV files of 20M and later, from the zip or its folder."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

from rowhaul.data.formats.header import one_path, with_header, without_header
from rowhaul.data.formats.side_table import make_join
from rowhaul.data.formats.source import Histories, Options, TextSource
from rowhaul.data.schema import IdColumn, LabelColumn, Schema
from rowhaul.data.text.blocks import TextFile
from rowhaul.data.text.layout import Field, TextLayout, fields
from rowhaul.errors import DataError

_POSITIVE_FROM = 4.0
_RATING = fields(user="integer", movie="integer", liked="label", time="integer")
_USER = fields(user="integer", gender="string", age="integer", occupation="integer", zip="string")
_MOVIE = (Field("movie", "integer"), Field("title", "skip"), Field("genres", "string", separator="|"))


def open_movielens(inputs: Sequence[Path], options: Options) -> TextSource:
    """A rating from ``positive_from`` (4) on is a 1; movies and, where there are any, users are joined."""
    path = one_path(inputs, "movielens", "the zip archive or the folder")
    files = _files(path)
    positive_from = _POSITIVE_FROM if options.positive_from is None else options.positive_from
    users = None
    if "ratings.dat" in files:
        ratings = without_header(files["ratings.dat"], TextLayout(_RATING, "::", positive_from=positive_from))
        movies = without_header(_need(files, "movies.dat", path), TextLayout(_MOVIE, "::"))
        if "users.dat" in files:
            users = without_header(files["users.dat"], TextLayout(_USER, "::"))
    else:
        ratings = with_header(
            _need(files, "ratings.csv", path),
            dict(zip(("userId", "movieId", "rating", "timestamp"), _RATING, strict=True)),
            positive_from=positive_from,
        )
        movies = with_header(
            _need(files, "movies.csv", path), dict(zip(("movieId", "title", "genres"), _MOVIE, strict=True))
        )
    sides = [(movies, "movie", "movie"), *([(users, "user", "user")] if users else [])]
    columns = (*_RATING[:2], *(_USER[1:] if users else ()), _MOVIE[-1])
    ids = tuple(IdColumn(one.name, type=one.kind) for one in columns)
    return TextSource(
        (ratings,),
        Schema(label=LabelColumn("liked"), dense=(), ids=ids),
        make_derive=lambda seed: make_join(sides, seed),
        time_column="time",
        histories=Histories("user", {"history": "movie"}),
        side_files=() if path.is_file() else tuple(side.file.path for side, *_ in sides),
    )


def _files(path: Path) -> dict[str, TextFile]:
    """The files of the data set by name, wherever they lie in the archive or the folder."""
    if path.is_dir():
        return {one.name: TextFile(one) for one in sorted(path.iterdir()) if one.is_file()}
    try:
        with zipfile.ZipFile(path) as archive:
            return {Path(name).name: TextFile(path, name) for name in archive.namelist()}
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{path} is neither a folder nor a whole zip archive: {error}") from None


def _need(files: dict[str, TextFile], name: str, path: Path) -> TextFile:
    if name not in files:
        raise DataError(
            f"{path} holds no {name}; a MovieLens archive has ratings and movies as .dat or .csv files"
        )
    return files[name]
