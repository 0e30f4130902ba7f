"""Every model on MovieLens-1M, the last tenth in time held out, beside logistic regression.

The peer is scikit-learn's logistic regression on one-hot user, movie and genres, the usual first baseline.

    python benchmarks/movielens.py
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from scipy.sparse import csr_matrix, hstack
from sklearn.feature_extraction import FeatureHasher
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

from datasets import movielens_1m
from report import print_machine, print_table
from rowhaul.data.preparing import prepare
from rowhaul.data.schema import Schema
from rowhaul.nn.models import MODELS
from rowhaul.train import TrainConfig, train_run
from rowhaul.train.config import ModelConfig


def main() -> None:
    print_machine("scikit-learn")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "data"
        prepare(movielens_1m(), folder, "movielens")
        schema = Schema.read(folder / "schema.yaml")
        lines = [["logistic regression (scikit-learn)", *logistic_regression(folder)]]
        config = TrainConfig(batch_size=1024)
        plain = (name for name, kind in MODELS.items() if kind.is_pooled and kind.least_tasks == 1)
        for name in plain:  # no histories here, and one label
            began = time.perf_counter()
            result = train_run(
                replace(config, model=ModelConfig(name)), schema, folder, eval_data=folder / "test"
            )
            assert result.metrics is not None
            seconds = time.perf_counter() - began
            lines.append([name, f"{result.metrics.auc:.4f}", f"{result.metrics.log_loss:.4f}", seconds])
    print_table(
        "MovieLens-1M, rating of 4 or more, one pass in the order of time",
        ["", "AUC", "log loss", "seconds"],
        lines,
    )


def logistic_regression(folder: Path) -> tuple[str, str, float]:
    began = time.perf_counter()
    train, test = (read_one_hot(path) for path in (folder, folder / "test"))
    model = LogisticRegression(max_iter=300).fit(*train)
    scores = model.predict_proba(test[0])[:, 1]
    seconds = time.perf_counter() - began
    return f"{roc_auc_score(test[1], scores):.4f}", f"{log_loss(test[1], scores):.4f}", seconds


def read_one_hot(folder: Path) -> tuple[csr_matrix, np.ndarray]:
    tables = [pq.read_table(path) for path in sorted(folder.glob("*.parquet"))]
    columns = {}
    for name in ("user", "movie", "genres"):
        columns[name] = [value for table in tables for value in table[name].to_pylist()]
    labels = np.concatenate([table["liked"].to_numpy() for table in tables])
    hasher = FeatureHasher(1 << 14, input_type="string", alternate_sign=False)
    parts = []
    for name, values in columns.items():
        lists = (value if isinstance(value, list) else [value] for value in values)
        parts.append(hasher.transform([f"{name}{one}" for one in many] for many in lists))
    return hstack(parts).tocsr(), labels


if __name__ == "__main__":
    main()
