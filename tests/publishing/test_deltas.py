"""Publishing, applying, compacting, dying and falling behind in any order: a dictionary is the oracle."""

import asyncio
import json
import shutil
import tempfile
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from published_rows import TABLES, Writer, rows_of
from server_process import children_of, start, stop, wait_for, wait_until_up

from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.publishing import compaction
from rowhaul.publishing import folder as publishing_folder
from rowhaul.publishing.graphs import GraphWriter
from rowhaul.serve import Scorer
from rowhaul.serve.refreshing import Refresher
from rowhaul.train.save_thread import SaveCancelledError

KEYS = st.tuples(st.sampled_from(TABLES), st.integers(-3, 12))
GIVEN = {}  # schema and graph, which hypothesis's classes cannot be given


@pytest.fixture(scope="module", autouse=True)
def given(log_schema, served_run):
    GIVEN.update(schema=log_schema, graph=next(served_run[1].glob("base-*/dense.onnx")))


def written(values):
    return {row: np.full(4, value, np.float32).tobytes() for row, value in values.items()}


class Publication(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.path = Path(tempfile.mkdtemp()) / "served"
        self.writer = Writer(self.path, GIVEN["schema"], GIVEN["graph"])
        self.step, self.known = 0, {}  # what a reader of everything knows
        self.versions = {0: {}}  # by step
        self.scorer = Scorer(self.path)

    @rule(rows=st.dictionaries(KEYS, st.integers(0, 9), max_size=8), deleted=st.sets(KEYS, max_size=4))
    def publish(self, rows, deleted):
        self.step += 1
        self.known = {row: value for row, value in self.known.items() if row not in deleted} | rows
        self.writer.write_delta(
            {row: [value] * 4 for row, value in rows.items()}, deleted - rows.keys(), self.step
        )
        self.versions[self.step] = dict(self.known)

    @rule()
    def die_while_publishing(self):
        self.writer.write_delta({("user", 1): [77] * 4}, [], self.step + 1, ends=False)
        self.writer = Writer(self.path, GIVEN["schema"], GIVEN["graph"])

    @rule()
    def compact(self):
        compaction.compact(self.writer.folder, lambda: None)

    @rule()
    def apply(self):
        self.scorer.refresh()
        assert self.scorer.step == self.step

    @rule()
    def open_anew(self):
        self.scorer = Scorer(self.path)
        assert self.scorer.step == self.step

    @invariant()
    def rows_are_those_of_one_version(self):
        if hasattr(self, "scorer"):
            assert rows_of(self.scorer) == written(self.versions[self.scorer.step])

    def teardown(self):
        shutil.rmtree(self.path.parent, ignore_errors=True)


Publication.TestCase.settings = settings(max_examples=12, stateful_step_count=14)
test_any_order = Publication.TestCase


@pytest.fixture
def writer(tmp_path):
    made = Writer(tmp_path / "served", GIVEN["schema"], GIVEN["graph"])
    for step in (1, 2):
        made.write_delta({("user", step): [step] * 4, ("item", 5): [step] * 4}, [("tags", 9)], step)
    return made


def damage(path, edit):
    data = bytearray(path.read_bytes())
    edit(data)
    path.write_bytes(data)


def test_a_delta_without_weights_for_kernels_is_scored_by_its_graph(tmp_path):
    writer = Writer(tmp_path, GIVEN["schema"], GIVEN["graph"])
    dots = GIVEN["graph"].with_name("dots.safetensors")
    both, graph = {"onnx": GIVEN["graph"], "dots": dots}, {"onnx": GIVEN["graph"]}
    writer.folder._graphs = GraphWriter(both, [])
    writer.write_base({}, 1)
    scorer = Scorer(tmp_path)
    assert scorer.dense.kind == "dots"
    writer.write_delta({("user", 1): [1] * 4}, [], 2)
    assert scorer.refresh().num_deltas == 1
    assert scorer.dense.kind == "dots"
    writer.folder._graphs = GraphWriter(graph, [])
    writer.write_delta({("user", 2): [1] * 4}, [], 3)
    assert scorer.refresh().num_deltas == 1
    assert (scorer.dense.kind, scorer.step) == ("onnx", 3)


def rewritten(path, **changes):
    from rowhaul._manifest import write_manifest

    about = json.loads(path.read_text()) | changes
    about.pop("xxh3")
    path.write_bytes(write_manifest(about))


def wrong_from(path):
    rewritten(path / "delta-000000003" / "delta.json", **{"from": "elsewhere.2"})


def other_schema(path):
    rewritten(path / "delta-000000003" / "delta.json", schema="0" * 16)


def gap(path):
    about = json.loads((path / "served.json").read_text())["published"]
    about["deltas"][-1]["from"] = about["version"]
    rewritten(path / "served.json", published=about)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda path: damage(path / "delta-000000003/rows-r0000.bin", lambda data: data.pop()), "bytes"),
        (lambda path: damage(path / "delta-000000003/rows-r0000.bin", lambda d: d.reverse()), "checksum"),
        (lambda path: damage(path / "delta-000000003/dense.onnx", lambda data: data.pop()), "bytes"),
        (lambda path: (path / "delta-000000003/delta.json").unlink(), "is missing"),
        (lambda path: damage(path / "delta-000000003/delta.json", lambda data: data.pop()), "damaged"),
        (wrong_from, "leads from version elsewhere.2"),
        (other_schema, "another schema"),
        (gap, "a gap before delta-000000003"),
    ],
)
def test_a_bad_delta_is_named_and_the_last_good_version_stays(writer, tmp_path, break_it, message):
    path = tmp_path / "served"
    scorer = Scorer(path)
    writer.write_delta({("user", 7): [3] * 4}, [], 3)
    break_it(path)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=message):
            scorer.refresh()
        assert scorer.step == 2
    assert rows_of(scorer) == written({("user", 1): 1, ("user", 2): 2, ("item", 5): 2})
    assert Scorer(path).step == 2  # a server that starts now


