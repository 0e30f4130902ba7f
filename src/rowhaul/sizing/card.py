"""What a run takes on a card, and beside it in host memory: all rows, or a cache of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rowhaul.sizing.sizing import Run

KEY_BYTES = 21  # of the index, for each row, at most
RESERVE = 0.1  # of all else: what PyTorch keeps, kernels and libraries
_NOTED_BYTES = 16  # in host memory, for each row of the cache: its key and table
_STAGED_SHARE, _STAGED_BYTES = 1 / 16, 32 << 20  # of the cache, as a buffer in pinned host memory
_NUM_STAGED = 3  # buffers


@dataclass(frozen=True)
class CardSize:
    """Bytes on the card, by what they are for."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts.values())


def is_on_card(run: Run) -> bool:
    """Whether the model of a run is on a card."""
    return run.config.device != "cpu"


def holds_all(run: Run) -> bool:
    """Whether all rows of a run are on a card."""
    return is_on_card(run) and not run.config.device_bytes


def card_size(run: Run, step_bytes: int) -> CardSize | None:
    """Return what a run takes on its card, if it has one."""
    if not is_on_card(run):
        return None
    rows = run.row_estimate
    if run.config.device_bytes:
        parts = {"rows": run.config.device_bytes}
    else:
        parts = {"rows": rows.num_records * rows.record_bytes, "index": rows.num_records * KEY_BYTES}
    parts |= {"dense model": run.model.dense, "step": step_bytes}
    parts["reserve"] = round(RESERVE * sum(parts.values()))
    return CardSize(parts)


def beside_cache(run: Run) -> int:
    """Bytes of host memory that a cache on a card takes, beside the rows themselves."""
    given = run.config.device_bytes
    cached = min(given // max(run.row_estimate.record_bytes, 1), run.row_estimate.num_records)
    return _NUM_STAGED * round(min(_STAGED_SHARE * given, _STAGED_BYTES)) + _NOTED_BYTES * cached
