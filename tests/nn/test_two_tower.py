"""Two towers against their formula, what they refuse, and that a cluster's parts add up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_sequence_models import HISTORY, IDS, expected_loss, make_batch, make_model, perceptron, rows_of
from torch import Tensor

from rowhaul.errors import ConfigError
from rowhaul.nn import check_trainable

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
