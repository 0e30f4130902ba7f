"""Several readers that decode some of the columns each: together they have what one would have read."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowhaul.data import parquet
from rowhaul.data.column_shares import all_columns, divide_columns
from rowhaul.data.parquet import ParquetRows, Sharing
from rowhaul.data.schema import DenseColumn, IdColumn, LabelColumn, Schema, TimeColumn
from rowhaul.data.stream import SampleStream
from rowhaul.errors import DataError

SCHEMA = Schema(
    LabelColumn("click"),
    (DenseColumn("age"), DenseColumn("price", transform="log1p")),
    (IdColumn("user"), IdColumn("tags"), IdColumn("word")),
    time=TimeColumn("at"),
    weight="weight",
    group="user",
)


def write_log(path: Path, num_rows: int, group_rows: int, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    tags = [random.integers(0, 9, count).tolist() for count in random.integers(0, 4, num_rows)]
    columns = {
        "click": pa.array(random.integers(0, 2, num_rows), pa.int8()),
        "age": pa.array(random.normal(size=num_rows), pa.float64()),
        "price": pa.array([None if one < 0.2 else one for one in random.random(num_rows)], pa.float32()),
        "user": pa.array(random.integers(0, 50, num_rows), pa.int64()),
        "tags": pa.array(tags, pa.list_(pa.int64())),
        "word": pa.array([None if one == 3 else f"w{one}" for one in random.integers(0, 9, num_rows)]),
        "at": pa.array(random.integers(1, 2**30, num_rows), pa.int64()),
        "weight": pa.array(random.random(num_rows), pa.float32()),
    }
    pq.write_table(pa.table(columns), path, row_group_size=group_rows)


class Beside:
    """A reader of other columns that is in this process."""

    def __init__(self, rows, share):
        self.rows, self.share, self.is_stopped, self.is_closed = rows, share, False, False

    def read_columns(self, place, skip, num_blocks):
        return self.rows.read_columns(self.share, place, skip)

    def stop(self):
        self.is_stopped = True

    def close(self):
        self.is_closed = True


def opened(path: Path) -> ParquetRows:
    return ParquetRows([path], SCHEMA, with_label=True)


def shared(path: Path, num_readers: int) -> Sharing:
    own, *others = divide_columns(SCHEMA, opened(path).column_costs(), num_readers)
    return Sharing(own, tuple(Beside(opened(path), share) for share in others))


def arrays_of(rows: ParquetRows, place: int, skip: int, sharing: Sharing | None = None) -> list[list[object]]:
    """All that is in the blocks of a row group."""
    return [
        [
            *((one.values.tolist(), one.offsets is None or one.offsets.tolist()) for one in block.ids),
            block.dense.tolist(),
            *(one.tolist() for one in vars(block.targets).values()),
            block.times.tolist(),
        ]
        for block in rows.read(place, skip, sharing)
    ]


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_readers_of_some_columns_each_read_together_what_one_reads_alone(tmp_path_factory, data) -> None:
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    num_rows = data.draw(st.integers(1, 60))
    write_log(path, num_rows, data.draw(st.integers(1, 60)), data.draw(st.integers(0, 9)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "READ_ROWS", data.draw(st.integers(1, 20)))
        alone, together, sharing = opened(path), opened(path), shared(path, data.draw(st.integers(1, 9)))
        for place, group in enumerate(alone.row_groups):
            skip = data.draw(st.sampled_from([0, 0, group.num_rows // 2]))
            assert arrays_of(together, place, skip, sharing) == arrays_of(alone, place, skip)
        assert together.contents.known == alone.contents.known  # digests do not depend on who decodes


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=12),
    st.lists(st.integers(0, 1000), max_size=12),
    st.integers(1, 9),
)
def test_every_column_has_one_reader_and_none_much_more_to_do_than_another(ids, dense, num_readers) -> None:
    schema = Schema(
        LabelColumn("label"),
        tuple(DenseColumn(f"d{number}") for number in range(len(dense))),
        tuple(IdColumn(f"i{number}") for number in range(len(ids))),
    )
    costs = {f"i{place}": cost for place, cost in enumerate(ids)}
    costs |= {f"d{place}": cost for place, cost in enumerate(dense)}
    shares = divide_columns(schema, costs, num_readers)
    assert sorted(place for share in shares for place in share.features) == list(range(len(ids)))
    assert sorted(place for share in shares for place in share.dense) == list(range(len(dense)))
    assert [share.targets for share in shares] == [True] + [False] * (len(shares) - 1)
    assert all(share.features or share.dense for share in shares[1:])
    loads = [
        sum(ids[place] for place in share.features) + sum(dense[place] for place in share.dense)
        for share in shares
    ]
    loads += [0] * (num_readers - len(loads))
    loads[0] += sum(costs.values()) // 2 - min(ids)  # it has the cheapest feature in any case
    for share, load in zip(shares, loads, strict=False):
        given = [*(ids[place] for place in share.features), *(dense[place] for place in share.dense)]
        if share.targets:
            given.remove(min(ids))
        # Before a reader got the last of its columns, it was the one with least to do.
        assert not given or load - min(given) <= min(loads)
    assert divide_columns(schema, costs, 1) == [all_columns(schema)]


def test_a_change_in_any_column_is_noticed_whichever_reader_decodes_it(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    write_log(path, 30, 30)
    before = opened(path)
    list(before.read(0, 0, shared(path, 3)))
    table = pq.read_table(path)
    assert set(table.column_names) == {*SCHEMA.column_names(), "at"}
    for number in range(table.num_columns):
        column = table.column(number).to_pylist()
        place = next(at for at in range(1, 30) if column[at] != column[0] and column[at] is not None)
        column[0] = column[place]
        changed = table.set_column(number, table.field(number), pa.array(column, table.field(number).type))
        pq.write_table(changed, path, row_group_size=30)
        again = opened(path)
        again.contents.known |= before.contents.known
        with pytest.raises(DataError, match="row group 0 holds other values"):
            list(again.read(0, 0, shared(path, 2)))


def test_only_one_iteration_shares_columns_and_ends_the_other_readers(tmp_path: Path) -> None:
    write_log(tmp_path / "log.parquet", 30, 10)
    stream, sharing = SampleStream(tmp_path, SCHEMA, 4), shared(tmp_path / "log.parquet", 3)
    expected = [batch.values.tolist() for batch in stream]
    stream.share_columns(sharing.own, sharing.others)
    first = iter(stream)
    begun = [next(first).values.tolist()]
    assert [batch.values.tolist() for batch in stream] == expected  # another iteration reads alone
    assert not any(one.is_closed for one in sharing.others)
    assert begun + [batch.values.tolist() for batch in first] == expected
    assert all(one.is_closed for one in sharing.others)


def test_a_stream_that_is_left_early_ends_the_other_readers(tmp_path: Path) -> None:
    write_log(tmp_path / "log.parquet", 3000, 10)
    stream, sharing = SampleStream(tmp_path, SCHEMA, 4), shared(tmp_path / "log.parquet", 3)
    stream.share_columns(sharing.own, sharing.others)
    batches = stream.prepared(lambda samples: samples)
    next(batches)
    batches.close()
    assert all(one.is_closed for one in sharing.others)
