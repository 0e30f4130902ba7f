"""`PublishedFolder`: writes versions of a model to a served folder, each visible only when it is whole.

What is in the folder: `rowhaul.serve.deltas`. One run writes to it, and one process, which holds a lock on
it (`rowhaul.publishing.folder_lock`). Files are written and synced under their
final names first; then ``served.json`` is replaced, which names them. A folder that it has not named for
`KEEP_SECONDS` is removed: until then a reader can finish with an older manifest.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rowhaul._files import sync, whole, write_text
from rowhaul._manifest import write_manifest
from rowhaul.checkpoint.progress import Counter
from rowhaul.data.schema import SCHEMA_FILE
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.export.manifest import README_FILE
from rowhaul.export.serving.folder import model_facts, unknown_ids
from rowhaul.export.serving.readme import readme
from rowhaul.export.serving.row_file import UnknownIds, write_row_file
from rowhaul.publishing.folder_lock import FolderLock, check_free
from rowhaul.publishing.graphs import GraphWriter
from rowhaul.serve.deltas import DELTA_FILE, DELTA_FORMAT, DELTA_VERSION, DeltaName, Moment, Published
from rowhaul.serve.files import ServedFile
from rowhaul.serve.folder import MANIFEST_FILE, ROWS_FILE, published_in, read_served
from rowhaul.store.served_rows import ServedRows
from rowhaul.train.trainer import Trainer

KEEP_SECONDS = 600.0
_BASE, _DELTA = "base-", "delta-"

Weights = Mapping[str, Tensor]
Unknown = Mapping[str, Mapping[str, int | float]]


@dataclass(frozen=True)
class State:
    """All of a version but its rows."""

    moment: Moment
    weights: Weights
    key_kinds: dict[str, str]


class PublishedFolder:
    """The served folder of a run.

    Args:
        path: the folder.
        run: the run's name for itself, which no other run has.
        trainer: its model.
        graphs: writes its graph.

    Raises:
        ConfigError: the folder belongs to another run, holds something else, or is in use.
    """

    def __init__(self, path: Path, run: str, trainer: Trainer, graphs: GraphWriter) -> None:
        self.path, self._run, self._graphs = path, run, graphs
        self._facts, self._schema = model_facts(trainer), trainer.schema
        self._unknown = unknown_ids(trainer)
        self._lock = threading.Lock()  # between the threads that write deltas and a new base
        self._unnamed: dict[str, float] = {}  # folders that the manifest does not name, and since when
        self._writing: set[str] = set()
        existing(path, run)  # or raises
        path.mkdir(parents=True, exist_ok=True)
        self._held = FolderLock.of(path)  # until the object is freed
        self.manifest = existing(path, run)  # now that nobody else writes it

    @property
    def published(self) -> Published | None:
        """The versions that can be read; None: nothing was published yet."""
        return None if self.manifest is None else published_in(self.path, self.manifest)

    @property
    def keeps_graphs(self) -> bool:
        """Whether deltas have each kind of graph that the base has: a server goes on with the one it runs.

        One that runs a model's kernels goes on with any.
        """
        return self.manifest is not None and self.manifest["dense"].keys() - {"dots"} <= set(
            self._graphs.kinds
        )

    def write_base(self, tables: Mapping[str, ServedRows], state: State, count: Counter) -> None:
        """Publish a whole model, from which deltas lead on; those before it lead nowhere any more."""
        number = self._next_number()
        name, version = f"{_BASE}{number:09d}", f"{secrets.token_hex(4)}.{number}"
        unknown = {table: self._unknown.numbers(table, rows) for table, rows in tables.items()}
        self.path.mkdir(parents=True, exist_ok=True)

        def dense(folder: Path) -> dict[str, dict[str, Any]]:
            return self._graphs.write(state.weights, folder)

        manifest = self._new_base(name, tables, unknown, dense, state, count)
        about = Published(self._run, version, state.moment)
        with self._lock:
            self._schema.write(self.path / SCHEMA_FILE)  # last: servers may begin with the base before
            schema = ServedFile.of(self.path, SCHEMA_FILE)._asdict()
            self._replace({**manifest, "schema": schema, "published": about.entry()})

    def begin_delta(self) -> tuple[str, Path]:
        """Make the folder of the next delta, for all ranks to write into; returns its name, too."""
        name = f"{_DELTA}{self._next_number():09d}"
        return name, self._empty_folder(name)

    def write_part(
        self, folder: Path, label: str, tables: Mapping[str, ServedRows], step: int
    ) -> dict[str, Any]:
        """Write changed rows into a delta's folder; returns the entry of the file."""
        return write_part(folder, label, tables, self._unknown, step)

    def end_delta(self, name: str, parts: Sequence[dict[str, Any]], state: State) -> DeltaName:
        """Add weights to a delta whose rows are written, and publish it."""
        about, folder = self.published, self.path / name
        assert about is not None
        assert self.manifest is not None
        chain, _, _ = about.newest.partition(".")
        dense = self._graphs.write(state.weights, folder)
        size = sum(int(one["bytes"]) for one in (*parts, *dense.values()))
        number = int(name.removeprefix(_DELTA))
        delta = DeltaName(name, about.newest, f"{chain}.{number}", state.moment.step, size)
        content = {
            "format": DELTA_FORMAT,
            "version": DELTA_VERSION,
            "from": delta.base,
            "to": delta.to,
            **state.moment.entry(),
            "schema": self.manifest["schema"]["xxh3"],
            "key_kinds": state.key_kinds,
            "rows": list(parts),
            "dense": dense,
        }
        (folder / DELTA_FILE).write_bytes(write_manifest(content))
        sync(folder / DELTA_FILE)
        sync(folder)
        with self._lock:
            about = self.published
            assert about is not None
            self._replace(
                {**self.manifest, "published": replace(about, deltas=(*about.deltas, delta)).entry()}
            )
            self._writing.discard(name)
        self._remove_unnamed()
        return delta

    def fold(self, folded: Published, write: Callable[[Path], dict[str, Any]], key_kinds: Any) -> None:
        """Replace the base and its deltas by a base of the newest of these versions.

        ``write`` fills the new folder, and returns the entries of its files.
        """
        last = folded.deltas[-1]
        name = f"{_BASE}{int(last.folder.removeprefix(_DELTA)):09d}"
        with self._base_folder(name) as folder:
            made = write(folder)
            moment: Moment = made.pop("moment")
            for one in (made["rows"], *made["dense"].values()):
                one["file"] = f"{name}/{one['file']}"
            sync(folder)
        with self._lock:
            self._writing.discard(name)
            now = self.published
            assert now is not None
            assert self.manifest is not None
            if now.position(last.to) < 0:  # a new chain has begun meanwhile
                return
            about = replace(now, version=last.to, moment=moment, deltas=now.after(last.to) or ())
            of_base = {"step": moment.step, "samples": moment.samples, "key_kinds": key_kinds}
            self._replace({**self.manifest, **of_base, **made, "published": about.entry()})
        self._remove_unnamed()

    def _new_base(
        self,
        name: str,
        tables: Mapping[str, ServedRows],
        unknown: Unknown,
        dense: Callable[[Path], dict[str, dict[str, Any]]],
        state: State,
        count: Counter,
    ) -> dict[str, Any]:
        with self._base_folder(name) as folder:
            header = write_row_file(tables, unknown, folder / ROWS_FILE, state.moment.step, count)
            graphs = dense(folder)
            for one in graphs.values():
                one["file"] = f"{name}/{one['file']}"
            sync(folder)
        self._writing.discard(name)
        rows = ServedFile.of(self.path, f"{name}/{ROWS_FILE}")
        return {
            **self._facts,
            "step": state.moment.step,
            "samples": state.moment.samples,
            "key_kinds": state.key_kinds,
            "rows": {**rows._asdict(), "header": header},
            "dense": graphs,
        }

    def _replace(self, manifest: dict[str, Any]) -> None:
        """Replace the manifest in one step."""
        base_changed = self.manifest is None or self.manifest["rows"] != manifest["rows"]
        with whole(self.path / MANIFEST_FILE) as temporary:
            temporary.write_bytes(write_manifest(manifest))
        self.manifest = manifest
        if base_changed:
            write_text(self.path / README_FILE, readme(manifest, self._schema))

    def _next_number(self) -> int:
        about = self.published
        return 0 if about is None else int(about.newest.rpartition(".")[2]) + 1

    @contextmanager
    def _base_folder(self, name: str) -> Iterator[Path]:
        """Yield the folder of a base; where writing it fails it is removed, for the next has another name."""
        try:
            yield self._empty_folder(name)
        except BaseException:
            shutil.rmtree(self.path / name, ignore_errors=True)
            self._writing.discard(name)
            raise

    def _empty_folder(self, name: str) -> Path:
        """Make a folder that nobody reads, without what a publication that was killed left there."""
        self._writing.add(name)
        folder = self.path / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def _remove_unnamed(self) -> None:
        """Remove folders that the manifest has not named for a while."""
        with self._lock:
            about, now = self.published, time.monotonic()
            assert about is not None
            assert self.manifest is not None
            named = {one.folder for one in about.deltas} | self._writing
            named |= {str(self.manifest["rows"]["file"]).partition("/")[0]}
            there = {one.name for one in self.path.iterdir() if one.name.startswith((_BASE, _DELTA))}
            self._unnamed = {name: self._unnamed.get(name, now) for name in there - named}
        for name, since in self._unnamed.items():
            if now - since >= KEEP_SECONDS:
                shutil.rmtree(self.path / name, ignore_errors=True)


