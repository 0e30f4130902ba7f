"""Dense layers of a card against PyTorch's own operations."""

import pytest
import torch

from rowhaul.nn.layers import LayerFactory, PairwiseDots
from rowhaul.nn.models import build_model

pytest.importorskip("triton", reason="Triton is not installed: `pip install rowhaul[gpu]`")

from rowhaul.device.dots import joined_dots
from rowhaul.device.launch import runs_interpreted
from rowhaul.device.layers import linear_relu, linear_relu_in_parts

DEVICE = torch.device("cpu" if runs_interpreted() else "cuda")


def gradients_of(out, given, coefficients):
    (out * coefficients[:, : out.shape[1]]).sum().backward()
    found = [one.grad.clone() for one in given]
    for one in given:
        one.grad = None
    return found


@pytest.mark.parametrize(("num_vectors", "dim", "has_first"), [(5, 3, True), (2, 16, False), (27, 20, True)])
@pytest.mark.parametrize("pads", [True, False])
def test_dots_and_their_gradients_are_those_of_batched_products(num_vectors, dim, has_first, pads):
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(4, dim, generator=generator).to(DEVICE).requires_grad_() if has_first else None
    others = torch.randn(4, (num_vectors - has_first) * dim, generator=generator).to(DEVICE).requires_grad_()
    given = [one for one in (first, others) if one is not None]
    layer = PairwiseDots(num_vectors).to(DEVICE)
    layer.fuses = False
    expected = layer.joined(first, others)
    found = joined_dots(first, others, num_vectors, pads=pads)
    width = expected.shape[1]
    assert found.shape[1] == (-(-width // 4) * 4 if pads else width)
    assert not found[:, width:].any()
    torch.testing.assert_close(found[:, :width], expected, rtol=1e-5, atol=1e-5)
    coefficients = torch.randn(found.shape, generator=generator).to(DEVICE)
    for one, two in zip(
        gradients_of(found, given, coefficients), gradients_of(expected, given, coefficients), strict=True
    ):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_vectors_that_are_too_many_or_too_long_are_left_to_others():
    assert joined_dots(None, torch.zeros(2, 65, device=DEVICE), 65, pads=False) is None
    assert joined_dots(None, torch.zeros(2, 258, device=DEVICE), 2, pads=False) is None


@pytest.mark.parametrize(("samples", "columns"), [(3, 5), (300, 3), (0, 4)])
def test_a_layer_with_relu_is_a_linear_layer_and_relu(samples, columns):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(samples, columns, generator=generator).to(DEVICE).requires_grad_()
    layer = LayerFactory(3).linear(columns, 130).to(DEVICE)
    given = [x, layer.weight, layer.bias]
    expected, found = torch.relu(layer(x)), linear_relu(x, layer.weight, layer.bias)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    coefficients = torch.randn(found.shape, generator=generator).to(DEVICE)
    for one, two in zip(
        gradients_of(found, given, coefficients), gradients_of(expected, given, coefficients), strict=True
    ):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("samples", [40] if runs_interpreted() else [40, 3000])
def test_products_in_parts_have_a_few_times_the_error_of_float32_at_most(samples):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 368, generator=generator).to(DEVICE).requires_grad_()
    layer = LayerFactory(3).linear(367, 132).to(DEVICE)  # the last column of x is beyond it
    given = [x, layer.weight, layer.bias]
    coefficients = torch.randn(samples, 132, generator=generator).to(DEVICE)
    exact = [one.detach().double().requires_grad_() for one in given]
    out = torch.relu(exact[0][:, :367] @ exact[1].t() + exact[2])
    expected = [out.detach(), *gradients_of(out, exact, coefficients.double())]
    plain = torch.relu(layer(x[:, :367]))
    plain = [plain.detach(), *gradients_of(plain, given, coefficients)]
    found = linear_relu_in_parts(x, *given[1:])
    found = [found.detach(), *gradients_of(found, given, coefficients)]
    for one, two, three in zip(found, plain, expected, strict=True):
        # Measured on an H200: 2.6 times. TF32 has a thousand times.
        assert relative(one, three) < max(4 * relative(two, three), 1e-6)


def test_columns_of_zeros_behind_the_input_change_nothing():
    layer = LayerFactory(3).linear(5, 7).to(DEVICE)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    wider = torch.nn.functional.pad(x, (0, 3))
    found = linear_relu(wider, layer.weight, layer.bias)
    torch.testing.assert_close(found, torch.relu(layer(x)), rtol=1e-5, atol=1e-6)
    found.sum().backward()
    assert layer.weight.grad.shape == layer.weight.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("num_dense", [3, 0])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dlrm", {"bottom": [8], "top": [40, 20]}),
        ("dlrm", {"bottom": [8], "top": []}),
        ("dcnv2", {"hidden": [20]}),
        ("dcnv2", {"hidden": [20], "structure": "parallel"}),
    ],
)
def test_a_model_on_a_card_scores_and_learns_as_without_its_kernels(name, options, num_dense):
    from rowhaul.nn import EmbeddingBagCollection

    model = build_model(
        name, tables={f"C{n}": [f"C{n}"] for n in range(5)}, num_dense=num_dense, embedding_dim=6,
        make_collection=EmbeddingBagCollection, seed=0, options=options,
    ).cuda()  # fmt: skip
    generator = torch.Generator().manual_seed(6)
    pooled = torch.randn(50, 30, generator=generator).cuda().requires_grad_()
    dense, index = torch.randn(50, num_dense, generator=generator).cuda(), torch.arange(50, device="cuda")
    found = []
    for fuses in (True, False):
        for one in model.modules():
            if hasattr(one, "fuses"):
                one.fuses = fuses
        logits = model.logits(pooled, dense, index)
        logits.square().sum().backward()
        parameters = [one for one in model.parameters() if one.grad is not None]
        found.append([logits.detach(), pooled.grad, *(one.grad for one in parameters)])
        pooled.grad = None
        model.zero_grad()
    assert len(found[0]) > 3
    for one, two in zip(*found, strict=True):
        # Sums of terms of either sign: their error goes by the size of the terms, not of the sum.
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5 * max(1.0, float(two.abs().max())))
