"""What cannot train exactly on several workers is refused, with a way out that is then accepted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rowhaul.errors import ConfigError
from rowhaul.nn import (
    BatchNorm1d,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    RowOptimizer,
    SampleDropout,
    check_trainable,
    convert_batch_norm,
    refuse_clipping,
    refuse_scaler,
)
from rowhaul.nn.models import MODELS, build_model

REFUSED = {
    "batch norm": (nn.BatchNorm1d(3), "use rowhaul.nn.BatchNorm1d"),
    "batch norm 2d": (nn.BatchNorm2d(3), r"norm\(x.flatten\(2\)\).view_as\(x\)"),
    "batch norm 3d": (nn.BatchNorm3d(3), r"norm\(x.flatten\(2\)\).view_as\(x\)"),
    "sync batch norm": (nn.SyncBatchNorm(3), "use rowhaul.nn.BatchNorm1d"),
    "batch norm without statistics": (BatchNorm1d(3, track_running_stats=False), "track_running_stats=True"),
    "instance norm": (nn.InstanceNorm1d(3, track_running_stats=True), "use track_running_stats=False"),
    "dropout": (nn.Dropout(0.1), "use rowhaul.nn.SampleDropout"),
    "dropout 2d": (nn.Dropout2d(0.1), "use rowhaul.nn.SampleDropout"),
    "alpha dropout": (nn.AlphaDropout(0.1), "use rowhaul.nn.SampleDropout"),
    "dropout in a transformer": (
        nn.TransformerEncoderLayer(4, 2),
        r"self_attn .*\n.*\.dropout, .*\.dropout1, .*\.dropout2 ",
    ),
    "rnn dropout": (nn.GRU(3, 3, num_layers=2, dropout=0.2), "use dropout=0, and outside"),
    "attention dropout": (nn.MultiheadAttention(4, 2, dropout=0.2), "use dropout=0, and outside"),
    "random slopes": (nn.RReLU(), "use torch.nn.LeakyReLU"),
    "random regions": (nn.FractionalMaxPool2d(2, output_size=1), "use torch.nn.MaxPool2d"),
    "sparse table": (nn.Embedding(5, 2, sparse=True), "put the table into the EmbeddingBagCollection"),
    "sparse bags": (nn.EmbeddingBag(5, 2, sparse=True), "put the table into the EmbeddingBagCollection"),
    "renormalised table": (nn.Embedding(5, 2, max_norm=1.0), "use max_norm=None"),
    "gradients by frequency": (nn.EmbeddingBag(5, 2, scale_grad_by_freq=True), "scale_grad_by_freq=False"),
    "lazy": (nn.LazyLinear(2), "run one batch through the model first"),
    "data parallel": (nn.DataParallel(nn.Linear(2, 2)), "use the module inside"),
}

ACCEPTED = {
    "batch norm": BatchNorm1d(3),
    "layer norms": nn.Sequential(nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.InstanceNorm1d(3)),
    "dropout": SampleDropout(0.5, seed=0, layer=0),
    "dropout that drops nothing": nn.Sequential(nn.Dropout(0.0), nn.GRU(3, 3), nn.MultiheadAttention(4, 2)),
    "transformer without dropout": nn.TransformerEncoderLayer(4, 2, dropout=0.0),
    "dense tables": nn.Sequential(nn.Embedding(5, 2), nn.EmbeddingBag(5, 2)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_layers_name_and_a_way_out(case: str) -> None:
    module, way_out = REFUSED[case]
    with pytest.raises(ConfigError, match=way_out) as refusal:
        check_trainable(nn.ModuleDict({"fine": nn.Linear(2, 2), "tower": nn.ModuleList([module])}))
    assert "tower.0" in str(refusal.value)
    assert "fine" not in str(refusal.value)


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(case: str) -> None:
    check_trainable(ACCEPTED[case])


@pytest.mark.parametrize("name", sorted(name for name, kind in MODELS.items() if kind.is_pooled))
def test_every_model_of_ours_is_accepted_with_dropout(name: str) -> None:
    model = build_model(
        name,
        tables={"users": ["user"], "items": ["item"]},
        num_dense=2,
        embedding_dim=4,
        make_collection=EmbeddingBagCollection,
        seed=0,
        options={"dropout": 0.5},
        num_tasks=MODELS[name].least_tasks,
    )
    check_trainable(model, torch.optim.Adam(model.parameters()))


def test_everything_wrong_is_said_at_once_and_like_troubles_together() -> None:
    towers = [nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5)) for _ in range(5)]
    with pytest.raises(ConfigError) as refusal:
        check_trainable(nn.Sequential(*towers))
    first, norms, dropouts = str(refusal.value).splitlines()
    assert first == "Sequential would not train on several workers as in one process:"
    assert norms.startswith("  - 0.0, 1.0, 2.0 and 2 more (torch's BatchNorm1d) normalises")
    assert dropouts.startswith("  - 0.1, 1.1, 2.1 and 2 more (torch's Dropout) drops")


def test_a_model_that_is_itself_refused_is_named() -> None:
    with pytest.raises(ConfigError, match=r"the model itself \(torch's Dropout\)"):
        check_trainable(nn.Dropout(0.5))


def test_converted_batch_norm_is_accepted() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ConfigError, match="convert_batch_norm"):
        check_trainable(model)
    check_trainable(convert_batch_norm(model))


def with_table() -> nn.Module:
    tables = [EmbeddingBagConfig(embedding_dim=2, name="t", feature_names=["f"])]
    return nn.ModuleList([EmbeddingBagCollection(tables), nn.Linear(2, 1)])


def test_optimizers_that_cannot_step_summed_dense_gradients_are_refused() -> None:
    model = with_table()
    check_trainable(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for optimizer, reason in (
        (RowOptimizer(model), r"which training.step\(\) does"),
        (torch.optim.LBFGS(model.parameters()), "several times a step"),
        (torch.optim.SparseAdam(list(model.parameters())), "use torch.optim.Adam"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check_trainable(model, optimizer)


def test_parameters_outside_the_model_are_refused() -> None:
    model, temperature = nn.Linear(2, 1), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    with pytest.raises(ConfigError, match=r"1 of 3 parameters .* shape \(3,\).* part of the model"):
        check_trainable(model, optimizer)


def test_clipping_over_rows_and_scalers_are_refused_with_reason_and_way_out() -> None:
    with pytest.raises(ConfigError, match=r"^training.clip_norm cannot be exact .*clip_grad_norm_"):
        refuse_clipping("training.clip_norm")
    with pytest.raises(ConfigError, match=r"^training.grad_scaler cannot be exact.*bfloat16"):
        refuse_scaler("training.grad_scaler")
