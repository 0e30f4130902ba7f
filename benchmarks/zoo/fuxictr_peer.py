"""FuxiCTR's DIN and DCNv2, trained by its own `train_epoch`. Runs in an environment of its own."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from typing import Any

import torch
from fuxictr.features import FeatureMap
from model_zoo.LongCTR.DCNv2.DCNv2 import DCNv2
from model_zoo.LongCTR.DIN.DIN import DIN
from peer_loop import Columns, Task, serve

NEVER = 1 << 60


class FuxiCTR:
    """One of its models."""

    def __init__(self, task: Task) -> None:
        settings, self._folder = task.settings, tempfile.TemporaryDirectory()
        common = {
            "optimizer": "adam",
            "learning_rate": settings["lr"],
            "loss": "binary_crossentropy",
            "embedding_dim": settings["dim"],
            "metrics": ["AUC"],
            "verbose": 0,
            "model_root": self._folder.name,
        }
        features = self._feature_map(settings)
        if settings["model"] == "din":
            self._model = DIN(
                features, dnn_hidden_units=[256, 128], attention_hidden_units=[64, 32], **common
            )
        else:
            self._model = DCNv2(
                features,
                model_structure="stacked",
                num_cross_layers=3,
                stacked_dnn_hidden_units=[256, 128],
                **common,
            )
        # As `fit` sets them, but for evaluations while it trains.
        self._model._max_gradient_norm = 10.0
        self._model._stop_training = False
        self._model._total_steps, self._model._eval_steps = 0, NEVER

    def prepared(self, columns: Columns) -> Any:
        """Features, items (the history, then the target), and the history's mask, as its collator does."""
        columns = dict(columns)
        history, target = columns.pop("history").long(), columns.pop("movie").long()
        history = history[:, : max(1, int((history > 0).sum(dim=1).max()))]
        items = torch.cat([history, target.unsqueeze(1)], dim=1)
        return columns, {"movie": items.flatten()}, (history > 0).float()

    def train(self, batches: list[Any]) -> None:
        """Train with its own loop."""
        self._model.train_epoch(batches)

    def scores(self, columns: Columns) -> torch.Tensor:
        """Probabilities."""
        self._model.eval()
        return self._model.forward(self.prepared(columns))["y_pred"].squeeze(1)

    def _feature_map(self, settings: dict[str, Any]) -> FeatureMap:
        found = FeatureMap("movielens", self._folder.name)
        found.labels, found.default_emb_dim = ["liked"], settings["dim"]
        specs = OrderedDict()
        for name, (rows, width) in settings["features"].items():
            if name == "history":
                continue  # it is made of items
            specs[name] = {
                "type": "categorical",
                "source": "item" if name == "movie" else "",
                "vocab_size": rows + 1,
                "padding_idx": 0,
            }
            if width:
                specs[name] |= {
                    "type": "sequence",
                    "max_len": width,
                    "feature_encoder": "layers.MaskedSumPooling()",
                }
        found.features = specs
        found.num_fields = found.get_num_fields()
        found.set_column_index()
        return found


if __name__ == "__main__":
    serve(FuxiCTR)
