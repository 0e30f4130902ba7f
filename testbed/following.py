"""Shows what ranks print while they run, a line at a time, each with its rank."""

from __future__ import annotations

import tempfile
from pathlib import Path

import typer

from testbed.layout import Network


class Following:
    """Reads new lines of each rank's output files."""

    def __init__(self, network: Network, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="testbed-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._read_bytes = {(rank, stream): 0 for rank in network.ranks for stream in ("stdout", "stderr")}

    def show_new_lines(self) -> None:
        """Print the complete lines written since the last call, to the stream that they came from."""
        for (rank, stream), begin in self._read_bytes.items():
            with (self.folder / f"rank-{rank}.{stream}").open("rb") as file:
                file.seek(begin)
                lines = file.read().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith(b"\n")]
            self._read_bytes[rank, stream] = begin + sum(map(len, whole))
            for line in whole:
                text = line.decode(errors="replace").rstrip("\r\n")
                typer.echo(f"[{rank}] {text}", err=stream == "stderr")
