"""The log as a stream: any part of it at any time, the same bits."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.data.generate import IdField, LogGenerator, preset_named, preset_names
from rowhaul.data.generate.laws import SkewLaw
from rowhaul.data.generate.population import Population
from rowhaul.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from expectation import mean_session_length

ROWS = 3_000


def log(preset: str, rows: int = ROWS, seed: int = 0, start: int = 0) -> pa.Table:
    batches = list(LogGenerator(preset, rows, seed).batches(start))
    return pa.Table.from_batches(batches).combine_chunks()


@pytest.mark.parametrize("preset", preset_names())
def test_the_columns_are_those_of_the_schema(preset):
    generator = LogGenerator(preset, ROWS)
    batch = next(generator.batches())
    schema = generator.schema
    assert batch.schema.names == [schema.label.name, *(d.name for d in schema.dense), *schema.features]
    assert batch.schema.field(schema.label.name).type == pa.int8()
    assert all(batch.schema.field(dense.name).type == pa.float32() for dense in schema.dense)
    lists = {field.name for field in generator.preset.ids if field.values > 1}
    for name in schema.features:
        wanted = pa.list_(pa.int64()) if name in lists else pa.int64()
        assert batch.schema.field(name).type == wanted


@settings(max_examples=8)
@given(preset=st.sampled_from(preset_names()), rows=st.integers(1, ROWS), data=st.data())
def test_every_part_of_the_log_can_be_made_alone(preset, rows, data):
    start = data.draw(st.integers(0, rows - 1))
    assert log(preset, rows, start=start).equals(log(preset).slice(start, rows - start))


def test_batches_are_of_65536_rows_and_a_late_start_finds_the_same_rows():
    generator = LogGenerator("avazu", 200_000)
    assert [batch.num_rows for batch in generator.batches()] == [65_536] * 3 + [3_392]
    assert [batch.num_rows for batch in generator.batches(100)] == [65_536] * 3 + [3_292]
    whole = pa.Table.from_batches(generator.batches()).combine_chunks()
    late = pa.Table.from_batches(generator.batches(99_999)).combine_chunks()
    assert late.equals(whole.slice(99_999))


def test_another_seed_is_another_log_with_other_labels():
    one, two = log("criteo"), log("criteo", seed=1)
    same = [np.mean(one[name].to_numpy() == two[name].to_numpy()) for name in ("C3", "C21")]
    assert max(same) < 0.05
    assert not one["label"].equals(two["label"])


def test_ids_of_different_values_are_different_keys():
    for preset in preset_names():
        for field in preset_named(preset).ids:
            ranks = np.unique(
                np.minimum(np.geomspace(1, field.law.support, 20_000).astype(np.int64), field.law.support) - 1
            )
            assert len(np.unique(field.naming.keys(ranks))) == len(ranks), (preset, field.name)


def test_a_session_is_one_lane_and_about_as_long_as_the_preset_says():
    preset = preset_named("taobao")
    rows = 200_000
    sessions = Population(preset, 0).visits(0, rows).sessions
    _, counts = np.unique(sessions, return_counts=True)
    assert rows / len(counts) == pytest.approx(mean_session_length(preset), rel=0.02)
    order = np.argsort(sessions, kind="stable")
    together = sessions[order][1:] == sessions[order][:-1]
    gaps = (order[1:] - order[:-1])[together]
    assert gaps.min() >= 1
    assert gaps.max() < 2 * preset.lanes


def test_sample_numbers_do_not_tell_the_session():
    """A session's samples fall on all residues: dealing samples round robin must not gather sessions."""
    sessions = Population(preset_named("movielens"), 0).visits(0, 100_000).sessions
    order = np.argsort(sessions, kind="stable")
    together = sessions[order][1:] == sessions[order][:-1]
    same_worker = (order[1:] % 8 == order[:-1] % 8)[together]
    assert same_worker.mean() == pytest.approx(1 / 8, abs=0.02)


def test_an_attribute_depends_on_its_member_alone():
    table = log("movielens", 20_000)
    for member, attributes in {"user": ("gender", "age", "occupation", "zip"), "movie": ("genres",)}.items():
        for attribute in attributes:
            pairs = zip(table[member].to_pylist(), map(str, table[attribute].to_pylist()), strict=True)
            assert len(set(pairs)) == len(set(table[member].to_pylist())), attribute


def test_genres_of_a_movie_are_one_to_three_different_ones():
    genres = log("movielens")["genres"].to_pylist()
    assert {len(one) for one in genres} == {1, 2, 3}
    assert all(len(set(one)) == len(one) for one in genres)


def test_popularity_drifts_slowly():
    """Which tail members are in fashion moves over the log, by a small share of the draws."""
    preset = replace(preset_named("criteo"), samples=400_000)
    population = Population(preset, 0)

    def taste_counts(first: int) -> np.ndarray:
        members = population.visits(first, first + 10_000).members["ad"]
        return np.bincount(members.tastes[members.ranks >= 4 * preset.tastes], minlength=preset.tastes)

    early, late = taste_counts(0), taste_counts(100_000)
    assert np.argmax(early) != np.argmax(late)
    assert early.max() / early.sum() < 4 / preset.tastes + 0.02


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match=r"unknown preset 'crito'.*criteo, criteo-tb.*taobao"):
        LogGenerator("crito", 10)
    with pytest.raises(ConfigError, match="rows must be at least 1, got 0"):
        LogGenerator("criteo", 0)
    generator = LogGenerator("criteo", 10)
    for start in (-1, 11):
        with pytest.raises(ConfigError, match="start must be from 0 to rows"):
            generator.batches(start)
    assert list(generator.batches(10)) == []
    movielens = preset_named("movielens")
    in_no_entity = IdField("x", SkewLaw(5, 2.0), movielens.ids[0].naming, "shop", "popularity")
    with pytest.raises(ConfigError, match="belongs to entity 'shop'; known are user, movie"):
        replace(movielens, ids=(in_no_entity,))
    with pytest.raises(ConfigError, match="lanes must be a power of two, got 3"):
        replace(movielens, lanes=3)
    avazu = preset_named("avazu")
    with pytest.raises(ConfigError, match=r"markets >= 1, .* are needed, got 0, 0.1 and 8.0"):
        replace(avazu, markets=0)
    user, *others = avazu.entities
    with pytest.raises(ConfigError, match="entity 'app' is opposite 'page', which must be an entity between"):
        replace(avazu, entities=(user, *reversed(others)))
    with pytest.raises(
        ConfigError, match="reveals the market of entity 'movie', which must be `user` or local"
    ):
        replace(movielens, ids=(replace(movielens.ids[1], link="market"),))
    with pytest.raises(ConfigError, match="exponent must be positive and other than 1"):
        SkewLaw(5, 1.0)