def test_a_graph_that_cannot_be_run_here_is_named_and_the_last_good_version_stays(writer, tmp_path):
    """Of a trainer with a newer ONNX than the server's."""
    path, newer = tmp_path / "served", onnx.load(GIVEN["graph"])
    newer.ir_version = 1000
    onnx.save(newer, tmp_path / "newer.onnx")
    scorer = Scorer(path)
    writer.folder._graphs = GraphWriter({"onnx": tmp_path / "newer.onnx"}, [])
    writer.write_delta({("user", 7): [3] * 4}, [], 3)
    with pytest.raises(CheckpointError, match=r"delta-000000003.*cannot be opened.*version of onnxruntime"):
        scorer.refresh()
    assert scorer.step == Scorer(path).step == 2


def test_whatever_goes_wrong_later_versions_are_looked_for(writer, tmp_path):
    scorer, failures = Scorer(tmp_path / "served"), []
    seen, has_failed = threading.Event(), threading.Event()

    def refreshed(found):
        if scorer.step == 3:
            raise ZeroDivisionError("in what counts")
        seen.set()

    def failed():
        failures.append(refresher.trouble)
        has_failed.set()

    refresher = Refresher(scorer, 0.01, refreshed, failed)
    refresher.start()
    writer.write_delta({}, [], 3)
    assert has_failed.wait(60)
    writer.write_delta({}, [], 4)
    assert seen.wait(60)
    refresher.close()
    assert failures == ["ZeroDivisionError: in what counts"]
    assert (scorer.step, refresher.trouble) == (4, "")


def test_who_falls_behind_takes_the_new_base(writer, tmp_path, monkeypatch):
    scorer = Scorer(tmp_path / "served")
    monkeypatch.setattr(publishing_folder, "KEEP_SECONDS", 0.0)
    writer.write_delta({("user", 3): [3] * 4}, [("user", 1)], 3)
    compaction.compact(writer.folder, lambda: None)
    writer.write_delta({("user", 4): [4] * 4}, [], 4)
    assert sorted(one.name for one in (tmp_path / "served").glob("*-*")) == [
        "base-000000003",
        "delta-000000004",
    ]
    found = scorer.refresh()
    assert (found.new_base, found.num_deltas, scorer.step) == (True, 1, 4)
    expected = {("user", 2): 2, ("user", 3): 3, ("user", 4): 4, ("item", 5): 2}
    assert rows_of(scorer) == written(expected)
    assert not scorer.refresh().new_base


