"""Two towers against their formula, what they refuse, and that a cluster's parts add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_sequence_models import (
    HISTORY,
    IDS,
    NEXT,
    expected_loss,
    make_batch,
    make_model,
    perceptron,
    rows_of,
)
from torch import Tensor

from rowhaul.data.schema import Schema
from rowhaul.errors import ConfigError
from rowhaul.nn import check_trainable
from rowhaul.train.losses import LossConfig, TaskLosses

TABLES = {"users": ("user",), "items": ("item", "history", "others")}
OTHERS = [[4, 5], [1], [], [9, 9], [2]]
CASE = {"user": IDS["user"], "item": IDS["item"], "history": HISTORY, "others": OTHERS}


def mean(rows: Tensor) -> Tensor:
    return rows.sum(0) / max(1, len(rows))


def tower(one: Any, x: Tensor) -> Tensor:
    vector = perceptron(one.mlp, one.out, x)
    return vector / vector.norm() if one.scaled else vector


@pytest.mark.parametrize(("temperature", "loss"), [(0.0, "binary"), (0.5, "binary"), (0.5, "softmax")])
def test_equals_its_formula(temperature: float, loss: str) -> None:
    model = make_model(
        "two_tower", TABLES, 2, hidden=(5,), size=3, temperature=temperature, negatives_loss=loss
    )
    batch = make_batch(CASE, 2)
    logits, losses = model.logits_and_losses(batch)
    assert torch.equal(logits, model(batch))
    for i in range(len(batch)):
        rows = [mean(rows_of(model, "users", IDS["user"][i])), mean(rows_of(model, "items", HISTORY[i]))]
        user = tower(model.user_tower, torch.cat([*rows, batch.dense[i].double()]))
        torch.testing.assert_close(model.user_vectors(batch)[i], user)

        def score(row: Tensor, user: Tensor = user) -> Tensor:
            return user @ tower(model.item_tower, row) / (temperature or 1) + model.bias

        logit = score(rows_of(model, "items", IDS["item"][i])[0])
        torch.testing.assert_close(logits[i], logit)
        others = [score(row) for row in rows_of(model, "items", OTHERS[i])]
        torch.testing.assert_close(losses[i], expected_loss(logit, batch.labels[i], others, loss))
    check_trainable(model, torch.optim.Adam(model.parameters()))
    assert model(make_batch({feature: [] for feature in CASE}, 2)).shape == (0,)


def test_the_item_is_found_or_must_be_named() -> None:
    assert make_model("two_tower", TABLES).item == ("item",)
    assert make_model("two_tower", {"users": ("user",), "items": ("item", "history")}).item == ("item",)
    assert make_model("two_tower", {"users": ("user",), "things": ("thing",)}).item == ("thing",)
    both = {"users": ("user",), "things": ("thing",), "shops": ("shop",)}
    assert make_model("two_tower", both, item=["thing", "shop"]).user_tower.features == ("user",)
    with pytest.raises(ConfigError, match="say which are the item's"):
        make_model("two_tower", both)
    with pytest.raises(ConfigError, match=r"no id feature 'thingy' .did you mean 'thing'"):
        make_model("two_tower", both, item=["thingy"])
    with pytest.raises(ConfigError, match="the others of a drawn id are not known"):
        make_model("two_tower", TABLES, item=["item", "user"])
    with pytest.raises(ConfigError, match="temperature must be 0 or a positive number"):
        make_model("two_tower", TABLES, temperature=-1)


@pytest.mark.parametrize("loss", ["binary", "softmax"])
@pytest.mark.parametrize("name", ["two_tower", "sasrec"])
def test_losses_of_negatives_are_weighted_and_divided_as_those_of_labels(name: str, loss: str) -> None:
    tables = TABLES if name == "two_tower" else NEXT
    model = make_model(name, tables, negatives_loss=loss).eval()
    batch = make_batch({feature: CASE[feature] for features in tables.values() for feature in features})
    _, plain = model.logits_and_losses(batch)
    weights = torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0])
    weighted = replace(batch, weights=weights)
    schema = Schema.from_dict({"label": "liked", "weight": "counts", "ids": ["item"]})

    def losses(config: LossConfig) -> Tensor:
        return model.logits_and_losses(weighted, TaskLosses(schema, config, model))[1]

    torch.testing.assert_close(losses(LossConfig()), plain * weights)
    torch.testing.assert_close(losses(LossConfig({"liked": 3.0})), plain * weights * 3)
    divided = losses(LossConfig({"liked": 3.0}, "weights"))
    torch.testing.assert_close(divided, plain * weights * 3 * len(batch) / 6.5)


def test_options_that_contradict_what_the_schema_draws_are_refused() -> None:
    message = r"'others' is drawn against 'item' .`negatives_of`., but the option `item` is \['user'\]"
    with pytest.raises(ConfigError, match=message):
        make_model("two_tower", TABLES, item=["user"])
    for given in ("", "history"):
        with pytest.raises(ConfigError, match=f"draws 'others', which .* option `negatives` is '{given}'"):
            make_model("two_tower", TABLES, negatives=given)
    assert make_model("two_tower", TABLES, item=["item"], negatives="others").item == ("item",)
