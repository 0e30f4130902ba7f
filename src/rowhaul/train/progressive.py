"""Progressive validation: every sample is scored by the forward pass of training, before it is learned from.

No held-out data is needed, and nothing is computed twice. The model is in training mode, so dropout is on and
batch norm uses the batch. Labels and logits of a window of samples are kept, so that its AUC is exact; on a
cluster they travel to rank 0 once a window, 5 bytes a sample, which is little beside the rows it needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.data.schema import LabelColumn
from rowhaul.train.metrics import auc, calibration, log_loss

AUTO_WINDOW = 100_000  # of a stream
MOST_SAMPLES = 10_000_000  # in a window: they are kept in memory


def scored_task(labels: Sequence[LabelColumn]) -> int | None:
    """The place of the label that is scored, the first of 0 and 1; None where all are numbers."""
    if not labels:
        return 0  # where the schema names no label, a batch may still have one
    return next((place for place, one in enumerate(labels) if one.kind == "binary"), None)


@dataclass(frozen=True)
class ProgressiveValues:
    """Quality over the ``num_samples`` samples of a window, each scored before it was learned from.

    ``calibration`` is predicted clicks over observed ones. NaN where a value is not defined: of one class
    only, or without a click.
    """

    auc: float
    log_loss: float
    calibration: float
    base_rate: float
    num_samples: int

    def by_name(self) -> dict[str, float]:
        """The values as a log has them."""
        return asdict(self)

    def text(self) -> str:
        """The values in a line."""
        return (
            f"AUC {self.auc:.4f}, log loss {self.log_loss:.4f}, calibration {self.calibration:.3f} over "
            f"{self.num_samples:,} samples before learning from them"
        )


@dataclass(frozen=True)
class Scores:
    """Labels of some samples, 0 or 1, and the logits that the model had for them."""

    labels: npt.NDArray[np.uint8]
    logits: npt.NDArray[np.float32]

    def values(self) -> ProgressiveValues:
        """Compute the metrics."""
        count, clicks = len(self.labels), int(self.labels.sum())
        return ProgressiveValues(
            auc=auc(self.labels, self.logits),
            log_loss=log_loss(self.labels, self.logits),
            calibration=calibration(self.labels, self.logits),
            base_rate=clicks / count if count else math.nan,
            num_samples=count,
        )


class Progressive:
    """Collects the scores of this process's samples, window by window.

    Windows end with the batch that reaches a multiple of ``window`` samples of the run, so that a resumed run
    has the same ones; its first has only the samples since the checkpoint.

    Args:
        window: samples.
        samples: of the run so far.
        task: the label that is scored, of those of the schema.
    """

    def __init__(self, window: int, samples: int = 0, task: int = 0) -> None:
        self.window, self.began = window, samples  # samples of the run before the window
        self.task = task
        self._added: list[tuple[Tensor, Tensor]] = []

    def add(self, labels: Tensor, logits: Tensor) -> None:
        """Add a batch, or this process's part of it; both must stay as they are."""
        self._added.append((labels, logits.detach()))

    def recorded(self) -> tuple[Tensor, Tensor]:
        """Remove what was added last and return it: memory that a recorded step will write to."""
        return self._added.pop()

    def is_due(self, samples: int) -> bool:
        """Whether a window has ended with these samples of the run."""
        return samples // self.window > self.began // self.window

    def steps_left(self, samples: int, batch_size: int) -> int:
        """Full batches until the window ends."""
        return -(-(self.window - samples % self.window) // batch_size)

    def take(self, samples: int) -> Scores:
        """Return the scores of this process, and begin the next window after these samples of the run."""
        labels = [torch.empty(0, dtype=torch.uint8)] + [one.to(torch.uint8) for one, _ in self._added]
        logits = [torch.empty(0)] + [one.to(torch.float32) for _, one in self._added]
        self.began, self._added = samples, []
        return Scores(*(torch.cat([one.cpu() for one in some]).numpy() for some in (labels, logits)))
