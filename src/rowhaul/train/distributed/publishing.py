"""How a cluster begins to publish: it publishes its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rowhaul.checkpoint import Place
from rowhaul.errors import ConfigError
from rowhaul.train.distributed import checkpointing

if TYPE_CHECKING:
    from rowhaul.train.distributed.session import ClusterSession


def begin_publishing(
    session: ClusterSession, folder: Path | None, checkpoints: Place | None, saved: checkpointing.Saved | None
) -> str:
    """Return what a run that publishes is known by; empty where it does not, and on other ranks.

    Raises:
        ConfigError: on every rank alike, what cannot be published; on rank 0 a folder of another run.
    """
    config = session.config.publish
    if not config.is_used:
        return ""
    if checkpoints is None:
        raise ConfigError(
            "publish: a cluster publishes its checkpoints; say where they go (--out or --checkpoints)"
        )
    from rowhaul.export.serving.folder import check_servable  # what exports imports much

    check_servable(session.trainer)
    if not session.is_leader:
        return ""
    from rowhaul.publishing.publisher import RUN_FACT, check_folder, run_name

    reader = saved.reader if saved is not None else None
    check_folder(config.path, folder, reader)
    run = run_name(folder, reader)
    session.more_facts = {RUN_FACT: run}
    session.notes.append("a cluster publishes its checkpoints, as often as checkpoint_every says")
    return run
