"""Parity with TorchRec's own classes, where TorchRec is installed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rowhaul.errors import DataError
from rowhaul.nn import jagged as ours

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TorchRec's own imports warn
    theirs = pytest.importorskip("torchrec", reason="parity with TorchRec needs torchrec and fbgemm-gpu-cpu")

pytestmark = pytest.mark.filterwarnings("ignore")


@st.composite
def arguments(draw: st.DrawFn, samples: int | None = None) -> dict[str, Any]:
    """Constructor arguments of a KeyedJaggedTensor: some by lengths, some by offsets, some weighted.

    There is at least one sample: without any, several of TorchRec's own methods fail.
    """
    num_keys = draw(st.integers(1, 4))
    samples = draw(st.integers(1, 4)) if samples is None else samples
    rows = num_keys * samples
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    lengths = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)), dtype=dtype)
    size = int(lengths.sum())
    offsets = torch.cat([torch.zeros(1, dtype=dtype), lengths.cumsum(0, dtype=dtype)])
    values = torch.tensor(
        draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=size, max_size=size)), dtype=torch.int64
    )
    sizes = {"lengths": lengths} if draw(st.booleans()) else {"offsets": offsets}
    weights = torch.arange(size, dtype=torch.float32) if draw(st.booleans()) else None
    return {"keys": list("abcd"[:num_keys]), "values": values, "weights": weights, **sizes}


def assert_same(mine: Any, other: Any) -> None:
    """The same answer of both libraries, whatever kind of thing it is."""
    if isinstance(other, Tensor):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)
    elif isinstance(other, list | tuple):
        assert len(mine) == len(other)
        for one, another in zip(mine, other, strict=True):
            assert_same(one, another)
    elif isinstance(other, dict):
        assert list(mine) == list(other)
        assert_same(list(mine.values()), list(other.values()))
    elif isinstance(other, theirs.KeyedJaggedTensor):
        for method in ("keys", "stride", "length_per_key", "offset_per_key"):
            assert_same(getattr(mine, method)(), getattr(other, method)())
        assert_same_rows(mine, other)
    elif isinstance(other, theirs.JaggedTensor):
        assert_same_rows(mine, other)
        assert_same(mine.to_dense(), other.to_dense())
    elif isinstance(other, theirs.KeyedTensor):
        for method in ("keys", "values", "length_per_key", "offset_per_key", "key_dim", "to_dict", "device"):
            assert_same(getattr(mine, method)(), getattr(other, method)())
    else:
        assert mine == other


def assert_same_rows(mine: Any, other: Any) -> None:
    sizes = (
        ("lengths", "offsets") if len(other.lengths()) else ()
    )  # without keys TorchRec changes their types
    for method in ("values", "weights_or_none", "device", *sizes):
        assert_same(getattr(mine, method)(), getattr(other, method)())


@given(arguments())
def test_construction_and_views(given_arguments: dict[str, Any]) -> None:
    mine, other = ours.KeyedJaggedTensor(**given_arguments), theirs.KeyedJaggedTensor(**given_arguments)
    assert_same(mine, other)
    assert_same(mine.to_dict(), other.to_dict())
    assert_same(
        mine.to(torch.device("cpu"), non_blocking=True), other.to(torch.device("cpu"), non_blocking=True)
    )
    for key in given_arguments["keys"]:
        assert_same(mine[key], other[key])


@given(arguments())
def test_positional_arguments_and_named_constructors(given_arguments: dict[str, Any]) -> None:
    both = (ours.KeyedJaggedTensor, theirs.KeyedJaggedTensor)
    keys, values, weights = (given_arguments[name] for name in ("keys", "values", "weights"))
    whole = theirs.KeyedJaggedTensor(**given_arguments)
    lengths, offsets, stride = whole.lengths(), whole.offsets(), whole.stride()
    assert_same(*(kind.from_lengths_sync(keys, values, lengths, weights, stride) for kind in both))
    assert_same(*(kind.from_offsets_sync(keys, values, offsets, weights, stride) for kind in both))
    assert_same(*(kind(keys, values, weights, lengths, offsets, stride) for kind in both))


@given(arguments(), st.data())
def test_permute_and_split(given_arguments: dict[str, Any], data: st.DataObject) -> None:
    mine, other = ours.KeyedJaggedTensor(**given_arguments), theirs.KeyedJaggedTensor(**given_arguments)
    num_keys = len(given_arguments["keys"])
    order = data.draw(st.lists(st.integers(0, num_keys - 1), unique=True))
    assert_same(mine.permute(order), other.permute(order))
    cuts = sorted(data.draw(st.lists(st.integers(0, num_keys), max_size=3)))
    segments = [end - begin for begin, end in zip([0, *cuts], [*cuts, num_keys], strict=True)]
    assert_same(mine.split(segments), other.split(segments))


@given(st.data())
def test_concat_and_dictionaries(data: st.DataObject) -> None:
    samples, weighted = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    parts = []
    for _ in range(data.draw(st.integers(1, 3))):
        part = data.draw(
            arguments(samples=samples).filter(lambda one: (one["weights"] is not None) == weighted)
        )
        whole = theirs.KeyedJaggedTensor(**part)
        lengths = whole.lengths().int()
        parts.append(
            {"keys": part["keys"], "values": part["values"], "weights": part["weights"], "lengths": lengths}
        )
    both = (ours.KeyedJaggedTensor, theirs.KeyedJaggedTensor)
    assert_same(*(kind.concat([kind(**part, stride=samples) for part in parts]) for kind in both))
    assert_same(*(kind.from_jt_dict(kind(**parts[0], stride=samples).to_dict()) for kind in both))


@pytest.mark.parametrize("weighted", [False, True])
def test_empty(weighted: bool) -> None:
    assert_same(ours.KeyedJaggedTensor.empty(weighted), theirs.KeyedJaggedTensor.empty(weighted))


@given(st.lists(st.lists(st.integers(-9, 9), max_size=3), min_size=1, max_size=4), st.booleans())
def test_jagged_tensors_from_dense(rows: list[list[int]], weighted: bool) -> None:
    tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
    weights = [torch.arange(len(row), dtype=torch.float32) for row in rows] if weighted else None
    assert_same(*(lib.JaggedTensor.from_dense(tensors, weights) for lib in (ours, theirs)))
    padded = torch.nn.utils.rnn.pad_sequence(
        [torch.cat([row, torch.zeros(1).long()]) for row in tensors], True
    )
    lengths = torch.tensor([len(row) for row in rows])
    assert_same(*(lib.JaggedTensor.from_dense_lengths(padded, lengths) for lib in (ours, theirs)))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 3), st.data())
def test_keyed_tensors(widths: list[int], samples: int, data: st.DataObject) -> None:
    keys = list("abcd"[: len(widths)])
    values = torch.arange(float(samples * sum(widths))).view(samples, sum(widths))
    pairs = [(lib, lib.KeyedTensor(keys, widths, values)) for lib in (ours, theirs)]
    assert_same(*(keyed for _, keyed in pairs))
    for key in keys:
        assert_same(*(keyed[key] for _, keyed in pairs))
    extra = [torch.ones(samples, 2), torch.zeros(samples, 1)]
    groups = data.draw(
        st.lists(
            st.lists(st.sampled_from([*keys, "x", "y"]), min_size=1, unique=True), min_size=1, max_size=3
        )
    )
    assert_same(
        *(
            list(
                lib.KeyedTensor.regroup([keyed, lib.KeyedTensor.from_tensor_list(["x", "y"], extra)], groups)
            )
            for lib, keyed in pairs
        )
    )
    stacked = (
        lib.KeyedTensor.from_tensor_list(["x", "y"], [extra[0].T, extra[1].T], 0, 0) for lib in (ours, theirs)
    )
    assert_same(*stacked)


@given(arguments())
def test_torchrecs_tensors_are_accepted_without_a_copy(given_arguments: dict[str, Any]) -> None:
    other = theirs.KeyedJaggedTensor(**given_arguments)
    taken = ours.as_keyed_jagged(other)
    assert isinstance(taken, ours.KeyedJaggedTensor)
    assert_same(taken, other)
    assert taken.values().data_ptr() == other.values().data_ptr()


def test_torchrecs_variable_batches_are_refused() -> None:
    variable = theirs.KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(3),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[1], [2]],
    )
    with pytest.raises(DataError, match="another number of samples per key"):
        ours.as_keyed_jagged(variable)
