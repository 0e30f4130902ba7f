"""Metrics within groups, such as a user's samples: GAUC, NDCG@k, HR@k, MRR.

Groups may span batches, files and workers. Samples are parted into `BUCKETS` by a hash of their group; when
more than `HELD_BYTES` are held, all go to files of their bucket, and each bucket is measured by itself. So
memory is bounded, and the numbers are exact: within a bucket sums are rounded once (``math.fsum``), whatever
the order of its samples, and buckets are added in order. Alone and on a cluster they are the same to the bit.

Samples of equal score share: of AUC one half, of NDCG the mean gain of their places, as in scikit-learn. For
HR and MRR a positive sample comes after the negative ones of its score, so a constant score earns nothing.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul._nearest import did_you_mean
from rowhaul.data.schema import Schema
from rowhaul.errors import ConfigError

BUCKETS = 64
HELD_BYTES = 64 << 20
DEFAULT_METRICS = ("gauc", "ndcg@10", "hr@10", "mrr")
RECORD = np.dtype([("group", "<i8"), ("score", "<f4"), ("label", "<u4")])

Records = npt.NDArray[Any]  # of RECORD
Floats = npt.NDArray[np.float64]

_AT_K = re.compile(r"(ndcg|hr|mrr)@([1-9][0-9]*)")
_EXAMPLES = ("gauc", "mrr", "ndcg@10", "hr@10", "mrr@10")


def check_metrics(names: Sequence[str]) -> None:
    """Refuse what is no metric within groups, naming the nearest that is."""
    for name in names:
        if not isinstance(name, str) or not (name in ("gauc", "mrr") or _AT_K.fullmatch(name)):
            near = did_you_mean(str(name), _EXAMPLES)
            raise ConfigError(
                f"unknown metric {name!r}{near}; known are gauc, mrr, ndcg@k, hr@k and mrr@k, such as "
                "ndcg@10 (AUC, log loss, normalised entropy, accuracy and calibration are always measured)"
            )


def check_grouped(names: Sequence[str], schema: Schema) -> None:
    """Refuse metrics within groups where nothing would be measured: without groups, or labels of 0 and 1."""
    if names and not schema.group:
        raise ConfigError(
            f"metrics is {', '.join(names)}, which is measured within groups, but the schema names none; "
            "add `group: COLUMN` to it, such as the column of users, or leave out metrics"
        )
    if names and schema.tasks and all(one.kind != "binary" for one in schema.tasks):
        raise ConfigError(
            f"metrics is {', '.join(names)}, which is measured of labels of 0 and 1, but all of the schema "
            f"are numbers ({', '.join(one.name for one in schema.tasks)}); give one `positive_from` instead "
            "of `kind: number`, or leave out metrics"
        )


class GroupedScores:
    """Scores of samples with their groups, by bucket; beyond ``held_bytes`` in temporary files."""

    def __init__(self, held_bytes: int = HELD_BYTES) -> None:
        self._most = held_bytes
        self._held: list[Records] = []
        self._held_bytes, self._is_parted = 0, False  # parted: one array a bucket
        self._folder: Path | None = None  # removed with this object
        self.sizes = np.zeros(BUCKETS, np.int64)  # samples in each bucket

    def add(self, groups: npt.NDArray[Any], labels: npt.NDArray[Any], scores: npt.NDArray[Any]) -> None:
        """Add some samples: labels are 0 or 1."""
        records = np.empty(len(groups), RECORD)
        records["group"], records["label"], records["score"] = groups, labels, scores
        self.sizes += np.bincount(_buckets(records), minlength=BUCKETS)
        self._held.append(records)
        self._is_parted = False
        self._held_bytes += records.nbytes
        if self._held_bytes > self._most:
            self._spill()

    def bucket(self, number: int) -> Records:
        """All samples of a bucket."""
        if not self._is_parted:
            self._part()
        held = self._held[number : number + 1]
        if self._folder is not None and (path := self._path(number)).exists():
            held.insert(0, np.fromfile(path, RECORD))
        return np.concatenate([np.empty(0, RECORD), *held])

    def _part(self) -> None:
        """Part what is held by bucket."""
        joined = np.concatenate([np.empty(0, RECORD), *self._held])
        buckets = _buckets(joined)
        order = np.argsort(buckets, kind="stable")
        ends = np.cumsum(np.bincount(buckets, minlength=BUCKETS))[:-1]
        self._held, self._is_parted = np.split(joined[order], ends), True

    def _spill(self) -> None:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="rowhaul-groups-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._part()
        for number, records in enumerate(self._held):
            with self._path(number).open("ab") as file:
                records.tofile(file)
        self._held, self._held_bytes, self._is_parted = [], 0, False

    def _path(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{number:02d}"


class RankingSums:
    """Sums over groups, bucket by bucket, and the metrics that they give."""

    def __init__(self, names: Sequence[str]) -> None:
        check_metrics(names)
        self._names = tuple(names)
        self._sums = dict.fromkeys(names, 0.0)
        self._counts = dict.fromkeys(names, 0)
        self._has_nan = False

    def add(self, records: Records) -> None:
        """Add all samples of some groups."""
        self._has_nan |= bool(np.isnan(records["score"]).any())
        if not len(records) or self._has_nan:
            return
        groups = _Ranked(records)
        for name in self._names:
            sums, count = groups.sums(name)
            self._sums[name] += math.fsum(sums.tolist())
            self._counts[name] += count

    def values(self) -> dict[str, float]:
        """The metrics by name; NaN where no group defines one."""
        nan = math.nan
        return {
            name: self._sums[name] / self._counts[name] if self._counts[name] and not self._has_nan else nan
            for name in self._names
        }


class _Ranked:
    """Groups with their samples by falling score; a block is samples of one group and one score."""

    def __init__(self, records: Records) -> None:
        order = np.lexsort((-records["score"], records["group"]))
        group, score = records["group"][order], records["score"][order]
        new_group = np.append(True, group[1:] != group[:-1])
        new_block = new_group | np.append(True, score[1:] != score[:-1])
        block_starts, group_starts = np.flatnonzero(new_block), np.flatnonzero(new_group)
        label = records["label"][order].astype(np.int64)
        self.first = np.searchsorted(block_starts, group_starts)  # block of each group
        self.sizes = np.diff(np.append(block_starts, len(records)))
        self.hits = np.add.reduceat(label, block_starts)
        self.of = np.cumsum(new_group)[block_starts] - 1  # group of each block
        self.places = block_starts - group_starts[self.of]  # samples above each block, within its group
        self.group_sizes = np.diff(np.append(group_starts, len(records)))
        self.group_hits = np.add.reduceat(label, group_starts)

    def sums(self, name: str) -> tuple[Floats, int]:
        """What each group adds to a metric, and to what the sum is divided by."""
        kind, _, given = name.partition("@")
        if kind == "gauc":
            return self._gauc()
        has_hit, most = self.group_hits > 0, int(given) if given else np.iinfo(np.int64).max
        if kind == "ndcg":
            return self._ndcg(most)[has_hit], int(has_hit.sum())
        rank = self._first_ranks()[has_hit]
        gains = (rank <= most).astype(np.float64)
        return gains if kind == "hr" else gains / rank, len(rank)

    def _gauc(self) -> tuple[Floats, int]:
        """AUC of groups with both classes, times their samples (Zhou et al., 2018, DIN)."""
        misses = self.sizes - self.hits
        group_misses = self.group_sizes - self.group_hits
        above = np.cumsum(misses) - misses
        below = group_misses[self.of] - (above - above[self.first][self.of]) - misses
        wins = np.add.reduceat(self.hits * (2 * below + misses), self.first)  # twice the pairs in order
        both = (self.group_hits > 0) & (group_misses > 0)
        pairs = 2.0 * self.group_hits[both] * group_misses[both]
        return wins[both] / pairs * self.group_sizes[both], int(self.group_sizes[both].sum())

    def _ndcg(self, most: int) -> Floats:
        longest = int(self.group_sizes.max())
        gained = np.append(0.0, np.cumsum(1.0 / np.log2(np.arange(2, longest + 2))))  # by the first n places
        most = min(most, longest)
        begins, ends = np.minimum(self.places, most), np.minimum(self.places + self.sizes, most)
        gains = self.hits / self.sizes * (gained[ends] - gained[begins])
        best = gained[np.minimum(self.group_hits, most)]
        total: Floats = np.add.reduceat(gains, self.first)
        np.divide(total, best, out=total, where=best > 0)  # without a positive sample both are 0
        return total

    def _first_ranks(self) -> npt.NDArray[np.int64]:
        """The place, from 1, of the first positive sample of each group that has one."""
        never = np.iinfo(np.int64).max
        ranks = np.where(self.hits > 0, self.places + (self.sizes - self.hits) + 1, never)
        first: npt.NDArray[np.int64] = np.minimum.reduceat(ranks, self.first)
        return first


def _buckets(records: Records) -> npt.NDArray[np.int64]:
    mixed = records["group"].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(58)).astype(np.int64)
