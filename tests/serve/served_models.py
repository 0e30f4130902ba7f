"""Small trained models to export and serve, and the logits that they give by themselves."""

from dataclasses import replace

import numpy as np
import torch

from rowhaul.data.stream import SampleStream
from rowhaul.export.serving.folder import export_served
from rowhaul.nn import Batch
from rowhaul.train import TrainConfig, load_trained, train_run
from rowhaul.train.run_folder import open_saved

SMALL = {
    "dlrm": {"bottom": [8], "top": [16]},
    "wide_deep": {"hidden": [16], "dropout": 0.2},
    "deepfm": {"hidden": [16]},
    "dcn": {"hidden": [16], "num_cross": 2, "cross": "matrix"},
    "dcnv2": {"hidden": [16], "rank": 4},
    "finalmlp": {"hidden": [16], "dropout": 0.1},
    "ncf": {"hidden": [16]},
    "legacy": {"hidden": [16], "dropout": 0.1},
}


def train(folder, log, schema, model="dlrm", dim=4, **settings):
    """A run of a few steps."""
    given = {"batch_size": 500, "model": {"name": model, "embedding_dim": dim, "options": SMALL[model]}}
    train_run(TrainConfig.from_dict({**given, **settings}), schema, f"{log}/*.parquet", out=folder)
    return folder


def serve(run, out, dense=("onnx",)):
    """Export a run to a folder to serve from."""
    return export_served(open_saved(str(run)), out, dense=dense)


def held_out(log, schema, count=300):
    """The first samples of the data that was held out."""
    stream = SampleStream(f"{log}/test", schema, count, limit=count, require_label=False)
    return next(iter(stream))


def own_logits(run, samples):
    """What the run's own model says."""
    trainer = load_trained(str(run))
    trainer.model.eval()
    with torch.no_grad():
        return trainer.model(Batch.from_samples(samples)).numpy()


def unseen(samples, share=0.2):
    """The same samples with ids that were never trained among them."""
    random = np.random.default_rng(5)
    other = random.integers(-(2**63), 2**63 - 1, len(samples.values))
    return replace(samples, values=np.where(random.random(len(other)) < share, other, samples.values))
