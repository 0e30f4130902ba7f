"""Which samples a stream yields, in which order, and from where it can go on."""

import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowhaul.data import parquet
from rowhaul.data.samples import Samples
from rowhaul.data.schema import DenseColumn, IdColumn, LabelColumn, Schema
from rowhaul.data.stream import SampleStream
from rowhaul.errors import ConfigError

SCHEMA = Schema(LabelColumn("click"), (DenseColumn("age"),), (IdColumn("row"), IdColumn("tags")))


def write_numbered(folder: Path, file_rows: list[int], group_rows: int) -> None:
    """Files whose ``row`` column numbers all rows in the files' order; the other columns follow from it."""
    first = 0
    for number, num_rows in enumerate(file_rows):
        rows = np.arange(first, first + num_rows)
        table = pa.table(
            {
                "row": pa.array(rows, pa.int64()),
                "tags": pa.array([list(range(row, row + row % 4)) for row in rows], pa.list_(pa.int64())),
                "age": pa.array(rows * 0.5, pa.float64()),
                "click": pa.array(rows % 2, pa.int8()),
            }
        )
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=group_rows)
        first += num_rows


def rows_of(batch: Samples) -> list[int]:
    """The row numbers of a batch, after checking that every other column went along."""
    num_samples = len(batch)
    rows = batch.values[:num_samples]
    assert batch.features == ("row", "tags")
    assert batch.lengths.tolist() == [[1] * num_samples, (rows % 4).tolist()]
    assert batch.values[num_samples:].tolist() == [tag for row in rows for tag in range(row, row + row % 4)]
    assert batch.dense[:, 0].tolist() == (rows * 0.5).tolist()
    assert batch.labels is not None
    assert batch.labels.tolist() == (rows % 2).tolist()
    return rows.tolist()


def collect(stream: SampleStream) -> list[tuple[list[int], list[int], int]]:
    return [(rows_of(batch), batch.index.tolist(), stream.position) for batch in stream]


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "READ_ROWS", 7)


settled = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])

layouts = st.fixed_dictionaries(
    {
        "file_rows": st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(sum),
        "group_rows": st.integers(1, 30),
        "batch_size": st.integers(1, 25),
        "epochs": st.integers(1, 3),
        "shuffle_rows": st.sampled_from([0, 0, 1, 5, 16, 1000]),
        "seed": st.sampled_from([0, 1, -1, 2**63]),
        "limit": st.none() | st.integers(1, 200),
    }
)


@given(layouts, st.data())
@settled
def test_a_resumed_stream_goes_on_with_the_batches_that_would_have_come(
    tmp_path_factory: pytest.TempPathFactory, layout: dict, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("numbered")
    write_numbered(folder, layout.pop("file_rows"), layout.pop("group_rows"))
    whole = collect(SampleStream(folder, SCHEMA, **layout))
    borders = [0, *(position for _, _, position in whole)]
    done = data.draw(st.integers(0, len(whole)))

    resumed = SampleStream(folder, SCHEMA, **layout, start=borders[done])

    assert resumed.num_batches == len(whole) - done
    assert collect(resumed) == whole[done:]


@given(layouts)
@settled
def test_every_epoch_holds_every_sample_once_and_ends_its_own_batch(
    tmp_path_factory: pytest.TempPathFactory, layout: dict
) -> None:
    folder = tmp_path_factory.mktemp("numbered")
    num_samples = sum(layout["file_rows"])
    write_numbered(folder, layout.pop("file_rows"), layout.pop("group_rows"))
    layout["limit"] = None
    stream = SampleStream(folder, SCHEMA, **layout)
    batches = collect(stream)

    assert stream.num_samples == num_samples
    rows = np.array([row for batch, _, _ in batches for row in batch]).reshape(layout["epochs"], num_samples)
    assert (np.sort(rows, axis=1) == np.arange(num_samples)).all()
    assert [index for _, numbers, _ in batches for index in numbers] == list(range(rows.size))
    size = layout["batch_size"]
    full, rest = divmod(num_samples, size)
    assert [len(batch) for batch, _, _ in batches] == ([size] * full + [rest] * (rest > 0)) * layout["epochs"]


def test_without_shuffling_samples_come_in_the_natural_order_of_files(tmp_path: Path) -> None:
    write_numbered(tmp_path, [3] * 12, 2)  # part-10 and part-11 come last, not after part-1
    assert [row for rows, _, _ in collect(SampleStream(tmp_path, SCHEMA, 5)) for row in rows] == list(
        range(36)
    )


def test_limit_is_a_position_of_the_whole_stream(tmp_path: Path) -> None:
    write_numbered(tmp_path, [10], 4)
    stream = SampleStream(tmp_path, SCHEMA, 4, epochs=3, limit=13)
    assert [rows for rows, _, _ in collect(stream)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2]]


