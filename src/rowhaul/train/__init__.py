"""The training loop, evaluation and metrics."""

from rowhaul.export.reader import ExportReader
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.config import TrainConfig
from rowhaul.train.loading import load_trained
from rowhaul.train.losses import LossConfig
from rowhaul.train.metrics import BinaryMetrics, MetricValues
from rowhaul.train.run import train_run
from rowhaul.train.session import RunResult
from rowhaul.train.task_metrics import EvaluationMetrics
from rowhaul.train.trainer import Trainer

__all__ = [
    "BinaryMetrics",
    "ClusterConfig",
    "EvaluationMetrics",
    "ExportReader",
    "LossConfig",
    "MetricValues",
    "RunResult",
    "TrainConfig",
    "Trainer",
    "load_trained",
    "train_run",
]
