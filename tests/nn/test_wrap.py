"""A wrapped model against the same model in plain PyTorch, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import rowhaul
from rowhaul.errors import ConfigError, DataError
from rowhaul.nn import RowEmbedding, RowEmbeddingBag
from rowhaul.optim import SGD, Adagrad, Adam


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


@pytest.mark.parametrize("loads_first", [True, False])  # Lightning does
def test_a_state_dict_resumes_adam_to_the_bit(loads_first: bool) -> None:
    def made(state: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = rowhaul.wrap(nn.Sequential(nn.Embedding(9, 2), nn.Linear(2, 1)), Adam(lr=0.1))
        if state is not None and loads_first:
            model.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rowhaul.step_rows_with(optimizer, model)
        if state is not None and not loads_first:
            train(model, optimizer, 2)  # forgotten by the load
            model.load_state_dict(state)
        return model, optimizer

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            (model(torch.tensor([step, 5])) - 1).square().sum().backward()
            optimizer.step()

    (straight, ours), (first, theirs) = made(), made()
    train(straight, ours, 3)
    train(first, theirs, 3)
    state = first.state_dict()
    resumed, theirs = made(state)
    train(straight, ours, 4)
    train(resumed, theirs, 4)
    torch.testing.assert_close(resumed.state_dict(), straight.state_dict(), atol=0, rtol=0)
    del state["0.rows.steps"]  # as version 0.1 saved it
    resumed.load_state_dict(state)


def test_named_modules_alone_are_replaced_and_meta_ones_start_fresh() -> None:
    model = nn.ModuleDict({"large": nn.Embedding(10**12, 4, device="meta"), "small": nn.Embedding(3, 4)})
    model["frozen"] = nn.Embedding.from_pretrained(torch.ones(3, 4))
    rowhaul.wrap(model, modules=["large", "frozen"])
    assert isinstance(model["small"], nn.Embedding)
    assert model["large"](torch.tensor([[10**11, 5]])).shape == (1, 2, 4)
    assert model["large"].rows.num_rows("large") == 2
    assert model["large"].embedding_dim == 4
    assert not model["frozen"](torch.tensor([1])).requires_grad


def test_weights_of_a_frozen_table_get_their_gradients() -> None:
    plain = nn.Sequential(nn.EmbeddingBag(5, 2, mode="sum"))
    plain[0].weight.requires_grad_(False)
    wrapped = rowhaul.wrap(copy.deepcopy(plain))
    found = []
    for model in (plain, wrapped):
        weights = torch.ones(1, 3, requires_grad=True)
        model[0](torch.tensor([[1, 2, 4]]), per_sample_weights=weights).square().sum().backward()
        found.append(weights.grad)
    torch.testing.assert_close(*found)


def test_rows_stay_as_they_are_while_their_module_requires_no_gradient() -> None:
    model = rowhaul.wrap(
        nn.Sequential(nn.Embedding(3, 2), nn.EmbeddingBag(3, 2), nn.Linear(2, 1)), SGD(lr=0.1)
    )
    rows = rowhaul.nn.RowOptimizer(model)

    def changed() -> list[bool]:
        before = copy.deepcopy(model.state_dict())
        for part in (model[0], model[1]):
            model[2](part(torch.tensor([[1, 2]]))).sum().backward()
        rows.step()
        after = model.state_dict()
        return [not torch.equal(after[name], before[name]) for name in before if name.endswith("records")]

    assert changed() == [True, True]
    assert model[0].requires_grad_(False) is model[0]
    assert changed() == [False, True]
    model[0].requires_grad_()
    model[1].requires_grad_(False)
    assert changed() == [True, False]


def test_tables_alone_learn_by_their_own_optimizer_and_in_training_alone() -> None:
    model = rowhaul.wrap(nn.Sequential(nn.Embedding(5, 2)), SGD(lr=0.5))
    assert not list(model.parameters())
    rows, ids = rowhaul.nn.RowOptimizer(model), torch.tensor([1, 4])
    model(ids).square().sum().backward()
    rows.step()
    assert not model(ids).any()  # one step of this rate to the minimum
    assert not model.eval()(ids).requires_grad


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_rows_frozen_before_wrapping_are_not_unfrozen_in_silence(kind: Any) -> None:
    model = nn.Sequential(kind(3, 2))
    model[0].weight.requires_grad_(False)
    rowhaul.wrap(model)
    with pytest.raises(ConfigError, match=r"table '0' was frozen when it was wrapped.*before rowhaul.wrap"):
        model[0].requires_grad_()
    assert model[0].requires_grad_(False) is model[0]


@pytest.mark.parametrize("bags", [False, True])
def test_another_type_is_refused_after_wrapping_and_another_device_is_not(bags: bool) -> None:
    model = rowhaul.wrap(nn.Sequential(nn.EmbeddingBag(3, 2) if bags else nn.Embedding(3, 2, padding_idx=0)))
    for convert in (nn.Module.double, nn.Module.half, lambda module: module.to(torch.bfloat16)):
        with pytest.raises(ConfigError, match=r"are torch.float32 and cannot become .* make the model anew"):
            convert(model)
    assert model.float()(torch.tensor([[1, 2]])).dtype == torch.float32
    assert model.to("meta")(torch.tensor([[1, 2]])).device.type == "meta"


class Scaled(nn.Embedding):
    """Computes more than a row."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_modules_that_do_more_than_read_rows_are_refused_by_name() -> None:
    table = nn.Embedding(3, 2)
    replaced: dict[str, nn.Module] = {name: copy.deepcopy(table) for name in ("forward", "weight", "module")}
    vars(replaced["forward"])["forward"] = Scaled(3, 2).forward  # as Accelerate's hooks do
    replaced["weight"].get_parameter("weight").register_hook(lambda gradient: 2 * gradient)
    replaced["module"].register_forward_hook(lambda module, given, found: 2 * found)
    replaced["backward"] = copy.deepcopy(table)
    replaced["backward"].register_full_backward_pre_hook(lambda module, gradients: None)
    refused = {
        r"'one' has a forward of its own \(Scaled\).*leave it out": [Scaled(3, 2)],
        r"'one' has a forward of its own \(Embedding\)": [replaced["forward"]],
        "'one' has hooks": [replaced["weight"], replaced["module"], replaced["backward"]],
        "'one' has a parametrization": [weight_norm(nn.EmbeddingBag(3, 2))],
    }
    for reason, modules in refused.items():
        for module in modules:
            with pytest.raises(ConfigError, match=reason):
                rowhaul.wrap(nn.ModuleDict({"one": module}))


