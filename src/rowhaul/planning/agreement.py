"""Ranks compare their plans before they act on them.

For every iteration each rank sends one small message of fixed size to all: digests of its plan and of its
samples, now and then of its replicas, and whether it wants to stop or, on rank 0, to save, to publish or to
rest. Control records of rank 0 follow if its message announces them. All ranks see the same messages, so all
raise the same error, or none does.
"""

from __future__ import annotations

import json
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from rowhaul.errors import ConfigError
from rowhaul.planning.disagreement import DisagreementError, ranks_text
from rowhaul.planning.planner import PlannedBatch
from rowhaul.planning.replicas import NO_REPLICAS, ReplicaDigests, check_summaries
from rowhaul.schedule import ControlRecord
from rowhaul.schedule.control import DELAY, Value
from rowhaul.transport.base import Collective

_MESSAGE = struct.Struct("<8sqQQ16s16s16s")
_TAG = b"rowhaulD"  # distinguishes this message from anything else that a rank may gather at the same time
_MEETING_TAG = b"rowhaulM"  # of ranks that make another call together
_NO_PLAN = bytes(16)
_STOP, _ENDED, _SAVE, _REST, _PUBLISH = 1, 2, 4, 8, 16  # flags


@dataclass(frozen=True)
class Agreement:
    """The outcome of a comparison, the same on all ranks."""

    stop: bool  # the iteration is the last for now: a rank requested it, or the data has ended
    save: bool = False  # the iteration ends the segment, for rank 0 to save; training continues
    rest: bool = False  # the iteration ends the segment, for all ranks to review something
    publish: bool = False  # the iteration ends the segment, for all ranks to publish what changed
    records: tuple[ControlRecord, ...] = ()  # of rank 0, for every planner
    ended: bool = False  # no rank had another batch
    measures: npt.NDArray[np.float64] | None = None  # ranks x numbers


class Postbox:
    """Control records decided on rank 0, until a message carries them; thread-safe."""

    def __init__(self, next_number: int = 0) -> None:
        self._lock = threading.Lock()
        self._next_number = next_number
        self._waiting: list[tuple[str, Value]] = []

    def post(self, name: str, value: Value) -> None:
        """Queue a record for the next message."""
        ControlRecord(0, 0, name, value)  # raises here, not in the thread that sends it
        with self._lock:
            self._waiting.append((name, value))

    def take(self, iteration: int) -> list[ControlRecord]:
        """Return the queued records for the message of an iteration, in force `DELAY` iterations later."""
        with self._lock:
            records = [
                ControlRecord(number, iteration + DELAY, name, value)
                for number, (name, value) in enumerate(self._waiting, self._next_number)
            ]
            self._next_number += len(records)
            self._waiting.clear()
        return records


class _Message(NamedTuple):
    """One rank's message about an iteration."""

    tag: bytes
    iteration: int
    flags: int
    num_record_bytes: int
    plan_digest: bytes
    samples_digest: bytes
    replicas_digest: bytes

    @property
    def has_ended(self) -> bool:
        return bool(self.flags & _ENDED)


def agree(
    collective: Collective,
    planned: PlannedBatch | None,
    own_digest: bytes,
    stop: bool,
    records: Sequence[ControlRecord] = (),
    measures: npt.NDArray[np.float64] | None = None,
    replicas: ReplicaDigests | None = None,
    save: bool = False,
    rest: bool = False,
    publish: bool = False,
) -> Agreement:
    """Compare the next iteration with all ranks.

    Args:
        collective: of all ranks; its rank 0 may send records.
        planned: this rank's plan; None after the end of its data, when all ranks call this too.
        own_digest: of the samples as this rank read them.
        stop: whether this rank wants the iteration to be the last.
        records: decided on rank 0 and sent with this message (`Postbox.take`).
        measures: numbers of this rank for all ranks; as many on each.
        replicas: digests of what every worker has a copy of, after some earlier iteration.
        save: whether rank 0 wants a checkpoint after the iteration.
        rest: whether rank 0 wants all ranks to pause after the iteration.
        publish: whether rank 0 wants to publish what changed up to the iteration.

    Raises:
        DisagreementError: on every rank, with the same text, if samples, plans or replicas differ.
    """
    text = b""
    if records:
        text = json.dumps([(one.number, one.active, one.name, one.value) for one in records]).encode()
    mine = _Message(
        tag=_TAG,
        iteration=-1 if planned is None else planned.plan.iteration,
        flags=_STOP * stop | _ENDED * (planned is None) | _SAVE * save | _REST * rest | _PUBLISH * publish,
        num_record_bytes=len(text),
        plan_digest=_NO_PLAN if planned is None else planned.plan_digest,
        samples_digest=own_digest,
        replicas_digest=NO_REPLICAS if replicas is None else replicas.summary,
    )
    numbers = b"" if measures is None else measures.tobytes()
    own = _MESSAGE.pack(*mine)
    gathered = collective.all_gather(np.frombuffer(bytearray(own + numbers), np.uint8))
    heads = gathered[:, : _MESSAGE.size].tobytes()
    messages = [mine]
    if text or heads != own * len(gathered):  # otherwise there is nothing to compare
        messages = [_Message(*one) for one in _MESSAGE.iter_unpack(heads)]
        _check(messages)
        check_summaries(collective, [one.replicas_digest for one in messages], replicas)
    agreed = _exchange_records(collective, text, messages[0]) if messages[0].num_record_bytes else ()
    ended = messages[0].has_ended
    every = np.ascontiguousarray(gathered[:, _MESSAGE.size :]).view(np.float64) if numbers else None
    return Agreement(
        stop=ended or any(one.flags & _STOP for one in messages),
        save=bool(messages[0].flags & _SAVE),
        rest=bool(messages[0].flags & _REST),
        publish=bool(messages[0].flags & _PUBLISH),
        records=agreed,
        ended=ended,
        measures=every,
    )


