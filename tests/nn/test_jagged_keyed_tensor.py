"""Keyed tensors against slices written by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rowhaul.errors import DataError
from rowhaul.nn.jagged import KeyedTensor


def test_keys_are_blocks_of_columns() -> None:
    values = torch.arange(12.0).view(2, 6)
    pooled = KeyedTensor(["a", "b", "c"], [1, 3, 2], values)
    assert torch.equal(pooled["a"], values[:, :1])
    assert torch.equal(pooled["b"], values[:, 1:4])
    assert {key: part.tolist() for key, part in pooled.to_dict().items()} == {
        key: pooled[key].tolist() for key in "abc"
    }
    assert (pooled.keys(), pooled.length_per_key(), pooled.offset_per_key()) == (
        ["a", "b", "c"],
        [1, 3, 2],
        [0, 1, 4, 6],
    )
    assert repr(pooled) == "KeyedTensor(shape=(2, 6), key_dim=1; a: 1, b: 3, c: 2)"


def test_keys_may_lie_along_any_dimension() -> None:
    first, second = torch.ones(3, 2), torch.zeros(4, 2)
    stacked = KeyedTensor.from_tensor_list(["a", "b"], [first, second], key_dim=0, cat_dim=0)
    assert stacked.key_dim() == 0
    assert torch.equal(stacked["b"], second)
    assert torch.equal(KeyedTensor.regroup([stacked], [["b", "a"]])[0], torch.cat([second, first]))


def test_regroup_takes_keys_from_all_and_passes_gradients_back() -> None:
    first = torch.arange(6.0).view(2, 3).requires_grad_()
    left = KeyedTensor(["a", "b"], [1, 2], first)
    right = KeyedTensor(["c"], [2], torch.ones(2, 2))
    ca, ba, b = KeyedTensor.regroup([left, right], [["c", "a"], ["b", "a"], ["b"]])
    assert ca.tolist() == [[1, 1, 0], [1, 1, 3]]
    assert ba.tolist() == [[1, 2, 0], [4, 5, 3]]
    (ca.sum() + 10 * ba.sum() + 100 * b.sum()).backward()
    assert first.grad is not None
    assert first.grad.tolist() == [[11, 110, 110]] * 2


def test_no_samples_is_fine() -> None:
    pooled = KeyedTensor(["a", "b"], [1, 2], torch.empty(0, 3))
    assert pooled["b"].shape == (0, 2)


def test_moves_to_a_device() -> None:
    moved = KeyedTensor(["a"], [2], torch.ones(1, 2)).to("meta")
    assert (moved.device().type, moved.keys()) == ("meta", ["a"])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: KeyedTensor(["a"], [1, 2], torch.ones(1, 3)), "1 keys and 2 lengths"),
        (lambda: KeyedTensor(["a"], [2], torch.ones(1, 3)), "add up to 2, but the values have 3"),
        (lambda: KeyedTensor(["a"], [3], torch.ones(1, 3))["b"], "unknown key 'b'; known are a"),
        (lambda: KeyedTensor.from_tensor_list([], []), "at least one tensor"),
        (
            lambda: KeyedTensor.regroup([KeyedTensor(["a"], [3], torch.ones(1, 3))], [["a"], ["q"]]),
            "unknown key 'q'; known are a",
        ),
        (
            lambda: KeyedTensor.regroup([KeyedTensor(["a"], [3], torch.ones(1, 3))] * 2, [["a"]]),
            "'a' is in more than one",
        ),
    ],
)
def test_what_does_not_fit_is_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build()
