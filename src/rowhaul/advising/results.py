"""All that a prediction found, for tables, JSON and the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rowhaul.advising.advice import Advice
from rowhaul.advising.costs import Costs
from rowhaul.advising.predict import SPEEDS, Machines, Prediction

ASSUMED = (
    "Every machine stores a part of the rows, trains an equal share of the batch, and sends rows to the "
    "others without a detour."
)
MEASURED = (
    "The machines are like this one. Its processor time was measured by training a little, alone and as two "
    "ranks, at two sizes of batch; in between, time is a straight line."
)
GIVEN = (
    "The time of a sample was given; ranks are taken to add nothing to it, so that several machines will be "
    "slower than this."
)
SHARED = "All machines share the same cores, as on a testbed."
APART = "A machine with two cores or more plans beside training; with one, while training waits for its link."
MOST_PER_MACHINE = 1.1  # times one machine: smaller parts may fit a cache better, but not much
DISTURBED = (
    "No advice: machines seem to add more than their own speed, so something else kept this one busy while "
    "it was measured. Repeat it when that is over, or give the time of a sample: --compute 29us is a machine "
    "that trains 34,000 samples per second."
)


MemoryKey = tuple[int, bool, bool]  # how many machines; whether rows are pruned; whether some are replicated


def memory_key(prediction: Prediction) -> MemoryKey:
    """What the memory of a machine depends on."""
    return prediction.machines, prediction.pruned, prediction.hot_rows > 0


@dataclass(frozen=True)
class Results:
    """Predictions and the advice drawn from them."""

    batch_size: int
    num_batches: int
    is_whole: bool
    machines: Machines
    costs: Costs
    predictions: tuple[Prediction, ...]
    needed: Mapping[MemoryKey, int]  # bytes of a machine
    available: int
    advice: Advice

    def samples_per_second(self, prediction: Prediction) -> float:
        """The speed of training."""
        return self.batch_size / prediction.seconds

    def memory(self, prediction: Prediction) -> int:
        """Bytes that a machine needs."""
        return self.needed[memory_key(prediction)]

    @property
    def warning(self) -> str:
        """Why not to trust the advice: what was measured says that machines do more than their share."""
        alone = self.predictions[0].seconds
        most = max(alone / one.seconds / one.machines for one in self.predictions)
        return DISTURBED if most > MOST_PER_MACHINE and not self.costs.given else ""

    @property
    def headline(self) -> str:
        """The advice as a sentence, or why there is none."""
        return self.warning or f"{self.advice.text[0].upper()}{self.advice.text[1:]}."

    @property
    def notes(self) -> tuple[str, ...]:
        """What the numbers rest on."""
        sample = f"Predicted from the first {self.num_batches:,} batches of {self.batch_size:,} samples"
        more = "all there are" if self.is_whole else "a sample: rows that come later may move more or less"
        return (
            f"{sample}, {more}.",
            GIVEN if self.costs.given else MEASURED,
            SHARED if self.machines.share_cores else APART,
            ASSUMED,
            self._links_note,
        )

    @property
    def _links_note(self) -> str:
        """How fast links are, in bits, whatever they were given in."""
        speeds = ", ".join(dict.fromkeys(map(str, self.machines.links)))
        return (
            f"Links of {speeds} a second are full-duplex, and nothing between them is a bottleneck; see "
            "docs/simulate.md for the model."
        )

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        alone = self.predictions[0].seconds
        return {
            "advice": self.warning or self.advice.text,
            "machines": None if self.warning else self.advice.machines,
            "batch_size": self.batch_size,
            "links": [str(link) for link in self.machines.links],
            "predictions": [
                {
                    "machines": one.machines,
                    "dispatcher": one.dispatcher,
                    "hot_rows": one.hot_rows,
                    "pruned": one.pruned,
                    "samples_per_second": self.samples_per_second(one),
                    "times_one_machine": alone / one.seconds,
                    "seconds": one.seconds,
                    "compute_seconds": one.compute,
                    "rows_seconds": one.rows,
                    "dense_seconds": one.dense,
                    "planning_seconds": one.planning,
                    "planning_cpu_seconds": one.planning_cpu,
                    "row_bytes": one.row_bytes,
                    "dense_bytes": one.dense_bytes,
                    "machine_bytes": self.memory(one),
                    "fits": self.memory(one) <= self.available,
                    "seconds_by_relative_link_speed": dict(zip(map(str, SPEEDS), one.at_speed, strict=True)),
                }
                for one in self.predictions
            ],
            "memory": self.available,
            "notes": list(self.notes),
        }
