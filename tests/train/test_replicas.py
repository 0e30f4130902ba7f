"""Copies that every worker holds are compared: one flipped bit ends the run, and is never saved."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from checkpointed_ranks import CONFIG, Session, ThreadCluster, on_threads, rows_of_first_table
from rowhaul.checkpoint.layout import finished_checkpoints
from rowhaul.cluster.launcher import launch
from rowhaul.data.stream import SampleStream
from rowhaul.errors import RowhaulError
from rowhaul.nn import Batch
from rowhaul.planning import agreement
from rowhaul.planning.disagreement import DisagreementError
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.distributed import checkpointing, divergence
from rowhaul.train.distributed.replica_state import ReplicaState
from rowhaul.train.distributed.replicas import Replicas
from rowhaul.train.distributed.setup import distribute
from rowhaul.train.distributed.tables import layout_of
from rowhaul.train.distributed.training import DistributedTraining
from rowhaul.train.trainer import Trainer

ODD, FLIPPED_AFTER, STEPS = 1, 3, 10
HOT = [0, 7919, 2 * 7919]
Flip = Callable[[Trainer, DistributedTraining], None]


@pytest.fixture(scope="module")
def session(tmp_path_factory, log_schema):
    return Session.on_log(tmp_path_factory.mktemp("small-log"), log_schema)


def flip_bit(values: np.ndarray) -> None:
    """The lowest bit of the last number."""
    values.reshape(-1).view(np.uint8)[-8] ^= 1


def flip_weight(trainer: Trainer, training: DistributedTraining) -> None:
    flip_bit(list(trainer.model.parameters())[2].detach().numpy())


def flip_momentum(trainer: Trainer, training: DistributedTraining) -> None:
    parameter = list(trainer.model.parameters())[2]
    flip_bit(trainer.dense.state[parameter]["momentum_buffer"].numpy())


def flip_row(trainer: Trainer, training: DistributedTraining) -> None:
    cache = training.runtime.mover.cache
    assert cache is not None
    number, position = cache.place_of(0)
    location = cache.groups[number].index.find_each(np.array([position]), np.array(HOT[1:2]))
    record = cache.groups[number].arena.read(location)
    flip_bit(record)
    cache.groups[number].arena.write(location, record)


def run(
    session: Session,
    cluster: ThreadCluster,
    flip: Flip,
    *,
    steps: int = STEPS,
    every: int = 2,
    segments: int = STEPS,
    folder=None,
) -> None:
    """Train on one rank; the odd one flips a bit after a step; save at the end if there is a folder."""
    config = replace(session.config, dense=replace(CONFIG.dense, options={"momentum": 0.5}))
    trainer = Trainer(config, session.schema)
    stream = SampleStream(session.data, session.schema, config.batch_size)
    layout = layout_of(trainer.collection)
    settings = layout.schedule_settings(session.cluster, cluster.topology, hot=rows_of_first_table(HOT))
    training = distribute(
        cluster, trainer.model, stream, settings=settings, optimizer=trainer.dense, compare_every=every
    )
    try:
        trainer.total_steps = steps
        while training.iteration < steps:
            for batch in training.batches(min(segments, steps - training.iteration)):
                train_batch(trainer, training, batch)
                if cluster.rank == ODD and trainer.step == FLIPPED_AFTER:
                    flip(trainer, training)
        if folder is not None:
            trainer.step, trainer.samples = training.iteration, training.samples  # on a store, too
            checkpointing.save(cluster, training, trainer, folder)
    finally:
        training.close()


def train_batch(trainer: Trainer, training: DistributedTraining, batch: Batch) -> None:
    trainer.learn([batch], batch.global_size, lambda loss: training.step(loss) or 0.0)


def caught(session: Session, flip: Flip, workers: int = 3, **options) -> str:
    topology = ClusterConfig(workers=workers).topology()
    with pytest.raises(DisagreementError) as error:
        on_threads(topology, lambda cluster: run(session, cluster, flip, **options))
    return str(error.value)


NAMES = {flip_weight: "", flip_momentum: "momentum_buffer of "}


@pytest.mark.parametrize("flip", NAMES)
def test_a_flipped_bit_is_caught_and_its_rank_iteration_and_tensor_are_named(session, flip):
    names = [name for name, _ in Trainer(session.config, session.schema).model.named_parameters()]
    text = caught(session, flip)
    assert text.startswith(f"rank 1 differs from ranks 0, 2 in {NAMES[flip]}{names[2]} at iteration 4, where")


@pytest.mark.parametrize("segments", [1, 3, STEPS])
def test_a_flipped_bit_of_a_replicated_row_is_caught(session, segments):
    table = Trainer(session.config, session.schema).collection.embedding_bag_configs()[0].name
    text = caught(session, flip_row, segments=segments)
    row = f"replicated row {HOT[1]} of table {table!r}"
    assert text.startswith(f"rank 1 differs from ranks 0, 2 in {row} at iteration 4, where"), text


def test_of_two_ranks_none_is_blamed(session):
    assert caught(session, flip_weight, workers=2).startswith("ranks 0, 1 differ from each other in ")


def test_a_difference_is_what_all_ranks_report_when_training_diverges_too(session, monkeypatch):
    """Training diverges while copies are compared, and what ranks know of it comes in the worst order."""
    clusters: dict[int, ThreadCluster] = {}
    gathered = threading.Event()

    def flip_and_diverge(trainer: Trainer, training: DistributedTraining) -> None:
        flip_weight(trainer, training)
        factors = iter([1.0, 1.0])  # of the gradients of the next steps
        parameter = list(trainer.model.parameters())[2]
        parameter.register_hook(lambda gradient: gradient * next(factors, float("nan")))

    def check_summaries(collective, *args):
        try:
            usual_check(collective, *args)
        except DisagreementError:
            gathered.wait(1)  # what workers tell each other when they diverge, unless they wait for this
            raise

    def gather_texts(collective, text):
        texts = usual_gather(collective, text)
        if collective.rank != ODD:
            gathered.set()
        while clusters[ODD].failure.error is None:  # the odd one has the news of the difference first
            gathered.wait(0.01)
        return texts

    usual_check, usual_gather = agreement.check_summaries, divergence.gather_texts
    monkeypatch.setattr(agreement, "check_summaries", check_summaries)
    monkeypatch.setattr(divergence, "gather_texts", gather_texts)

    def work(cluster: ThreadCluster) -> str:
        clusters[cluster.rank] = cluster
        with pytest.raises(RowhaulError) as error:
            run(session, cluster, flip_and_diverge, every=1)
        return str(error.value)

    (text,) = set(on_threads(ClusterConfig(workers=3).topology(), work))
    assert text.startswith("rank 1 differs from ranks 0, 2 in ")


@pytest.mark.parametrize("flip", [flip_weight, flip_momentum, flip_row])
def test_what_differs_is_not_saved(session, tmp_path, flip):
    text = caught(session, flip, every=0, steps=FLIPPED_AFTER, folder=tmp_path)
    assert text.startswith("rank 1 differs from ranks 0, 2 in ")
    assert f"at iteration {FLIPPED_AFTER}" in text
    assert list(tmp_path.iterdir()) == []


def test_equal_copies_are_trained_and_saved(session, tmp_path):
    topology = ClusterConfig(workers=3).topology()
    nothing = lambda trainer, training: None  # noqa: E731  # a one-line helper
    on_threads(topology, lambda cluster: run(session, cluster, nothing, every=1, folder=tmp_path))
    assert len(finished_checkpoints(tmp_path)) == 1


SCRIPT = """
import json, os, sys
from pathlib import Path
rank, (data, out, config, way) = int(os.environ["RANK"]), sys.argv[1:]
if way and rank == 1:
    os.environ["ATEN_CPU_CAPABILITY"] = "default"  # read when torch computes for the first time
