"""Open the files of a run on a cluster.

With ``data_from: every_host`` every rank opens them, and all ranks learn which hosts cannot. With ``rank0``
only rank 0 needs them: it sends the schema and the facts of its streams to the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

from rowhaul._activity import Activity, doing
from rowhaul.cluster.checks import gather_texts, wait_until_all_know
from rowhaul.cluster.cluster import Cluster
from rowhaul.cluster.waiting import ranks_text, within
from rowhaul.data.contents import FileFacts
from rowhaul.data.samples import Samples
from rowhaul.data.schema import Schema
from rowhaul.data.sources.live import LiveStream
from rowhaul.data.sources.opening import stream_of
from rowhaul.data.stream import SampleStream
from rowhaul.errors import ClusterError, DataError
from rowhaul.nn import TableCollection
from rowhaul.planning.rank0_data.evaluation import ReceivedBatches, SentBatches
from rowhaul.planning.rank0_data.sharing import READER, DataReceiver, DataSource
from rowhaul.schedule import HotRows
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed.training import DistributedTraining
from rowhaul.train.run import EVALUATION_BATCH, Streams, open_streams
from rowhaul.train.run_stream import check_streamable
from rowhaul.transport.remote_errors import read_report, write_report
from rowhaul.tuning.hot_set.broadcast import broadcast_rows
from rowhaul.tuning.hot_set.first_rows import profile_hot_rows

_OPENING_SECONDS = 600.0  # to read all footers; the heartbeat notices a rank that dies meanwhile


@dataclass(frozen=True)
class StreamFacts:
    """What a rank without the files knows of a stream, with the attributes of `SampleStream`."""

    files: list[str]  # the first file only, for messages
    batch_size: int
    num_samples: int
    num_batches: int
    fingerprint: str
    key_kinds: dict[str, str]
    file_facts: list[FileFacts]
    is_live: bool = False

    @classmethod
    def of(cls, stream: SampleStream | LiveStream) -> StreamFacts:
        """Return the facts of a stream."""
        same = ("batch_size", "num_samples", "num_batches", "fingerprint", "key_kinds", "file_facts")
        values = (getattr(stream, name) for name in same)
        return replace(cls([str(stream.files[0])], *values), is_live=stream.is_live)

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> StreamFacts:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**given, "file_facts": [FileFacts(**one) for one in given["file_facts"]]})

    def news(self) -> list[str]:
        """Return nothing: the rank that reads tells what is worth telling."""
        return []


def reading_rank(cluster: Cluster, config: TrainConfig) -> int:
    """The rank that reads the training data, of those on the host of rank 0."""
    if config.cluster.data_from == "rank0":
        return READER
    return max(next(ranks for ranks in cluster.hosts if 0 in ranks))


def schema_for_all(cluster: Cluster, config: TrainConfig, schema: Schema | None) -> Schema:
    """Return the schema, broadcast by rank 0 where only it reads the files; a collective call there."""
    if config.cluster.data_from == "rank0":
        text = json.dumps(schema.to_dict()) if schema is not None and cluster.rank == READER else ""
        text = gather_texts(cluster, "sharing the schema", text)[READER]
        schema = Schema.from_dict(json.loads(text), "the schema of rank 0") if text else None
    if schema is None:
        raise DataError("no schema was given; with --data-from rank0, rank 0 must have one, else every rank")
    return schema


def open_streams_for_all(
    cluster: Cluster,
    config: TrainConfig,
    schema: Schema,
    data: Any,
    eval_data: Any,
    start: int,
    open_live: Callable[[str], LiveStream] | None = None,
) -> Streams:
    """Open the files to train on, from ``start``, and those to evaluate on; a collective call.

    Returns `StreamFacts` on a rank without the files: those streams cannot be iterated. ``open_live`` opens
    data without a known end, on rank 0.

    Raises:
        ClusterError: on every rank, if some hosts cannot open the files.
        DataError: on every rank, if no rank can, or rank 0 cannot where it reads for all.
    """
    open_files = partial(open_streams, config, schema, data, eval_data, start)

    def open_here() -> Streams:
        live = stream_of(data, config.stream.follow)
        if live is None or open_live is None:
            return open_files()
        check_streamable(config, is_rank=True)
        evaluation = SampleStream(eval_data, schema, EVALUATION_BATCH) if eval_data else None
        # It has the attributes that are read of a stream here, but no files.
        return cast(SampleStream, open_live(live)), evaluation

    if config.cluster.data_from == "rank0":
        return _opened_by_reader(cluster, open_here)
    return _opened_by_all(cluster, open_files)


def from_reader(cluster: Cluster, what: str, make: Callable[[], Any]) -> Any:
    """Return on every rank what rank 0 makes, in plain types; a collective call.

    Raises:
        Exception: on every rank, what rank 0 raises.
    """
    error, text = None, ""
    if cluster.rank == READER:
        try:
            text = json.dumps({"made": make()})
        except Exception as raised:
            error, text = raised, json.dumps({"error": write_report(raised, READER).decode()})
    answer = json.loads(gather_texts(cluster, what, text, _OPENING_SECONDS)[READER])
    if "error" in answer:
        wait_until_all_know(cluster)
        if error is None:
            error = read_report(answer["error"].encode())
            error.__notes__ = [f"(on rank {READER}, which reads the data for all)"]
        raise error
    return answer["made"]


def _opened_by_reader(cluster: Cluster, open_here: Callable[[], Streams]) -> Streams:
    opened: list[Streams] = []

    def facts_of_opened() -> list[dict[str, Any] | None]:
        with doing(Activity.OPENING):
            opened.append(open_here())
        return [None if one is None else asdict(StreamFacts.of(one)) for one in opened[0]]

    facts = from_reader(cluster, "sharing facts of the data", facts_of_opened)
    if opened:
        return opened[0]
    training, evaluation = (None if one is None else StreamFacts.from_dict(one) for one in facts)
    # A rank without the files reads only these attributes.
    return cast(SampleStream, training), cast("SampleStream | None", evaluation)


def _opened_by_all(cluster: Cluster, open_here: Callable[[], Streams]) -> Streams:
    streams, error = None, None
    try:
        with doing(Activity.OPENING):
            streams = open_here()
    except Exception as raised:
        error = raised
    texts = gather_texts(
        cluster, "opening the data", "" if error is None else str(error) or repr(error), _OPENING_SECONDS
    )
    blind = [rank for rank, text in enumerate(texts) if text]
    if blind:
        wait_until_all_know(cluster)
    if error is not None and len(blind) == cluster.num_ranks:
        raise error
    if blind:
        hosts = sorted({cluster.members[rank].host_name for rank in blind})
        raise ClusterError(
            f"{ranks_text(blind, cluster.roles)} on {', '.join(hosts)} cannot open the data, which other "
            f"ranks can: {texts[blind[0]]}. What to do: put the files into a folder that all hosts share, "
            "copy them to the same path on every host, or let rank 0 read them for all (--data-from rank0)"
        ) from error
    assert streams is not None
    return streams


def hot_rows_for_all(
    cluster: Cluster, config: TrainConfig, stream: SampleStream, collection: TableCollection
) -> HotRows | None:
    """Choose the rows that every worker holds, on ranks with the files; a collective call before training."""
    settings = config.cluster
    if settings.data_from != "rank0" or not settings.num_hot_rows:
        return profile_hot_rows(stream, settings, collection)
    mine = profile_hot_rows(stream, settings, collection) if cluster.rank == READER else None
    # Not in this thread: a rank that waits in the network for one that is gone cannot be interrupted.
    return within(_OPENING_SECONDS, lambda: broadcast_rows(cluster.data, mine), check=cluster.failure.check)


@contextmanager
def evaluation_batches(training: DistributedTraining, stream: SampleStream) -> Iterator[Iterable[Samples]]:
    """Provide the batches for `evaluate`, read here or sent by rank 0; collective, like `evaluate`."""
    data, num_workers = training.runtime.feed.data, training.settings.topology.num_workers
    batches: SentBatches | ReceivedBatches
    if data is None or not training.runtime.trains:
        yield stream
        return
    if isinstance(data, DataSource):
        batches = SentBatches(data, stream, num_workers, stream.num_samples)
    else:
        assert isinstance(data, DataReceiver)
        batches = ReceivedBatches(data, training.runtime.rank, stream.num_samples)
    try:
        yield batches
    except Exception:  # known to all ranks, unless the rank has failed
        if training.runtime.failure.error is None:
            batches.close()
        raise
    batches.close()
