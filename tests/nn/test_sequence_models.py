"""Models of histories against their formulas, written out sample by sample, and that they learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from rowhaul.data.samples import Samples
from rowhaul.errors import ConfigError, DataError
from rowhaul.nn import EmbeddingCollection, EmbeddingConfig, RowOptimizer, check_trainable
from rowhaul.nn.batch import Batch
from rowhaul.nn.models import RecommendationModel, build_model
from rowhaul.optim import SGD, Adagrad

DIM = 4
HISTORY = [[2, 3, 2], [], [1], [9, 8, 7, 6], []]
IDS = {
    "user": [[5], [7], [], [5], [6]],
    "item": [[1], [2], [1], [3], [9]],
    "history": HISTORY,
    "kind": [[0], [1], [0], [1], [1]],
    "kinds": [[key % 2 for key in one] for one in HISTORY],
}
TABLES = {"users": ("user",), "items": ("item", "history"), "kinds": ("kind", "kinds")}
NEXT = {"items": ("item", "history", "others")}


def make_collection(configs: list[EmbeddingConfig]) -> EmbeddingCollection:
    typed = [
        replace(one, data_type=torch.float64, weight_init_min=-0.8, weight_init_max=0.8) for one in configs
    ]
    return EmbeddingCollection(typed, optimizer=SGD(lr=1.0), seed=3)


def make_model(name: str, tables: dict[str, tuple[str, ...]], num_dense: int = 0, **options: Any) -> Any:
    model = build_model(
        name,
        tables=tables,
        num_dense=num_dense,
        embedding_dim=DIM,
        make_collection=make_collection,
        seed=11,
        options=options,
        histories=("history", "kinds"),
        negatives={"others": "item"} if "others" in tables.get("items", ()) else {},
    ).double()
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():  # biases and norms that start at 0 and 1 would hide mistakes
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def make_batch(ids: dict[str, Sequence[Sequence[int]]], num_dense: int = 0) -> Batch:
    bags = [bag for one in ids.values() for bag in one]
    count = len(next(iter(ids.values())))
    return Batch.from_samples(
        Samples(
            tuple(ids),
            np.array([key for bag in bags for key in bag], np.int64),
            np.array([len(bag) for bag in bags], np.int32).reshape(len(ids), count),
            np.linspace(-1, 2, count * num_dense, dtype=np.float32).reshape(count, num_dense),
            np.arange(count, dtype=np.float32) % 2,
            np.arange(count),
        )
    )


def rows_of(model: Any, table: str, bag: Sequence[int]) -> Tensor:
    """The rows of a sample's ids, one by one, looked up by hand."""
    stored = {
        int(key): torch.from_numpy(record[:DIM].copy())
        for keys, records in model.collection.rows(table)
        for key, record in zip(keys, records, strict=True)
    }
    return torch.stack([stored[key] for key in bag]) if bag else torch.zeros(0, DIM, dtype=torch.float64)


def layer(linear: Any, x: Tensor) -> Tensor:
    return linear.weight @ x + linear.bias


def perceptron(mlp: Any, out: Any, x: Tensor) -> Tensor:
    for linear in mlp.linears:
        x = torch.relu(layer(linear, x))
    return layer(out, x)


@pytest.mark.parametrize("softmax", [False, True])
def test_din_equals_its_formula(softmax: bool) -> None:
    model = make_model("din", TABLES, 2, hidden=(5,), attention=(6, 3), softmax=softmax)
    batch = make_batch(IDS, 2)
    logits = model(batch)
    for i in range(len(batch)):
        target = torch.cat(
            [rows_of(model, t, IDS[f][i])[0] for t, f in (("items", "item"), ("kinds", "kind"))]
        )
        events = torch.cat(
            [rows_of(model, "items", IDS["history"][i]), rows_of(model, "kinds", IDS["kinds"][i])], dim=1
        )
        weights = [
            perceptron(model.attention, model.weigh, torch.cat([h, target, target - h, target * h]))
            for h in events
        ]
        if softmax and weights:
            weights = list(torch.softmax(torch.stack(weights), 0))
        interest = sum((a * h for a, h in zip(weights, events, strict=True)), torch.zeros_like(target))
        user = rows_of(model, "users", IDS["user"][i]).sum(0)
        inputs = torch.cat([user, target, interest, target * interest, batch.dense[i].double()])
        torch.testing.assert_close(logits[i : i + 1], perceptron(model.mlp, model.out, inputs))


