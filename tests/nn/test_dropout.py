from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rowhaul.errors import ConfigError
from rowhaul.nn.dropout import SampleDropout

COLUMNS = 33  # odd: hashes decide columns in pairs


def kept(
    index: torch.Tensor, p: float = 0.5, seed: int = 0, layer: int = 0, columns: int = COLUMNS
) -> torch.Tensor:
    return SampleDropout(p, seed, layer)(torch.ones(len(index), columns), index) != 0


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_samples_mask_does_not_depend_on_its_batch_or_order() -> None:
    whole = kept(torch.arange(1000))
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(kept(order), whole[order])
    assert torch.equal(torch.cat([kept(torch.arange(300)), kept(torch.arange(300, 1000))]), whole)
    assert torch.equal(kept(torch.tensor([17])), whole[17:18])


def test_a_columns_mask_does_not_depend_on_the_number_of_columns() -> None:
    assert torch.equal(kept(torch.arange(50), columns=8), kept(torch.arange(50), columns=33)[:, :8])


@pytest.mark.usefixtures("restored_threads")
def test_masks_do_not_depend_on_the_number_of_threads() -> None:
    masks = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        masks.append(kept(torch.arange(2000), columns=64))
    assert torch.equal(masks[0], masks[1])


def reference_hash(seed: int, layer: int, index: int, pair: int) -> int:
    def mixed(bits: int) -> int:
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) % 2**64
        return bits ^ (bits >> 31)

    golden = 0x9E3779B97F4A7C15
    stream = mixed((mixed(seed % 2**64) + layer) % 2**64)
    sample = mixed((index * golden + stream) % 2**64)
    return mixed((sample + mixed(pair * golden % 2**64)) % 2**64)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_follow_the_hash_in_unbounded_integers(p: float) -> None:
    index = torch.tensor([0, 5, 123_456_789_012, 2**62])
    mask = kept(index, p, seed=-4, layer=7)
    for row, sample in zip(mask, index.tolist(), strict=True):
        for column in range(COLUMNS):
            bits = reference_hash(-4, 7, sample, column // 2) >> (32 * (column % 2)) & 0xFFFFFFFF
            signed = bits - 2**32 if bits >= 2**31 else bits
            assert bool(row[column]) == (signed + 2**31 >= round(p * 2**32))


@pytest.mark.parametrize("p", [0.05, 0.5, 0.8])
def test_rate_is_right_overall_by_column_and_by_sample(p: float) -> None:
    dropped = (~kept(torch.arange(4000), p, columns=200)).double()
    deviation = (p * (1 - p)) ** 0.5
    assert abs(dropped.mean().item() - p) < 5 * deviation / 800_000**0.5
    assert (dropped.mean(0) - p).abs().max() < 5 * deviation / 4000**0.5
    assert (dropped.mean(1) - p).abs().max() < 5 * deviation / 200**0.5


def test_samples_and_columns_are_independent() -> None:
    signs = kept(torch.arange(2000), columns=100).double() * 2 - 1
    for matrix, draws in ((signs, 2000), (signs.T[:, :500], 100)):
        correlation = matrix.T @ matrix / draws
        correlation.fill_diagonal_(0)
        assert correlation.abs().max() < 6 / draws**0.5


@pytest.mark.parametrize("other", [{"seed": 1}, {"layer": 1}, {"index": 100_000}])
def test_other_seeds_layers_and_epochs_give_unrelated_masks(other: dict[str, int]) -> None:
    index = torch.arange(2000)
    first = kept(index)
    later = kept(index + other.pop("index", 0), **other)
    agreement = (first == later).double().mean().item()
    assert abs(agreement - 0.5) < 5 * 0.5 / first.numel() ** 0.5


def test_kept_entries_are_scaled_and_gradients_follow_the_mask() -> None:
    x = torch.full((8, 6), 3.0, dtype=torch.float64, requires_grad=True)
    out = SampleDropout(0.25, seed=0, layer=0)(x, torch.arange(8))
    assert sorted(set(out.flatten().tolist())) == [0.0, 3.0 * (1 / 0.75)]
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad * 3, out)


def test_nothing_happens_in_evaluation_or_at_rate_zero() -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert SampleDropout(0.9, 0, 0).eval()(x, torch.arange(4)) is x
    assert SampleDropout(0.0, 0, 0)(x, torch.arange(4)) is x


def test_no_samples() -> None:
    assert SampleDropout(0.5, 0, 0)(torch.ones(0, 5), torch.arange(0)).shape == (0, 5)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    kept(torch.arange(10))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_an_accelerator_gives_the_same_bits() -> None:
    index = torch.arange(5000) * 12_345_678_901
    on_device = SampleDropout(0.3, 1, 2)(torch.ones(5000, COLUMNS, device="cuda"), index.cuda())
    assert torch.equal(on_device.cpu(), SampleDropout(0.3, 1, 2)(torch.ones(5000, COLUMNS), index))


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5])
def test_a_rate_that_is_no_probability_below_one_is_refused(p: float) -> None:
    with pytest.raises(ConfigError, match=f"at least 0 and below 1, got {p}"):
        SampleDropout(p, 0, 0)
