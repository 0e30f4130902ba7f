"""Request forms: what candidates share is computed once, and logits are those of the model."""

import numpy as np
import pytest
import torch

from rowhaul.errors import CheckpointError
from rowhaul.export.serving.dense import all_kinds, export_dense
from rowhaul.nn import EmbeddingBagCollection
from rowhaul.nn.models import MODELS, build_model
from rowhaul.serve.dense import NumpyGraph
from rowhaul.serve.request_forms import FORMS, SharedInputs
from slow_cases import mostly_slow

NUM_FEATURES, DIM = 5, 6
TABLES = {f"t{number}": [f"f{number}"] for number in range(NUM_FEATURES)}
SPLITS = ([], [0], [1, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4])  # features that are shared


def model_of(name, num_dense, dtype=torch.float32, **options):
    model = build_model(
        name,
        tables=TABLES,
        num_dense=num_dense,
        embedding_dim=DIM,
        make_collection=EmbeddingBagCollection,
        seed=1,
        options=options,
    )
    with torch.no_grad():
        for one in model.parameters():  # biases, too
            one.copy_(torch.randn(one.shape, generator=torch.Generator().manual_seed(one.numel())) / 4)
    return model.to(dtype).eval()


CASES = [
    ("dlrm", 3, {"bottom": [9], "top": [17, 5]}),
    ("dlrm", 0, {"top": [8]}),
    ("dlrm", 2, {"bottom": [], "top": []}),
    ("legacy", 3, {"hidden": [12, 4]}),
    ("legacy", 3, {"use_dense": False}),
    ("wide_deep", 3, {"hidden": [12]}),
    ("wide_deep", 0, {"hidden": []}),
    ("deepfm", 3, {"hidden": [12]}),
]


@pytest.mark.parametrize(("name", "num_dense", "options"), CASES)
@pytest.mark.parametrize("precision", mostly_slow(["float32", "float64"], "float32"))
def test_logits_are_those_of_the_model_whatever_is_shared(name, num_dense, options, precision, tmp_path):
    dtype = getattr(torch, precision)
    model = model_of(name, num_dense, dtype, **options)
    export_dense(model, "numpy", tmp_path / "dense.safetensors")
    graph, random = NumpyGraph(tmp_path / "dense.safetensors"), np.random.default_rng(3)
    for count in (1, 7, 40):
        for split in SPLITS:
            for shares_numbers in (False, True):
                pooled = random.normal(size=(count, sum(model.widths))).astype(precision)
                numbers = random.normal(size=(count, num_dense)).astype(precision)
                is_shared = np.isin(np.repeat(np.arange(NUM_FEATURES), model.widths), split)
                pooled[:, is_shared] = pooled[0, is_shared]
                numbers = np.repeat(numbers[:1], count, 0) if shares_numbers else numbers
                found = graph(pooled, numbers, SharedInputs(is_shared, shares_numbers))
                with torch.no_grad():
                    expected = model.logits(torch.from_numpy(pooled), torch.from_numpy(numbers), None)
                assert found.dtype == np.dtype(precision)
                assert found.shape == (count,)
                bound = 1e-5 if precision == "float32" else 1e-12
                assert np.abs(found - expected.numpy()).max() < bound, (count, split, shares_numbers)


def test_a_form_keeps_the_weights_of_few_splits(tmp_path):
    export_dense(model_of("legacy", 0, hidden=[4]), "numpy", tmp_path / "dense.safetensors")
    graph = NumpyGraph(tmp_path / "dense.safetensors")
    pooled = np.ones((2, NUM_FEATURES * DIM), np.float32)
    results = []
    for number in range(100):
        is_shared = np.array([number >> (place % 7) & 1 for place in range(pooled.shape[1])], np.bool_)
        results.append(graph(pooled, pooled[:, :0], SharedInputs(is_shared, True)))
    assert np.ptp(results) < 1e-5
    assert len(graph._form._top._parts) <= 32


def test_only_models_that_have_a_form_are_written_for_numpy():
    for name in FORMS:
        assert all_kinds(model_of(name, 2), ["onnx"]) == ["numpy", "onnx"]
    others = set(MODELS) - set(FORMS)
    assert "dcnv2" in others
    assert all_kinds(model_of("dcnv2", 2), ["pt2"]) == ["pt2"]


def test_damaged_weights_are_refused(tmp_path):
    path = tmp_path / "dense.safetensors"
    export_dense(model_of("dlrm", 2), "numpy", path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="is damaged"):
        NumpyGraph(path)