def test_a_subclass_with_the_same_forward_is_replaced() -> None:
    class Named(nn.Embedding):
        pass

    assert isinstance(rowhaul.wrap(nn.Sequential(Named(3, 2)))[0], RowEmbedding)


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


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_is_refused_before_anything_steps(fused: bool) -> None:
    model = rowhaul.wrap(nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1)), SGD(lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    rowhaul.step_rows_with(optimizer, model)
    before = copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.tensor([1])).sum()).backward()
    with pytest.raises(ConfigError, match=r"unscales .* weights alone.*bfloat16"):
        scaler.step(optimizer)
    torch.testing.assert_close(model.state_dict(), before, atol=0, rtol=0)
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    assert not torch.equal(model.state_dict()["0.rows.0.records"], before["0.rows.0.records"])


def test_lbfgs_is_refused_before_anything_steps() -> None:
    model = rowhaul.wrap(nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1)))
    with pytest.raises(ConfigError, match=r"LBFGS\) needs the loss of a batch several times a step"):
        rowhaul.step_rows_with(torch.optim.LBFGS(model.parameters()), model)


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("offsets", [[1, 2], [0, 3], [0, 2, 1, 4]])
def test_offsets_that_do_not_cover_the_ids_are_refused(offsets: list[int], padding: int | None) -> None:
    bags = nn.EmbeddingBag(5, 2, mode="sum", include_last_offset=True, padding_idx=padding)
    model = rowhaul.wrap(nn.Sequential(bags))
    with pytest.raises(DataError, match=r"begin with 0, end with the number of ids, 4 and never fall"):
        model[0](torch.tensor([1, 0, 2, 3]), torch.tensor(offsets))
