"""``training.json``: what a run that publishes into a served folder says of its quality.

Each window has its step and time, and the metrics of progressive validation: how good the model was on
samples before it learned from them. A server scores without it just as well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TRAINING_FILE = "training.json"


def read_windows(folder: str | Path) -> list[dict[str, Any]]:
    """Return the windows, oldest first; none where there is no such file, or it cannot be read."""
    try:
        found = json.loads((Path(folder) / TRAINING_FILE).read_text(encoding="utf-8"))
        return [one for one in found["windows"] if isinstance(one["step"], int)]
    except (OSError, ValueError, KeyError, TypeError):
        return []
