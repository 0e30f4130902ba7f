"""Models of several labels against their formulas, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from rowhaul.data.samples import Samples
from rowhaul.errors import ConfigError
from rowhaul.nn import Batch, EmbeddingBagCollection, RowOptimizer
from rowhaul.nn.models import build_model
from rowhaul.optim import Adagrad
from slow_cases import mostly_slow

SMALL = {"hidden": (5,), "dropout": 0.0}
OPTIONS = {
    "mmoe": SMALL | {"num_experts": 3, "tower": (4,)},
    "ple": SMALL | {"num_levels": 2, "num_own": 2, "num_shared": 1, "tower": (4,)},
    "esmm": SMALL,
}


def make(name, num_tasks=2, options=None, dim=3, num_dense=2):
    return build_model(
        name,
        tables={"users": ("user",), "items": ("item",)},
        num_dense=num_dense,
        embedding_dim=dim,
        make_collection=lambda tables: EmbeddingBagCollection(tables, optimizer=Adagrad(lr=0.1)),
        seed=3,
        options=OPTIONS[name] if options is None else options,
        num_tasks=num_tasks,
    )


def linear(layer, x):
    return np.array(
        [
            sum(w * v for w, v in zip(row, x, strict=True))
            + (0 if layer.bias is None else layer.bias[place].item())
            for place, row in enumerate(layer.weight.detach().numpy().astype(np.float64))
        ]
    )


def mlp(module, x):
    for layer in module.linears:
        x = np.maximum(linear(layer, x), 0)
    return x


def softmax(x):
    return np.exp(x) / np.exp(x).sum()


def tower(model, task, x):
    return linear(model.towers.out[task], mlp(model.towers.deep[task], x))[0]


def mmoe(model, x, num_tasks):
    experts = [mlp(one, x) for one in model.experts.mlps]
    weights = [softmax(linear(gate, x)) for gate in model.gates]
    return [
        tower(model, t, sum(w * e for w, e in zip(weights[t], experts, strict=True)))
        for t in range(num_tasks)
    ]


def ple(model, x, num_tasks):
    of_tasks, shared = [x] * num_tasks, x
    for level in model.levels:
        own = [[mlp(one, of_tasks[t]) for one in level.own[t].mlps] for t in range(num_tasks)]
        common = [mlp(one, shared) for one in level.shared.mlps]
        following = []
        for t in range(num_tasks):
            weights = softmax(linear(level.gates[t], of_tasks[t]))
            following.append(sum(w * e for w, e in zip(weights, own[t] + common, strict=True)))
        if level.shared_gate is not None:
            every = [expert for mine in own for expert in mine] + common
            shared = sum(
                w * e for w, e in zip(softmax(linear(level.shared_gate, shared)), every, strict=True)
            )
        of_tasks = following
    return [tower(model, t, of_tasks[t]) for t in range(num_tasks)]


def esmm(model, x, num_tasks):
    a, b = tower(model, 0, x), tower(model, 1, x)
    both = 1 / (1 + np.exp(-a)) / (1 + np.exp(-b))
    return [a, np.log(both / (1 - both))]


@pytest.mark.parametrize(
    ("name", "num_tasks"), [("mmoe", 2), ("mmoe", 3), ("ple", 2), ("ple", 3), ("esmm", 2)]
)
def test_logits_are_the_formulas(name, num_tasks):
    model = make(name, num_tasks).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # biases too, which start at zero
        torch.nn.init.uniform_(parameter, -0.7, 0.7, generator=generator)
    random = np.random.default_rng(0)
    pooled, dense = random.normal(size=(4, 6)), random.normal(size=(4, 2))
    logits = model.logits(torch.tensor(pooled), torch.tensor(dense), torch.arange(4))
    formula = {"mmoe": mmoe, "ple": ple, "esmm": esmm}[name]
    expected = [formula(model, np.append(pooled[i], dense[i]), num_tasks) for i in range(4)]
    assert logits.shape == (4, num_tasks)
    np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=1e-6, atol=1e-9)


def test_the_product_of_probabilities_does_not_overflow():
    model = make("esmm")
    with torch.no_grad():
        for out in model.towers.out:
            out.weight.fill_(0)
        for click, after in ((90.0, 90.0), (-90.0, 90.0), (-90.0, -90.0)):
            model.towers.out[0].bias.fill_(click)
            model.towers.out[1].bias.fill_(after)
            _, both = model.task_logits(torch.zeros(1, 8), torch.arange(1))[0].tolist()
            assert both == pytest.approx(-np.logaddexp.reduce([-click, -after, -click - after]), rel=1e-6)


def test_esmm_knows_that_nothing_converts_without_a_click():
    nan = float("nan")
    labels = torch.tensor([[0, nan], [1, nan], [1, 1], [1, 0], [nan, 1], [0, 0]])
    expected = torch.tensor([[0, 0], [1, nan], [1, 1], [1, 0], [nan, 1], [0, 0]])
    assert torch.equal(make("esmm").targets(labels).nan_to_num(9), expected.nan_to_num(9))


def test_one_label_has_one_logit_a_sample():
    assert make("mmoe", 1).logits(torch.zeros(3, 6), torch.zeros(3, 2), torch.arange(3)).shape == (3,)


@pytest.mark.parametrize(
    ("name", "num_tasks", "message"),
    [
        (
            "dlrm",
            2,
            "model 'dlrm' predicts one label, but the schema has 2 labels; choose one of mmoe, ple, esmm",
        ),
        ("esmm", 1, "model 'esmm' predicts two labels, but the schema has 1 label; choose one of wide_deep"),
        ("esmm", 3, "model 'esmm' predicts two labels, but the schema has 3 labels; choose one of mmoe, ple"),
    ],
)
def test_models_refuse_other_numbers_of_labels(name, num_tasks, message):
    with pytest.raises(ConfigError, match=message):
        make(name, num_tasks, options={})


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match="num_experts must be at least 1, got 0"):
        make("mmoe", options={"num_experts": 0})
    with pytest.raises(ConfigError, match="num_own must be at least 1, got True"):
        make("ple", options={"num_own": True})


def draw(random, count):
    """A click is a pair of equal signs; a conversion, after a click, a pair of equal halves."""
    users, items = random.integers(40, size=(2, count))
    click = users % 2 == items % 2
    conversion = np.where(click, (users < 20) == (items < 20), np.nan)
    return Samples(
        ("user", "item"),
        np.concatenate([users, items]),
        np.ones((2, count), np.int32),
        np.zeros((count, 1), np.float32),
        np.stack([click, conversion], axis=1).astype(np.float32),
        np.arange(count),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(OPTIONS, "mmoe"))
def test_models_learn_both_labels(name):
    model = make(name, options={}, dim=6, num_dense=1)
    rows, dense = RowOptimizer(model), torch.optim.Adam(model.parameters(), lr=0.003)
    random = np.random.default_rng(0)
    for _ in range(250):
        batch = Batch.from_samples(draw(random, 256))
        labels = model.targets(batch.labels)
        known = ~torch.isnan(labels)
        per_label = torch.nn.functional.binary_cross_entropy_with_logits(
            model(batch), labels.nan_to_num(0), reduction="none"
        )
        dense.zero_grad()
        losses = [
            batch.loss(per_label[:, t], known[:, t], denominator=batch.totals.labelled[t]) for t in (0, 1)
        ]
        sum(losses).backward()
        rows.step()
        dense.step()
    test = Batch.from_samples(draw(np.random.default_rng(1), 4000))
    labels = model.targets(test.labels).numpy()
    with torch.no_grad():
        scores = model.eval()(test).numpy()
    for task in (0, 1):
        known = ~np.isnan(labels[:, task])
        assert roc_auc_score(labels[known, task], scores[known, task]) > 0.98
