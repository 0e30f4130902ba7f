"""What a budget leaves open is decided from the ids of the data, and only that."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowhaul.budget.id_counts import IdCounts
from rowhaul.budget.maps import record_bytes
from rowhaul.budget.room import room_for
from rowhaul.budget.settings import PERIOD
from rowhaul.data.schema import Schema
from rowhaul.errors import ConfigError
from rowhaul.pruning.config import PruneConfig
from rowhaul.train.config import ModelConfig, TrainConfig
from rowhaul.train.fitting import as_fitted, decisions, fitted, with_decisions

SCHEMA = Schema.from_dict({"label": "click", "ids": ["user", "item"]})
CONFIG = TrainConfig(model=ModelConfig(embedding_dim=32), batch_size=100)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """20,000 samples of long-tailed ids."""
    random = np.random.default_rng(0)
    ids = {name: random.zipf(1.2, 20_000).astype(np.int64) % 10**6 for name in ("user", "item")}
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    pq.write_table(pa.table({"click": np.zeros(20_000, np.int8), **ids}), path)
    return path


@pytest.fixture(scope="module")
def often_read(tmp_path_factory):
    """20,000 samples of ids that come some twenty times each, a few much more often."""
    random = np.random.default_rng(0)
    ids = {name: (random.pareto(1.5, 20_000) * 300).astype(np.int64) % 1000 for name in ("user", "item")}
    path = tmp_path_factory.mktemp("often") / "log.parquet"
    pq.write_table(pa.table({"click": np.zeros(20_000, np.int8), **ids}), path)
    return path


def with_budget(budget, **given):
    return replace(CONFIG, prune=PruneConfig(budget=budget), **given)


def dim_of(config, log):
    return fitted(config, SCHEMA, log, choose_dim=True).config.model.embedding_dim


def test_smaller_budgets_get_smaller_rows(log, often_read):
    for data, smallest in ((often_read, 2), (log, 16)):  # where most ids are rare, not much smaller ones
        dims = [dim_of(with_budget(budget), data) for budget in ("8KiB", "20KiB", "40KiB", "200KiB", "64MiB")]
        assert dims == sorted(dims)
        assert dims[0] == smallest
        assert dims[-1] == 32  # all ids have a row


def test_the_choice_is_written_down_and_said(log):
    found = fitted(with_budget("40KiB"), SCHEMA, log, choose_dim=True)
    dim = found.config.model.embedding_dim
    assert found.config.prune.narrowed_from == 32
    assert found.note.startswith(f"embedding_dim {dim} instead of 32, in {found.config.row_dtype}: so ")
    assert TrainConfig.from_dict(found.config.to_dict()) == found.config
    stays = fitted(with_budget("64MiB"), SCHEMA, log, choose_dim=True)
    assert stays.config.prune.narrowed_from == 0
    assert "embedding_dim stays 32" in stays.note


def test_precision_and_shared_rows_follow_the_budget(log, often_read):
    budgets = [with_budget(one) for one in ("8KiB", "40KiB", "180KiB", "64MiB")]
    found = [fitted(one, SCHEMA, often_read, choose_dim=True).config for one in budgets]
    assert [one.row_dtype for one in found[2:]] == ["bfloat16", "float32"]  # in the end all ids have a row
    assert found[0].prune.shared > found[-1].prune.shared == 0.04
    chosen = with_budget("1MiB", row_dtype="int8")
    assert fitted(chosen, SCHEMA, log, choose_dim=True).config.row_dtype == "int8"
    exact = with_budget("1MiB", precision="float64")
    assert fitted(exact, SCHEMA, log, choose_dim=True).config.row_dtype == "auto"


def test_ids_that_are_rare_get_rows_in_float32_one_shared_a_table_and_small_steps(log, often_read):
    for budget in ("80KiB", "200KiB"):
        found = fitted(with_budget(budget), SCHEMA, log, choose_dim=True).config
        assert found.row_dtype == "float32"
        settings = found.row_settings()
        size = record_bytes(found.model.embedding_dim, found.row_rule(), "float32", "float32")
        assert room_for(settings, settings.bytes, size, len(SCHEMA.tables)).num_shared == len(SCHEMA.tables)
        assert found.row_rule().initial_state > 0
        assert with_decisions(with_budget(budget), decisions(found)) == found
        same = fitted(with_budget(budget), SCHEMA, often_read, choose_dim=True).config
        assert (same.rows, same.prune.shared >= 0.04) == (CONFIG.rows, True)


def test_a_dim_that_was_given_stays(log):
    found = fitted(with_budget("8KiB"), SCHEMA, log)
    assert (found.config.model.embedding_dim, found.config.prune.narrowed_from, found.note) == (32, 0, "")


def test_a_ratio_with_a_shared_tail_is_of_what_all_rows_would_take(log):
    config = replace(CONFIG, prune=PruneConfig(ratio="90%", tail="shared"))
    with pytest.raises(ConfigError, match="ids have to be counted first"):
        config.row_settings()
    found = fitted(config, SCHEMA, log).config
    table = pq.read_table(log)
    num_ids = sum(len(np.unique(table[name])) for name in ("user", "item"))
    whole = num_ids * (32 + 1) * 4  # rowwise_adagrad has one number of state
    assert 0.1 * whole < found.row_settings().bytes < 0.15 * whole + 2000
    assert found.prune.ratio == "0"


@pytest.mark.parametrize(
    ("given", "period"),
    [({}, 4), ({"epochs": 3}, 12), ({"max_steps": 100}, 2), ({"batch_size": 1}, PERIOD)],
)
def test_the_period_follows_the_length_of_the_run(given, period, log):
    assert fitted(with_budget("1MiB", **given), SCHEMA, log).config.prune.period == period
    chosen = replace(CONFIG, prune=PruneConfig(budget="1MiB", period=7), **given)
    assert fitted(chosen, SCHEMA, log).config.prune.period == 7


@pytest.mark.parametrize("prune", [PruneConfig(ratio="90%"), PruneConfig(budget="1MiB", tail="zeros")])
def test_what_chunks_leave_open_follows_the_length_of_the_run(prune, log):
    config = replace(CONFIG, prune=prune)  # 200 steps
    found = fitted(config, SCHEMA, log, choose_dim=True)
    assert (found.config.prune.period, found.config.prune.cold_start) == (10, 20)
    assert replace(found.config, prune=prune) == config
    assert as_fitted(config, found.config) == found.config
    assert found.config.prune.unused(200, 32) == []
    given = replace(config, prune=replace(prune, period=7, cold_start=3))
    assert fitted(given, SCHEMA, log).config == given
    long = replace(CONFIG, prune=prune, epochs=1000)
    assert fitted(long, SCHEMA, log).config.row_settings() == long.row_settings()  # 1000 steps each
    assert fitted(config, SCHEMA, None).config.row_settings() == config.row_settings()  # a stream


def test_what_never_comes_is_said():
    prune = PruneConfig(ratio="90%", period=300, cold_start=1000)
    period, columns = prune.unused(506, 32) + prune.unused(200, 32)[:1]
    assert "prune.cold_start is 1,000 steps, but the run ends after 506" in period
    assert "prune.period is 300 steps, but the run ends after 200" in columns
    assert replace(prune, two_dimensions=False).unused(506, 32) == []
    assert PruneConfig(budget="1MiB").unused(1, 32) == []  # rows change hands from the first step on


def test_a_stream_has_rows_as_configured():
    config = with_budget("1MiB", max_steps=1000)
    found = fitted(config, SCHEMA, None, choose_dim=True)
    assert found.config.prune.period == 1000 // 50
    assert replace(found.config, prune=config.prune) == config
    assert "embedding_dim stays 32, in int8" in found.note
    assert fitted(with_budget("1MiB"), SCHEMA, None).config.prune.period == PERIOD


def test_runs_without_pruning_stay_as_they_are(log):
    for prune in (PruneConfig(), PruneConfig(period=5)):
        config = replace(CONFIG, prune=prune)
        assert fitted(config, SCHEMA, log, choose_dim=True).config is config


def test_a_configuration_gets_what_was_decided_before(log):
    given = with_budget("40KiB")
    begun = fitted(given, SCHEMA, log, choose_dim=True).config
    assert as_fitted(given, begun) == begun
    assert as_fitted(begun, begun) == begun
    ratio = replace(CONFIG, prune=PruneConfig(ratio="90%", tail="shared"))
    begun = fitted(ratio, SCHEMA, log, choose_dim=True).config
    assert as_fitted(ratio, begun) == begun
    other = replace(given, model=ModelConfig(embedding_dim=8))
    assert as_fitted(other, begun).model.embedding_dim == 8


def test_counts_are_exact_for_a_fair_sample():
    random = np.random.default_rng(3)
    keys = random.zipf(1.3, 50_000).astype(np.int64)
    exact, sampled = IdCounts(), IdCounts(most_ids=700)
    for some in np.array_split(keys, 7):
        for found in (exact, sampled):
            found.add(0, some)
            found.add(1, -some[::-1].copy())
    each = np.unique(keys, return_counts=True)[1]
    expected = np.sort(np.concatenate([each, each]))[::-1]
    np.testing.assert_array_equal(exact.counts(), expected)
    assert exact.share == 1
    counts = sampled.counts()
    assert 300 < len(counts) <= 700
    assert len(counts) / sampled.share == pytest.approx(len(expected), rel=0.2)
    assert np.isin(counts, expected).all()
