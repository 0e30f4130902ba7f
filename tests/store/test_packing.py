"""Packed rows against plain Python: the same bits, right on average, in every part of a group of tables."""

import numpy as np
import pytest

from rowhaul._packed_vectors import MOST_INT8
from rowhaul.errors import ConfigError
from rowhaul.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from rowhaul.store import TableGroup, TableSpec
from rowhaul.store.packed_rows import BFloat16Rows, Float16Rows, Int8Rows
from rowhaul.store.packing import RowNames, RowPacking
from rowhaul.store.snapshot import GroupSnapshot
from rowhaul.store.tables import table_seeds

PACKED = ("bfloat16", "float16", "int8")
DIMS = (2, 3, 8, 13, 32)
RULES = [
    SGD(lr=0.1, weight_decay=0.01),
    Adagrad(lr=0.1, weight_decay=0.01),
    RowwiseAdagrad(lr=0.1, weight_decay=0.01),
    Adam(lr=0.1, weight_decay=0.01),
]
_ALL = (1 << 64) - 1


def mixed(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _ALL
    return x ^ (x >> 31)


def row_draws(table_seed, key, number, dim, sender=0):
    """Sixteen bits for each column."""
    seed = mixed((int(key) & _ALL) ^ int(table_seed))
    seed = mixed((seed + (number + 1) * 0x9E3779B97F4A7C15) & _ALL)
    if sender:
        seed = mixed(seed ^ mixed(sender))
    first, step = seed & 0xFFFFFFFF, (seed >> 32) | 1
    return [((first + column * step) & 0xFFFFFFFF) >> 16 for column in range(dim)]


def rounded(row_dtype, values, draws):
    """What packed values read as, number by number, in float32."""
    values = np.asarray(values, np.float32)
    if row_dtype == "bfloat16":
        bits = [
            ((int(v.view(np.uint32)) + d) & 0xFFFFFFFF) >> 16 << 16
            for v, d in zip(values, draws, strict=True)
        ]
        return np.array(bits, np.uint32).view(np.float32)
    if row_dtype == "float16":
        return np.array([half(v, d >> 3) for v, d in zip(values, draws, strict=True)], np.float16).astype(
            np.float32
        )
    most, limit = np.abs(values).max(), np.float32(MOST_INT8)
    scale = most * np.float32(1 / MOST_INT8)
    share = limit / most if most > 1e-36 else np.float32(0)
    above = [np.float32(128 + d / 65536) for d in draws]
    steps = [int(v * share + up) - 128 for v, up in zip(values, above, strict=True)]
    return np.array(steps, np.float32) * scale


def half(value, draw):
    """Round to float16 by 13 random bits."""
    size, sign = abs(np.float32(value)), np.signbit(value)
    if size >= 65536:
        found = np.float16(np.inf)
    elif size < 2.0**-14:
        found = np.float16(int(np.float32(size * 2.0**24) + np.float32(draw / 8192)) * 2.0**-24)
    else:
        bits = (int(size.view(np.uint32)) + draw) >> 13 << 13
        with np.errstate(over="ignore"):
            found = np.array(bits, np.uint32).view(np.float32).astype(np.float16)
    return -found if sign else found


def some_values(rng, rows, dim):
    """Of very different sizes, some of them zero."""
    values = rng.standard_normal((rows, dim)) * 10.0 ** rng.integers(-9, 4, (rows, dim))
    values[rng.random((rows, dim)) < 0.1] = 0
    values[0] = 0
    return values.astype(np.float32)


def names(rng, rows, num_tables=1):
    return RowNames(rng.integers(0, num_tables, rows), rng.integers(-(2**63), 2**63 - 1, rows))


@pytest.mark.parametrize("row_dtype", PACKED)
def test_rounding_is_that_of_plain_python(row_dtype):
    rng, seeds = np.random.default_rng(0), table_seeds(["a", "b"], 7)
    for dim in DIMS:
        packing, values = RowPacking(row_dtype, dim, 1), some_values(rng, 40, dim)
        rows = names(rng, 40, 2)
        contents = np.concatenate([values, rng.random((40, 1), np.float32)], axis=1)
        found = packing.readable(packing.pack(contents, rows, 5, seeds))
        expected = [
            rounded(row_dtype, one, row_draws(seeds[table], key, 5, dim))
            for one, table, key in zip(values, rows.tables, rows.keys, strict=True)
        ]
        np.testing.assert_array_equal(found[:, :dim], expected)
        np.testing.assert_array_equal(found[:, dim:], contents[:, dim:])


@pytest.mark.parametrize("row_dtype", PACKED)
def test_gradients_are_rounded_by_their_sender_and_summed_in_order(row_dtype):
    rng, seeds, dim = np.random.default_rng(1), table_seeds(["a"], 7), 13
    packing, rows = RowPacking(row_dtype, dim, 0), names(rng, 30)
    kind = "int8" if row_dtype == "int8" else "bfloat16"
    parts, expected = [], np.zeros((30, dim), np.float32)
    for rank in range(3):
        values = some_values(rng, 30, dim)
        parts.append(packing.pack_gradients(values, rows, 9, seeds, rank))
        assert parts[-1].shape == (30, packing.value_bytes)
        draws = [row_draws(seeds[0], key, 9, dim, rank + 1) for key in rows.keys]
        expected += [rounded(kind, one, some) for one, some in zip(values, draws, strict=True)]
        np.testing.assert_array_equal(packing.unpack_gradients(parts[-1])[0], 0)
    addresses = np.stack([part.ctypes.data + np.arange(30) * part.shape[1] for part in parts], axis=1)
    addresses[4, 1] = 0  # no part of this worker
    expected[4] = packing.unpack_gradients(parts[0])[4] + packing.unpack_gradients(parts[2])[4]
    sums = np.empty((30, dim), np.float32)
    packing.sum_gradients(addresses, sums)
    np.testing.assert_array_equal(sums, expected)


def test_every_half_reads_as_numpy_reads_it():
    patterns = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 16)
    with np.errstate(invalid="ignore"):  # of what is no number
        halves = patterns.view(np.float16).astype(np.float32)
    for row_dtype, expected in (
        ("float16", halves),
        ("bfloat16", (patterns.astype(np.uint32) << 16).view(np.float32)),
    ):
        found = RowPacking(row_dtype, 16, 0).readable(patterns.view(np.uint8))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("row_dtype", ["bfloat16", "float16"])
