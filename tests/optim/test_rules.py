"""Row optimizers against torch.optim, and the stated semantics of rows seen rarely."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.errors import ConfigError
from rowhaul.optim import SGD, Adagrad, Adam, RowwiseAdagrad, row_optimizer
from rowhaul.store.arena import RecordArena

NUM_ROWS = 6


def arena_with(rule, values):
    arena = RecordArena(values.shape[1] + rule.state_width(values.shape[1]), values.dtype)
    records = arena.allocate(len(values))
    contents = np.full((len(values), arena.width), rule.initial_state, dtype=values.dtype)
    contents[:, : values.shape[1]] = values
    arena.write(records, contents)
    return arena, records


def run(rule, values, steps):
    """Values after a list of (touched rows, gradients) steps."""
    arena, records = arena_with(rule, values)
    for number, (touched, gradients) in enumerate(steps, start=1):
        rule.step(arena, records[touched], gradients.astype(values.dtype), rule.lr, number)
    return arena.read(records)[:, : values.shape[1]]


def run_torch(make, values, steps):
    """The same with a torch optimizer on sparse gradients."""
    weight = torch.tensor(values, requires_grad=True)
    optimizer = make([weight])
    for touched, gradients in steps:
        indices = torch.tensor(np.array(touched)).unsqueeze(0)
        with torch.sparse.check_sparse_tensor_invariants():
            weight.grad = torch.sparse_coo_tensor(indices, torch.tensor(gradients), weight.shape)
            optimizer.step()
    return weight.detach().numpy()


def random_steps(seed, dim, num_steps=8):
    generator = np.random.default_rng(seed)
    steps = []
    for _ in range(num_steps):
        touched = generator.permutation(NUM_ROWS)[: generator.integers(1, NUM_ROWS + 1)]
        steps.append((touched, generator.normal(size=(len(touched), dim))))
    return generator.normal(size=(NUM_ROWS, dim)), steps


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
        (
            Adagrad(lr=0.1, eps=1e-3, initial_accumulator_value=0.5),
            lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-3, initial_accumulator_value=0.5),
        ),
        (Adam(lr=0.1, beta1=0.8, beta2=0.9), lambda p: torch.optim.SparseAdam(p, lr=0.1, betas=(0.8, 0.9))),
    ],
    ids=["sgd", "adagrad", "adagrad-set", "adam"],
)
@given(seed=st.integers(0, 10_000), dim=st.integers(1, 9))
@settings(max_examples=25)
def test_equals_torch_on_sparse_gradients(rule, make, seed, dim):
    values, steps = random_steps(seed, dim)
    np.testing.assert_allclose(
        run(rule, values, steps), run_torch(make, values, steps), rtol=1e-10, atol=1e-12
    )


@given(seed=st.integers(0, 10_000), dim=st.integers(1, 9), decay=st.sampled_from([0.0, 0.1]))
@settings(max_examples=25)
def test_rowwise_adagrad_equals_its_formula(seed, dim, decay):
    values, steps = random_steps(seed, dim)
    rule = RowwiseAdagrad(lr=0.1, eps=1e-6, initial_accumulator_value=0.01, weight_decay=decay)
    expected, sums = values.copy(), np.full(NUM_ROWS, 0.01)
    for touched, gradients in steps:
        for row, gradient in zip(touched, gradients, strict=True):
            gradient = gradient + decay * expected[row]
            sums[row] += (gradient**2).mean()
            expected[row] -= 0.1 * gradient / (np.sqrt(sums[row]) + 1e-6)
    np.testing.assert_allclose(run(rule, values, steps), expected, rtol=1e-10)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_weight_decay_is_an_added_gradient_on_touched_rows_only(name):
    values, _ = random_steps(0, 4)
    gradients = np.full((2, 4), 0.3)
    decayed = run(row_optimizer(name, lr=0.1, weight_decay=0.2), values, [([1, 3], gradients)])
    by_hand = run(row_optimizer(name, lr=0.1), values, [([1, 3], gradients + 0.2 * values[[1, 3]])])
    np.testing.assert_allclose(decayed, by_hand, rtol=1e-12)
    np.testing.assert_array_equal(decayed[[0, 2, 4, 5]], values[[0, 2, 4, 5]])


def test_adam_corrects_by_the_global_step_not_by_the_row():
    """A row first seen at step 10 takes the step that SparseAdam takes, not a first step of its own."""
    rule, values = Adam(lr=0.1), np.ones((1, 3))
    arena, records = arena_with(rule, values)
    rule.step(arena, records, np.ones((1, 3)), 0.1, 10)
    moved = (1 - arena.read(records)[0, 0]) / 0.1
    assert moved == pytest.approx((1 - 0.9) / (1 - 0.9**10) * np.sqrt((1 - 0.999**10) / (1 - 0.999)))


@pytest.mark.parametrize("rule", [SGD(lr=0.1), Adagrad(lr=0.1), RowwiseAdagrad(lr=0.1), Adam(lr=0.1)])
def test_steps_stay_in_float32(rule):
    """Float32 records step like float32 arithmetic, not like rounded float64."""
    values, steps = random_steps(1, 5)
    narrow = run(rule, values.astype(np.float32), steps)
    assert narrow.dtype == np.float32
    np.testing.assert_allclose(narrow, run(rule, values, steps), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: row_optimizer("lamb", lr=1), "unknown row optimizer 'lamb'; known are sgd, adagrad"),
        (lambda: row_optimizer("sgd", lr=1, eps=1), "sgd: unknown setting 'eps'; known are lr, weight_decay"),
        (lambda: SGD(lr=-1), "lr must be a number of at least 0, got -1"),
        (lambda: Adagrad(lr=float("nan")), "got nan"),
        (lambda: Adam(lr=1, beta2=1.0), "below 1"),
        (lambda: Adam(lr=1, beta2=0.99999999), "below 1 in float32, got 0.9 and 0.99999999"),
        (lambda: Adam(lr=1, beta1=0.99999999), "below 1 in float32"),
        (lambda: RowwiseAdagrad(lr=1, eps=0.0), "eps must be above 0"),
        (lambda: Adagrad(lr=0.1, eps=1e-50), "eps must be above 0 in float32"),
    ],
)
def test_mistakes_are_explained(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
