"""Which of the two waits for the other: the reader of the data, or the card that trains on it."""

from __future__ import annotations

_NOTABLE = 0.05  # the share of the time below which the card does not wait


class Waits:
    """Adds up how long steps take, and how long each waits for its batch; the first step is left out."""

    def __init__(self) -> None:
        self._seconds = {"reader": 0.0, "card": 0.0}
        self._loading = 0.0
        self._num_steps = 0

    def loaded(self, seconds: float) -> None:
        """Note how long training has waited for a batch."""
        self._loading = seconds

    def computed(self, seconds: float) -> None:
        """Note how long its step took."""
        self._num_steps += 1
        if self._num_steps > 1:  # the first compiles kernels, while batches pile up
            self._seconds["reader"] += self._loading
            self._seconds["card"] += seconds

    @property
    def share(self) -> float:
        """The share of the time that the card waits for the reader."""
        total = sum(self._seconds.values())
        return self._seconds["reader"] / total if total else 0.0

    def text(self) -> str:
        """Say who waits; nothing before the second step."""
        if self._num_steps < 2:
            return ""
        if self.share < _NOTABLE:
            return f"the reader for the card, which waits {self.share:.0%} of the time"
        return f"the card for the reader, {self.share:.0%} of the time"