def test_what_can_be_held_exactly_is(row_dtype):
    rng, packing, seeds = np.random.default_rng(2), RowPacking(row_dtype, 11, 0), table_seeds(["a"], 0)
    rows = names(rng, 200)
    once = packing.pack(some_values(rng, 200, 11), rows, 1, seeds)
    again = packing.pack(packing.readable(once), rows, 2, seeds)
    np.testing.assert_array_equal(once, again)


@pytest.mark.parametrize("row_dtype", PACKED)
def test_rounding_is_right_on_average_and_columns_are_independent(row_dtype):
    count, dim, seeds = 40_000, 8, table_seeds(["a"], 3)
    values = np.tile(np.array([1, 0.3, -0.3, 0.7001, 0.0123, -0.5557, 1e-5, 0.9], np.float32), (count, 1))
    rows = RowNames(np.zeros(count, np.int64), np.arange(count))
    packing = RowPacking(row_dtype, dim, 0)
    for number in (0, 1):
        errors = packing.readable(packing.pack(values, rows, number, seeds)) - values
        spread = errors.std(axis=0) + 1e-9
        assert (np.abs(errors.mean(axis=0)) < 4.5 * spread / count**0.5 + 1e-8).all()
        both = np.corrcoef(errors[:, spread > 1e-8].T)
        assert np.abs(both - np.eye(len(both))).max() < 0.03


@pytest.mark.parametrize("row_dtype", PACKED)
def test_what_is_not_finite_stays_so(row_dtype):
    packing, seeds = RowPacking(row_dtype, 9, 0), table_seeds(["a"], 0)
    for bad in (np.nan, np.inf, -np.inf):
        values = np.ones((1, 9), np.float32)
        values[0, 8] = bad
        stored = packing.pack(values, RowNames(np.zeros(1, np.int64), np.arange(1)), 1, seeds)
        assert not np.isfinite(packing.readable(stored)).all()


@pytest.mark.parametrize("row_dtype", PACKED)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_step_is_a_step_in_float32_rounded(row_dtype, rule):
    rng = np.random.default_rng(3)
    for dim in (3, 16, 21):
        specs = [TableSpec(name, dim, -1.0, 1.0) for name in ("a", "b")]
        packed = TableGroup(specs, rule, "float32", 5, row_dtype)
        plain = TableGroup(specs, rule, "float32", 5)
        rows = RowNames(np.repeat([0, 1], 20), np.tile(np.arange(20), 2))
        records = packed.make_fresh(rows.tables, rows.keys)
        for number in (1, 2, 3):
            some = rng.permutation(40)[:25]
            these = rows.some(some)._replace(numbers=rng.integers(1, 9, 25))
            gradients = rng.standard_normal((25, dim)).astype(np.float32)
            before = packed.read(records)
            for table in (0, 1):
                here = rows.tables == table
                plain.load(table, rows.keys[here], before[here])
            located = plain.make_fresh(rows.tables, rows.keys)
            plain.update(located[some], gradients, 0.1, number)
            packed.update(records[some], gradients, 0.1, number, these)
            expected = plain.read(located)
            for place, table, key, step in zip(some, *these, strict=True):
                draws = row_draws(packed._seeds[table], key, int(step), dim)
                expected[place, :dim] = rounded(row_dtype, expected[place, :dim], draws)
            np.testing.assert_array_equal(packed.read(records), expected)


