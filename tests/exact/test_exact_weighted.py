"""A cluster trains ids with weights as one process does: each row counts as often as its weight says."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from cluster_checks import check_run
from exact_cases import cases
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from in_process_cluster import run_cluster
from oracles import assert_bit_equal, assert_close, plain, replay
from training_case import Case, TinyModel

from rowhaul.data.samples import Samples
from rowhaul.errors import DataError
from rowhaul.nn import Batch, EmbeddingBagCollection, KeyedJaggedTensor, RowPrecision
from rowhaul.planning.planner import check_samples
from rowhaul.runtime.own_samples import part_of
from rowhaul.train.distributed.samples import as_samples


@dataclass(frozen=True)
class WeightedCase(Case):
    """A case whose ids have weights, some of them 0 or below."""

    def model(self) -> TinyModel:
        model = TinyModel(self)
        model.rows = EmbeddingBagCollection(
            [replace(table, data_type=self.dtype) for table in self.tables],
            is_weighted=True,
            optimizer=self.optimizer,
            seed=self.seed,
            row_settings=RowPrecision(self.row_dtype),
        )
        return model


def weighted(case: Case) -> WeightedCase:
    own = {field.name: getattr(case, field.name) for field in fields(Case)}
    draw = np.random.default_rng(case.seed)
    batches = tuple(
        replace(one, id_weights=draw.integers(-4, 5, len(one.values)).astype(np.float32) / 3)
        for one in case.batches
    )
    return WeightedCase(**{**own, "batches": batches})


@pytest.mark.parametrize(
    ("sync", "peer_to_peer", "row_dtype"),
    [
        ("on-demand", True, "float32"),
        pytest.param("on-demand", False, "float32", marks=pytest.mark.slow),
        pytest.param("full", False, "float32", marks=pytest.mark.slow),
        pytest.param("static", False, "float32", marks=pytest.mark.slow),
        pytest.param("on-demand", False, "bfloat16", marks=pytest.mark.slow),
    ],
)
@settings(max_examples=2, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(data=st.data())
def test_a_cluster_trains_what_one_process_trains(
    sync: str, peer_to_peer: bool, row_dtype: str, data: st.DataObject
) -> None:
    case = weighted(data.draw(cases(sync, peer_to_peer, row_dtype=row_dtype)))
    outcome = run_cluster(case)
    assert_bit_equal(case, outcome, replay(case, outcome))
    if case.dtype == torch.float64:
        assert_close(case, outcome, plain(case, outcome))
    check_run(case, outcome)


def batch_of(weights: torch.Tensor) -> Batch:
    lengths = torch.tensor([2, 0, 1, 1, 3, 0])
    ids = KeyedJaggedTensor(["a", "b"], torch.arange(7), weights, lengths, stride=3)
    return Batch(torch.zeros(3, 1), ids, None, torch.arange(3), 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_go_with_their_ids(dtype: torch.dtype) -> None:
    given = batch_of(torch.arange(7, dtype=dtype) / 3)
    samples = as_samples(given)
    worker = np.array([0, 1, 0], np.int32)
    for part in (samples.take(np.array([0, 2])), part_of(samples, worker, 0)):
        assert part.values.tolist() == [0, 1, 2, 3]
        ids = Batch.from_samples(part).ids
        assert torch.equal(ids.weights(), ids.values().to(dtype) / 3)


def test_weights_that_do_not_fit_or_are_learned_are_refused() -> None:
    with pytest.raises(DataError, match="compute them in the model"):
        as_samples(batch_of(torch.zeros(7, requires_grad=True)))
    samples: Samples = as_samples(batch_of(torch.zeros(7)))
    with pytest.raises(DataError, match="7 ids need as many weights"):
        check_samples(replace(samples, id_weights=np.zeros(6)))
