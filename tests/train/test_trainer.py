"""The single-process trainer: it learns, it is reproducible, and evaluating leaves no trace."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from rowhaul.data.stream import SampleStream
from rowhaul.errors import ConfigError, DataError
from rowhaul.monitoring.settings import MonitoringConfig
from rowhaul.nn import Batch
from rowhaul.pruning.config import PruneConfig
from rowhaul.train import TrainConfig, Trainer
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.config import ModelConfig, OptimizerConfig, RateSchedule
from rowhaul.train.finite import DivergedError
from rowhaul.train.losses import LossConfig
from rowhaul.train.publish_config import PublishConfig
from rowhaul.train.stream_config import StreamConfig
from rowhaul.train.trainer import rate_factor


def fitted(config, schema, folder, **options):
    trainer = Trainer(config, schema)
    for samples in SampleStream(folder, schema, config.batch_size, epochs=config.epochs, **options):
        trainer.train_step(Batch.from_samples(samples))
    return trainer


def state_bytes(trainer):
    """Every bit that training has produced."""
    rows = {
        (config.name, int(key)): record.tobytes()
        for config in trainer.collection.embedding_bag_configs()
        for keys, records in trainer.collection.rows(config.name)
        for key, record in zip(keys, records, strict=True)
    }
    dense = {name: tensor.detach().numpy().tobytes() for name, tensor in trainer.model.named_parameters()}
    return rows, dense


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_two_runs_give_the_same_bits_and_evaluation_leaves_no_trace(precision, log_schema, log_folder):
    options = {"dropout": 0.3}
    config = TrainConfig(
        model=ModelConfig(embedding_dim=4, options=options), batch_size=100, precision=precision, seed=5
    )
    plain = fitted(config, log_schema, log_folder)
    watched = Trainer(config, log_schema)
    test = SampleStream(log_folder / "test", log_schema, 300)
    for samples in SampleStream(log_folder, log_schema, 100):
        watched.train_step(Batch.from_samples(samples))
        if watched.step % 20 == 0:
            watched.evaluate(test)
    assert state_bytes(plain) == state_bytes(watched)


def test_equals_a_plain_pytorch_loop(log_schema, log_folder):
    """The whole trainer against nn.EmbeddingBag, nn.Linear and torch.optim on pre-indexed ids."""
    config = TrainConfig(
        model=ModelConfig("legacy", 3, {"hidden": [8]}),
        rows=OptimizerConfig("adagrad", 0.1),
        dense=OptimizerConfig("SGD", 0.1),
        batch_size=128,
        precision="float64",
    )
    trainer = Trainer(config, log_schema)
    batches = [Batch.from_samples(s) for s in SampleStream(log_folder, log_schema, 128, limit=128 * 12)]
    known = {
        name: sorted({k for b in batches for k in b.ids[name].values().tolist()})
        for name in log_schema.features
    }
    bags = nn.ModuleDict()
    for name, keys in known.items():
        bags[name] = nn.EmbeddingBag(len(keys), 3, mode="sum", dtype=torch.float64)
    everything = Trainer(config, log_schema)  # a twin that has seen every key, for the initial values
    for batch in batches:
        everything.model(batch)
    for name, keys in known.items():
        rows = {
            int(k): r[:3] for ks, rs in everything.collection.rows(name) for k, r in zip(ks, rs, strict=True)
        }
        bags[name].weight.data = torch.tensor(np.array([rows[key] for key in keys]))
    weights = [parameter.detach().clone().requires_grad_() for parameter in trainer.model.parameters()]
    assert len(weights) == 4  # two linear layers
    sparse = torch.optim.Adagrad(bags.parameters(), lr=0.1)
    dense = torch.optim.SGD(weights, lr=0.1)
    for batch in batches:
        pooled = []
        for name in log_schema.features:
            jagged = batch.ids[name]
            indices = torch.tensor([known[name].index(key) for key in jagged.values().tolist()])
            pooled.append(bags[name](indices, jagged.offsets()[:-1].long()))
        hidden = torch.cat([*pooled, batch.dense.double()], dim=1)
        hidden = torch.relu(hidden @ weights[0].T + weights[1])
        logits = (hidden @ weights[2].T + weights[3]).squeeze(1)
        loss = binary_cross_entropy_with_logits(logits, batch.labels.double())
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        assert trainer.train_step(batch) == pytest.approx(loss.item(), rel=1e-9)
    for name, keys in known.items():
        rows = {
            int(k): r[:3] for ks, rs in trainer.collection.rows(name) for k, r in zip(ks, rs, strict=True)
        }
        np.testing.assert_allclose(
            np.array([rows[key] for key in keys]), bags[name].weight.detach().numpy(), rtol=1e-9, atol=1e-12
        )


def test_a_diverging_run_says_so(log_schema, log_folder):
    config = TrainConfig(batch_size=100, epochs=3, dense=OptimizerConfig("SGD", 1e9))
    with pytest.raises(
        DivergedError, match=r"the loss is (nan|inf) at step .* in sample .* Lower the learning rates"
    ):
        fitted(config, log_schema, log_folder)


def test_rates_warm_up_then_decay():
    rates = RateSchedule(warmup_steps=4, decay="linear")
    assert [rate_factor(rates, step, 8) for step in range(9)] == [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25, 0]
    assert rate_factor(RateSchedule(decay="cosine"), 5, 10) == pytest.approx(0.5)
    assert rate_factor(RateSchedule(), 10**9, 10) == 1


def test_rates_decay_in_ones_own_loop_where_the_end_is_known(log_schema, log_folder):
    config = TrainConfig(batch_size=50, rates=RateSchedule(decay="linear"))
    batches = [Batch.from_samples(one) for one in SampleStream(log_folder, log_schema, 50, limit=200)]
    bounded = Trainer(replace(config, max_steps=4), log_schema)
    found = []
    for batch in batches:
        bounded.train_step(batch)
        found.append(bounded.dense.param_groups[0]["lr"] / config.dense.lr)
    assert found == pytest.approx([1, 0.75, 0.5, 0.25])
    unbounded = Trainer(config, log_schema)
    with pytest.raises(ConfigError, match=r"decay is linear, but how many steps .* set max_steps, or call"):
        unbounded.train_step(batches[0])
    unbounded.expect(SampleStream(log_folder, log_schema, 50, limit=200), None)
    unbounded.train_step(batches[0])
    assert unbounded.total_steps == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batchsize": 5}, "unknown setting batchsize; did you mean batch_size?"),
        (
            {"model": {"embeding_dim": 5}},
            "unknown setting model.embeding_dim; did you mean model.embedding_dim?",
        ),
        ({"model": "dlrm"}, "model: expected settings by name, got 'dlrm'"),
        ({"batch_size": "many"}, "batch_size: expected int, got 'many'"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"rates": {"decay": "slow"}}, "rates.decay must be one of constant, linear, cosine, got 'slow'"),
        ({"rows": {"options": {"lr": 1}}}, "options of rowwise_adagrad: 'lr' is not an option to set here"),
        ({"model": {"options": {1: 2}}}, "model.options: 1 is not an option"),
        ({"model": {"embedding_dim": 10**12}}, "model.embedding_dim must be from 1 to 65536"),
        ({"seed": 2**64}, "seed must be below 2**63"),
        ({"threads": 100_000}, "threads must be at most 1024"),
        ({"precision": "bf16"}, "precision must be one of float32, float64, got 'bf16'"),
    ],
)
def test_settings_that_are_wrong_are_explained(settings, message):
    with pytest.raises(ConfigError) as error:
        TrainConfig.from_dict(settings)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TrainConfig(model=ModelConfig(options={"tables": 1})), "model 'dlrm' has no option 'tables'"),
        (
            TrainConfig(model=ModelConfig("dlmr")),
            "unknown model 'dlmr' (did you mean 'dlrm'?); known are wide_deep",
        ),
        (TrainConfig(dense=OptimizerConfig("Adamm", 1)), "no 'Adamm' in torch.optim; it has"),
        (TrainConfig(dense=OptimizerConfig("Adam", 1, {"momentum": 1})), "Adam rejects its options"),
        (
            TrainConfig(dense=OptimizerConfig("Adam", 1, {"foreach": True, "fused": True})),
            "Adam rejects its options: `fused` and `foreach` cannot be `True` together",
        ),
        (TrainConfig(dense=OptimizerConfig("Adam", 1, {"differentiable": True})), "differentiable is true"),
        (TrainConfig(rows=OptimizerConfig("adam", 1, {"momentum": 1})), "adam: unknown setting 'momentum'"),
        (TrainConfig(dense=OptimizerConfig("LBFGS", 1)), "LBFGS is not supported: it needs closures"),
    ],
)
def test_models_and_optimizers_that_do_not_exist_are_explained(config, message, log_schema):
    with pytest.raises(ConfigError) as error:
        Trainer(config, log_schema)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainConfig(model="dlrm"), "TrainConfig: model must be of type ModelConfig, got 'dlrm'"),
        (lambda: TrainConfig(rows="adagrad"), "rows must be of type OptimizerConfig, got 'adagrad'"),
        (lambda: TrainConfig(cluster={"workers": 2}), "cluster must be of type ClusterConfig, got {"),
        (lambda: TrainConfig(batch_size=10.5), "batch_size must be of type int, got 10.5"),
        (lambda: TrainConfig(batch_size="10"), "batch_size must be of type int, got '10'"),
        (lambda: TrainConfig(batch_size=True), "batch_size must be of type int, got True"),
        (lambda: TrainConfig(seed=None), "seed must be of type int, got None"),
        (lambda: TrainConfig(metrics="gauc"), "metrics must be of type list[str], got 'gauc'"),
        (lambda: TrainConfig(tables=[]), "tables must be of type dict[str, typing.Any], got []"),
        (
            lambda: TrainConfig(checkpoint_every=1.5),
            "checkpoint_every: '1.5' has no unit; write a time such as",
        ),
        (lambda: ModelConfig(embedding_dim="8"), "ModelConfig: embedding_dim must be of type int, got '8'"),
        (lambda: OptimizerConfig("Adam", "0.1"), "OptimizerConfig: lr must be of type float, got '0.1'"),
        (lambda: RateSchedule(warmup_steps="5"), "warmup_steps must be of type int, got '5'"),
        (lambda: LossConfig(weights=[1]), "LossConfig: weights must be of type dict[str, typing.Any]"),
        (lambda: ClusterConfig(workers="2"), "ClusterConfig: workers must be of type int, got '2'"),
        (lambda: StreamConfig(follow="yes"), "StreamConfig: follow must be of type bool, got 'yes'"),
        (lambda: PublishConfig(compact_after="9"), "compact_after must be of type int, got '9'"),
        (lambda: PruneConfig(chunks="4"), "PruneConfig: chunks must be of type int, got '4'"),
        (lambda: MonitoringConfig(stalled_after="9"), "stalled_after must be of type float, got '9'"),
        (lambda: MonitoringConfig(log_json="false"), "log_json must be of type bool, got 'false'"),
    ],
)
def test_settings_of_another_type_are_refused(make, message):
    with pytest.raises(ConfigError) as error:
        make()
    assert message in str(error.value)


def test_paths_and_numbers_of_numpy_become_what_files_hold(tmp_path):
    config = TrainConfig(
        batch_size=np.int64(10),
        epochs=2.0,
        checkpoints=tmp_path / "c",
        checkpoint_every=np.int64(3),
        rows=OptimizerConfig("adagrad", np.float32(0.5)),
        prune=PruneConfig(ratio=0.5),
        monitoring=MonitoringConfig(metrics_port=9100, log_folder=tmp_path),
    )
    assert config.monitoring.port == 9100
    assert (config.batch_size, config.epochs, config.rows.lr) == (10, 2, 0.5)
    assert {type(one) for one in (config.batch_size, config.epochs, config.checkpoint_every)} == {int}
    assert (config.checkpoints, config.prune.ratio) == (str(tmp_path / "c"), "0.5")
    config.write(tmp_path / "config.yaml")
    assert TrainConfig.read(tmp_path / "config.yaml") == config


def test_options_become_what_files_hold_however_deep(tmp_path):
    config = TrainConfig(
        model=ModelConfig(
            options={"top": (8, np.int64(4)), "bottom": np.array([8]), "dropout": np.float64(0.1)}
        ),
        rows=OptimizerConfig("adam", 0.1, {"beta1": np.float32(0.5)}),
        dense=OptimizerConfig("Adam", 0.1, {"betas": (0.9, 0.99)}),
        tables={"user": {"admit_after": np.int64(2)}},
        metrics=("gauc", np.str_("mrr")),
    )
    assert config.dense.options == {"betas": [0.9, 0.99]}
    assert config.model.options == {"top": [8, 4], "bottom": [8], "dropout": 0.1}
    config.write(tmp_path / "config.yaml")
    assert TrainConfig.read(tmp_path / "config.yaml").to_dict() == config.to_dict()


def test_options_that_no_file_holds_are_refused():
    with pytest.raises(
        ConfigError, match=r"OptimizerConfig: options: betas is tensor\(.*no configuration file"
    ):
        OptimizerConfig("Adam", 0.1, {"betas": [torch.tensor(0.9), 0.99]})


def test_a_device_may_be_named_and_a_schema_must_be_read(log_schema):
    assert Trainer(TrainConfig(), log_schema, device="cpu").device == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"the schema is 'schema.yaml'.*Schema.read\(path\)"):
        Trainer(TrainConfig(), "schema.yaml")


@pytest.mark.parametrize("weights", [{}, {"click": 2.0}])
def test_batches_without_labels_are_not_trained_on(weights, log_schema, log_folder):
    trainer = Trainer(TrainConfig(loss=LossConfig(weights)), log_schema)
    samples = next(iter(SampleStream(log_folder, log_schema, 10, require_label=False)))
    with pytest.raises(DataError, match="training needs labels, and this batch has none"):
        trainer.train_step(Batch.from_samples(samples))


def test_a_configuration_survives_its_file(tmp_path):
    config = TrainConfig.from_dict({"model": {"embedding_dim": 7}, "rows": {"lr": "1e-3"}, "epochs": 2})
    assert config.rows == OptimizerConfig("rowwise_adagrad", 0.001)
    config.write(tmp_path / "config.yaml")
    assert TrainConfig.read(tmp_path / "config.yaml") == config
    (tmp_path / "config.toml").write_text("epochs = 2\n[model]\nembedding_dim = 7\n[rows]\nlr = 1e-3\n")
    assert TrainConfig.read(tmp_path / "config.toml") == config


def test_yaml_options_with_powers_of_ten_are_numbers(tmp_path):
    """YAML 1.1 takes 1e-8, without a point, for text."""
    path = tmp_path / "config.yaml"
    path.write_text(
        "rows: {name: adagrad, options: {eps: 1e-8}}\n"
        "dense: {name: AdamW, options: {betas: [9e-1, 0.99], weight_decay: 1e-4}}\n"
        "model: {options: {name: 1e, other: e5}}\n"
    )
    config = TrainConfig.read(path)
    assert config.row_rule().eps == 1e-8
    assert config.dense.options == {"betas": [0.9, 0.99], "weight_decay": 1e-4}
    assert config.model.options == {"name": "1e", "other": "e5"}
