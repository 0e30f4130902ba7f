"""Runs ``rowhaul`` as one rank whose reading of data stops while a file exists: a slow or dead file server.

``python -m testbed.chaos.rank HOLD train --data ...``
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rowhaul.cli.app import main
from rowhaul.data.parquet import Sharing
from rowhaul.data.samples import Samples
from rowhaul.data.stream import SampleStream

_POLL_SECONDS = 0.02


def hold_reading_while(hold: Path) -> None:
    """Make every stream of this process wait before its next batch while ``hold`` exists."""
    read = SampleStream._batches

    def batches(stream: SampleStream, sharing: Sharing | None) -> Iterator[Samples]:
        for batch in read(stream, sharing):
            while hold.exists():
                time.sleep(_POLL_SECONDS)
            yield batch

    setattr(SampleStream, "_batches", batches)  # noqa: B010  # this process is made to be slow


if __name__ == "__main__":
    hold_reading_while(Path(sys.argv[1]))
    sys.argv = ["rowhaul", *sys.argv[2:]]
    main()
