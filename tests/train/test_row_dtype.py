"""Runs whose rows are in fewer bits: saved, resumed, converted, exported, in one process and on a cluster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from checkpointed_layouts import LAYOUTS, SAVED
from checkpointed_ranks import CONFIG, Session, contents, same_bits
from rowhaul.checkpoint import CheckpointReader
from rowhaul.checkpoint.converting import convert
from rowhaul.checkpoint.merging import merge
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.export.export import export
from rowhaul.train import TrainConfig, load_trained, train_run
from rowhaul.train.run_folder import CHECKPOINTS
from rowhaul.train.snapshot import restore
from rowhaul.train.trainer import Trainer
from slow_cases import mostly_slow

PACKED = ("bfloat16", "int8")
PLAIN = replace(CONFIG, precision="float32")


@pytest.fixture(scope="module")
def session(tmp_path_factory, log_schema):
    return Session.on_log(tmp_path_factory.mktemp("small-log"), log_schema)


def run(session, out, row_dtype, *, steps=10**9, resume=False, **options):
    """Train to the end, or until it is stopped after some steps."""
    config = replace(PLAIN, row_dtype=row_dtype, checkpoint_every=SAVED, keep_checkpoints=9, **options)
    asked = iter(range(10**9))
    return train_run(
        config, session.schema, session.data, out=out, resume=resume,
        should_stop=lambda: next(asked) + 1 >= steps,
    )  # fmt: skip


def newest(out):
    return CheckpointReader(out / CHECKPOINTS / f"step-{CONFIG.max_steps:09d}")


@pytest.mark.parametrize("row_dtype", [*PACKED, "float16"])
def test_a_resumed_run_has_the_same_bits(row_dtype, session, tmp_path):
    run(session, tmp_path / "a", row_dtype)
    stopped = run(session, tmp_path / "b", row_dtype, steps=SAVED)
    assert stopped.step == SAVED
    run(session, tmp_path / "b", row_dtype, resume=True)
    whole, resumed = newest(tmp_path / "a"), newest(tmp_path / "b")
    for table in whole.tables:
        for one, other in zip(whole.blocks(table), resumed.blocks(table), strict=True):
            assert all(np.array_equal(one[name], other[name]) for name in one)
            assert one["values"].dtype.itemsize == (1 if row_dtype == "int8" else 2)


MOVING = [name for name in LAYOUTS if not name.startswith("at home")]  # rows in few bits move by plans


@pytest.mark.slow
@pytest.mark.parametrize("row_dtype", PACKED)
@pytest.mark.parametrize("layout", mostly_slow(MOVING, "hot rows, co-located", "bounded:2"))
def test_the_same_cluster_goes_on_with_the_same_bits(layout, row_dtype, session, tmp_path):
    chosen = replace(session, **LAYOUTS[layout])
    chosen = replace(chosen, config=replace(chosen.config, precision="float32", row_dtype=row_dtype))
    chosen.on_threads(tmp_path / "a")
    chosen.interrupted(tmp_path / "b", at=SAVED)
    assert same_bits(contents(tmp_path / "a"), contents(tmp_path / "b"))


@pytest.mark.parametrize("row_dtype", PACKED)
def test_policies_drop_rows_of_few_bits(row_dtype, session, tmp_path):
    tables = {"default": {"admit_after": 2, "max_rows": 50}}
    result = run(session, tmp_path / "a", row_dtype, tables=tables)
    assert result.row_counts is not None
    assert result.row_counts.over_limit > 0


def test_a_checkpoint_of_another_precision_is_refused_and_can_be_converted(session, tmp_path):
    run(session, tmp_path / "a", "float32")
    reader = newest(tmp_path / "a")
    trainer = Trainer(replace(PLAIN, row_dtype="int8"), session.schema)
    with pytest.raises(CheckpointError, match=r"rowhaul ckpt convert .* --row-dtype int8 --out NEW"):
        restore(trainer, reader.path)
    made = convert(reader, tmp_path / "int8", "int8", seed=PLAIN.seed)
    restore(trainer, made.path)
    again = convert(made, tmp_path / "float32", "float32")
    for table in reader.tables:
        before, after, back = (
            {int(k): r for keys, records in one.rows(table) for k, r in zip(keys, records, strict=True)}
            for one in (reader, made, again)
        )
        dim = reader.tables[table].dim
        for key, record in before.items():
            assert np.abs(after[key][:dim] - record[:dim]).max() <= np.abs(record[:dim]).max() / 126.9
            assert np.array_equal(after[key][dim:], record[dim:])
            assert np.array_equal(after[key], back[key])
    with pytest.raises(CheckpointError, match="do not go together"):
        merge([reader, made], tmp_path / "merged")
    merge([made], tmp_path / "one")
    assert CheckpointReader(tmp_path / "one").tables.keys() == reader.tables.keys()


@pytest.mark.parametrize("row_dtype", [*PACKED, "float16"])
def test_exports_are_float32_and_can_be_served(row_dtype, session, tmp_path):
    run(session, tmp_path / "a", row_dtype)
    exported = export(newest(tmp_path / "a"), tmp_path / "export", with_state=True)
    assert {(one.format, one.dtype) for one in exported.tables} == {("whole", "float32")}
    served, saved = load_trained(tmp_path / "export"), load_trained(tmp_path / "a")
    for config in saved.collection.embedding_bag_configs():
        mine, theirs = (
            {int(k): r[: config.embedding_dim] for keys, rows in one.collection.rows(config.name)
             for k, r in zip(keys, rows, strict=True)}
            for one in (served, saved)
        )  # fmt: skip
        assert mine.keys() == theirs.keys()
        for key, row in theirs.items():
            most = np.abs(row).max() / 100 if row_dtype == "int8" else 0
            assert np.abs(mine[key] - row).max() <= most


def test_settings_that_do_not_go_together_are_refused():
    with pytest.raises(ConfigError, match="one of float32, bfloat16, float16, int8, got 'half'"):
        TrainConfig(row_dtype="half")
    with pytest.raises(ConfigError, match="row_dtype is int8, and precision float64"):
        TrainConfig(row_dtype="int8", precision="float64")
    with pytest.raises(ConfigError, match="leave out prune"):
        TrainConfig.from_dict({"row_dtype": "bfloat16", "prune": {"ratio": "50%"}})
