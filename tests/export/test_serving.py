"""A folder to serve from gives the logits of the trained model, or there is no folder."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from served_models import SMALL, serve, train
from torch import nn

from rowhaul.data.schema import Schema
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.export.serving import folder as exporting
from rowhaul.export.serving.dense import export_dense
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig
from rowhaul.nn.batch_norm import BatchNorm1d
from rowhaul.nn.layers import LayerFactory
from rowhaul.nn.models import RecommendationModel
from rowhaul.serve import Scorer
from rowhaul.serve.dense import OnnxGraph, TorchGraph


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("model", list(SMALL))
def test_every_model_is_exported_both_ways(model, precision, tmp_path, log_folder, log_schema):
    run = train(tmp_path / "run", log_folder, log_schema, model, precision=precision)
    made = serve(run, tmp_path / "served", dense=("onnx", "pt2"))
    assert made.comparison.is_real
    assert made.comparison.num_samples == 4096
    assert made.comparison.num_unseen > 100
    has_kernels = model == "dlrm" and precision == "float32"
    assert set(made.comparison.differences) == {"onnx", "pt2"} | ({"dots"} if has_kernels else set())
    assert max(made.comparison.differences.values()) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("model", list(SMALL))
def test_models_without_numbers_are_exported(model, tmp_path, log_folder):
    schema = Schema.from_dict({"label": "click", "ids": ["user", "item", "tags"]})
    run = train(tmp_path / "run", log_folder, schema, model)
    made = serve(run, tmp_path / "served", dense=("onnx", "pt2"))
    assert max(made.comparison.differences.values()) <= 1e-5
    assert len(Scorer(tmp_path / "served").score({"user": 1}, [{"item": "a", "tags": [1]}])) == 1


class Normalised(RecommendationModel):
    """A model with everything that acts differently in training."""

    def __init__(self, collection, num_dense):
        super().__init__(collection, num_dense)
        layers = LayerFactory(0)
        self.norm = BatchNorm1d(sum(self.widths) + num_dense)
        self.deep = layers.mlp(sum(self.widths) + num_dense, (8,), dropout=0.5)
        self.out = layers.linear(8, 1)

    def logits(self, pooled, dense, index):
        inputs = self.norm(torch.cat([pooled, dense], dim=1))
        return self.out(self.deep(inputs, index)).squeeze(1)


@pytest.mark.parametrize("kind", ["pt2", pytest.param("onnx", marks=pytest.mark.slow)])
def test_batch_norm_and_dropout_are_as_in_evaluation(kind, tmp_path):
    tables = [EmbeddingBagConfig(embedding_dim=3, name=name, feature_names=[name]) for name in ("a", "b")]
    model = Normalised(EmbeddingBagCollection(tables), 2)
    with torch.no_grad():
        for _ in range(5):  # running statistics that are not those of the beginning
            model.norm(torch.randn(50, 8) * 3 + 1)
    assert model.training
    export_dense(model, kind, tmp_path / "dense")
    assert model.training
    model.eval()
    graph = OnnxGraph(tmp_path / "dense", True, 1) if kind == "onnx" else TorchGraph(tmp_path / "dense", True)
    for num_samples in (1, 7, 500):
        pooled, numbers = torch.randn(num_samples, 6), torch.randn(num_samples, 2)
        expected = model.logits(pooled, numbers, torch.arange(num_samples)).detach().numpy()
        assert np.abs(graph(pooled.numpy(), numbers.numpy()) - expected).max() < 1e-5


def test_an_export_that_scores_otherwise_is_not_kept(served_run, tmp_path, monkeypatch):
    def export_wrongly(model, kind, path):
        with torch.no_grad():
            bias = next(one for one in reversed(list(model.modules())) if isinstance(one, nn.Linear)).bias
            bias += 0.01
            export_dense(model, kind, path)
            bias -= 0.01

    monkeypatch.setattr(exporting, "export_dense", export_wrongly)
    with pytest.raises(CheckpointError, match=r"\(pt2\) does not give the logits of .*nothing was kept"):
        serve(served_run[0], tmp_path / "served", dense=("pt2",))
    assert list(tmp_path.iterdir()) == []


def test_rows_that_are_lost_are_noticed(served_run, tmp_path, monkeypatch):
    plain = exporting.write_rows

    def write_other_rows(reader, tables, unknown, *others):
        return plain(reader, tables, replace(unknown, seed=unknown.seed + 1), *others)

    monkeypatch.setattr(exporting, "write_rows", write_other_rows)
    with pytest.raises(CheckpointError, match="does not give the logits"):
        serve(served_run[0], tmp_path / "served", dense=("pt2",))


def test_samples_are_made_where_the_data_is_gone(served_run, tmp_path):
    shutil.copytree(served_run[0], tmp_path / "run")
    (tmp_path / "run" / "data.yaml").unlink()
    made = serve(tmp_path / "run", tmp_path / "served", dense=("pt2",))
    assert not made.comparison.is_real
    assert made.comparison.num_samples == 4096
    assert json.loads((made.path / "served.json").read_text())["compared"]["samples"] == 4096


def test_bad_requests_say_what_to_change(served_run, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="--dense 'torchscript' is not known; choose onnx or pt2"):
        serve(served_run[0], tmp_path / "served", dense=("torchscript",))
    with pytest.raises(ConfigError, match="exists and is not empty"):
        serve(served_run[0], served_run[1])
    monkeypatch.setattr("rowhaul.export.serving.dense.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--dense onnx needs ONNX: pip install 'rowhaul\[onnx\]'"):
        serve(served_run[0], tmp_path / "served")
