"""BatchNorm1d on several workers is torch's on the whole batch, however the samples are split."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rowhaul.errors import ConfigError, DataError
from rowhaul.nn import BatchNorm1d, convert_batch_norm, set_reducer
from rowhaul.transport.in_process import InProcessNetwork

FEATURES = 5
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@pytest.fixture(autouse=True)
def single_threaded() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def on_workers(num_workers: int, body: Callable[[int, Callable[[Tensor], None]], Any]) -> list[Any]:
    """Results of all workers, each a thread with its reducer."""
    network = InProcessNetwork(num_workers)

    def work(rank: int) -> Any:
        try:
            return body(rank, network.collective(rank).sum_in_rank_order)
        except Exception as error:
            network.fail(error)
            raise

    with ThreadPoolExecutor(num_workers) as pool:
        futures = [pool.submit(work, rank) for rank in range(num_workers)]
        return [future.result() for future in futures]


@dataclass
class Trained:
    """What some steps of a layer left: over all its samples, or over a worker's."""

    layer: nn.Module
    outputs: list[Tensor]
    input_gradients: list[Tensor]
    parameter_gradients: list[list[Tensor]]


def train(layer: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> Trained:
    """A step on each (input, weights of the loss): as many forwards and backwards."""
    result = Trained(layer, [], [], [])
    for x, loss_weights in batches:
        x = x.clone().requires_grad_()
        output = layer(x)
        (output.square() * loss_weights).sum().backward()
        assert x.grad is not None
        result.outputs.append(output.detach())
        result.input_gradients.append(x.grad)
        result.parameter_gradients.append([one.grad for one in layer.parameters() if one.grad is not None])
        layer.zero_grad()
    return result


def batches_of(
    sizes: Sequence[int], places: int | None = None, dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tail = (FEATURES,) if places is None else (FEATURES, places)

    def draw(size: int) -> Tensor:
        return torch.randn(size, *tail, generator=generator, dtype=torch.float64)

    return [((draw(size) * 3 + 2).to(dtype), draw(size).to(dtype)) for size in sizes]


def layer_like(kind: type[nn.BatchNorm1d], dtype: torch.dtype = torch.float64, **arguments: Any) -> Any:
    layer = kind(FEATURES, dtype=dtype, **arguments)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -2, 2, generator=generator)
    return layer


def train_on_workers(
    num_workers: int,
    batches: Sequence[tuple[Tensor, Tensor]],
    owners: Sequence[Tensor],
    dtype: torch.dtype = torch.float64,
    **arguments: Any,
) -> list[Trained]:
    """``owners`` says for every batch which worker has which sample."""

    def body(rank: int, reducer: Callable[[Tensor], None]) -> Trained:
        layer = layer_like(BatchNorm1d, dtype, **arguments)
        layer.reducer = reducer
        parts = [(x[owner == rank], w[owner == rank]) for (x, w), owner in zip(batches, owners, strict=True)]
        return train(layer, parts)

    return on_workers(num_workers, body)


def assert_equals_whole(
    parts: list[Trained], whole: Trained, owners: Sequence[Tensor], tolerance: float
) -> None:
    def assert_close(ours: Tensor, theirs: Tensor) -> None:
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)

    for step, owner in enumerate(owners):
        for rank, part in enumerate(parts):
            assert_close(part.outputs[step], whole.outputs[step][owner == rank])
            assert_close(part.input_gradients[step], whole.input_gradients[step][owner == rank])
        for number, gradient in enumerate(whole.parameter_gradients[step]):
            assert_close(sum(part.parameter_gradients[step][number] for part in parts), gradient)  # type: ignore[arg-type]  # sum() may be 0
    for name in STATISTICS:
        ours = [getattr(part.layer, name) for part in parts]
        theirs = getattr(whole.layer, name)
        if theirs is None:
            assert ours == [None] * len(parts)
            continue
        assert all(torch.equal(ours[0], other) for other in ours), name
        assert_close(ours[0], theirs)


