"""States of `torch.distributed.checkpoint` whose groups have no tensors."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from rowhaul import EmbeddingBagCollection, EmbeddingBagConfig
from rowhaul.checkpoint.dcp import DcpReader, StateShard, manifest
from rowhaul.errors import CheckpointError
from rowhaul.train.distributed.dcp import load_dcp
from rowhaul.train.distributed.own_loop import LoopState
from rowhaul.train.snapshot import save_dense

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed")


def model_of(num_outputs):
    tables = [EmbeddingBagConfig(embedding_dim=2, name="items", feature_names=["item"])]
    top = nn.Linear(2, num_outputs) if num_outputs else nn.Identity()
    return nn.Sequential(EmbeddingBagCollection(tables), top)


def optimizer_of(model, rate):
    return torch.optim.SGD([*model.parameters()] or [torch.zeros(1)], lr=rate)


@pytest.mark.parametrize("num_outputs", [0, 3])
def test_models_without_weights_and_optimizers_without_state_are_loaded(num_outputs, tmp_path):
    model, other = model_of(num_outputs), model_of(num_outputs)
    found = {}
    shard = StateShard("", found)
    facts = save_dense(LoopState(model, optimizer_of(model, 0.5), step=3, samples=7), shard)
    shard.table("items", [], dim=2, state_width=1, dtype="float32")
    found["manifest"] = manifest(facts, shard.written.tables)
    dcp.save(found, checkpoint_id=tmp_path)
    optimizer = optimizer_of(other, 0.25)
    assert load_dcp(tmp_path, other, optimizer)["samples"] == 7
    assert optimizer.param_groups[0]["lr"] == 0.5
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    reader = DcpReader(tmp_path)
    assert reader.groups == ["dense-optimizer", "model", "random"]
    assert reader.tensors("dense-optimizer") == {}
    with pytest.raises(CheckpointError, match="no tensors called 'lifetimes'"):
        reader.tensors("lifetimes")