def test_files_stay_as_long_as_an_older_manifest_may_be_read(writer, tmp_path):
    compaction.compact(writer.folder, lambda: None)
    writer.write_delta({}, [], 3)
    assert (tmp_path / "served" / "delta-000000001").is_dir()


@pytest.mark.parametrize("error", [SaveCancelledError(), OSError(28, "No space left on device")])
def test_a_base_that_cannot_be_written_leaves_nothing(error, writer, tmp_path):
    """The next base has another name, and nobody else would remove the folder."""
    before = sorted((tmp_path / "served").iterdir())
    for paces in range(8):  # the last ones while rows are written
        with pytest.raises(type(error)) as found:
            compaction.compact(writer.folder, Mock(side_effect=[None] * paces + [error]))
        assert found.value is error
        assert sorted((tmp_path / "served").iterdir()) == before
    writer.folder._graphs = Mock(**{"write.side_effect": error})
    with pytest.raises(type(error)):
        writer.write_base({}, 3)
    assert sorted((tmp_path / "served").iterdir()) == before
    assert not writer.folder._writing
    compaction.compact(writer.folder, lambda: None)
    assert Scorer(tmp_path / "served").step == 2


def test_another_run_does_not_publish_here(writer, tmp_path):
    with pytest.raises(ConfigError, match="published by another run"):
        Writer(tmp_path / "served", GIVEN["schema"], GIVEN["graph"], run="another")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="thesis"):
        Writer(tmp_path / "other", GIVEN["schema"], GIVEN["graph"])


def test_a_request_is_scored_by_one_version(tmp_path):
    """Rows and weights change together: every score is that of a version, and says which."""
    path = tmp_path / "served"
    writer = Writer(path, GIVEN["schema"], GIVEN["graph"])
    request = {"user": 1, "item": "a", "tags": [1, 2]}, [{"price": 0.5}] * 50
    scorer, expected, found = Scorer(path), {}, []
    ends = threading.Event()

    def ask():
        while not ends.is_set():
            scored = scorer.score_request(*request)
            found.append((scored.step, set(scored.scores.tolist())))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    expected[0] = set(scorer.score(*request).tolist())
    for thread in threads:
        thread.start()
    for step in range(1, 9):
        rows = {("tags", key): [step / 4] * 4 for key in (1, 2)} | {("user", 1): [-step / 3] * 4}
        writer.write_delta(rows, [], step)
        scorer.refresh()
        expected[step] = set(scorer.score(*request).tolist())
    ends.set()
    for thread in threads:
        thread.join()
    assert len({frozenset(one) for one in expected.values()}) == 9
    assert all(scores == expected[step] for step, scores in found)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_server_lets_go_of_a_base_that_compaction_has_removed(writer, tmp_path, monkeypatch, workers):
    """A file that a process maps takes its place on the disk, removed or not."""
    path = tmp_path / "served"
    process, url = start(path, "--refresh", "0.05", "--workers", str(workers))
    try:
        wait_until_up(url)
        monkeypatch.setattr(publishing_folder, "KEEP_SECONDS", 0.0)
        compaction.compact(writer.folder, lambda: None)
        assert not (path / "base-000000000").exists()

        def holders():
            every = [process.pid, *children_of(process.pid)]
            maps = {one: Path(f"/proc/{one}/maps").read_text() for one in every}
            return [one for one, found in maps.items() if "base-000000000" in found]

        wait_for(lambda: not holders(), holders)
    finally:
        assert stop(process)[0] == 0


def cut(folder):
    """Damage a file before it is published: the server maps it as soon as it is."""
    damage(folder / "rows-r0000.bin", lambda data: data.pop())