def test_the_shuffle_depends_on_seed_and_epoch_and_on_nothing_else(tmp_path: Path) -> None:
    write_numbered(tmp_path, [60, 60], 20)

    def epochs(seed: int, batch_size: int) -> list[list[int]]:
        stream = SampleStream(tmp_path, SCHEMA, batch_size, epochs=2, shuffle_rows=30, seed=seed)
        rows = [row for batch, _, _ in collect(stream) for row in batch]
        return [rows[:120], rows[120:]]

    first, second = epochs(seed=1, batch_size=8)
    assert epochs(seed=1, batch_size=50) == [first, second]
    assert len({tuple(order) for order in (first, second, *epochs(seed=2, batch_size=8))}) == 4


def test_the_shuffle_is_the_same_on_every_machine(tmp_path: Path) -> None:
    write_numbered(tmp_path, [8], 2)
    (batch,) = SampleStream(tmp_path, SCHEMA, 8, shuffle_rows=4, seed=7)
    assert rows_of(batch) == [6, 3, 7, 2, 1, 0, 5, 4]


def test_shuffling_mixes_within_windows_only(tmp_path: Path) -> None:
    write_numbered(tmp_path, [100], 100)  # one row group: its permutation is the identity
    (batch,) = SampleStream(tmp_path, SCHEMA, 100, shuffle_rows=10)
    rows = np.array(rows_of(batch)).reshape(10, 10)
    assert (rows // 10 == np.arange(10)[:, None]).all()
    assert (np.diff(rows, axis=1) != 1).any()


def test_stopping_early_leaves_no_thread_and_iterating_again_begins_again(tmp_path: Path) -> None:
    write_numbered(tmp_path, [10], 4)
    older = set(threading.enumerate())
    stream = SampleStream(tmp_path, SCHEMA, 4, start=4)
    next(iter(stream))
    assert stream.position == 8
    assert "rowhaul-prefetch" not in {thread.name for thread in set(threading.enumerate()) - older}
    assert collect(stream) == collect(stream)
    assert stream.position == 10


@pytest.mark.parametrize(
    ("setting", "value"),
    [("batch_size", 0), ("epochs", 0), ("shuffle_rows", -1), ("start", -1), ("limit", 0)],
)
def test_impossible_settings_are_refused_by_name(tmp_path: Path, setting: str, value: int) -> None:
    write_numbered(tmp_path, [3], 3)
    with pytest.raises(ConfigError, match=f"{setting} is {value}"):
        SampleStream(tmp_path, SCHEMA, **{"batch_size": 2, setting: value})


@pytest.mark.parametrize("seed", [None, "7", 1.5])
def test_seeds_that_are_no_whole_numbers_are_refused(tmp_path: Path, seed: object) -> None:
    write_numbered(tmp_path, [3], 3)
    with pytest.raises(ConfigError, match=f"seed is {seed!r}; it must be a whole number"):
        SampleStream(tmp_path, SCHEMA, 2, seed=seed)


def test_numbers_of_numpy_are_those_of_python(tmp_path: Path) -> None:
    write_numbered(tmp_path, [10], 4)
    numbers = {"batch_size": 3, "epochs": 2, "shuffle_rows": 5, "seed": -7, "start": 2, "limit": 18}
    plain = SampleStream(tmp_path, SCHEMA, **numbers)
    numpys = SampleStream(tmp_path, SCHEMA, **{name: np.int8(one) for name, one in numbers.items()})
    assert collect(numpys) == collect(plain)


def test_the_path_of_a_schema_is_not_taken_for_one(tmp_path: Path) -> None:
    write_numbered(tmp_path, [3], 3)
    with pytest.raises(ConfigError, match=r"the schema is 'schema.yaml'.*Schema.read\(path\)"):
        SampleStream(tmp_path, "schema.yaml", 2)
