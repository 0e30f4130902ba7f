from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rowhaul.nn.layers import LayerFactory, PairwiseDots, split_linear_column


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_an_mlp_is_linear_relu_by_layer() -> None:
    mlp = LayerFactory(0).mlp(3, (4, 2)).double()
    x = noise(5, 3)
    expected = x
    for linear in mlp.linears:
        expected = (expected @ linear.weight.T + linear.bias).clamp(min=0)
    assert torch.equal(mlp(x, torch.arange(5)), expected)
    assert [tuple(linear.weight.shape) for linear in mlp.linears] == [(4, 3), (2, 4)]


def test_an_mlp_without_layers_passes_its_input_through() -> None:
    x = noise(5, 3)
    assert LayerFactory(0).mlp(3, ())(x, torch.arange(5)) is x


def test_each_layer_has_its_own_dropout() -> None:
    layers = LayerFactory(seed=9)
    dropouts = [*layers.mlp(3, (4, 4), 0.5).dropouts, *layers.mlp(3, (4,), 0.5).dropouts]
    assert [dropout.layer for dropout in dropouts] == [0, 1, 2]
    assert {dropout.seed for dropout in dropouts} == {9}


def test_weights_come_from_the_seed_alone() -> None:
    def made(seed: int) -> Tensor:
        return torch.cat(
            [parameter.flatten() for parameter in LayerFactory(seed).mlp(7, (5, 3)).parameters()]
        )

    before = torch.get_rng_state()
    first = made(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, made(1))
    assert not torch.equal(first, made(2))


def test_weights_have_glorots_scale_and_biases_are_zero() -> None:
    linear = LayerFactory(0).linear(300, 100)
    bound = (6 / 400) ** 0.5
    assert linear.weight.abs().max() <= bound
    assert abs(linear.weight.std().item() - bound / 3**0.5) < 0.01 * bound
    assert linear.bias.abs().sum() == 0
    assert linear.weight.device.type == linear.bias.device.type == "cpu"


@pytest.mark.parametrize(("samples", "vectors", "dim"), [(3, 4, 2), (2, 2, 5), (0, 3, 2), (2, 1, 3)])
def test_pairwise_dots_are_the_lower_triangle(samples: int, vectors: int, dim: int) -> None:
    layer = PairwiseDots(vectors)
    given = noise(samples, vectors, dim).requires_grad_()
    pairs = [(i, j) for i in range(vectors) for j in range(i)]
    dots = layer(given)
    assert dots.shape == (samples, len(pairs)) == (samples, layer.num_pairs)
    for sample in range(samples):
        for position, (i, j) in enumerate(pairs):
            expected = sum(given[sample, i, k].item() * given[sample, j, k].item() for k in range(dim))
            assert dots[sample, position].item() == pytest.approx(expected, rel=1e-12)


def test_pairwise_dots_have_the_right_gradient() -> None:
    assert torch.autograd.gradcheck(PairwiseDots(4), (noise(3, 4, 2).requires_grad_(),))


@pytest.mark.parametrize("widths", [(3, 3), (2, 4, 3), (2,)])
@pytest.mark.parametrize("samples", [0, 2])
def test_the_last_column_of_each_feature_is_split_off(widths: tuple[int, ...], samples: int) -> None:
    pooled = noise(samples, sum(widths)).requires_grad_()
    embeddings, linear = split_linear_column(pooled, widths)
    ends = [sum(widths[: position + 1]) for position in range(len(widths))]
    last = [end - 1 for end in ends]
    others = [column for column in range(sum(widths)) if column not in last]
    assert torch.equal(embeddings, pooled[:, others])
    assert torch.equal(linear, pooled[:, last])
    (embeddings.sum() + 5 * linear.sum()).backward()
    assert pooled.grad is not None
    assert torch.equal(pooled.grad[:, last], torch.full((samples, len(widths)), 5.0, dtype=torch.float64))
