"""Files of rows within a budget: checkpoints to the bit, rows by id, exports that other tools can read."""

from dataclasses import replace

import numpy as np
import pytest

from embedding_cases import jagged
from rowhaul import optim
from rowhaul.budget import BudgetSettings
from rowhaul.checkpoint import CheckpointReader, CheckpointWriter
from rowhaul.checkpoint.finding import find_rows
from rowhaul.checkpoint.merging import merge
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.export.export import export
from rowhaul.export.files import FILE_KINDS
from rowhaul.export.reader import ExportReader
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, RowOptimizer
from rowhaul.store import row_parts
from rowhaul.store.row_format import format_of, row_format
from rowhaul.store.row_parts import RowShape
from slow_cases import mostly_slow

SMALL = BudgetSettings(6000, shared=0.2, period=4, decay=0.9)
DIMS = {"a": 4, "b": 6, "c": 4}
IDS = np.array([0, 1, 2, 3, 5, 8, 13, 21, 99, 10**15, -7, 2**63 - 1, -(2**63)])


def make(settings=SMALL, seed=3):
    tables = [
        EmbeddingBagConfig(embedding_dim=dim, name=name, feature_names=[name]) for name, dim in DIMS.items()
    ]
    return EmbeddingBagCollection(tables, pruning=settings, seed=seed, optimizer=optim.Adagrad(lr=0.1))


def train(collection, rows, steps):
    for number in steps:
        random = np.random.default_rng([4, number])
        batch = {name: [(random.zipf(1.2, 3) % 200).tolist() for _ in range(20)] for name in DIMS}
        pooled = collection(jagged(batch)).values()
        (pooled**2 + pooled).sum().backward()
        rows.step()


def state_of(collection):
    """What a format saves: all but the number of steps, which a checkpoint has among its facts."""
    state = collection.state_dict()
    del state["steps"]
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


def saved(collection, folder):
    with CheckpointWriter(folder) as writer:
        writer.facts |= {"step": 7, "samples": 9, "row_optimizer": "adagrad"}
        format_of(collection.row_settings).save(writer, collection)
    return CheckpointReader(folder)


def values_of(collection, table):
    """What a collection reads for each of the ids."""
    vectors = collection.eval()(jagged({name: [[key] for key in IDS.tolist()] for name in DIMS}))
    collection.train()
    return vectors[table].detach().numpy()


@pytest.fixture(params=mostly_slow(["float32", "bfloat16", "float16", "int8"], "float32", "int8"))
def trained(request, tmp_path):
    collection = make(replace(SMALL, row_dtype=request.param))
    rows = RowOptimizer(collection)
    train(collection, rows, range(7))
    return collection, rows, saved(collection, tmp_path / "checkpoint")


def test_a_checkpoint_goes_on_with_the_same_bits(trained, tmp_path):
    collection, rows, reader = trained
    other = make(collection.row_settings)
    format = format_of(other.row_settings)
    format.check_loadable(reader, other)
    format.load(reader, other)
    assert state_of(other) == state_of(collection)
    resumed = RowOptimizer(other)
    resumed.load_state_dict(rows.state_dict())
    for each, stepping in ((collection, rows), (other, resumed)):
        train(each, stepping, range(7, 20))
    assert state_of(other) == state_of(collection)
    for table in DIMS:
        (keys,) = reader.keys(table)
        assert (np.diff(keys) > 0).all()


def test_rows_are_found_by_id(trained):
    collection, _, reader = trained
    for table in DIMS:
        found = find_rows(reader, table, IDS)
        assert sorted(found) == sorted(IDS.tolist())
        expected = values_of(collection, table)
        for key, values in zip(IDS.tolist(), expected, strict=True):
            np.testing.assert_array_equal(found[key].values, values)
            assert len(found[key].state) == DIMS[table]
        kinds = {found[key].details["row"] >= 0 for key in IDS.tolist()}
        assert kinds == {False, True}
        assert "shared row" in found[-(2**63)].notes["row   "]


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_an_export_can_be_looked_up_in_by_what_it_says(trained, kind, tmp_path, monkeypatch):
    """The README's own lines find the values that the model reads, to the bit."""
    monkeypatch.setattr(row_parts, "BLOCK_ROWS", 17)
    collection, _, reader = trained
    export(reader, tmp_path / "out", format=kind, with_state=True)
    again = ExportReader(tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "names of rows, not ids" in text
    for table, entry in again.tables.items():
        lines = row_format(entry.format).reading[kind].replace("{file}", entry.file)
        assert lines.replace(entry.file, again.tables["a"].file) in text
        names = {}
        exec(lines, names)
        np.testing.assert_array_equal(names["vectors"](IDS), values_of(collection, table))
        if kind == "npz":
            names["table"].close()
    served = make(collection.row_settings)
    format_of(served.row_settings).load_export(again, served)
    for table in DIMS:
        mine, theirs = values_of(served, table), values_of(collection, table)
        np.testing.assert_allclose(mine, theirs, rtol=0.01, atol=np.abs(theirs).max() / 64)
        if collection.row_settings.row_dtype == "float32":
            np.testing.assert_array_equal(mine, theirs)


def test_a_checkpoint_alone_can_be_copied_and_two_not_merged(trained, tmp_path):
    collection, _, reader = trained
    merge([reader], tmp_path / "one")
    other = make(collection.row_settings)
    format_of(other.row_settings).load(CheckpointReader(tmp_path / "one"), other)
    assert state_of(other) == state_of(collection)
    with pytest.raises(CheckpointError, match="each has given its rows to the ids"):
        merge([reader, CheckpointReader(tmp_path / "one")], tmp_path / "both")
    with pytest.raises(ConfigError, match="there is no row for every id"):
        export(reader, tmp_path / "out", whole_rows=True)


def test_what_cannot_be_loaded_is_refused(tmp_path):
    reader = saved(make(), tmp_path / "checkpoint")
    format = row_format("slots")
    with pytest.raises(CheckpointError, match=r"a budget of 5\.9 KiB .*, 20% of it shared; here"):
        format.check_loadable(reader, make(replace(SMALL, bytes=7000)))
    with pytest.raises(CheckpointError, match="use the same seed"):
        format.check_loadable(reader, make(seed=4))
    assert format.note(reader.facts) == "within a budget of 5.9 KiB (6,000 bytes), 20% of it shared"
    exported = export(reader, tmp_path / "out")
    with pytest.raises(CheckpointError, match="another seed or budget"):
        format.load_export(ExportReader(exported.path), make(replace(SMALL, bytes=7000)))


@pytest.mark.parametrize("row_dtype", ["float32", "int8"])
def test_the_estimate_is_what_is_allocated(row_dtype):
    settings = BudgetSettings(1 << 20, row_dtype=row_dtype)
    tables = [EmbeddingBagConfig(embedding_dim=8, name=name, feature_names=[name]) for name in DIMS]
    rule = optim.RowwiseAdagrad(lr=0.1)
    collection = EmbeddingBagCollection(tables, pruning=settings, optimizer=rule)
    shape = RowShape(8, rule, "float32")
    estimate = format_of(settings).estimate(shape, {"a": 10**6, "b": 10, "c": 10**4}, 100.0, settings)
    total = sum(estimate.stored(None, [list(DIMS)]).values())
    assert abs(total - collection.allocated_bytes) < 100
    assert abs(sum(map(sum, estimate.tables().values())) - total) < 0.01 * total
    assert f"{estimate.room.num_slots:,} ids" in estimate.note()
