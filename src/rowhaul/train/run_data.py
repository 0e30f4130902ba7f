"""The data of a run: which files it was given, and what was in those it has read.

::

    run/data.yaml      the data and evaluation data as given, but for passwords: for `--resume` without them
    run/contents.json  digests of the row groups read so far, to notice files that change
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from rowhaul._files import write_text
from rowhaul._yaml import load_yaml
from rowhaul.checkpoint import CheckpointReader
from rowhaul.data.contents import FileFacts, first_difference
from rowhaul.data.schema import Schema
from rowhaul.data.sources.live import LiveStream
from rowhaul.data.sources.opening import is_address
from rowhaul.data.sources.redis_stream import without_password
from rowhaul.data.stream import SampleStream
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.train.config import TrainConfig
from rowhaul.train.run_stream import stream_facts

DATA_FILE, CONTENTS_FILE = "data.yaml", "contents.json"
FILES_FACT = "data_files"  # of a checkpoint


@dataclass(frozen=True)
class RunData:
    """Paths, folders and globs."""

    data: list[str]
    eval_data: list[str]


def remember_data(folder: Path, data: Any, eval_data: Any) -> None:
    """Keep in a run's folder what it is trained and evaluated on."""
    given = {"data": _as_list(data), "eval_data": _as_list(eval_data), "working_directory": os.getcwd()}
    write_text(folder / DATA_FILE, yaml.safe_dump(given, sort_keys=False, allow_unicode=True))


def remembered_data(folder: Path) -> RunData | None:
    """What `remember_data` kept, relative paths where they were; None in runs of earlier versions."""
    path = folder / DATA_FILE
    if not path.is_file():
        return None
    try:
        given = load_yaml(path.read_text(encoding="utf-8"))
        start = given["working_directory"]
        data, eval_data = (
            [one if is_address(one) else os.path.join(start, one) for one in given[name]]
            for name in ("data", "eval_data")
        )
    except (yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); name the data: --data, --eval-data") from None
    return RunData(data, eval_data)


def _as_list(given: Any) -> list[str]:
    if not given:
        return []
    one_or_more = [given] if isinstance(given, str | Path) else given
    return [os.path.expanduser(without_password(one)) for one in map(str, one_or_more)]


def data_facts(stream: SampleStream | LiveStream) -> dict[str, Any]:
    """What a checkpoint keeps of the data it was trained on."""
    if isinstance(stream, LiveStream):
        return stream_facts(stream)
    files = [asdict(one) for one in stream.file_facts]
    return {"samples_per_epoch": stream.num_samples, "data": stream.fingerprint, FILES_FACT: files}


def check_same_data(reader: CheckpointReader, stream: SampleStream, config: TrainConfig | None = None) -> str:
    """Refuse to resume a checkpoint on other files than it was trained on.

    Files may be added at the end while the order of the samples stays what it was, which ``config`` says.
    Returns what to note of that, empty if nothing has changed.
    """
    facts = reader.facts
    if "data" not in facts:
        raise CheckpointError(
            f"{reader.path} was trained on a stream; resume it on that (--follow for a folder), or start a "
            "new run"
        )
    if facts["data"] == stream.fingerprint and FILES_FACT not in facts:
        return ""
    if FILES_FACT not in facts:
        raise CheckpointError(
            f"{reader.path} was trained on other files ({facts['samples_per_epoch']:,} samples an "
            f"epoch, now {stream.num_samples:,}); resume on the same files, in the same order"
        )
    before, now = [FileFacts(**one) for one in facts[FILES_FACT]], stream.file_facts
    difference = first_difference(before, now)
    if difference:
        raise CheckpointError(
            f"{reader.path} was trained on other files: {difference}; resume on the same files, in the same "
            "order (more may be added at the end)"
        )
    added = now[len(before) :]
    if not added:
        return ""
    reason = _why_not_extended(facts, config)
    if reason:
        raise CheckpointError(
            f"{added[0].name} was added to the files that {reader.path} was trained on, but {reason}; resume "
            "without it, or start a new run"
        )
    more = sum(one.rows for one in added)
    return f"{len(added):,} data files were added at the end, from {added[0].name} on: {more:,} samples more"


def _why_not_extended(facts: dict[str, Any], config: TrainConfig | None) -> str:
    if config is None or config.shuffle_rows:
        return "with shuffling the order of the samples depends on all files"
    if facts["samples"] > facts["samples_per_epoch"]:
        return "the run is beyond its first epoch, which would have had more samples"
    if config.rates.decay != "constant":
        return f"the learning rates decay ({config.rates.decay}) towards the end of the files given then"
    return ""


def write_contents(folder: Path, stream: SampleStream) -> None:
    """Keep the digests of what was read so far."""
    digests: list[dict[str, str]] = [{} for _ in stream.file_facts]
    for (file, group), digest in sorted(dict(stream.contents.known).items()):
        digests[file][str(group)] = digest
    files = [
        {"name": facts.name, "mtime_ns": facts.mtime_ns, "column_digests": known}
        for facts, known in zip(stream.file_facts, digests, strict=True)
    ]
    write_text(folder / CONTENTS_FILE, json.dumps(files))


def read_contents(folder: Path, stream: SampleStream, verify: bool) -> None:
    """Expect of a stream the values that were read before.

    With ``verify``, files whose time of change differs are read again at once, as far as they were read
    before; otherwise values are compared when training reads them again.
    """
    try:
        files = json.loads((folder / CONTENTS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except ValueError:
        raise CheckpointError(
            f"{folder / CONTENTS_FILE} is damaged; remove it to resume without comparing what was read"
        ) from None
    changed: list[int] = []
    for file, (facts, before) in enumerate(zip(stream.file_facts, files, strict=False)):
        # Earlier versions hashed all columns together, as "row_groups": those are not compared.
        for group, digest in before.get("column_digests", {}).items():
            stream.contents.known[file, int(group)] = digest
        if before["mtime_ns"] != facts.mtime_ns:
            changed.append(file)
    if verify:
        stream.read_again(changed)


def check_times(config: TrainConfig, schema: Schema) -> None:
    """Refuse a ttl in time for files without times; a stream knows when its samples came.

    Raises:
        ConfigError: it says what to change.
    """
    if schema.time is None and any(one.ttl_seconds for one in config.row_policies(list(schema.tables))):
        raise ConfigError(
            "a ttl in days or hours goes by when events happened, but the schema does not say which column "
            "of these files that is; add `time: COLUMN` to it, or give ttl as a number of steps"
        )
