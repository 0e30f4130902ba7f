"""Models of several labels, exported and scored: a score a label, as `predict` writes them."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowhaul.data.schema import Schema
from rowhaul.export.serving.folder import export_served
from rowhaul.serve import Scorer, bodies
from rowhaul.serve.scorer import Scored
from rowhaul.train import TrainConfig, train_run
from rowhaul.train.predict import predict_file
from rowhaul.train.run_folder import open_saved
from slow_cases import mostly_slow

OPTIONS = {
    "mmoe": {"hidden": [8], "tower": [4]},
    "ple": {"hidden": [8], "tower": [4]},
    "esmm": {"hidden": [8]},
}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    random = np.random.default_rng(0)
    click = random.integers(0, 2, 600)
    columns = {"liked": click, "conversion": pa.array(random.integers(0, 2, 600), mask=click == 0)}
    columns |= {"user": random.integers(0, 30, 600), "movie": random.integers(0, 90, 600)}
    path = tmp_path_factory.mktemp("data") / "both.parquet"
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("name", mostly_slow(OPTIONS))
def test_scores_are_those_of_predict(name, log, tmp_path):
    labels = ["liked", {"name": "conversion", "after": "liked"}]
    schema, run = Schema.from_dict({"labels": labels, "ids": ["user", "movie"]}), tmp_path / "run"
    model = {"name": name, "embedding_dim": 4, "options": OPTIONS[name]}
    train_run(TrainConfig.from_dict({"batch_size": 300, "model": model}), schema, log, out=run)
    export_served(open_saved(str(run)), tmp_path / "served", dense=("onnx",))  # compares the logits, too
    scorer = Scorer(tmp_path / "served")
    assert scorer.tasks == ("liked", "conversion")
    predict_file(str(run), log, tmp_path / "scores.parquet")
    expected = pq.read_table(tmp_path / "scores.parquet")
    rows = pq.read_table(log).slice(0, 50)
    scores = scorer.score({}, rows.select([column.name for column in schema.ids]))
    assert scores.shape == (50, 2)
    for place, task in enumerate(scorer.tasks):
        wanted = expected[f"score_{task}"].to_numpy()[:50]
        np.testing.assert_allclose(scores[:, place], wanted, rtol=1e-4, atol=1e-6)
    if name == "esmm":
        assert (scores[:, 1] <= scores[:, 0]).all()  # a conversion comes with a click


def test_answers_have_a_list_or_a_column_a_label():
    tasks = ("click", "sale")
    scored = Scored(np.array([[0.5, 0.25], [1.0, 0.0]], np.float32), 4, 0, step=7, tasks=tasks)
    body, _ = bodies.answer(scored, "application/json")
    assert json.loads(body) == {"scores": {"click": [0.5, 1.0], "sale": [0.25, 0.0]}, "step": 7}
    body, _ = bodies.answer(scored, bodies.ARROW)
    with pa.ipc.open_stream(body) as stream:
        assert stream.read_all().to_pydict() == {"score_click": [0.5, 1.0], "score_sale": [0.25, 0.0]}
    nothing = scored._replace(scores=scored.scores[:0])
    assert json.loads(bodies.answer(nothing, "application/json")[0])["scores"] == {"click": [], "sale": []}
