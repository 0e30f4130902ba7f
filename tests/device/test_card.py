"""Training on a card: these need one."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from rowhaul.data.prefetch import prefetch
from rowhaul.data.samples import Samples
from rowhaul.data.schema import DenseColumn, IdColumn, LabelColumn, Schema
from rowhaul.errors import ConfigError
from rowhaul.train import snapshot
from rowhaul.train.config import ModelConfig, OptimizerConfig, TrainConfig
from rowhaul.train.trainer import Trainer

needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
SCHEMA = Schema(
    LabelColumn("label"), (DenseColumn("I1"), DenseColumn("I2")), tuple(IdColumn(f"C{n}") for n in range(4))
)


def config(device, **given):
    return replace(TrainConfig(model=ModelConfig("dlrm", 8), batch_size=64, device=device, seed=3), **given)


def samples(count, seed=0, size=64):
    random = np.random.default_rng(seed)
    for number in range(count):
        ids = random.zipf(1.3, (4, size)) % 500
        yield Samples(
            features=SCHEMA.features,
            values=ids.reshape(-1).astype(np.int64),
            lengths=np.ones((4, size), np.int32),
            dense=random.random((size, 2)).astype(np.float32),
            labels=(random.random(size) < 0.4).astype(np.float32),
            index=np.arange(size) + number * size,
        )


def trained(device, count=12, **given):
    trainer = Trainer(config(device, **given), SCHEMA)
    trainer.total_steps = count
    return trainer, [trainer.train_step(trainer.prepare(one)) for one in samples(count)]


@needs_card
@pytest.mark.parametrize("dense", ["Adam", "SGD"])
def test_a_card_learns_what_a_cpu_learns(dense):
    given = {"precision": "float64", "dense": OptimizerConfig(dense, 0.01)}
    here, expected = trained("cpu", **given)
    there, found = trained("cuda", **given)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    for name in ("C0", "C3"):
        rows = dict(
            zip(*(np.concatenate(one) for one in zip(*here.collection.rows(name), strict=True)), strict=True)
        )
        for keys, records in there.collection.rows(name):
            for key, record in zip(keys.tolist(), records, strict=True):
                np.testing.assert_allclose(record, rows[key], rtol=1e-9, atol=1e-12)


@needs_card
def test_two_runs_give_the_same_bits_and_a_checkpoint_goes_on_with_them(tmp_path):
    _, losses = trained("cuda", 20)
    _, again = trained("cuda", 20)
    assert losses == again
    batches = list(samples(20))
    half = Trainer(config("cuda"), SCHEMA)
    for one in batches[:10]:
        half.train_step(half.prepare(one))
    snapshot.save(half, tmp_path / "step")
    resumed = Trainer(config("cuda"), SCHEMA)
    snapshot.restore(resumed, tmp_path / "step")
    assert [resumed.train_step(resumed.prepare(one)) for one in batches[10:]] == losses[10:]
    moved = Trainer(config("cpu"), SCHEMA)  # the same files on another device
    snapshot.restore(moved, tmp_path / "step")
    on_cpu = [moved.train_step(moved.prepare(one)) for one in batches[10:]]
    np.testing.assert_allclose(on_cpu, losses[10:], rtol=1e-3)


@needs_card
def test_a_cache_of_rows_gives_the_bits_of_all_rows_and_so_does_what_it_saves(tmp_path):
    _, losses = trained("cuda", 20)
    batches = list(samples(20))
    half = Trainer(config("cuda", device_memory="48KiB"), SCHEMA)
    prepared = prefetch((half.prepare(one) for one in batches), 4)
    assert [half.train_step(one) for one in islice(prepared, 10)] == losses[:10]
    taken = snapshot.Snapshot(half)  # written while training goes on
    assert [half.train_step(one) for one in islice(prepared, 5)] == losses[10:15]
    taken.write(tmp_path / "step")
    taken.close()
    assert [half.train_step(one) for one in prepared] == losses[15:]
    assert half.collection.source.counts.num_fetched > 0
    for device, memory in (("cuda", ""), ("cuda", "300KiB"), ("cpu", "")):
        resumed = Trainer(config(device, device_memory=memory), SCHEMA)
        snapshot.restore(resumed, tmp_path / "step")
        found = [resumed.train_step(resumed.prepare(one)) for one in batches[10:]]
        np.testing.assert_allclose(found, losses[10:], rtol=1e-3 if device == "cpu" else 0)
    rows = half.collection.num_rows("C0")
    assert rows == trained("cuda", 20)[0].collection.num_rows("C0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_one_line_says_so():
    with pytest.raises(ConfigError, match="PyTorch finds no card here; set device to cpu"):
        Trainer(config("cuda"), SCHEMA)


@pytest.mark.parametrize(("device", "given", "message"), [
    ("gpu", {}, "device must be cpu, or a card such as cuda"),
    ("cpu", {"device_memory": "1GiB"}, "device_memory is 1GiB, but device is cpu"),
    ("cuda", {"device_memory": "much"}, "device_memory: 'much' is not understood"),
    ("cuda", {"row_dtype": "int8"}, "does not go together with row_dtype yet"),
    ("cuda", {"tables": {"default": {"ttl": 5}}}, "does not go together with tables yet"),
])  # fmt: skip
def test_what_a_card_cannot_do_is_refused(device, given, message):
    with pytest.raises(ConfigError, match=message):
        config(device, **given)