import torch
from rowhaul.data.schema import Schema
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed import run, setup

if way == "unseen":
    setup.version_facts = lambda is_worker: {}
out = Path(out)
try:
    run.train_on_cluster(
        TrainConfig.from_dict(json.loads(config)), Schema.read(Path(data) / "schema.yaml"), data, out=out,
        resume=out.exists())
    said = "trained"
except Exception as error:
    said = f"{type(error).__name__}: {error}"
(out.parent / f"{rank}.txt").write_text(said)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="PyTorch has one set of instructions for this processor",
)
def test_real_processes_with_different_instructions(session, tmp_path):
    """Refused when they start; where the start does not see it, the first comparison does."""
    session.schema.write(session.data / "schema.yaml")
    (tmp_path / "train_it.py").write_text(SCRIPT)
    config = replace(
        CONFIG,
        precision="float32",
        rates=type(CONFIG.rates)(),
        cluster=ClusterConfig(workers=2, cache="190", compare_every=5),
    )

    def said(way: str, steps: int) -> list[str]:
        plain = json.dumps(replace(config, max_steps=steps).to_dict())
        arguments = [str(tmp_path / "train_it.py"), str(session.data), str(tmp_path / "run"), plain, way]
        launch(arguments, 2, command=[sys.executable], environment={"OMP_NUM_THREADS": "1"})
        return [(tmp_path / f"{rank}.txt").read_text() for rank in range(3)]

    assert said("", 7) == ["trained"] * 3
    for text in said("mixed", 20):
        assert text.startswith("ClusterError: ranks disagree, and would not train the same model:\n  CPU")
        assert "set ATEN_CPU_CAPABILITY=avx2" in text
        assert "DEFAULT on rank 1\n" in text
    for text in said("unseen", 20)[:2]:
        # Its own error, or that of the other rank, if that one was quicker and has told it.
        assert "DisagreementError: ranks 0, 1 differ from each other in " in text
        assert " at iteration 10, where all must hold the same bits. rank 0: " in text
        assert ", DEFAULT, 1 threads" in text
    assert [path.name for path in finished_checkpoints(tmp_path / "run" / "checkpoints")] == [
        "step-000000007"
    ]
    assert said("", 20) == ["trained"] * 3


