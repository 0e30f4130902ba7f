"""What all ranks make sure of together before they rely on it, and collective calls that do not hang.

Everything goes through the rendezvous store, not through a process group: a rank that never comes
must be named, and a group would only wait for it.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.distributed import DistError

from rowhaul import __version__
from rowhaul.cluster.cluster import Cluster
from rowhaul.cluster.waiting import ranks_text, until, within
from rowhaul.errors import ClusterError

_WIDTH = 100  # characters of a value that are shown
_STORE_SECONDS = 10.0  # for the requests of a meeting


def gather_texts(cluster: Cluster, what: str, text: str, seconds: float = 30.0) -> list[str]:
    """Everyone's text, by rank; a collective call.

    Args:
        cluster: of this rank.
        what: is done, in words: the calls of one name are counted, and a rank that is missing is told so.
        text: of this rank.
        seconds: how long to wait for the others.
    """
    number = cluster.next_meeting(what)
    patience = seconds + _STORE_SECONDS
    try:
        # A request to a store whose host is gone can hang: not in this thread.
        return within(
            patience, lambda: _meet(cluster, what, number, text, seconds), check=cluster.failure.check
        )
    except TimeoutError:
        raise ClusterError(f"{what!r}: the rendezvous store has not answered for {patience:g} s") from None
    except DistError as error:
        explained = cluster.heartbeat.explain(error)
        raise explained from (error if explained is not error else None)


def _meet(cluster: Cluster, what: str, number: int, text: str, seconds: float) -> list[str]:
    keys = [f"meeting/{what}/{number}/{rank}" for rank in range(cluster.num_ranks)]
    cluster.store.set(keys[cluster.rank], text)
    if not until(lambda: cluster.store.check(keys), seconds, cluster.failure.check):
        missing = [rank for rank, key in enumerate(keys) if not cluster.store.check([key])]
        if missing:
            raise ClusterError(
                f"{ranks_text(missing, cluster.roles)} did not join in {what!r} within {seconds:g} s. It is "
                "a collective call: every rank, stores too, must make it, at the same point of the run"
            )
    texts = [cluster.store.get(key).decode() for key in keys]
    if number:  # everyone is past the meeting before this one
        cluster.forget(f"meeting/{what}/{number - 1}/{cluster.rank}")
    return texts


def require_all(cluster: Cluster, what: str, seconds: float = 30.0) -> None:
    """Wait until every rank has called this; raise naming those that do not, instead of hanging."""
    gather_texts(cluster, what, "", seconds)


def version_facts() -> dict[str, str]:
    """The versions that have to be equal for all ranks to make the same plans and the same bits."""
    return {
        "version of rowhaul": __version__,
        "version of torch": torch.__version__,
        "version of numpy": np.__version__,
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
        "kind of machine": platform.machine(),
    }


def check_same(cluster: Cluster, facts: Mapping[str, str], seconds: float = 30.0) -> None:
    """Compare named facts over all ranks; if any differ, every rank raises an error that names them."""
    texts = gather_texts(cluster, "comparing configurations", json.dumps(dict(facts)), seconds)
    everyone = [json.loads(text) for text in texts]
    names = dict.fromkeys(name for one in everyone for name in one)
    differences = [
        f"  {name}: {difference}"
        for name in names
        if (difference := _difference([one.get(name, "(not given)") for one in everyone]))
    ]
    if differences:
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
    """Make sure that all ranks see one folder: rank 0 writes a file there, the others look for it.

    Args:
        cluster: of this rank.
        folder: that has to be shared; rank 0 makes it if it is not there.
        purpose: what it is for, in words, for the message.
        instead: what a user could do.
        seconds: how long to look; network file systems show a new file with a delay.
    """
    what = f"looking for the folder of {purpose}"
    nonce = secrets.token_hex(16)
    probe = Path(folder) / f".rowhaul-{nonce}"
    written = _write(probe, nonce) if cluster.rank == 0 else ""
    first = json.loads(gather_texts(cluster, what, json.dumps({"nonce": nonce, "error": written}))[0])
    if first["error"]:
        raise ClusterError(f"rank 0 cannot write to {folder}, the folder of {purpose}: {first['error']}")
    probe = Path(folder) / f".rowhaul-{first['nonce']}"
    sees = until(lambda: _reads(probe, first["nonce"]), seconds, cluster.failure.check)
    try:
        answers = gather_texts(cluster, what, "yes" if sees else "no", 30.0 + seconds)
    finally:
        if cluster.rank == 0:
            probe.unlink(missing_ok=True)
    blind = [rank for rank, answer in enumerate(answers) if answer == "no"]
    if blind:
        hosts = sorted({cluster.members[rank].host_name for rank in blind})
        raise ClusterError(
            f"{ranks_text(blind, cluster.roles)} on {', '.join(hosts)} cannot see what rank 0 writes to "
            f"{folder}, the folder of {purpose}: it is not the same folder there. What to do: {instead}"
        )


def _write(probe: Path, nonce: str) -> str:
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text(nonce)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _reads(probe: Path, nonce: str) -> bool:
    try:
        return probe.read_text() == nonce
    except OSError:
        return False


def _difference(values: Sequence[str]) -> str:
    """Which ranks have which value, in words; nothing if all are equal."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) == 1:
        return ""
    num_equal = next(
        (place for place, signs in enumerate(zip(*ranks, strict=False)) if len(set(signs)) > 1),
        min(map(len, ranks)),
    )
    start = max(0, num_equal - _WIDTH // 4)
    return "; ".join(f"{_shortened(value, start)} on {ranks_text(those)}" for value, those in ranks.items())


def _shortened(value: str, start: int) -> str:
    """The part of a long value where it begins to differ."""
    if len(value) <= _WIDTH:
        return value
    shown = value[start : start + _WIDTH]
    return ("..." if start else "") + shown + ("..." if start + _WIDTH < len(value) else "")
