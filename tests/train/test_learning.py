"""Every model learns the generator's signal, most of the way to what no model can beat."""

import pytest

from rowhaul.data.generate.folder import generate_folder
from rowhaul.data.schema import Schema
from rowhaul.nn.models import MODELS
from rowhaul.train import TrainConfig, train_run
from rowhaul.train.config import ModelConfig, OptimizerConfig
from slow_cases import mostly_slow

NUM_ROWS = 60_000


@pytest.fixture(scope="module", params=["criteo", "movielens"])
def log(request, tmp_path_factory):
    """A generated log's folder, its schema and the best AUC that is possible on it."""
    folder = tmp_path_factory.mktemp("learning") / request.param
    best = generate_folder(request.param, NUM_ROWS, folder, test_share=0.2)
    return folder, Schema.read(folder / "schema.yaml"), best["auc"]


# Models of one label and any features; the others learn from logs of their own elsewhere.
GENERAL = [name for name, kind in MODELS.items() if kind.is_pooled and kind.least_tasks == 1]


@pytest.mark.parametrize("name", mostly_slow(GENERAL, "dlrm"))
def test_a_model_learns_most_of_what_there_is(name, log):
    folder, schema, best = log
    config = TrainConfig(
        model=ModelConfig(name, embedding_dim=8),
        rows=OptimizerConfig("rowwise_adagrad", 0.05),
        batch_size=256,
    )
    auc = train_run(config, schema, folder, eval_data=folder / "test").metrics.auc
    learned = (auc - 0.5) / (best - 0.5)
    assert learned > 0.6