def write_part(
    folder: Path, label: str, tables: Mapping[str, ServedRows], unknown: UnknownIds, step: int
) -> dict[str, Any]:
    """Write the changed rows of one rank into a delta's folder; returns the entry of the file."""
    numbers = {table: unknown.numbers(table, rows) for table, rows in tables.items()}
    file = f"rows-{label}.bin"
    header = write_row_file(tables, numbers, folder / file, step, _uncounted())
    return {**ServedFile.of(folder, file)._asdict(), "header": header}


def existing(path: Path, run: str) -> dict[str, Any] | None:
    """Return the manifest of what a run has published in a folder; None: nothing yet.

    Raises:
        ConfigError: the folder belongs to another run, holds something else, or is in use.
    """
    if not path.exists() or (path.is_dir() and not (path / MANIFEST_FILE).exists()):
        left = (one.name for one in path.iterdir()) if path.exists() else ()
        if others := sorted(one for one in left if not one.startswith((_BASE, _DELTA, ".", SCHEMA_FILE))):
            raise ConfigError(f"publish.to: {path} has other files ({others[0]}); choose another folder")
        return None
    try:
        manifest = read_served(path)
        about = published_in(path, manifest)
    except CheckpointError as error:
        raise ConfigError(f"publish.to: {error}; or remove the folder to publish anew") from None
    if about is None or about.run != run:
        by = "was exported" if about is None else "is published by another run"
        raise ConfigError(
            f"publish.to: the model in {path} {by}; choose another folder, or remove it. Only the run that "
            "began a folder goes on with it (--resume); a run made by ckpt convert or merge is another one"
        )
    check_free(path)
    return manifest


def _uncounted() -> Counter:
    return Counter(1, lambda done, total: None)
