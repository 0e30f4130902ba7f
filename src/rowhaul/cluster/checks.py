"""Checks that all ranks make together, as collective calls that do not hang.

They use the rendezvous store, not a process group: a missing rank must be named, and a group would only
wait for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.distributed import DistError, DistStoreError

from rowhaul import __version__
from rowhaul._machine import compiler_versions, cpu_capability
from rowhaul.cluster.cluster import Cluster
from rowhaul.cluster.rendezvous import Store, first_line
from rowhaul.cluster.waiting import ranks_text, until, within
from rowhaul.errors import ClusterError

BEGINNING_SECONDS = 600.0  # for all ranks to begin: some load more; the heartbeat notices one that dies

_WIDTH = 100  # most characters shown of a value
_STORE_SECONDS = 10.0  # for the requests to the store
# A request that waits keeps its connection: not for long, since an error elsewhere may need it. Asking more
# often would take processor time from a rank that computes while the others wait, for hours maybe.
_ASKING_SECONDS = 1.0


def gather_texts(
    cluster: Cluster,
    what: str,
    text: str,
    seconds: float = 30.0,
    *,
    store: Store | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[str]:
    """Return the texts of all ranks, by rank; a collective call.

    Args:
        cluster: of this rank.
        what: the name of the operation: calls of one name are counted, and errors show it.
        text: of this rank.
        seconds: how long to wait for the others.
        store: the connection of the calling thread; by default the cluster's, which is the main thread's.
        check: called while waiting; an error that it raises ends the call.
    """

    def check_all() -> None:
        cluster.failure.check()
        check()

    number = cluster.next_meeting(what)
    patience = seconds + _STORE_SECONDS
    meet = partial(_meet, cluster, what, number, text, seconds, store or cluster.store, check_all)
    try:
        # A request to a store whose host is gone can hang: not in this thread.
        return within(patience, meet, check=check_all)
    except TimeoutError:
        raise ClusterError(f"{what!r}: the rendezvous store has not answered for {patience:g} s") from None
    except DistError as error:
        explained = cluster.heartbeat.explain(error)
        raise (_store_lost(cluster, what, error) if explained is error else explained) from error


def _store_lost(cluster: Cluster, what: str, error: DistError) -> ClusterError:
    """Return the error for a broken connection to the store that no lost rank explains."""
    keeper = "its launcher" if cluster.place.launcher_keeps_store else "rank 0"
    return ClusterError(
        f"{what!r}: the connection to the rendezvous store has broken ({first_line(error)}): {keeper}, which "
        "hosts it, has ended or cannot be reached; see its output, and resume from the last checkpoint"
    )


def _meet(
    cluster: Cluster,
    what: str,
    number: int,
    text: str,
    seconds: float,
    store: Store,
    check: Callable[[], None],
) -> list[str]:
    keys = [f"meeting/{what}/{number}/{rank}" for rank in range(cluster.num_ranks)]
    store.set(keys[cluster.rank], text)
    if not until(lambda: _are_set(store, keys, min(seconds, _ASKING_SECONDS)), seconds, check):
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if missing:
            raise ClusterError(
                f"{ranks_text(missing, cluster.roles)} did not join in {what!r} within {seconds:g} s. It is "
                "a collective call: every rank, stores too, must make it, at the same point of the run"
            )
    texts = [store.get(key).decode() for key in keys]
    if number:  # all ranks have finished the call before this one
        store.delete_key(f"meeting/{what}/{number - 1}/{cluster.rank}")
    return texts


def _are_set(store: Store, keys: list[str], seconds: float) -> bool:
    """Return whether all keys have values within some seconds; the store answers as soon as they do."""
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except DistStoreError:
        return False
    return True


def require_all(cluster: Cluster, what: str, seconds: float = 30.0) -> None:
    """Wait until every rank has called this; raise an error that names the missing ones."""
    gather_texts(cluster, what, "", seconds)


def wait_until_all_know(cluster: Cluster, seconds: float = 30.0) -> None:
    """Call before raising an error that every rank has found, so that each can raise it.

    Otherwise the first rank to fail is lost to the others, and they report that instead.
    """
    with contextlib.suppress(ClusterError):  # there is a better one to raise
        require_all(cluster, "sharing an error", seconds)


def version_facts(is_worker: bool = True) -> dict[str, str | None]:
    """Return the versions that must be equal on all ranks to get the same plans and bits.

    Left out, because the bits don't depend on it: the CPU that Numba compiles for, since kernels add in a
    stated order and never fuse operations; and the number of threads, since it changes at most a worker's
    own gradients, which all workers add up alike, and not how they step dense weights.
    """
    return {
        # Only workers step dense weights; with other instructions these steps round differently.
        "CPU capability of torch (set ATEN_CPU_CAPABILITY=avx2, or =default, on all ranks)": (
            cpu_capability() if is_worker else None
        ),
        **compiler_versions(),
        "version of rowhaul": __version__,
        "version of torch": torch.__version__,
        "version of numpy": np.__version__,
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
        "kind of machine": platform.machine(),
    }


def check_same(cluster: Cluster, facts: Mapping[str, str | None], seconds: float = BEGINNING_SECONDS) -> None:
    """Compare named facts between all ranks; if any differ, every rank raises an error that names them.

    A fact that is None on a rank does not matter there.
    """
    texts = gather_texts(cluster, "comparing configurations", json.dumps(dict(facts)), seconds)
    everyone = [json.loads(text) for text in texts]
    names = dict.fromkeys(name for one in everyone for name in one)
    differences = [
        f"  {name}: {difference}"
        for name in names
        if (difference := _difference([one.get(name, "(not given)") for one in everyone]))
    ]
    if differences:
        wait_until_all_know(cluster)
        raise ClusterError(
            "ranks disagree, and would not train the same model:\n"
            + "\n".join(differences)
            + "\nGive every rank the same installation, configuration and data"
        )


def check_shared_folder(
    cluster: Cluster,
    folder: str | os.PathLike[str],
    purpose: str,
    instead: str = "mount the same folder at the same path on every host",
    seconds: float = 10.0,
) -> None:
    """Check that all ranks see the same folder: rank 0 writes a file there, the others look for it.

    Args:
        cluster: of this rank.
        folder: the shared folder; rank 0 creates it if it does not exist.
        purpose: its purpose, for the error message.
        instead: advice, for the error message.
        seconds: how long to look; network file systems show a new file with a delay.
    """
    what = f"looking for the folder of {purpose}"
    nonce, trouble = secrets.token_hex(16), ""
    if cluster.rank == 0:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            _probe(folder, nonce).write_text(nonce)
        except OSError as error:
            trouble = error.strerror or str(error)
    first = json.loads(gather_texts(cluster, what, json.dumps({"nonce": nonce, "error": trouble}))[0])
    if first["error"]:
        wait_until_all_know(cluster)
        raise ClusterError(f"rank 0 cannot write to {folder}, the folder of {purpose}: {first['error']}")
    probe = _probe(folder, first["nonce"])
    sees = until(lambda: _reads(probe, first["nonce"]), seconds, cluster.failure.check)
    try:
        answers = gather_texts(cluster, what, "yes" if sees else "no", 30.0 + seconds)
    finally:
        if cluster.rank == 0:
            probe.unlink(missing_ok=True)
    blind = [rank for rank, answer in enumerate(answers) if answer == "no"]
    if blind:
        wait_until_all_know(cluster)
        hosts = sorted({cluster.members[rank].host_name for rank in blind})
        raise ClusterError(
            f"{ranks_text(blind, cluster.roles)} on {', '.join(hosts)} cannot see what rank 0 writes to "
            f"{folder}, the folder of {purpose}: it is not the same folder there. What to do: {instead}"
        )


def _probe(folder: str | os.PathLike[str], nonce: str) -> Path:
    return Path(folder) / f".rowhaul-{nonce}"


def _reads(probe: Path, nonce: str) -> bool:
    try:
        return probe.read_text() == nonce
    except OSError:
        return False


def _difference(values: Sequence[str | None]) -> str:
    """Say which ranks have which value; empty if all that have one have the same."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            ranks.setdefault(value, []).append(rank)
    if len(ranks) < 2:
        return ""
    num_equal = next(
        (place for place, signs in enumerate(zip(*ranks, strict=False)) if len(set(signs)) > 1),
        min(map(len, ranks)),
    )
    start = max(0, num_equal - _WIDTH // 4)
    return "; ".join(f"{_shortened(value, start)} on {ranks_text(those)}" for value, those in ranks.items())


def _shortened(value: str, start: int) -> str:
    """Cut a long value to the part where it begins to differ."""
    if len(value) <= _WIDTH:
        return value
    shown = value[start : start + _WIDTH]
    return ("..." if start else "") + shown + ("..." if start + _WIDTH < len(value) else "")