def sasrec_state(model: Any, events: Tensor) -> Tensor:
    """The state after the last event, place by place; every place attends to itself and those before it."""
    if not len(events):
        return model.norm(model.start[0])
    count, size = len(events), DIM // model.blocks[0].heads
    states = [event * DIM**0.5 + model.places[count - 1 - i] for i, event in enumerate(events)]
    for block in model.blocks:
        normed = [block.before_attention(one) for one in states]
        after = []
        for i in range(count):
            parts = []
            for head in range(block.heads):
                some = slice(head * size, (head + 1) * size)
                query = layer(block.query, normed[i])[some]
                keys = torch.stack([layer(block.key, normed[j])[some] for j in range(i + 1)])
                values = torch.stack([layer(block.value, normed[j])[some] for j in range(i + 1)])
                parts.append(torch.softmax(keys @ query / size**0.5, 0) @ values)
            state = states[i] + layer(block.joined, torch.cat(parts))
            deeper = layer(block.second, torch.relu(layer(block.first, block.before_layers(state))))
            after.append(state + deeper)
        states = after
    return model.norm(states[-1])


def expected_loss(logit: Tensor, label: Tensor, others: list[Tensor], negatives_loss: str) -> Tensor:
    """Of one sample, by the formula."""
    if negatives_loss == "softmax" and label:
        return -torch.log(logit.exp() / torch.stack([logit, *others]).exp().sum())
    wrong = [-torch.log(1 - torch.sigmoid(other)) for other in others if negatives_loss == "binary"]
    likely = torch.sigmoid(logit if label else -logit)
    return -torch.log(likely) + (sum(wrong) / len(wrong) if wrong else 0)


@pytest.mark.parametrize(("heads", "negatives_loss"), [(1, "binary"), (2, "binary"), (1, "softmax")])
def test_sasrec_equals_its_formula(heads: int, negatives_loss: str) -> None:
    """Histories longer than there are places are cut to the newest; negatives count by their mean."""
    model = make_model("sasrec", NEXT, heads=heads, max_length=3, dropout=0.0, negatives_loss=negatives_loss)
    others = [[4, 5], [1], [], [9, 9], [2]]
    batch = make_batch({"item": IDS["item"], "history": HISTORY, "others": others})
    logits, losses = model.logits_and_losses(batch)
    assert torch.equal(logits, model(batch))
    for i in range(len(batch)):
        state = sasrec_state(model, rows_of(model, "items", HISTORY[i][-3:]))
        logit = state @ rows_of(model, "items", IDS["item"][i])[0]
        torch.testing.assert_close(logits[i], logit)
        scores = [state @ row for row in rows_of(model, "items", others[i])]
        expected = expected_loss(logit, batch.labels[i], scores, negatives_loss)
        torch.testing.assert_close(losses[i], expected)


@pytest.mark.parametrize("name", ["din", "sasrec"])
def test_a_sample_is_scored_alike_in_any_batch(name: str) -> None:
    """Whatever histories are beside it, also with none at all and in a batch without samples."""
    ids = {"item": IDS["item"], "history": HISTORY, "others": IDS["item"]}
    tables = NEXT if name == "sasrec" else {"items": ("item", "history"), "others": ("others",)}
    model = make_model(name, tables).eval()
    whole = model(make_batch(ids))
    for i in range(5):
        alone = model(make_batch({feature: [bags[i]] for feature, bags in ids.items()}))
        torch.testing.assert_close(alone[0], whole[i])
    assert model(make_batch({feature: [] for feature in ids})).shape == (0,)


