"""Pruning in two dimensions: a ratio is that of all values, before columns are chosen and after."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowhaul import optim
from rowhaul.checkpoint import CheckpointReader, CheckpointWriter
from rowhaul.errors import ConfigError
from rowhaul.export.export import export
from rowhaul.export.files import FILE_KINDS
from rowhaul.export.reader import ExportReader
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, RowOptimizer
from rowhaul.pruning import PruneSettings
from rowhaul.pruning.config import PruneConfig
from rowhaul.pruning.deciding.room import Sizes, room_for
from rowhaul.store.row_format import format_of
from rowhaul.train import TrainConfig
from rowhaul.train.distributed.cluster_rows import cluster_rows
from rowhaul.train.distributed.tables import layout_of

COLD_START, PERIOD = 12, 5


def skewed_batches(num_steps, samples=200):
    """Some ids again and again, and many once."""
    random = np.random.default_rng(0)
    for _ in range(num_steps):
        keys = np.minimum(random.zipf(1.2, samples), 1 << 40)
        yield KeyedJaggedTensor(
            ["item"], torch.from_numpy(keys), lengths=torch.ones(samples, dtype=torch.int64)
        )


def test_a_ratio_is_that_of_all_values_at_every_step():
    table = EmbeddingBagConfig(embedding_dim=16, name="item", feature_names=["item"])
    pruning = PruneSettings(
        ratio=0.9, chunks=2, period=PERIOD, cold_start=COLD_START, two_dimensions=True, enforcement=0.0
    )
    collection = EmbeddingBagCollection([table], optimizer=optim.RowwiseAdagrad(lr=0.1), pruning=pruning)
    rows, shares = RowOptimizer(collection), []
    for batch in skewed_batches(40):
        (collection(batch).values() - 1).square().sum().backward()
        rows.step()
        report = collection.source.report()
        assert report.value_bytes <= 0.1 * report.unpruned_value_bytes
        shares.append(report.num_chunks / (2 * report.num_rows))
    assert shares[COLD_START - 2] <= 0.1  # of the pieces, while rows have all columns
    assert 0.2 < shares[-1] <= 0.1 * 16 / 6  # fewer columns leave room for more
    assert collection.source.tables[0].columns.shape[1] == 6
    assert 0.9 <= collection.source.report().ratio < 0.925


@given(
    st.floats(0.01, 0.999),
    st.integers(1, 8),
    st.integers(8, 512),
    st.integers(0, 10**7),
    st.integers(1, 4096),
)
def test_no_more_values_are_kept_than_asked_and_every_row_that_is_has_an_entry(
    ratio, chunks, dim, num_rows, least
):
    settings = PruneSettings(ratio=ratio, chunks=chunks, two_dimensions=True)
    kept = settings.num_columns(dim)
    assert kept == 0 or max(chunks, dim / 4) <= kept < dim
    before, after = (
        room_for(settings, 0, Sizes(36, 36, chunks, columns), num_rows, least)
        for columns in (1.0, (kept or dim) / dim)
    )
    assert before.num_chunks <= after.num_chunks <= chunks * num_rows
    for room, columns in ((before, dim), (after, kept or dim)):
        assert room.num_chunks * columns <= (1 - ratio) * chunks * num_rows * dim + columns
        assert room.num_entries >= min(num_rows, room.num_chunks / chunks)


def test_it_is_what_a_share_in_a_configuration_means():
    settings = PruneConfig(ratio="90%").settings()
    assert settings is not None
    assert settings.num_columns(64) == 21
    pieces_alone = PruneConfig(ratio="90%", two_dimensions=False).settings()
    assert pieces_alone is not None
    assert pieces_alone.num_columns(64) == 0
    assert PruneConfig(ratio="90%", dims=12).settings().num_columns(64) == 12
    assert PruneConfig(budget="1GiB", tail="zeros").settings().num_columns(64) == 0
    assert PruneConfig().settings() is None
    with pytest.raises(ConfigError, match="two_dimensions"):
        TrainConfig.from_dict({"prune": {"two_dimensions": "often"}})


@pytest.mark.parametrize("before", [0, 4])
@pytest.mark.parametrize("now", [0, 6])
@pytest.mark.parametrize("cold_start", [2, 99])
def test_a_cluster_begins_with_the_columns_that_one_process_goes_on_with(before, now, cold_start, tmp_path):
    def made(dims):
        table = EmbeddingBagConfig(embedding_dim=8, name="item", feature_names=["item"])
        pruning = PruneSettings(ratio=0.5, chunks=2, cold_start=cold_start, dims=dims)
        return EmbeddingBagCollection([table], optimizer=optim.SGD(lr=0.1), pruning=pruning)

    trained, other = made(before), made(now)
    rows = RowOptimizer(trained)
    for batch in skewed_batches(3):
        (trained(batch).values() - 1).square().sum().backward()
        rows.step()
    with CheckpointWriter(tmp_path / "saved") as writer:
        writer.facts |= {"step": 3, "samples": 600, "row_optimizer": "sgd"}
        format_of(trained.row_settings).save(writer, trained)
    reader, format = CheckpointReader(tmp_path / "saved"), format_of(other.row_settings)
    layout = cluster_rows(format, ["item"]).saved_layout(reader, layout_of(other))
    format.load(reader, other)
    (tables,) = other.source.tables
    assert np.array_equal(layout.column_matrix, tables.columns)
    assert layout.awaits_columns == tables.awaits_columns


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_a_table_that_nothing_was_read_of_is_exported_with_the_columns_of_the_others(kind, tmp_path):
    def made():
        tables = [
            EmbeddingBagConfig(embedding_dim=dim, name=name, feature_names=[name])
            for name, dim in (("wide", 12), ("item", 8), ("never", 8))
        ]
        pruning = PruneSettings(ratio=0.2, chunks=2, cold_start=2, dims=4)
        return EmbeddingBagCollection(tables, optimizer=optim.SGD(lr=0.1), pruning=pruning)

    def batch(keys):
        values, lengths = torch.from_numpy(np.tile(keys, 2)), np.repeat([1, 1, 0], len(keys))
        return KeyedJaggedTensor(["wide", "item", "never"], values, lengths=torch.from_numpy(lengths))

    trained, served = made(), made()
    rows = RowOptimizer(trained)
    for _ in range(3):
        (trained(batch(np.arange(9))).values() - 1).square().sum().backward()
        rows.step()
    with CheckpointWriter(tmp_path / "saved") as writer:
        writer.facts |= {"step": 3, "samples": 27, "row_optimizer": "sgd"}
        format_of(trained.row_settings).save(writer, trained)
    export(CheckpointReader(tmp_path / "saved"), tmp_path / "out", format=kind)
    format_of(served.row_settings).load_export(ExportReader(tmp_path / "out"), served)
    trained.eval()
    served.eval()
    asked = batch(np.arange(20))
    assert torch.equal(served(asked).values(), trained(asked).values())
