"""Training on a card: these need one."""

import copy
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

import rowhaul
from rowhaul.data.prefetch import prefetch
from rowhaul.data.samples import Samples
from rowhaul.data.schema import DenseColumn, IdColumn, LabelColumn, Schema
from rowhaul.errors import ConfigError
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from rowhaul.pruning.config import PruneConfig
from rowhaul.train import snapshot, train_run
from rowhaul.train.config import ModelConfig, OptimizerConfig, TrainConfig
from rowhaul.train.publish_config import PublishConfig
from rowhaul.train.trainer import Trainer, own_device

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
def test_a_short_batch_between_recorded_steps_learns_from_its_own_samples_alone():
    batches = [*samples(6), *samples(1, seed=1, size=23), *samples(6, seed=2)]
    losses = {}
    for device in ("cpu", "cuda"):
        trainer = Trainer(config(device, precision="float64"), SCHEMA)
        losses[device] = [trainer.train_step(trainer.prepare(one)) for one in batches]
    np.testing.assert_allclose(losses["cuda"], losses["cpu"], rtol=1e-9)


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


@needs_card
def test_an_ordinary_step_after_recorded_ones_learns_from_its_own_batch_alone():
    sizes = [*[64] * 8, 10, *[64] * 6, 10, 10]
    batches = [next(samples(1, seed=number, size=size)) for number, size in enumerate(sizes)]
    found = []
    for records in (True, False):
        trainer = Trainer(config("cuda", dense=OptimizerConfig("Adam", 0.01)), SCHEMA)
        assert trainer._recorder is not None
        if not records:
            trainer._recorder = None
        found.append([trainer.train_step(trainer.prepare(one)) for one in batches])
    np.testing.assert_allclose(*found, rtol=1e-5)


@needs_card
def test_bags_without_padding_are_summed_on_a_card_as_by_pytorch():
    plain = torch.nn.EmbeddingBag(30, 3, mode="sum", padding_idx=2)
    wrapped = rowhaul.wrap(torch.nn.Sequential(copy.deepcopy(plain))).cuda()
    ids = torch.tensor([[1, 2, 3], [2, 2, 2], [4, 4, 2]])
    torch.testing.assert_close(wrapped(ids.cuda()).cpu(), plain(ids))


@needs_card
def test_weights_on_a_card_have_gradients_where_rows_are_in_host_memory():
    rows = EmbeddingBagCollection(
        [EmbeddingBagConfig(embedding_dim=3, name="t", feature_names=["f"])], is_weighted=True
    )
    found = []
    for device in ("cpu", "cuda"):
        weights = torch.tensor([1.0, 2.0, 3.0], device=device, requires_grad=True)
        ids = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), weights, lengths=torch.tensor([2, 1]))
        rows(ids).values().sum().backward()
        assert weights.grad.device == weights.device
        found.append(weights.grad.cpu())
    assert torch.equal(*found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_one_process_trains_on_a_card_that_is_not_the_first():
    tables = [EmbeddingBagConfig(embedding_dim=3, name="t", feature_names=["f"])]
    torch.cuda.set_device(0)
    with pytest.raises(ConfigError, match=r'call torch.cuda.set_device\("cuda:1"\)'):
        EmbeddingBagCollection(tables).to("cuda:1")
    try:
        for memory in ("", "300KiB"):
            assert trained("cuda:1", device_memory=memory)[1] == trained("cuda:0", device_memory=memory)[1]
    finally:
        torch.cuda.set_device(0)


def test_a_card_becomes_the_threads_own(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert [own_device(name) for name in ("cpu", "cuda:1")] == [torch.device("cpu"), *chosen]
    assert chosen == [torch.device("cuda", 1)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_one_line_says_so():
    with pytest.raises(ConfigError, match="PyTorch finds no card here; set device to cpu"):
        Trainer(config("cuda"), SCHEMA)


@pytest.mark.parametrize(("device", "given", "message"), [
    ("gpu", {}, "device must be cpu, or a card such as cuda"),
    ("cpu", {"device_memory": "1GiB"}, "device_memory is 1GiB, but device is cpu"),
    ("cuda", {"device_memory": "much"}, "device_memory: 'much' is not understood"),
    ("cuda", {"row_dtype": "int8"}, "does not go together with row_dtype yet"),
    ("cuda", {"prune": PruneConfig(ratio="50%")}, "does not go together with prune yet"),
])  # fmt: skip
def test_what_a_card_cannot_do_is_refused(device, given, message):
    with pytest.raises(ConfigError, match=message):
        config(device, **given)


def test_changes_on_a_card_are_published_by_clusters_only(tmp_path):
    on_ranks = config("cuda", publish=PublishConfig(to=str(tmp_path / "served")))  # under torchrun
    with pytest.raises(ConfigError, match="publish does not go together with device cuda in one process"):
        train_run(on_ranks, SCHEMA, tmp_path)


def run_verify(log_folder, *arguments):
    command = [sys.executable, "-m", "rowhaul", "verify", "--data", str(log_folder), "--device", "cuda"]
    command += ["--batch-size", "200", "--steps", "6", "--set", "model.embedding_dim=8", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


@needs_card
def test_a_card_is_verified_against_a_cpu(log_folder):
    done = run_verify(log_folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exact: the card trained the same model as the CPU" in done.stdout


@needs_card
@pytest.mark.parametrize("arguments", [
    ("--workers", "3", "--stores", "1", "--row-optimizer", "rowwise_adagrad", "--set", "cluster.hot_rows=5"),
    ("--workers", "2", "--colocated", "--peer-to-peer", "--row-optimizer", "adam"),
])  # fmt: skip
def test_workers_on_one_card_train_what_one_process_on_it_does(log_folder, arguments):
    done = run_verify(log_folder, *arguments, "--cache", "2000", "--share-device")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal to the bit") == 4
    assert "exact: the ranks trained the same model as one process" in done.stdout


@needs_card
@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs one card")
def test_two_workers_on_one_card_are_refused(log_folder):
    done = run_verify(log_folder, "--workers", "2")
    assert done.returncode == 2
    assert "would share one card" in done.stderr + done.stdout


@needs_card
def test_workers_with_caches_on_a_card_resume_with_the_same_bits_and_go_on_without_it(log_folder, tmp_path):
    command = [sys.executable, "-m", "rowhaul", "train", "--data", f"{log_folder}/*.parquet"]
    command += ["--batch-size", "200", "--set", "model.embedding_dim=8", "--set", "log_every=1"]
    command += ["--workers", "2", "--stores", "1", "--cache", "2000", "--precision", "float64"]
    on_card = ["--device", "cuda", "--share-device"]

    def losses(name, *arguments):
        run = [*command, "--out", str(tmp_path / name), *arguments]
        done = subprocess.run(run, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        return {
            line["step"]: line["loss"] for line in found if line.get("kind", line.get("event")) == "train"
        }

    whole = losses("whole", *on_card, "--max-steps", "8")
    losses("half", *on_card, "--max-steps", "4")
    shutil.copytree(tmp_path / "half", tmp_path / "moved")
    assert losses("half", *on_card, "--max-steps", "8", "--resume") == whole
    on_cpu = losses("moved", "--device", "cpu", "--max-steps", "8", "--resume")
    np.testing.assert_allclose(list(on_cpu.values()), list(whole.values()), rtol=1e-9)
