"""Where a saved state comes from: a scheduler can only go on from it with equal settings and batches."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from rowhaul.errors import CheckpointError
from rowhaul.schedule.batch import IdBatch
from rowhaul.schedule.describe import differences
from rowhaul.schedule.digest import DIGEST_BYTES
from rowhaul.schedule.saved import Arrays, Saved, text_array
from rowhaul.schedule.settings import ScheduleSettings

FORMAT = 1


def origin(settings: ScheduleSettings, window: Sequence[IdBatch]) -> Arrays:
    """The settings of a scheduler and hashes of the batches in its window, as plain arrays."""
    hashes = b"".join(batch.digest() for batch in window)
    return {
        "format": np.array([FORMAT]),
        "settings": text_array(json.dumps(settings.describe())),
        "window": np.frombuffer(hashes, np.uint8).copy(),
    }


def check_origin(saved: Saved, settings: ScheduleSettings) -> None:
    """Refuse a state that was saved with other settings."""
    if saved.number("format") != FORMAT:
        raise CheckpointError(
            f"the state of the scheduler is of format {saved.number('format')}, this version reads {FORMAT}"
        )
    different = differences(settings.describe(), json.loads(saved.text("settings")))
    if different:
        raise CheckpointError(
            f"the state of the scheduler was saved with other settings ({'; '.join(different)}): "
            "use the settings of the checkpoint, or start without this state"
        )


def check_window(saved: Saved, window: Sequence[IdBatch], iteration: int) -> None:
    """Refuse batches that are not those that had been read ahead; the first is of this iteration."""
    hashes = saved.array("window", np.uint8).tobytes()
    for number in range(len(hashes) // DIGEST_BYTES):
        expected = hashes[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        if number >= len(window) or window[number].digest() != expected:
            raise CheckpointError(
                f"the batch of iteration {iteration + number} is not the one that was read before the "
                "checkpoint: batches must go on after the last one that was planned, in the same order"
            )
