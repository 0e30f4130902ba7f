"""Ids that co-occur: a dispatcher that keeps related samples together must gain from it."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from rowhaul.data.generate import LogGenerator, preset_named
from rowhaul.data.generate.population import Population
from slow_cases import mostly_slow

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from cooccurrence import REAL, ratios

WORKERS, SHARE, BATCHES = 8, 64, 16


def columns_of(preset: str) -> list[np.ndarray]:
    columns = next(LogGenerator(preset, WORKERS * SHARE * BATCHES).samples()).columns
    return [
        np.where(missing, -1, ranks)
        for ranks, missing in zip(columns.ranks, columns.missing_ids, strict=True)
    ]


def moved_rows(columns: list[np.ndarray], follow_rows: bool) -> int:
    """Rows trained last on another worker than the one that needs them, as simply as can be counted."""
    samples = [
        [(field, value) for field, value in enumerate(row) if value >= 0]
        for row in zip(*columns, strict=True)
    ]
    rng = np.random.default_rng(0)
    owner: dict[tuple[int, int], int] = {}
    moved = 0
    for first in range(0, len(samples), WORKERS * SHARE):
        dealt = iter(rng.permutation(np.repeat(np.arange(WORKERS), SHARE)))
        room = np.full(WORKERS, SHARE)
        needed: dict[tuple[int, int], set[int]] = defaultdict(set)
        for sample in samples[first : first + WORKERS * SHARE]:
            if follow_rows:
                score = np.zeros(WORKERS)
                for row in sample:
                    if row in owner:
                        score[owner[row]] += 1
                worker = int(np.argmax(np.where(room > 0, score, -1)))
            else:
                worker = int(next(dealt))
            room[worker] -= 1
            for row in sample:
                needed[row].add(worker)
        moved += sum(len(workers - {owner[row]}) for row, workers in needed.items() if row in owner)
        for row, workers in needed.items():
            if len(workers) == 1:
                owner[row] = next(iter(workers))
            else:
                owner.pop(row, None)
    return moved


@pytest.mark.parametrize("preset", ["criteo", "taobao", "movielens", "criteo-search"])
def test_following_rows_gains_more_than_in_a_log_of_unrelated_columns(preset):
    related = columns_of(preset)
    rng = np.random.default_rng(1)
    unrelated = [rng.permutation(column) for column in related]
    gain = 1 - moved_rows(related, follow_rows=True) / moved_rows(related, follow_rows=False)
    gain_unrelated = 1 - moved_rows(unrelated, follow_rows=True) / moved_rows(unrelated, follow_rows=False)
    assert gain > gain_unrelated + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("preset", mostly_slow(["criteo", "avazu"], "avazu"))
def test_dispatchers_gain_as_much_as_on_the_head_of_the_real_log(preset):
    """Cost of a random partition, ESD and joint dispatch relative to LAIA, to 0.05 of the real log's."""
    assert ratios(preset) == pytest.approx(REAL[preset], abs=0.05)


@pytest.mark.parametrize("preset", ["criteo", "criteo-tb", "avazu"])
def test_a_market_keeps_to_its_own_part_of_the_log(preset):
    """Two samples of one market share a page at least twice as often as any two samples."""
    columns = next(LogGenerator(preset, 20_000).samples()).columns
    users, pages = (columns.visits.members[name].ranks for name in ("user", "page"))
    markets = Population(preset_named(preset), seed=0).members_at("user", users).markets
    sizes = np.bincount(markets, minlength=preset_named(preset).markets)
    assert sizes.min() > 0.4 * sizes.mean()

    def chance(one: np.ndarray) -> float:
        counts = np.unique(one, return_counts=True)[1]
        return float(np.sum((counts / len(one)) ** 2))

    rare = pages > 0  # of Avazu's, 0 stands for none
    inside = np.mean([chance(pages[rare & (markets == market)]) for market in range(len(sizes))])
    assert inside > 2 * chance(pages[rare])


def test_a_sample_is_of_a_site_or_of_an_app():
    columns = next(LogGenerator("avazu", 20_000).samples()).columns
    names = [field.name for field in preset_named("avazu").ids]
    site, app = (columns.ranks[names.index(name)] for name in ("site_id", "app_id"))
    assert np.mean((site > 0) & (app > 0)) < 0.001
    assert np.mean(app > 0) == pytest.approx(0.36 * 0.83, abs=0.05)  # the most popular app is rank 0 too


@pytest.mark.parametrize(("preset", "at_least"), [("criteo", 1.4), ("taobao", 2.0)])
def test_users_come_back(preset, at_least):
    """Within 4,096 samples a user who appears has several, and some users return after their session."""
    visits = Population(preset_named(preset), seed=0).visits(0, 400_000)
    users = visits.members["user"].ranks
    assert 4_096 / len(np.unique(users[:4_096])) > at_least
    pairs = np.unique(np.stack((users, visits.sessions)), axis=1)
    sessions_a_user = np.unique(pairs[0], return_counts=True)[1]
    assert np.mean(sessions_a_user > 1) > 0.1


def test_what_is_shown_fits_the_taste():
    visits = next(LogGenerator("criteo", 65_536).samples()).columns.visits
    shown = visits.members["ad"]
    fits = np.mean(shown.tastes == visits.tastes)
    assert fits > 8 / 32