@pytest.mark.parametrize("row_dtype", PACKED)
def test_unknown_rows_read_as_they_would_begin(row_dtype):
    specs = [TableSpec(name, 5, -0.5, 1.0) for name in ("a", "b")]
    group = TableGroup(specs, Adagrad(lr=0.1), "float32", 1, row_dtype)
    ids = np.array([4, 5, 4, 9]), np.array([0, 2, 4]), np.array([0, 1])
    lookup = group.lookup(*ids, insert=False)
    assert group.index.num_keys.sum() == 0
    made = group.lookup(*ids, insert=True)
    np.testing.assert_array_equal(lookup.spare, group.read(made.locations)[:, :5])
    assert (np.abs(lookup.spare) > 0).all()


@pytest.mark.parametrize("row_dtype", PACKED)
def test_records_are_bytes_that_are_copied_as_they_are(row_dtype):
    group = TableGroup([TableSpec("a", 32, -1.0, 1.0)], RowwiseAdagrad(lr=0.1), "float32", 1, row_dtype)
    keys = np.arange(100)
    records = group.make_fresh(np.zeros(100, np.int64), keys)
    assert group.arena.record_bytes == {"bfloat16": 68, "float16": 68, "int8": 40}[row_dtype]
    snapshot, before = GroupSnapshot(group), group.read(records)
    rows = RowNames(np.zeros(100, np.int64), keys)
    group.update(records, np.ones((100, 32), np.float32), 0.1, 1, rows)
    twin = TableGroup(group.tables, group.optimizer, "float32", 1, row_dtype)
    for some, stored in snapshot.blocks(0):
        twin.load_stored(0, some, stored)
    snapshot.close()
    np.testing.assert_array_equal(twin.read(twin.make_fresh(rows.tables, keys)), before)
    assert (group.read(records) != before).any()


@pytest.mark.parametrize("format", [BFloat16Rows(), Float16Rows(), Int8Rows()], ids=lambda one: one.name)
def test_blocks_have_what_records_have(format):
    rng, dim = np.random.default_rng(4), 7
    for width in (0, 1, dim):
        packing, rows = format.packing(dim, width), names(rng, 20)
        contents = rng.random((20, dim + width), np.float32)
        stored = packing.pack(contents, rows, 0, table_seeds(["a"], 0))
        block = format.encode(rows.keys, stored, dim)
        assert block["values"].shape == (20, dim)
        assert block["values"].dtype.itemsize == (1 if format.name == "int8" else 2)
        np.testing.assert_array_equal(format.stored(block, dim), stored)
        np.testing.assert_array_equal(format.decode(block, dim), packing.readable(stored))
        assert format.wire_bytes(dim, width, "float32") == (packing.value_bytes, 4 * width)


def test_wrong_types_are_refused():
    with pytest.raises(ConfigError, match="one of float32, bfloat16, float16, int8, got 'float8'"):
        RowPacking("float8", 4, 0)
    with pytest.raises(ConfigError, match="a row has a single value"):
        TableGroup([TableSpec("a", 1, 0, 1)], SGD(lr=1), "float32", 0, "int8")
    with pytest.raises(ConfigError, match="use precision float32"):
        TableGroup([TableSpec("a", 4, 0, 1)], SGD(lr=1), "float64", 0, "bfloat16")


@pytest.mark.parametrize("row_dtype", ["bfloat16", "float16"])
def test_what_is_no_finite_number_does_not_become_one(row_dtype):
    """Cards write all bits for what is no number, processors few."""
    patterns = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001, 0xFF800001, 0x7F800000], np.uint32)
    dim, rng = 11, np.random.default_rng(4)
    values = np.tile(patterns, dim).reshape(-1, dim).view(np.float32)
    packing, rows = RowPacking(row_dtype, dim, 0), names(rng, len(values))
    for number in range(20):
        found = packing.readable(packing.pack(values, rows, number, table_seeds(["a"], 0)))
        assert not np.isfinite(found).any()
        if row_dtype == "bfloat16":
            np.testing.assert_array_equal(np.isnan(found), np.isnan(values))