class Buffers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("own", torch.zeros(3), persistent=False)
        self.register_buffer("empty", torch.zeros(0, dtype=torch.bfloat16))


def test_persistent_buffers_are_compared_and_others_are_not():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, dtype=torch.bfloat16), Buffers())
    replicas = Replicas(model, cache=None)  # type: ignore[arg-type]  # not used here
    digests = replicas.at_rest(1, None, None)
    assert list(digests.by_name) == ["0.weight", "0.bias", "1.kept", "1.empty"]
    model[1].own += 1
    assert replicas.at_rest(1, None, None).summary == digests.summary
    model[1].kept += 1
    assert replicas.at_rest(1, None, None).summary != digests.summary
    assert replicas.at_rest(2, None, None).summary != digests.summary


def test_a_rate_in_a_tensor_as_on_cards_is_sent_and_stays_where_it_is() -> None:
    def step(layer: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        layer(torch.arange(6.0).reshape(2, 3)).square().sum().backward()
        optimizer.step()

    layers = [torch.nn.Linear(3, 2) for _ in range(2)]
    rates = [torch.tensor(0.05), torch.tensor(0.9)]
    adams = [
        torch.optim.Adam(layer.parameters(), lr=rate, betas=(0.8, 0.9))
        for layer, rate in zip(layers, rates, strict=True)
    ]
    step(layers[0], adams[0])
    states = [ReplicaState(*both, None) for both in zip(layers, adams, strict=True)]
    states[1].unpack(states[0].pack(None), None)
    assert adams[1].param_groups[0]["lr"] is rates[1]
    assert rates[1] == rates[0]
    assert adams[1].param_groups[0]["betas"] == (0.8, 0.9)
    for layer, adam in zip(layers, adams, strict=True):
        step(layer, adam)
    assert all(map(torch.equal, layers[0].parameters(), layers[1].parameters()))