def meet(collective: Collective, what: str, num_measures: int) -> None:
    """Make sure that all ranks make the same call between two segments, before they wait in it.

    Args:
        collective: of all ranks.
        what: they do, for messages: ``evaluate or save``.
        num_measures: numbers that `agree` sends: ranks that call it instead must find a message of its size.

    Raises:
        DisagreementError: on every rank, if some train or make another call.
    """
    digest = xxhash.xxh3_128_digest(what.encode())
    own = _MESSAGE.pack(*_Message(_MEETING_TAG, -1, 0, 0, _NO_PLAN, digest, NO_REPLICAS))
    gathered = collective.all_gather(np.frombuffer(bytearray(own + bytes(8 * num_measures)), np.uint8))
    heads = [row.tobytes() for row in gathered[:, : _MESSAGE.size]]
    others = [rank for rank, head in enumerate(heads) if head != own]
    if others:
        train = any(heads[rank].startswith(_TAG) for rank in others)
        raise DisagreementError(
            f"{ranks_text(others)} {'began the next batch' if train else 'did something else'} while the "
            f"others {what}: every rank, stores too, must train, evaluate and save in the same order; "
            "run the same script on all of them"
        )


def _exchange_records(collective: Collective, text: bytes, announced: _Message) -> tuple[ControlRecord, ...]:
    """Receive rank 0's records, whose length it has announced."""
    size = announced.num_record_bytes
    mine = np.zeros(size, np.uint8)
    if collective.rank == 0:
        mine[:] = np.frombuffer(text, np.uint8)
    records = tuple(
        ControlRecord(number, active, name, tuple(value) if isinstance(value, list) else value)
        for number, active, name, value in json.loads(collective.all_gather(mine)[0].tobytes())
    )
    for record in records:
        if record.active != announced.iteration + DELAY:
            raise ConfigError(
                f"control record {record.number} ({record.name}) came with iteration {announced.iteration}, "
                f"so it is in force from {announced.iteration + DELAY} on; it says {record.active}"
            )
    return records


def _check(messages: Sequence[_Message]) -> None:
    """Raise an error if ranks differ; the checks that explain the most come first."""
    _check_calls(messages)
    senders = [rank for rank, one in enumerate(messages) if rank and one.num_record_bytes]
    if senders:
        raise DisagreementError(
            f"{ranks_text(senders)} posted control records; only rank 0 decides them: post them there"
        )
    ended = [rank for rank, one in enumerate(messages) if one.has_ended]
    batch = max(one.iteration for one in messages)
    where = "at the end of the data" if batch < 0 else f"at batch {batch}"
    if ended and len(ended) < len(messages):
        raise DisagreementError(
            f"{ranks_text(ended)} found no more samples {where}, where the other ranks have some: Rowhaul "
            "needs the same global batch on every rank (the same files, as many batches and epochs)"
        )
    if odd := _odd_ones([one.samples_digest for one in messages]):
        raise DisagreementError(
            f"{ranks_text(odd)} read different samples {where}: Rowhaul needs the same global batch on every "
            "rank (no DistributedSampler, a seeded shuffle, the same files)"
        )
    if odd := _odd_ones([one.plan_digest for one in messages]):
        raise DisagreementError(
            f"{ranks_text(odd)} planned batch {batch} differently, from the same samples: all hosts need the "
            "same versions of Rowhaul, NumPy and Numba and the same settings of the schedule (dispatcher, "
            "sync, cache, shares, prices, seed)"
        )


def _check_calls(messages: Sequence[_Message]) -> None:
    """Every rank must be at the same call, for the same iteration."""
    strangers = [rank for rank, one in enumerate(messages) if one.tag != _TAG]
    if strangers:
        raise DisagreementError(
            f"{ranks_text(strangers)} did something else while the others began the next batch: every rank "
            "must train, evaluate and save in the same order; run the same script on all of them"
        )
    at: dict[int, list[int]] = {}
    for rank, one in enumerate(messages):
        if not one.has_ended:
            at.setdefault(one.iteration, []).append(rank)
    if len(at) > 1:
        places = "; ".join(f"{ranks_text(ranks)} at batch {batch}" for batch, ranks in sorted(at.items()))
        raise DisagreementError(
            f"ranks are at different iterations: {places}. Every rank must train the same number of batches, "
            "starting from the same checkpoint; run the same script on all of them"
        )


def _odd_ones(values: Sequence[bytes]) -> list[int]:
    """Return the ranks whose value is not the most common one; in a tie, the lowest rank is right."""
    usual, _ = Counter(values).most_common(1)[0]
    return [rank for rank, value in enumerate(values) if value != usual]
