from __future__ import annotations

import numpy as np
import pytest
import torch

from rowhaul.data.samples import Samples
from rowhaul.errors import DataError
from rowhaul.nn.batch import Batch
from rowhaul.nn.jagged import KeyedJaggedTensor


def make_samples(count: int = 3, labels: bool = True) -> Samples:
    lengths = np.array([[1] * count, [2, 0, 1][:count]], dtype=np.int32)
    return Samples(
        features=("user", "items"),
        values=np.arange(100, 100 + lengths.sum(), dtype=np.int64),
        lengths=lengths,
        dense=np.arange(2 * count, dtype=np.float32).reshape(count, 2),
        labels=np.ones(count, dtype=np.float32) if labels else None,
        index=np.arange(7, 7 + count, dtype=np.int64),
    )


def test_samples_become_tensors_over_the_same_memory() -> None:
    samples = make_samples()
    batch = Batch.from_samples(samples)
    assert len(batch) == batch.global_size == 3
    assert [row.tolist() for row in batch.ids["items"].to_dense()] == [[103, 104], [], [105]]
    assert batch.index.tolist() == [7, 8, 9]
    samples.values[0], samples.dense[0, 0] = -1, 5
    assert (int(batch.ids.values()[0]), float(batch.dense[0, 0])) == (-1, 5)


def test_read_only_columns_are_accepted() -> None:
    samples = make_samples()
    for column in (samples.values, samples.lengths, samples.dense, samples.labels, samples.index):
        assert column is not None
        column.flags.writeable = False
    assert Batch.from_samples(samples).dense.tolist() == samples.dense.tolist()


@pytest.mark.parametrize("labels", [True, False])
def test_no_samples_is_a_batch(labels: bool) -> None:
    batch = Batch.from_samples(make_samples(0, labels), global_size=4)
    assert (len(batch), batch.ids.stride(), batch.ids.keys()) == (0, 0, ["user", "items"])
    assert (batch.labels is None) is not labels
    assert float(batch.loss(torch.zeros(0))) == 0
    assert float(Batch.from_samples(make_samples(0)).loss(torch.zeros(0))) == 0


def test_losses_of_the_parts_add_up_to_the_mean_of_the_whole() -> None:
    losses = torch.tensor([1.0, 2.0, 6.0])
    whole = Batch.from_samples(make_samples(3)).loss(losses)
    parts = [Batch.from_samples(make_samples(count), global_size=3) for count in (2, 1)]
    assert float(whole) == 3
    assert float(parts[0].loss(losses[:2]) + parts[1].loss(losses[2:])) == 3


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (4,)])
def test_a_loss_that_is_not_per_sample_is_refused(shape: tuple[int, ...]) -> None:
    batch = Batch.from_samples(make_samples(3))
    with pytest.raises(DataError, match=r'one value per sample, of shape \(3,\).*reduction="none"'):
        batch.loss(torch.zeros(shape))


def test_a_reduced_loss_of_a_single_sample_is_refused_too() -> None:
    with pytest.raises(DataError, match="one value per sample"):
        Batch.from_samples(make_samples(1)).loss(torch.zeros(()))


def test_moving_keeps_the_parts() -> None:
    moved = Batch.from_samples(make_samples(), global_size=9).to("meta")
    assert {moved.dense.device.type, moved.ids.device().type, moved.index.device.type} == {"meta"}
    assert moved.labels is not None
    assert (moved.labels.device.type, moved.global_size, len(moved)) == ("meta", 9, 3)


def test_parts_of_different_sizes_are_refused() -> None:
    ids = KeyedJaggedTensor(["a"], torch.arange(2), lengths=torch.ones(2, dtype=torch.int32))
    good = {"dense": torch.zeros(2, 1), "ids": ids, "labels": torch.ones(2), "index": torch.arange(2)}
    Batch(**good, global_size=2)
    for name, wrong in {"dense": torch.zeros(3, 1), "labels": torch.ones(3, 1)}.items():
        with pytest.raises(DataError, match=f"batch of 2 samples needs.*wrong are .*{name}"):
            Batch(**(good | {name: wrong}), global_size=2)
    with pytest.raises(DataError, match=r"dense numbers in two dimensions.*shape \(2,\)"):
        Batch(**(good | {"dense": torch.zeros(2)}), global_size=2)
    with pytest.raises(DataError, match="global_size is 1, but the batch alone has 2 samples"):
        Batch(**good, global_size=1)
