"""Chunks are looked up in the thread that loads batches: a run learns the bits that it learns without."""

import threading

from rowhaul.data.stream import SampleStream
from rowhaul.nn import Batch
from rowhaul.pruning.config import PruneConfig
from rowhaul.pruning.pool.collection import PrunedGroup
from rowhaul.train import TrainConfig, load_trained, train_run
from rowhaul.train.config import ModelConfig
from rowhaul.train.trainer import Trainer

CONFIG = TrainConfig(
    model=ModelConfig(embedding_dim=8),
    batch_size=512,
    prune=PruneConfig(ratio="90%", chunks=4, period=3, decay=0.3),
)


def bits_of(trainer):
    collection = trainer.collection
    found = {
        (config.name, int(key)): row.tobytes()
        for config in collection.embedding_bag_configs()
        for keys, rows in collection.rows(config.name)
        for key, row in zip(keys, rows, strict=True)
    }
    return found, [one.detach().numpy().tobytes() for one in trainer.model.parameters()]


def test_a_run_looks_up_in_the_loading_thread_and_learns_the_same_bits(
    tmp_path, log_schema, log_folder, monkeypatch
):
    plain = Trainer(CONFIG, log_schema)
    stream = SampleStream(log_folder, log_schema, CONFIG.batch_size)
    plain.check_keys(stream)
    plain.total_steps = stream.num_batches
    for samples in stream:
        plain.train_step(Batch.from_samples(samples))
    threads = []
    locate = PrunedGroup.locate

    def watched(group, features):
        threads.append(threading.current_thread().name)
        return locate(group, features)

    monkeypatch.setattr(PrunedGroup, "locate", watched)
    result = train_run(CONFIG, log_schema, log_folder, out=tmp_path / "run")
    assert result.step == plain.step
    assert set(threads) == {"rowhaul-prefetch"}
    assert bits_of(load_trained(tmp_path / "run")) == bits_of(plain)


def test_what_is_prepared_comes_in_order_and_counts(log_schema, log_folder):
    stream = SampleStream(log_folder, log_schema, 300)
    expected = [samples.index.tolist() for samples in stream]
    positions, found = [], []
    for index in stream.prepared(lambda samples: samples.index.tolist()):
        found.append(index)
        positions.append(stream.position)
    assert found == expected
    assert positions[-1] == stream.num_samples == sum(map(len, found))
