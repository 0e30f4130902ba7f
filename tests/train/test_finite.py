"""A loss or gradient that is not finite is named, no step uses it, and no checkpoint has it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointed_ranks import CONFIG, Session, ThreadCluster, on_threads, rows_of_first_table
from rowhaul._finite import is_finite
from rowhaul.checkpoint import CheckpointReader
from rowhaul.checkpoint.layout import finished_checkpoints
from rowhaul.data.samples import Samples
from rowhaul.data.stream import SampleStream
from rowhaul.nn import Batch
from rowhaul.train import losses, snapshot, train_run
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.distributed import checkpointing
from rowhaul.train.distributed.setup import distribute
from rowhaul.train.distributed.tables import layout_of
from rowhaul.train.finite import DivergedError
from rowhaul.train.trainer import Trainer

BAD_STEP = 4  # counted from 0
VALUES = st.floats(width=32) | st.sampled_from([3e38, -3e38, float("nan"), float("inf"), -float("inf")])


@given(st.lists(VALUES, max_size=40))
def test_is_finite_is_that_of_numpy(values):
    array = np.array(values, np.float32)
    assert is_finite(array) == bool(np.isfinite(array).all())
    assert is_finite(torch.from_numpy(array)) == bool(np.isfinite(array).all())


@pytest.fixture(scope="module")
def session(tmp_path_factory, log_schema):
    return Session.on_log(tmp_path_factory.mktemp("small-log"), log_schema)


class Poison(torch.autograd.Function):
    """The same values, and a gradient that is not finite for the sample of an index."""

    @staticmethod
    def forward(ctx, values, chosen):
        ctx.save_for_backward(chosen)
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        (chosen,) = ctx.saved_tensors
        gradient = gradient.clone()
        gradient[chosen] = float("inf")
        return gradient, None


def poison(trainer: Trainer, what: str, index: int) -> None:
    """Make a loss, the gradient of a row, or that of a parameter bad, in the sample of this index."""
    model, forward = trainer.model, trainer.model.forward
    pooled = trainer.collection.forward
    chosen = torch.zeros(0, dtype=torch.bool)

    def poisoned(batch: Batch):
        nonlocal chosen
        chosen = batch.index == index
        logits = forward(batch)
        return torch.where(chosen, float("nan"), logits) if what == "loss" else logits

    def poisoned_rows(ids):
        found = pooled(ids)
        values = found.values()
        if what == "row" and values.requires_grad:
            found._values = Poison.apply(values, chosen)
        return found

    model.forward, trainer.collection.forward = poisoned, poisoned_rows
    if what == "parameter":
        parameter = list(model.parameters())[2]
        parameter.register_hook(lambda gradient: gradient * float("nan") if chosen.any() else gradient)


def expected(what: str, trainer: Trainer, samples: Samples, place: int) -> str:
    """The beginning of the message."""
    step = f"at step {BAD_STEP + 1}"
    if what == "loss":
        return f"the loss is nan {step} in sample {samples.index[place]}, counted from 0"
    if what == "parameter":
        return f"the gradient of {list(trainer.model.named_parameters())[2][0]} is not finite {step}"
    return "the gradient of row "


def rows_of_sample(samples: Samples, place: int) -> set[int]:
    one = samples.take(np.array([place]))
    return set(one.values.tolist())


def batches_of(session: Session) -> list[Samples]:
    return list(SampleStream(session.data, session.schema, session.config.batch_size))


def dense_weights(trainer: Trainer) -> list[bytes]:
    return [one.detach().numpy().tobytes() for one in trainer.model.parameters()]


def saved_after(folder, session: Session) -> Trainer:
    """A trainer with the dense weights of the last checkpoint."""
    trainer = Trainer(session.config, session.schema)
    snapshot.restore_dense(trainer, CheckpointReader(finished_checkpoints(folder)[-1]))
    return trainer


def state(trainer: Trainer) -> list[bytes]:
    """Everything that a step changes."""
    dense = dense_weights(trainer)
    rows = [
        records.tobytes()
        for one in trainer.collection.embedding_bag_configs()
        for _, records in trainer.collection.rows(one.name)
    ]
    return dense + rows


@pytest.mark.parametrize("what", ["loss", "row", "parameter"])
def test_one_process_names_it_and_steps_nothing(session, what):
    trainer, batches, place = Trainer(session.config, session.schema), batches_of(session), 17
    for samples in batches[:BAD_STEP]:
        trainer.train_step(Batch.from_samples(samples))
    samples = batches[BAD_STEP]
    poison(trainer, what, int(samples.index[place]))
    with torch.no_grad():
        trainer.collection(Batch.from_samples(samples).ids)  # makes its rows
    before = state(trainer)
    with pytest.raises(DivergedError) as error:
        trainer.train_step(Batch.from_samples(samples))
    assert str(error.value).startswith(expected(what, trainer, samples, place))
    if what == "row":
        key = int(str(error.value).split()[4])
        assert key in rows_of_sample(samples, place)
    assert "Lower the learning rates" in str(error.value)
    assert state(trainer) == before
    assert trainer.step == BAD_STEP


def run(session: Session, cluster: ThreadCluster, what: str, index: int, hot, folder, trainers) -> None:
    trainer = Trainer(session.config, session.schema)
    trainers[cluster.rank] = trainer
    stream = SampleStream(session.data, session.schema, session.config.batch_size)
    trainer.total_steps = stream.num_batches
    settings = layout_of(trainer.collection).schedule_settings(
        session.cluster, cluster.topology, hot=rows_of_first_table(hot) if hot else None
    )
    training = distribute(cluster, trainer.model, stream, settings=settings, optimizer=trainer.dense)
    poison(trainer, what, index)
    try:
        for end in range(1, stream.num_batches + 1):  # saves after every step
            for batch in training.batches(1):
                trainer.learn([batch], batch.global_size, lambda loss: training.step(loss) or 0.0)
            trainer.step, trainer.samples = end, training.samples
            checkpointing.save(cluster, training, trainer, folder)
    finally:
        training.close()


AT_HOME = {"colocated": True, "sync": "at-home", "dispatcher": "round-robin", "cache": "1GiB"}


@pytest.mark.parametrize(
    ("hot", "cluster"),
    [([], {}), ([0, 7919, 2 * 7919], {}), ([], AT_HOME)],
    ids=["", "hot", "at home"],
)
@pytest.mark.parametrize("what", ["loss", "row", "parameter"])
def test_a_cluster_names_it_on_every_worker_and_never_saves_it(session, tmp_path, what, hot, cluster):
    session = replace(session, cluster=replace(session.cluster, **cluster))
    samples, place = batches_of(session)[BAD_STEP], 17
    trainers: dict[int, Trainer] = {}
    errors: list[BaseException] = []

    def work(cluster):
        try:
            run(session, cluster, what, int(samples.index[place]), hot, tmp_path, trainers)
        except DivergedError as error:
            errors.append(error)
            raise

    with pytest.raises(DivergedError):
        on_threads(session.cluster.topology(), work)
    assert len(errors) >= 3, "all workers"
    (text,) = {str(error) for error in errors}
    assert text.startswith(expected(what, trainers[0], samples, place))
    assert " (on rank " in text
    if what == "row":
        assert int(text.split()[4]) in rows_of_sample(samples, place)
    assert [int(one.name[-3:]) for one in finished_checkpoints(tmp_path)] == list(range(1, BAD_STEP + 1))
    weights = [
        [one.detach().numpy().tobytes() for one in trainers[rank].model.parameters()] for rank in range(3)
    ]
    assert weights[0] == weights[1] == weights[2], "nobody has stepped dense weights"
    assert all(np.isfinite(one.detach().numpy()).all() for one in trainers[0].model.parameters())


def test_a_sum_that_overflows_is_not_stepped(session, tmp_path):
    """Finite on every worker, and not finite when added up."""

    def work(cluster):
        trainer = Trainer(replace(session.config, precision="float32"), session.schema)
        stream = SampleStream(session.data, session.schema, session.config.batch_size)
        settings = layout_of(trainer.collection).schedule_settings(session.cluster, cluster.topology)
        training = distribute(cluster, trainer.model, stream, settings=settings)
        try:
            for batch in training.batches(1):
                batch.loss(trainer.model(batch)).backward()
                for parameter in trainer.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.fill_(3e38)
                training.step()
        finally:
            training.close()

    with pytest.raises(DivergedError, match="the sum of all workers' gradients overflows at step 1"):
        on_threads(ClusterConfig(workers=3).topology(), work)


def test_a_run_leaves_the_checkpoint_before(session, tmp_path, monkeypatch):
    index = BAD_STEP * session.config.batch_size + 17
    usual = losses.per_sample_loss

    def loss(logits, batch):
        return torch.where(batch.index == index, float("inf"), usual(logits, batch))

    monkeypatch.setattr(losses, "per_sample_loss", loss)
    config = replace(CONFIG, checkpoint_every=2)
    with pytest.raises(DivergedError, match=f"the loss is inf at step {BAD_STEP + 1} in sample {index}, "):
        train_run(config, session.schema, session.data, out=tmp_path / "run")
    steps = [one.name for one in finished_checkpoints(tmp_path / "run" / "checkpoints")]
    assert steps[-1] == f"step-{BAD_STEP:09d}"
