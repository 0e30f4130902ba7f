"""Compare what every worker holds a copy of: dense weights, their optimizer's state, replicated rows.

Workers step their copies by the same gradients, so the copies are the same bits; a processor that rounds
differently or a flipped bit would make the workers train different models, unseen. Each worker therefore
hashes its copies now and then. One digest of them all travels with the agreement on a plan; only if digests
differ do the ranks exchange those of single tensors, to name the one that differs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import xxhash

from rowhaul.planning.disagreement import DisagreementError, ranks_text
from rowhaul.transport.base import Collective, gather_texts

NO_REPLICAS = bytes(16)  # of a rank that has none, or has none to compare now
_MOST_NAMES = 4  # of tensors in a message


@dataclass(frozen=True)
class ReplicaDigests:
    """One worker's digests of its copies, taken between two steps."""

    iteration: int  # iterations trained when they were taken
    by_name: Mapping[str, str]
    machine: str = ""  # what may have made a difference, for the error message

    @property
    def summary(self) -> bytes:
        """A digest of all of them."""
        return xxhash.xxh3_128_digest(json.dumps([self.iteration, list(self.by_name.items())]).encode())


def compare_replicas(collective: Collective, mine: ReplicaDigests | None) -> None:
    """Compare the copies of all workers; every rank calls this, those without copies with None.

    Raises:
        DisagreementError: on every rank, with the same text, if any differ.
    """
    summary = NO_REPLICAS if mine is None else mine.summary
    gathered = collective.all_gather(np.frombuffer(summary, np.uint8))
    check_summaries(collective, [row.tobytes() for row in gathered], mine)


def check_summaries(collective: Collective, summaries: Sequence[bytes], mine: ReplicaDigests | None) -> None:
    """Raise an error that names ranks, iteration and tensor if the summaries of workers differ."""
    if len(set(summaries) - {NO_REPLICAS}) < 2:
        return
    texts = gather_texts(collective, b"" if mine is None else json.dumps(asdict(mine)).encode())
    held = {rank: ReplicaDigests(**json.loads(text)) for rank, text in enumerate(texts) if text}
    raise DisagreementError(_difference(held))


def _difference(held: Mapping[int, ReplicaDigests]) -> str:
    names = dict.fromkeys(name for one in held.values() for name in one.by_name)
    differing = [
        name for name in names if len({(one.iteration, one.by_name.get(name)) for one in held.values()}) > 1
    ]
    by_digest: dict[str | None, list[int]] = {}
    for rank, one in held.items():
        by_digest.setdefault(one.by_name.get(differing[0]), []).append(rank)
    usual, *others = sorted(by_digest.values(), key=len, reverse=True)
    odd = sorted(rank for ranks in others for rank in ranks)
    if others and len(usual) > len(others[0]):
        who = f"{ranks_text(odd)} differ{'s' if len(odd) == 1 else ''} from {ranks_text(usual)}"
    else:  # no majority
        who = f"{ranks_text(sorted([*usual, *odd]))} differ from each other"
    shown = ", ".join(differing[:_MOST_NAMES])
    if len(differing) > _MOST_NAMES:
        shown += f" and {len(differing) - _MOST_NAMES} more"
    iteration = next(iter(held.values())).iteration
    return (
        f"{who} in {shown} at iteration {iteration:,}, where all must hold the same bits.{_machines(held)} "
        "Likely causes: processors that round differently, faulty memory, or code that changes the model on "
        "some ranks only. Resume from the last checkpoint: copies are compared before each is written"
    )


def _machines(held: Mapping[int, ReplicaDigests]) -> str:
    by_machine: dict[str, list[int]] = {}
    for rank, one in held.items():
        by_machine.setdefault(one.machine, []).append(rank)
    if len(by_machine) < 2:
        return ""
    return " " + "; ".join(f"{ranks_text(ranks)}: {what}" for what, ranks in by_machine.items()) + "."
