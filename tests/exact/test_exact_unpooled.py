"""A cluster trains unpooled rows as one process does: a model that attends over histories."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import zip_longest

import numpy as np
import pytest
import torch
from cluster_checks import check_run
from exact_cases import cases
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from in_process_cluster import run_cluster
from oracles import assert_bit_equal, assert_close, plain, replay
from training_case import Case

from rowhaul.nn import Batch, EmbeddingCollection, EmbeddingConfig, RowPrecision
from rowhaul.schedule import CacheSettings, IdBatch, RowSizes, Scheduler, ScheduleSettings, Topology
from rowhaul.schedule.plan import Kind
from rowhaul.store.tables import InitFn


def first_values(dim: int) -> InitFn:
    """Rows of the first table start as a function says, on whichever rank."""
    return lambda seed, keys: np.sin(np.add.outer(keys % 1000, np.arange(dim) + seed))


class AttentionModel(torch.nn.Module):
    """Softmax attention within every feature's rows, cut to three, then a linear layer."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        makes = [first_values(case.tables[0].embedding_dim)] if case.row_dtype == "float32" else []
        tables = [
            EmbeddingConfig(None, one.embedding_dim, one.name, case.dtype, one.feature_names, init_fn=init_fn)
            for one, init_fn in zip_longest(case.tables, makes)
        ]
        self.rows = EmbeddingCollection(
            tables, optimizer=case.optimizer, seed=case.seed, row_settings=RowPrecision(case.row_dtype)
        )
        width = sum(table.embedding_dim * len(table.feature_names) for table in tables)
        generator = torch.Generator().manual_seed(case.seed)
        self.last = torch.nn.Parameter(torch.randn(width, generator=generator, dtype=case.dtype))

    def forward(self, batch: Batch) -> torch.Tensor:
        parts = []
        for rows in self.rows(batch.ids).values():
            padded, mask = rows.to_padded_dense(3, keep="last"), rows.padding_mask(3)
            scores = padded.sum(2).masked_fill(~mask, -1e9).softmax(1) * mask
            parts.append((scores.unsqueeze(2) * padded).sum(1))
        return torch.tanh(torch.cat(parts, dim=1)) @ self.last


@dataclass(frozen=True)
class UnpooledCase(Case):
    """A case whose model reads rows one by one."""

    def model(self) -> AttentionModel:
        return AttentionModel(self)


def unpooled(case: Case) -> UnpooledCase:
    own = {field.name: getattr(case, field.name) for field in fields(Case)}
    tables = tuple(replace(table, weight_init_min=None, weight_init_max=None) for table in case.tables)
    return UnpooledCase(**{**own, "tables": tables})


@pytest.mark.parametrize(
    ("sync", "peer_to_peer"),
    [
        ("on-demand", False),
        pytest.param("on-demand", True, marks=pytest.mark.slow),
        pytest.param("full", False, marks=pytest.mark.slow),
    ],
)
@settings(max_examples=4, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(data=st.data())
def test_a_cluster_trains_what_one_process_trains(sync: str, peer_to_peer: bool, data: st.DataObject) -> None:
    """Hot rows, policies and any cache included: bit-equal to a replay, 1e-9 to whole batches."""
    case = unpooled(data.draw(cases(sync, peer_to_peer)))
    outcome = run_cluster(case)
    assert_bit_equal(case, outcome, replay(case, outcome))
    if case.dtype == torch.float64:
        assert_close(case, outcome, plain(case, outcome))
    check_run(case, outcome)


def test_a_row_moves_once_however_often_histories_name_it() -> None:
    draw = np.random.default_rng(0)
    lengths = np.array([[1] * 64, [50] * 64], np.int32)
    popular = np.minimum(draw.geometric(0.01, (20, lengths.sum())), 400)
    scheduler = Scheduler(
        ScheduleSettings(Topology(2), RowSizes((64,), (64,)), (1, 1), CacheSettings(500)),
        iter([IdBatch.from_features([0, 0], keys, lengths) for keys in popular]),
    )
    for keys in popular:
        assert scheduler.fill()
        plan = scheduler.plan()
        of_sample = np.concatenate([np.repeat(np.arange(64), each) for each in lengths])
        moved = plan.moves
        rows = {*zip(moved.kind, moved.key, moved.source, moved.target, strict=True)}
        assert len(rows) == len(moved)
        for worker in range(2):
            wanted = np.unique(keys[plan.worker[of_sample] == worker])
            pulled = moved.key[(moved.kind == Kind.MISS_PULL) & (moved.target == worker)]
            assert np.isin(pulled, wanted).all()
            assert plan.lookups[worker] == len(wanted) < (plan.worker == worker).sum() * 51 / 2


@pytest.mark.slow
@settings(max_examples=3, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(data=st.data())
def test_rows_in_few_bits_are_the_same_in_a_replay(data: st.DataObject) -> None:
    case = unpooled(data.draw(cases("on-demand", row_dtype="bfloat16")))
    outcome = run_cluster(case)
    assert_bit_equal(case, outcome, replay(case, outcome))
