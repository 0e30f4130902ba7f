"""Jagged tensors against plain lists of lists."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowhaul.errors import DataError
from rowhaul.nn.jagged import JaggedTensor, KeyedJaggedTensor, as_keyed_jagged

IDS = st.integers(-(2**63), 2**63 - 1)
Rows = dict[str, list[list[int]]]


@st.composite
def keyed_rows(draw: st.DrawFn) -> Rows:
    samples = draw(st.integers(0, 4))
    row = st.lists(st.lists(IDS, max_size=3), min_size=samples, max_size=samples)
    return draw(st.dictionaries(st.sampled_from("abcd"), row, min_size=1))


def make(rows: Rows, weighted: bool = False, from_offsets: bool = False) -> KeyedJaggedTensor:
    bags = [bag for of_key in rows.values() for bag in of_key]
    values = torch.tensor([key for bag in bags for key in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int32)
    weights = torch.arange(len(values), dtype=torch.float32) if weighted else None
    if from_offsets:
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return KeyedJaggedTensor.from_offsets_sync(list(rows), values, offsets, weights)
    return KeyedJaggedTensor.from_lengths_sync(list(rows), values, lengths, weights)


def lists(jagged: JaggedTensor) -> list[list[int]]:
    return [row.tolist() for row in jagged.to_dense()]


def keyed_lists(ids: KeyedJaggedTensor) -> list[tuple[str, list[list[int]]]]:
    return [(key, lists(ids[key])) for key in ids.keys()]  # noqa: SIM118  # not a dict


@given(keyed_rows(), st.booleans(), st.booleans())
def test_every_view_shows_the_rows_it_was_built_from(rows: Rows, weighted: bool, from_offsets: bool) -> None:
    ids = make(rows, weighted, from_offsets)
    sizes = [sum(map(len, of_key)) for of_key in rows.values()]

    assert keyed_lists(ids) == list(rows.items())
    assert {key: lists(jagged) for key, jagged in ids.to_dict().items()} == rows
    assert ids.stride() == len(next(iter(rows.values())))
    assert ids.length_per_key() == sizes
    assert ids.offset_per_key() == [sum(sizes[:end]) for end in range(len(sizes) + 1)]
    assert ids.offsets().diff().tolist() == ids.lengths().tolist()
    for key in rows:
        jagged = ids[key]
        assert jagged.offsets().tolist() == [sum(map(len, rows[key][:i])) for i in range(ids.stride() + 1)]
        if weighted:
            begin = ids.offset_per_key()[list(rows).index(key)]
            assert jagged.weights().tolist() == list(range(begin, begin + len(jagged.values())))
        else:
            assert jagged.weights_or_none() is None


@given(keyed_rows(), st.booleans(), st.data())
def test_permute_split_concat_and_dictionaries_only_rearrange(
    rows: Rows, weighted: bool, data: st.DataObject
) -> None:
    ids = make(rows, weighted)
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), unique=True))
    cut = data.draw(st.integers(0, len(rows)))
    named = list(rows.items())

    permuted = ids.permute(order)
    assert keyed_lists(permuted) == [named[index] for index in order]
    assert permuted.stride() == ids.stride()
    parts = ids.split([cut, len(rows) - cut])
    assert keyed_lists(parts[0]) == named[:cut]
    assert keyed_lists(parts[1]) == named[cut:]
    for rebuilt in (KeyedJaggedTensor.concat(parts), KeyedJaggedTensor.from_jt_dict(ids.to_dict())):
        assert keyed_lists(rebuilt) == named
        if weighted:
            assert rebuilt.weights().tolist() == ids.weights().tolist()


def test_split_and_lookup_share_memory() -> None:
    ids = make({"a": [[1], [2]], "b": [[3, 4], []]})
    ids["b"].values()[0] = 30
    ids.split([1, 1])[0].values()[1] = 20
    assert ids.values().tolist() == [1, 20, 30, 4]


def test_a_key_may_be_permuted_twice() -> None:
    ids = make({"a": [[1], [2]], "b": [[3, 4], []]}).permute([1, 0, 1])
    assert ids.keys() == ["b", "a", "b"]
    assert ids.values().tolist() == [3, 4, 1, 2, 3, 4]


@given(st.lists(st.lists(IDS, max_size=3), min_size=1, max_size=5))
def test_dense_rows_round_trip(rows: list[list[int]]) -> None:
    tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
    from_rows = JaggedTensor.from_dense(tensors, [torch.ones(len(row)) for row in rows])
    assert lists(from_rows) == rows
    assert from_rows.weights().tolist() == [1.0] * sum(map(len, rows))

    padded = torch.full((len(rows), 3), -7)
    for place, row in zip(padded, tensors, strict=True):
        place[: len(row)] = row
    lengths = torch.tensor([len(row) for row in rows])
    assert lists(JaggedTensor.from_dense_lengths(padded, lengths)) == rows


def test_empty_has_no_keys_and_no_samples() -> None:
    ids = KeyedJaggedTensor.empty(is_weighted=True, values_dtype=torch.int64)
    assert (ids.keys(), ids.stride(), len(ids.values()), len(ids.weights())) == ([], 0, 0, 0)
    assert ids.length_per_key() == []


def test_moving_keeps_everything() -> None:
    ids = make({"a": [[1], [2]], "b": [[3, 4], []]}, weighted=True)
    moved = ids.to("meta", non_blocking=True)
    assert {moved.device().type, moved.weights().device.type, moved.offsets().device.type} == {"meta"}
    assert moved.offset_per_key() == ids.offset_per_key() == [0, 2, 4]  # known without a look at the device


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_on_an_accelerator_mistakes_are_found_when_sizes_are_needed() -> None:
    ids = make({"a": [[1], [2]], "b": [[3, 4], []]}, weighted=True).pin_memory()
    assert ids.values().is_pinned()
    assert keyed_lists(ids.to("cuda").permute([1, 0])) == [("b", [[3, 4], []]), ("a", [[1], [2]])]
    wrong = KeyedJaggedTensor(
        ["a"], torch.arange(3, device="cuda"), lengths=torch.ones(2, device="cuda").int()
    )
    with pytest.raises(DataError, match="add up to 2, but there are 3 values"):
        wrong.sync()


def test_repr_shows_rows_and_stays_short() -> None:
    text = repr(make({"a": [[1], [2, 3]], "b": [[], list(range(20))]}))
    assert "a: [[1], [2, 3]]" in text
    assert "b: [[], [0, 1, 2, 3, 4, 5, 6, 7, …]]" in text
    assert len(repr(JaggedTensor(torch.arange(10_000), lengths=torch.full((5_000,), 2)))) < 200


class ForeignKeyedJagged:
    """What a KeyedJaggedTensor of another library offers."""

    def __init__(self, variable: bool = False) -> None:
        self.variable = variable

    def keys(self) -> list[str]:
        return ["a", "b"]

    def values(self) -> torch.Tensor:
        return torch.tensor([1, 2, 3])

    def weights_or_none(self) -> None:
        return None

    def lengths(self) -> torch.Tensor:
        return torch.tensor([1, 0, 1, 1])

    def stride(self) -> int:
        return 2

    def variable_stride_per_key(self) -> bool:
        return self.variable


def test_other_libraries_tensors_are_taken_by_their_methods() -> None:
    ids = as_keyed_jagged(ForeignKeyedJagged())
    assert keyed_lists(ids) == [("a", [[1], []]), ("b", [[2], [3]])]
    assert as_keyed_jagged(ids) is ids
    with pytest.raises(DataError, match="another number of samples per key"):
        as_keyed_jagged(ForeignKeyedJagged(variable=True))
    with pytest.raises(DataError, match="expected a KeyedJaggedTensor, got dict"):
        as_keyed_jagged({"a": [1]})


VALUES = torch.arange(4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: JaggedTensor(VALUES), "needs lengths or offsets"),
        (lambda: JaggedTensor(VALUES, lengths=torch.tensor([1, 2])), "span 0 to 3, but there are 4 values"),
        (lambda: JaggedTensor(VALUES, lengths=torch.tensor([5, -1])), "must not be negative"),
        (lambda: JaggedTensor(VALUES, offsets=torch.tensor([1, 4])), "span 1 to 4"),
        (lambda: JaggedTensor(VALUES, offsets=torch.tensor([0, 5, 4])), "must not decrease"),
        (lambda: JaggedTensor(VALUES, offsets=torch.tensor([], dtype=torch.int64)), "at least one entry"),
        (lambda: JaggedTensor(VALUES, lengths=torch.tensor([[4]])), r"flat tensor .* got shape \(1, 1\)"),
        (lambda: JaggedTensor(VALUES, lengths=torch.tensor([4.0])), "int64, got .* torch.float32"),
        (
            lambda: JaggedTensor(VALUES, torch.ones(3), torch.tensor([4])),
            "3 weights for 4 values",
        ),
        (
            lambda: JaggedTensor(VALUES, lengths=torch.tensor([1, 3]), offsets=torch.tensor([0, 2, 4])),
            "both given and disagree",
        ),
        (lambda: JaggedTensor(VALUES, lengths=torch.tensor([4])).weights(), "has no weights"),
        (
            lambda: KeyedJaggedTensor(["a"], [1, 2], lengths=torch.tensor([1, 1])),
            "values must be a tensor, got list; make one",
        ),
        (
            lambda: KeyedJaggedTensor(["a"], VALUES, lengths=[1, 3]),
            "lengths must be a tensor, got list",
        ),
        (lambda: JaggedTensor.from_dense([]), "at least one tensor"),
        (lambda: JaggedTensor.from_dense([VALUES], [torch.ones(2)]), "lengths of values, row by row"),
        (
            lambda: JaggedTensor.from_dense_lengths(VALUES.view(2, 2), torch.tensor([1, 3])),
            "none above the width",
        ),
        (
            lambda: KeyedJaggedTensor(["a", "b"], VALUES, lengths=torch.tensor([1, 1, 2])),
            "3 lengths for 2 keys do not divide evenly",
        ),
        (
            lambda: KeyedJaggedTensor(["a", "b"], VALUES, lengths=torch.tensor([2, 2]), stride=2),
            "2 lengths for 2 keys and 2 samples",
        ),
        (lambda: make({"a": [[1]], "b": [[2]]})["c"], "unknown key 'c'; known are a, b"),
        (lambda: make({"a": [[1]]}).split([2]), "must add up to the 1 keys"),
        (lambda: make({"a": [[1]]}).permute([1]), "there are 1 keys, so no index 1"),
        (lambda: KeyedJaggedTensor.concat([]), "at least one KeyedJaggedTensor"),
        (
            lambda: KeyedJaggedTensor.concat([make({"a": [[1]]}), make({"b": [[1], [2]]})]),
            r"same number of samples, got \[1, 2\]",
        ),
        (
            lambda: KeyedJaggedTensor.concat([make({"a": [[1]]}), make({"b": [[1]]}, weighted=True)]),
            "weights to all or to none",
        ),
        (lambda: KeyedJaggedTensor.from_jt_dict({}), "empty mapping"),
        (
            lambda: KeyedJaggedTensor(["a", "a"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1])),
            "'a' is given twice",
        ),
        (lambda: KeyedJaggedTensor.concat([make({"a": [[1]]}), make({"a": [[2]]})]), "'a' is given twice"),
        (
            lambda: KeyedJaggedTensor(["a"], torch.tensor([1, 2]), lengths=torch.tensor([2**62] * 4 + [2])),
            "one is 4,611,686,018,427,387,904, but there are 2 values",
        ),
        (
            lambda: KeyedJaggedTensor.from_jt_dict(
                {"a": make({"a": [[1]]})["a"], "b": make({"b": [[1], []]})["b"]}
            ),
            "same number of samples, got {'a': 1, 'b': 2}",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(build: Callable[[], object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build()


def test_lengths_and_offsets_that_agree_may_both_be_given() -> None:
    lengths, offsets = torch.tensor([1, 3], dtype=torch.int32), torch.tensor([0, 1, 4])
    assert lists(JaggedTensor(VALUES, lengths=lengths, offsets=offsets)) == [[0], [1, 2, 3]]


def test_lengths_of_nothing_may_be_of_any_type() -> None:
    empty = KeyedJaggedTensor(["a"], torch.empty(0, dtype=torch.int64), lengths=torch.tensor([]))
    assert (empty.stride(), empty.offset_per_key()) == (0, [0, 0])