@settings(max_examples=40)
@given(
    num_workers=st.integers(1, 5),
    sizes=st.lists(st.integers(2, 12), min_size=1, max_size=3),
    places=st.sampled_from([None, 1, 3]),
    momentum=st.sampled_from([0.1, 0.7, None]),
    affine=st.booleans(),
    tracks=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_workers_equal_torch_on_the_whole_batch(
    num_workers: int,
    sizes: list[int],
    places: int | None,
    momentum: float | None,
    affine: bool,
    tracks: bool,
    seed: int,
) -> None:
    batches = batches_of(sizes, places, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    owners = [torch.randint(num_workers, (size,), generator=generator) for size in sizes]
    arguments = {"momentum": momentum, "affine": affine, "track_running_stats": tracks, "eps": 1e-3}
    whole = train(layer_like(nn.BatchNorm1d, **arguments), batches)
    parts = train_on_workers(num_workers, batches, owners, **arguments)
    assert_equals_whole(parts, whole, owners, 1e-12)


def test_unequal_parts_and_a_worker_without_samples() -> None:
    batches = batches_of([10, 10])
    owners = [torch.tensor([0] * 7 + [2] * 3), torch.tensor([1] * 10)]
    whole = train(layer_like(nn.BatchNorm1d), batches)
    assert_equals_whole(train_on_workers(3, batches, owners), whole, owners, 1e-12)


def test_float32_is_as_close_to_float64_as_torch_is_even_far_from_zero() -> None:
    owners = [torch.arange(40) % 3]
    for offset in (0.0, 1e3, 1e6):
        batches = [((x + offset).float(), w.float()) for x, w in batches_of([40])]
        exact = train(layer_like(nn.BatchNorm1d), [(x.double(), w.double()) for x, w in batches])
        torchs = train(layer_like(nn.BatchNorm1d, torch.float32), batches)
        ours = train_on_workers(3, batches, owners, torch.float32)

        together = torch.empty_like(torchs.outputs[0])
        for rank, part in enumerate(ours):
            together[owners[0] == rank] = part.outputs[0]
            assert part.outputs[0].dtype == part.input_gradients[0].dtype == torch.float32
        error = (together - exact.outputs[0]).abs().max()
        assert error <= 1.5 * (torchs.outputs[0] - exact.outputs[0]).abs().max() + 1e-6
        variance = ours[0].layer.running_var
        assert isinstance(variance, Tensor)
        torch.testing.assert_close(variance.double(), exact.layer.running_var, rtol=1e-6, atol=0)  # type: ignore[arg-type]  # a buffer or None


def test_half_precision_inputs_are_normalised_in_float32() -> None:
    ((x, loss_weights),) = batches_of([40])
    half = (x.bfloat16(), loss_weights.bfloat16())
    whole = train(layer_like(nn.BatchNorm1d, torch.float32), [(half[0].float(), half[1].float())])
    (part,) = train_on_workers(1, [half], [torch.zeros(40)], torch.float32)
    assert part.outputs[0].dtype == torch.bfloat16
    assert torch.equal(part.outputs[0], whole.outputs[0].bfloat16())
    torch.testing.assert_close(part.layer.running_mean, whole.layer.running_mean)


def test_a_network_around_several_layers_trains_as_one_process() -> None:
    """Reductions of layers in branches come in one order on all workers, forward and backward."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = (
                nn.Sequential(nn.Linear(FEATURES, width), nn.BatchNorm1d(width), nn.ReLU())
                for width in (4, 6)
            )
            self.out = nn.Sequential(nn.BatchNorm1d(10), nn.Linear(10, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.cat([self.left(x), self.right(x)], 1))  # type: ignore[no-any-return]  # modules return Any

    torch.manual_seed(0)
    start = Branches().double()
    ((x, _),) = batches_of([24])
    owner = torch.arange(24) % 4 // 2 * 2  # workers 1 and 3 have nothing

    def gradients(model: nn.Module, part: Tensor) -> list[Tensor]:
        model(part).square().sum().backward()
        return [one.grad for one in model.parameters() if one.grad is not None]

    def body(rank: int, reducer: Callable[[Tensor], None]) -> list[Tensor]:
        model = convert_batch_norm(copy.deepcopy(start))
        set_reducer(model, reducer)
        return gradients(model, x[owner == rank])

    whole = gradients(copy.deepcopy(start), x)
    parts = on_workers(4, body)
    for number, expected in enumerate(whole):
        summed = sum(part[number] for part in parts)
        torch.testing.assert_close(summed, expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_parameters_alone_need_no_sum_in_backward() -> None:
    calls: list[int] = []
    layer = layer_like(BatchNorm1d)
    layer.reducer = lambda values: calls.append(values.numel())
    layer(batches_of([6])[0][0]).square().sum().backward()
    assert calls == [1 + FEATURES, FEATURES]
    assert layer.weight.grad is not None


def test_without_a_reducer_it_is_torchs_to_the_bit() -> None:
    batches = batches_of([8, 0, 3], dtype=torch.float32)
    ours, theirs = (
        train(layer_like(kind, torch.float32, momentum=None), batches)
        for kind in (BatchNorm1d, nn.BatchNorm1d)
    )
    for name in ("outputs", "input_gradients"):
        assert all(map(torch.equal, getattr(ours, name), getattr(theirs, name))), name
    assert all(torch.equal(getattr(ours.layer, name), getattr(theirs.layer, name)) for name in STATISTICS)


def test_evaluation_uses_running_statistics_and_waits_for_nobody() -> None:
    batches = batches_of([9, 9])
    trained = train(layer_like(nn.BatchNorm1d), batches[:1]).layer.eval()
    layer = layer_like(BatchNorm1d).eval()
    layer.load_state_dict(trained.state_dict())

    def unexpected(values: Tensor) -> None:
        raise AssertionError("evaluation must not sum over the workers")

    layer.reducer = unexpected
    assert torch.equal(layer(batches[1][0]), trained(batches[1][0]))
    assert layer(batches[1][0][:0]).shape == (0, FEATURES)


def test_evaluation_without_running_statistics_is_refused_on_workers_only() -> None:
    layer = layer_like(BatchNorm1d, track_running_stats=False).eval()
    ((x, _),) = batches_of([4])
    assert layer(x).shape == x.shape
    layer.reducer = lambda values: None
    with pytest.raises(ConfigError, match="use track_running_stats=True"):
        layer(x)


def test_a_global_batch_without_samples_leaves_running_statistics_as_torch_does() -> None:
    batches = batches_of([0])
    owners = [torch.zeros(0)]
    whole = train(layer_like(nn.BatchNorm1d), batches)
    assert_equals_whole(train_on_workers(2, batches, owners), whole, owners, 0)


def test_a_global_batch_of_one_sample_fails_on_every_worker() -> None:
    def body(rank: int, reducer: Callable[[Tensor], None]) -> str:
        layer = layer_like(BatchNorm1d)
        layer.reducer = reducer
        with pytest.raises(DataError, match="at least 2 samples in the global batch, got 1"):
            layer(torch.ones(1 if rank == 0 else 0, FEATURES, dtype=torch.float64))
        return "failed"

    assert on_workers(3, body) == ["failed"] * 3


@pytest.mark.parametrize("shape", [(4, FEATURES + 1), (4, FEATURES - 1, 2)])
def test_a_wrong_number_of_features_fails_before_anyone_is_waited_for(shape: tuple[int, ...]) -> None:
    layer = layer_like(BatchNorm1d)
    layer.reducer = lambda values: pytest.fail("must not reduce")
    with pytest.raises(ConfigError, match=rf"BatchNorm1d\({FEATURES}\) got .* {shape[1]} features"):
        layer(torch.zeros(shape, dtype=torch.float64))


def test_copies_and_pickles_leave_the_reducer_behind() -> None:
    layer = layer_like(BatchNorm1d)
    layer.reducer = InProcessNetwork(1).collective(0).sum_in_rank_order  # holds a lock: cannot be copied
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.reducer is None
        assert torch.equal(other.weight, layer.weight)
    assert layer.reducer is not None


def test_conversion_keeps_parameters_statistics_mode_and_sharing() -> None:
    shared = nn.BatchNorm1d(FEATURES, eps=0.5, momentum=None)
    model = nn.Sequential(shared, nn.Linear(FEATURES, FEATURES), shared, nn.BatchNorm2d(2))
    shared(torch.randn(6, FEATURES))
    shared.eval()
    parameters = [id(one) for one in model.parameters()]
    before = copy.deepcopy(model.state_dict())

    assert convert_batch_norm(model) is model
    assert isinstance(model[0], BatchNorm1d)
    assert model[0] is model[2]
    assert not model[0].training
    assert model[0].eps == 0.5
    assert model[0].momentum is None
    assert [id(one) for one in model.parameters()] == parameters
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert type(model[3]) is nn.BatchNorm2d


def test_conversion_of_a_model_that_is_one_layer_and_of_a_derived_class() -> None:
    class Own(nn.BatchNorm1d):
        pass

    assert type(convert_batch_norm(nn.BatchNorm1d(2))) is BatchNorm1d
    assert type(convert_batch_norm(Own(2))) is Own


def test_set_reducer_reaches_every_layer_and_takes_it_back() -> None:
    model = nn.Sequential(BatchNorm1d(3), nn.Sequential(BatchNorm1d(3), nn.BatchNorm1d(3)))

    def reducer(values: Tensor) -> None:
        pass

    ours = [one for one in model.modules() if isinstance(one, BatchNorm1d)]
    set_reducer(model, reducer)
    assert [one.reducer for one in ours] == [reducer, reducer]
    set_reducer(model, None)
    assert [one.reducer for one in ours] == [None, None]
