"""A wrapped model against the same model in plain PyTorch, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowhaul
from rowhaul.errors import ConfigError
from rowhaul.nn import RowEmbedding, RowEmbeddingBag
from rowhaul.optim import SGD, Adagrad


class Clicks(nn.Module):
    """Ids of one and two dimensions, bags by offsets, by rows and with weights, padding, one table twice."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(20, 4)
        self.part = nn.ModuleDict({"history": nn.Embedding(30, 4, padding_idx=0)})
        self.words = nn.EmbeddingBag(30, 3, mode="mean", padding_idx=2, sparse=True)
        self.tags = nn.EmbeddingBag(30, 3, mode="sum", include_last_offset=True)
        self.again = self.user
        self.top = nn.Linear(4 + 4 + 3 + 3 + 4, 1)

    def forward(self, user: Tensor, history: Tensor, words: Tensor, tags: Tensor, weights: Tensor) -> Any:
        offsets = torch.tensor([0, 2, 2, len(tags)])
        parts = [
            self.user(user),
            self.part["history"](history).mean(1),
            self.words(words),
            self.tags(tags, offsets, per_sample_weights=weights),
            self.again((user + 1) % 20),
        ]
        return self.top(torch.cat(parts, dim=1)).squeeze(1)


def batch(generator: torch.Generator) -> tuple[Tensor, ...]:
    def ids(*shape: int) -> Tensor:
        return torch.randint(20, shape, generator=generator)

    weights = torch.rand(5, generator=generator, dtype=torch.float64)
    return ids(3), ids(3, 6), ids(3, 4), ids(5), weights


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch.optim.Adagrad, about itself
@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (SGD(lr=0.3), lambda model: torch.optim.SGD(model.parameters(), lr=0.3)),
        (Adagrad(lr=0.3), lambda model: torch.optim.Adagrad(model.parameters(), lr=0.3)),
    ],
    ids=["sgd", "adagrad"],
)
def test_learns_what_plain_pytorch_does(rule: Any, make: Any) -> None:
    torch.manual_seed(0)
    plain = Clicks().double()
    wrapped = rowhaul.wrap(copy.deepcopy(plain), rule)
    assert [name for name, _ in wrapped.named_parameters()] == ["top.weight", "top.bias"]
    assert wrapped.again is wrapped.user
    theirs, ours = make(plain), make(wrapped)
    rowhaul.step_rows_with(ours, wrapped)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        given = batch(generator)
        losses = []
        for model, optimizer in ((plain, theirs), (wrapped, ours)):
            loss = (model(*given) - 1).square().mean()
            loss.backward()
            losses.append(loss.item())
            if step != 2:  # two batches accumulate
                optimizer.step()
                optimizer.zero_grad()
        assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    for name, module in wrapped.named_modules():
        if isinstance(module, RowEmbedding | RowEmbeddingBag):
            weight = plain.get_submodule(name).weight
            for keys, records in module.rows.rows(name):
                torch.testing.assert_close(
                    torch.from_numpy(records[:, : weight.shape[1]].copy()),
                    weight[keys].detach(),
                    atol=1e-12,
                    rtol=0,
                )
    torch.testing.assert_close(wrapped.top.weight, plain.top.weight, atol=1e-12, rtol=0)
    other = rowhaul.wrap(Clicks().double(), rule)
    other.load_state_dict(wrapped.state_dict())
    given = batch(generator)
    assert torch.equal(other.eval()(*given), wrapped.eval()(*given))


def test_named_modules_alone_are_replaced_and_meta_ones_start_fresh() -> None:
    model = nn.ModuleDict({"large": nn.Embedding(10**12, 4, device="meta"), "small": nn.Embedding(3, 4)})
    model["frozen"] = nn.Embedding.from_pretrained(torch.ones(3, 4))
    rowhaul.wrap(model, modules=["large", "frozen"])
    assert isinstance(model["small"], nn.Embedding)
    assert model["large"](torch.tensor([[10**11, 5]])).shape == (1, 2, 4)
    assert model["large"].rows.num_rows("large") == 2
    assert model["large"].embedding_dim == 4
    assert not model["frozen"](torch.tensor([1])).requires_grad


def test_refusals_say_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"has no nn.Embedding"):
        rowhaul.wrap(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match="is itself an Embedding"):
        rowhaul.wrap(nn.Embedding(3, 2))
    with pytest.raises(ConfigError, match=r"'usr' is not there .did you mean 'user'"):
        rowhaul.wrap(Clicks(), modules=["usr"])
    with pytest.raises(ConfigError, match="'top' is a Linear"):
        rowhaul.wrap(Clicks(), modules=["top"])
    refused = {
        "max_norm": nn.Embedding(3, 2, max_norm=1.0),
        "scale_grad_by_freq": nn.Embedding(3, 2, scale_grad_by_freq=True),
        "summed or|sum or mean": nn.EmbeddingBag(3, 2, mode="max"),
        "float32 or float64": nn.Embedding(3, 2, dtype=torch.bfloat16),
    }
    for reason, module in refused.items():
        with pytest.raises(ConfigError, match=reason):
            rowhaul.wrap(nn.Sequential(module))
    tied = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False))
    tied[1].weight = tied[0].weight
    with pytest.raises(ConfigError, match=r"is also 1.weight"):
        rowhaul.wrap(tied)
    assert isinstance(tied[0], nn.Embedding)
    model = rowhaul.wrap(Clicks())
    with pytest.raises(ConfigError, match="in one with offsets"):
        model.words(torch.tensor([1, 2]))
    with pytest.raises(ConfigError, match="for mode='sum'"):
        model.words(torch.tensor([[1, 2]]), per_sample_weights=torch.ones(1, 2))


def test_several_processes_are_refused_at_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = rowhaul.wrap(nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rowhaul.step_rows_with(optimizer, model)
    model(torch.tensor([1])).sum().backward()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"use rowhaul.distribute"):
        optimizer.step()
