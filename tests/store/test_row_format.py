"""A row format is one class and one line in the registry: half precision, which only this test registers."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rowhaul.checkpoint import CheckpointReader, CheckpointWriter
from rowhaul.checkpoint.describing import describe
from rowhaul.checkpoint.finding import find_rows
from rowhaul.checkpoint.merging import merge
from rowhaul.errors import CheckpointError
from rowhaul.export.export import export
from rowhaul.export.files import FILE_KINDS
from rowhaul.export.reader import ExportReader
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from rowhaul.optim import Adagrad
from rowhaul.runtime.layout import TableLayout
from rowhaul.schedule.sizes import RowSizes
from rowhaul.store import TableSpec
from rowhaul.store.row_format import ROW_FORMATS, format_of, implied_format, row_format
from rowhaul.store.row_parts import RowShape
from rowhaul.store.whole_rows import WholeRows
from rowhaul.verify.comparison import Trained, compare

DIM = 4


class HalfRows(WholeRows):
    """Values in half precision, optimizer state and arithmetic in single."""

    name = "float16"

    def value_dtype(self, dtype):
        return np.dtype(np.float16)

    def decode(self, block, dim):
        state = block.get("state", np.empty((len(block["keys"]), 0), np.float32))
        return np.concatenate([block["values"].astype(np.float32), state], axis=1)


@dataclass(frozen=True)
class HalfSettings:
    row_format = "float16"


@dataclass(frozen=True)
class HalfLayout(TableLayout):
    row_format = "float16"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(ROW_FORMATS, "float16", f"{__name__}:HalfRows")


def random_rows(first, last, seed):
    keys = np.arange(first, last)
    return keys, np.random.default_rng(seed).normal(size=(len(keys), 2 * DIM)).astype(np.float32)


def rounded(records):
    """What half precision leaves of values; state is as it was."""
    values = records[:, :DIM].astype(np.float16).astype(np.float32)
    return np.concatenate([values, records[:, DIM:]], axis=1)


def write(path, first, last, seed, format="float16"):
    keys, records = random_rows(first, last, seed)
    with CheckpointWriter(path) as writer:
        halves = np.array_split(np.arange(len(keys)), 2)
        blocks = [row_format(format).encode(keys[some], records[some], DIM) for some in halves]
        writer.blocks("items", blocks, DIM, DIM, "float32", format)
        writer.facts |= {"step": 3, "row_optimizer": "adagrad"}
    return CheckpointReader(path), dict(zip(keys.tolist(), rounded(records), strict=True))


def by_key(blocks):
    return {int(key): row for keys, rows in blocks for key, row in zip(keys, rows, strict=True)}


def same(found, expected):
    return found.keys() == expected.keys() and all(np.array_equal(found[key], expected[key]) for key in found)


def test_a_manifest_names_the_format_unless_its_facts_imply_it(tmp_path):
    reader, _ = write(tmp_path / "half", 0, 9, 1)
    assert reader.tables["items"].format == "float16"
    assert '"format": "float16"' in (tmp_path / "half" / "manifest.json").read_text()
    write(tmp_path / "whole", 0, 9, 1, "whole")
    assert '"format": "whole"' not in (tmp_path / "whole" / "manifest.json").read_text()
    assert [implied_format(facts) for facts in ({}, {"pruning": None}, {"pruning": {}})] == [
        *("whole", "whole", "chunked")
    ]
    assert [format_of(one).name for one in (None, HalfSettings())] == ["whole", "float16"]


def test_an_unknown_format_is_refused_by_name(tmp_path, monkeypatch):
    reader, _ = write(tmp_path / "half", 0, 9, 1)
    monkeypatch.delitem(ROW_FORMATS, "float16")
    with pytest.raises(CheckpointError, match="format 'float16', which this Rowhaul does not have"):
        list(reader.rows("items"))


def test_checkpoints_are_written_read_found_and_described(tmp_path):
    reader, expected = write(tmp_path / "half", 0, 50, 1)
    assert same(by_key(reader.rows("items")), expected)
    assert {block["values"].dtype for block in reader.blocks("items")} == {np.dtype(np.float16)}
    found = find_rows(reader, "items", [7, 99])
    assert list(found) == [7]
    assert np.array_equal(found[7].values, expected[7][:DIM])
    assert np.array_equal(found[7].state, expected[7][DIM:])
    (table,) = describe(reader).tables
    assert (table.format, table.rows, table.state_width) == ("float16", 50, DIM)
    whole, _ = write(tmp_path / "whole", 0, 50, 1, "whole")
    saved = describe(whole).tables[0].bytes - table.bytes
    assert saved == pytest.approx(50 * DIM * 2, abs=32)  # two bytes a value, but for the header


def test_checkpoints_merge_with_their_like_only(tmp_path):
    (one, first), (two, second) = write(tmp_path / "1", 0, 30, 1), write(tmp_path / "2", 20, 60, 2)
    merged = merge([one, two], tmp_path / "to")
    made = CheckpointReader(merged.path)
    assert same(by_key(made.rows("items")), {**first, **second})
    assert (made.tables["items"].format, merged.tables[0].replaced) == ("float16", 10)
    whole, _ = write(tmp_path / "3", 0, 9, 3, "whole")
    with pytest.raises(CheckpointError, match="the format of the rows is float16 in the first and whole"):
        merge([one, whole], tmp_path / "other")


@pytest.mark.parametrize("kind", list(FILE_KINDS))
def test_exports_have_rows_as_stored_or_whole_vectors(kind, tmp_path):
    reader, expected = write(tmp_path / "half", 0, 40, 1)
    values = {key: row[:DIM] for key, row in expected.items()}
    for whole_rows, dtype in ((False, np.float16), (True, np.float32)):
        made = export(reader, tmp_path / str(whole_rows), format=kind, with_state=True, whole_rows=whole_rows)
        exported = ExportReader(made.path)
        assert exported.tables["items"].format == ("whole" if whole_rows else "float16")
        assert {block["values"].dtype for block in exported.blocks("items")} == {np.dtype(dtype)}
        assert same(by_key(exported.rows("items")), values)


def test_collections_are_saved_and_loaded(tmp_path):
    format = format_of(HalfSettings())

    def collection():
        config = EmbeddingBagConfig(embedding_dim=DIM, name="items", feature_names=["item"])
        return EmbeddingBagCollection([config], optimizer=Adagrad(lr=0.1))

    trained, loaded, served = collection(), collection(), collection()
    ids = KeyedJaggedTensor.from_lengths_sync(
        ["item"], torch.arange(9), lengths=torch.ones(9, dtype=torch.int64)
    )
    trained(ids).values().sum().backward()
    trained.apply_gradients(0.1, 1)
    with CheckpointWriter(tmp_path / "c") as writer:
        format.save(writer, trained)
    reader = CheckpointReader(tmp_path / "c")
    format.load(reader, loaded)
    expected = {key: rounded(row[None])[0] for key, row in by_key(trained.rows("items")).items()}
    assert same(by_key(loaded.rows("items")), expected)
    format.load_export(ExportReader(export(reader, tmp_path / "x").path), served)
    assert same(
        {key: row[:DIM] for key, row in by_key(served.rows("items")).items()},
        {key: row[:DIM] for key, row in expected.items()},
    )


def test_trainings_are_compared_as_they_are_stored():
    layout = HalfLayout((TableSpec("items", DIM, -1.0, 1.0),), Adagrad(lr=0.1), "float32", 7)
    format = format_of(layout)
    keys, records = random_rows(0, 20, 1)

    def trained(records, keys=keys):
        return Trained({"items": format.encode(keys, records, DIM)}, {}, np.zeros(1))

    nearly = records.copy()
    nearly[3, 0] *= 1 + 1e-5  # the same in half precision
    assert compare(layout, trained(records), trained(nearly)).is_equal
    nearly[3, 0] += 0.5
    found = compare(layout, trained(records), trained(nearly))
    assert (found.kinds["rows"].where, found.only_found) == ("key 3 of table items", 0)
    lost = compare(layout, trained(records[:-1], keys[:-1]), trained(records))
    assert (lost.only_found, lost.only_expected) == (0, 1)
    nothing = Trained({"items": format.empty(layout, "items")}, {}, np.zeros(1))
    assert compare(layout, trained(records), nothing).only_found == 20


def test_sizes_in_memory_and_on_the_wire_are_those_of_the_format():
    shape, rows = RowShape(DIM, Adagrad(lr=0.1), "float32"), {"items": 100_000}
    half, whole = (row_format(name).estimate(shape, rows, 0, None) for name in ("float16", "whole"))
    assert (half.record_values, half.record_bytes) == (2 * DIM, 2 * DIM + 4 * DIM)
    assert (whole.record_values, whole.record_bytes) == (4 * DIM, 8 * DIM)
    values, state, index = half.tables()["items"]
    assert (values, state, index) == (200_000 * DIM, 400_000 * DIM, whole.tables()["items"][2])
    assert half.stored(None, [["items"]])["rows"] < whole.stored(None, [["items"]])["rows"]
    assert half.cached(5000) <= whole.cached(5000)
    tables = (TableSpec("items", DIM, -1.0, 1.0),), Adagrad(lr=0.1), "float32", 0
    assert HalfLayout(*tables).sizes() == RowSizes((2 * DIM,), (4 * DIM,), (4 * DIM,))
    assert TableLayout(*tables).sizes() == RowSizes((4 * DIM,), (4 * DIM,))


def test_listing_asks_the_format():
    table = SimpleNamespace(state_width=3)
    assert row_format("float16").cells([table]) == {"state": "3"}