@pytest.mark.parametrize("name", ["din", "sasrec"])
def test_dropout_depends_on_the_sample_alone(name: str) -> None:
    ids = {"item": IDS["item"], "history": HISTORY}
    model = make_model(name, {"items": ("item", "history")}, dropout=0.5)
    check_trainable(model, torch.optim.Adam(model.parameters()))
    batch = make_batch(ids)
    assert torch.equal(model(batch), model(batch))
    assert not torch.equal(model(batch), model(replace(batch, index=batch.index + 7)))


def test_refusals_say_what_to_change() -> None:
    with pytest.raises(ConfigError, match="set `max_length` on the history's column"):
        make_model("din", {"items": ("item",)})
    with pytest.raises(ConfigError, match="leave out user"):
        make_model("sasrec", {"users": ("user",), "items": ("item", "history")})
    with pytest.raises(ConfigError, match="3 heads do not divide rows of 4"):
        make_model("sasrec", NEXT, heads=3)
    with pytest.raises(ConfigError, match="negatives_loss must be one of binary, softmax, got 'soft'"):
        make_model("sasrec", NEXT, negatives_loss="soft")
    with pytest.raises(ConfigError, match="no id feature 'typo'"):
        make_model("din", TABLES, history=("typo",), target=("item",))
    with pytest.raises(ConfigError, match="'din' does not read negatives, of which the schema draws others"):
        make_model("din", NEXT)
    model = make_model("din", TABLES)
    with pytest.raises(DataError, match="differ in length"):
        model(make_batch({**IDS, "kinds": [[1], [], [], [], []]}))


@pytest.mark.parametrize("name", ["din", "sasrec"])
def test_one_name_is_a_list_of_one(name: str) -> None:
    model = make_model(name, {"items": ("item", "history")}, history="history", target="item")
    assert (model.history, model.target) == (("history",), ("item",))
    assert make_model("two_tower", {"u": ("user",), "i": ("item",)}, item="user").item == ("user",)


NUM_ITEMS, NUM_STEPS, BATCH = 40, 200, 128


def draw(generator: np.random.Generator, count: int, negatives: bool) -> Samples:
    """A click is an item whose successor was seen before: no item, and no history, tells it alone."""
    lengths = generator.integers(1, 6, count)
    histories = [generator.integers(NUM_ITEMS, size=length) for length in lengths]
    seen = np.array([(generator.choice(one) + 1) % NUM_ITEMS for one in histories])
    items = np.where(generator.random(count) < 0.5, seen, generator.integers(NUM_ITEMS, size=count))
    labels = [float((item - 1) % NUM_ITEMS in one) for item, one in zip(items, histories, strict=True)]
    values, sizes = [items, *histories], [np.ones(count), lengths]
    features = ("item", "history")
    if negatives:
        values.append(generator.integers(NUM_ITEMS, size=count))
        sizes.append(np.ones(count))
        features = (*features, "others")
    return Samples(
        features,
        np.concatenate(values).astype(np.int64),
        np.stack(sizes).astype(np.int32),
        np.zeros((count, 0), np.float32),
        np.array(labels, np.float32),
        np.arange(count),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["din", "sasrec"])
def test_learns_what_only_the_history_tells(name: str) -> None:
    negatives = name == "sasrec"
    model: RecommendationModel = build_model(
        name,
        tables={"items": ("item", "history", *(("others",) if negatives else ()))},
        num_dense=0,
        embedding_dim=16,
        make_collection=lambda configs: EmbeddingCollection(configs, optimizer=Adagrad(lr=0.1)),
        seed=0,
        histories=("history",),
        negatives={"others": "item"} if negatives else {},
    )
    rows, dense = RowOptimizer(model), torch.optim.Adam(model.parameters(), lr=0.003)
    generator = np.random.default_rng(0)
    for _ in range(NUM_STEPS * (3 if negatives else 1)):
        batch = Batch.from_samples(draw(generator, BATCH, negatives))
        dense.zero_grad()
        batch.loss(model.logits_and_losses(batch)[1]).backward()
        rows.step()
        dense.step()
    test = draw(np.random.default_rng(1), 3000, negatives)
    with torch.no_grad():
        scores = model.eval()(Batch.from_samples(test))
    assert roc_auc_score(test.labels, scores.numpy()) > (0.85 if negatives else 0.95)