def test_the_metrics_are_of_the_model_that_is_served_beside_a_bad_delta(writer, tmp_path):
    httpx = pytest.importorskip("httpx")
    from rowhaul.serve.app import make_app
    from rowhaul.serve.settings import ServeSettings

    path = tmp_path / "served"
    app = make_app(Scorer(path), ServeSettings(str(path), refresh_seconds=0.02))
    writer.write_delta({}, [], 3)
    writer.write_delta({}, [], 4, edit=cut)

    async def run():
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport) as client:
            while "failures_total 0.0" in (await client.get("http://test/metrics")).text:
                await asyncio.sleep(0.01)
            assert (await client.get("http://test/healthz")).json()["step"] == 3
            metrics = (await client.get("http://test/metrics")).text
            assert "rowhaul_serve_model_step 3.0" in metrics
            assert "rowhaul_serve_model_published_timestamp_seconds 1.000000003e+09" in metrics
            assert "rowhaul_serve_deltas_applied_total 1.0" in metrics

    asyncio.run(run())


def test_a_request_is_read_by_the_version_that_scores_it(writer, tmp_path):
    """Another run has published to the same place meanwhile, with its features in another order."""
    path = tmp_path / "served"
    scorer = Scorer(path)

    class Refreshing(dict):
        def get(self, *given):
            scorer.refresh()
            return super().get(*given)

    request = {"user": 1, "item": "a", "tags": [1, 2]}, [{"price": 0.5}] * 5
    expected = scorer.score_request(*request)
    shutil.rmtree(path)
    turned = replace(GIVEN["schema"], ids=GIVEN["schema"].ids[::-1])
    Writer(path, turned, GIVEN["graph"], run="another")
    found = scorer.score_request(Refreshing(request[0]), request[1])
    assert scorer.folder.schema.features == ("tags", "item", "user")
    assert (found.scores.tolist(), found.step) == (expected.scores.tolist(), 2)


def test_a_server_applies_deltas_and_stays_up_with_a_bad_one(writer, tmp_path):
    httpx = pytest.importorskip("httpx")
    from rowhaul.serve.app import make_app
    from rowhaul.serve.settings import ServeSettings

    path = tmp_path / "served"
    app = make_app(Scorer(path), ServeSettings(str(path), refresh_seconds=0.02))
    request = {"shared": {"user": 1, "item": "a", "tags": [1]}, "candidates": [{"price": 0.5}]}

    async def run():
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport) as client:
            get = partial(client.get, "http://test/healthz")
            health = (await get()).json()
            assert (health["step"], health["deltas"], health["version"][-2:]) == (2, 2, ".2")
            writer.write_delta({("user", 1): [9] * 4}, [], 3)
            while (health := (await get()).json())["step"] == 2:
                await asyncio.sleep(0.01)
            assert (health["step"], health["deltas"], "trouble" in health) == (3, 3, False)
            writer.write_delta({("user", 1): [8] * 4}, [], 4, edit=cut)
            while "trouble" not in (health := (await get()).json()):
                await asyncio.sleep(0.01)
            assert (health["step"], "delta-000000004" in health["trouble"]) == (3, True)
            answer = await client.post("http://test/score", json=request)
            assert (answer.status_code, answer.json()["step"]) == (200, 3)
            metrics = (await client.get("http://test/metrics")).text
            assert "rowhaul_serve_deltas_applied_total 1.0" in metrics
            assert "rowhaul_serve_model_step 3.0" in metrics

    asyncio.run(run())


def test_another_schema_is_there_once_its_base_is(writer, tmp_path):
    """A server may begin while the base is written, or after the trainer has died doing it."""
    path, turned = tmp_path / "served", replace(GIVEN["schema"], ids=GIVEN["schema"].ids[::-1])
    resumed = Writer(path, turned, GIVEN["graph"])
    graphs, steps = resumed.folder._graphs, []

    def write(*given):
        steps.append(Scorer(path).step)
        raise OSError(28, "No space left on device")

    resumed.folder._graphs = Mock(**{"write.side_effect": write})
    with pytest.raises(OSError, match="No space"):
        resumed.write_base({}, 3)
    assert steps == [Scorer(path).step] == [2]
    resumed.folder._graphs = graphs
    resumed.write_base({}, 3)
    assert Scorer(path).folder.schema.features == ("tags", "item", "user")
