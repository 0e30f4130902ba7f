"""`Scorer` gives the scores that `rowhaul predict` writes, however a request is written down."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from served_models import serve

from rowhaul.data.schema import Schema
from rowhaul.errors import CheckpointError, ConfigError, UnknownKeyError
from rowhaul.serve import Scorer
from rowhaul.serve.requests import RequestError, RequestReader
from rowhaul.train.predict import predict_file


@pytest.fixture(scope="module")
def scorer(served_run):
    return Scorer(served_run[1])


@pytest.fixture(scope="module")
def log(log_folder):
    return pq.read_table(log_folder / "test" / "part-0.parquet").slice(0, 60)


@pytest.fixture(scope="module")
def predicted(served_run, log, tmp_path_factory):
    """What `predict` writes for the log."""
    folder = tmp_path_factory.mktemp("predicted")
    pq.write_table(log, folder / "log.parquet")
    predict_file(str(served_run[0]), str(folder / "log.parquet"), folder / "scores.parquet")
    return pq.read_table(folder / "scores.parquet")["score"].to_numpy()


def test_scores_are_those_of_predict_in_every_form(scorer, log, predicted):
    rows, columns = log.to_pylist(), log.to_pydict()
    arrays = {name: np.array(values) for name, values in columns.items() if name != "tags"}
    forms = [rows, columns, log, log.to_batches()[0], {**arrays, "tags": columns["tags"]}]
    for candidates in forms:
        found = scorer.score({}, candidates)
        assert found.dtype == np.float32
        assert np.abs(found - predicted).max() < 1e-6


@pytest.mark.parametrize("backend", ["onnx", "pt2"])
def test_shared_features_are_the_same_for_all(served_run, log, backend):
    scorer = Scorer(served_run[1], backend=backend)
    shared = {"user": 7919, "tags": [3, 4, 3]}
    rows = [{"item": one["item"], "price": one["price"]} for one in log.to_pylist()]
    found = scorer.score(shared, rows)
    assert np.allclose(found, scorer.score({}, [{**shared, **one} for one in rows]), atol=1e-7)
    assert scorer.dense.kind == backend
    assert len(set(found.tolist())) > 10


def test_no_ids_unknown_ids_and_no_candidates(scorer):
    one = {"user": None, "item": None, "tags": [], "price": None}
    other = {"user": 10**15, "item": "nobody has seen me", "tags": [10**12], "price": 0}
    found = scorer.score_request({}, [one, other])
    assert np.isfinite(found.scores).all()
    assert (found.num_ids, found.num_unknown) == (3, 3)
    nothing = {"user": None, "item": None, "tags": None, "price": None}
    assert scorer.score_request(nothing, [{}, {}]).num_ids == 0
    assert scorer.score_request({}, [nothing, nothing]).num_ids == 0
    assert scorer.score({"user": 1, "item": "x", "tags": [1], "price": 1}, []).shape == (0,)
    assert scorer.score({"user": 1, "item": "x", "tags": [1], "price": 1}, [{}, {}]).shape == (2,)


GOOD = {"item": "a", "tags": [], "price": 1}


@pytest.mark.parametrize(
    ("shared", "candidates", "field", "reason"),
    [
        ({}, [GOOD], "candidates[0].user", "it is missing"),
        ({"user": 1}, [GOOD, {"tags": [], "price": 1}], "candidates[1].item", "it is missing"),
        ({"user": 1}, {"item": ["a"], "tags": [[]]}, "price", "it is missing"),
        ({"user": 1}, {"item": ["a"], "tags": [[], []]}, "candidates.tags", "2 values, and item has 1"),
        ({"user": 1}, {"item": "a"}, "candidates.item", "a list with a value for each candidate"),
        ({"user": "u"}, [GOOD], "shared.user", "trained on integer ids; give an integer, got 'u'"),
        ({"user": 1}, [{**GOOD, "item": 5}], "candidates[0].item", "give a string, got 5"),
        ({"user": 1.5}, [GOOD], "shared.user", "an id is an integer"),
        ({"user": 2**63}, [GOOD], "shared.user", "does not fit into 64 bits"),
        ({"user": 1}, [{**GOOD, "price": "9"}], "candidates[0].price", "a number is needed, got '9'"),
        ({"user": 1}, [GOOD, {**GOOD, "price": "9"}], "candidates[1].price", "a number is needed"),
        ({"user": 1}, [{**GOOD, "price": 1e40}], "candidates[0].price", "no finite float32"),
        ({"user": 1}, [{**GOOD, "tags": [[1]]}], "candidates[0].tags", "an id is an integer"),
        ({"user": 1, "item": "\ud800"}, [{"tags": [], "price": 1}], "shared.item", "got a string"),
        ({"user": 1}, [{**GOOD, "user": 1}], "user", "both in shared and in candidates"),
        ({"user": 1}, [GOOD, {**GOOD, "user": 2}], "user", "both in shared and in candidates"),
        ({"user": 1, "price": 2.5}, [{"item": "a", "tags": []}, GOOD], "price", "both in shared and in"),
        ({"user": 1}, [3], "candidates[0]", "a mapping of feature names"),
        ({"user": 1}, "all", "candidates", "got a string"),
        ([1], [], "shared", "got a list"),
    ],
)
def test_bad_requests_name_the_field(scorer, shared, candidates, field, reason):
    with pytest.raises(RequestError, match=reason) as error:
        scorer.score(shared, candidates)
    assert error.value.field == field


class Sliced(list):
    """Counts the values in its slices."""

    num_values = 0

    def __getitem__(self, which):
        found = super().__getitem__(which)
        self.num_values += len(found) if isinstance(which, slice) else 0
        return found


@pytest.mark.parametrize("place", [0, 1, 511, 998, 999])
@pytest.mark.parametrize(("given", "wrong", "said"), [(7, "a", "got a string"), (7, 2**70, "fit into 64")])
def test_the_first_wrong_value_is_found_without_trying_all(scorer, place, given, wrong, said):
    """Of lists of many ids that would take hours."""
    user = Sliced([given] * place + [wrong] * (1000 - place))
    columns = {"user": user, "item": ["a"] * 1000, "tags": [[]] * 1000, "price": [1.0] * 1000}
    if place == 0 and wrong == "a":  # all are strings
        user[-1] = 7
        place, said = 999, "got an integer where the values before it are of another type"
    with pytest.raises(RequestError, match=said) as error:
        scorer.score({}, columns)
    assert error.value.field == f"candidates.user[{place}]"
    assert user.num_values < 12_000


def test_hexadecimal_ids_are_read_as_preparing_reads_them():
    schema = Schema.from_dict({"ids": ["device", "seen"]})
    reader = RequestReader(schema, {"device": "hex", "seen": "hex"})
    found = reader.read({"device": "1f"}, [{"seen": ["ffffffffffffffff", "10"]}, {"seen": None}])
    assert found.bags.ids.tolist() == [31, -1, 16]
    assert found.bags.offsets.tolist() == [0, 1, 3, 3]
    assert reader.read({"device": 31}, [{"seen": [-1, 16]}]).bags.ids.tolist() == [31, -1, 16]
    in_bytes = pa.table({"device": [b"1f", None], "seen": [[b"ffffffffffffffff"], [b"10"]]})
    assert reader.read({}, in_bytes).bags.ids.tolist() == [31, -1, 16]
    for wrong in ("xyz", b"xyz"):
        with pytest.raises(RequestError, match="'xyz' is no hexadecimal number"):
            reader.read({}, pa.table({"device": [wrong], "seen": [None]}))


def test_of_a_history_the_newest_ids_count():
    schema = Schema.from_dict({"ids": ["item", {"name": "seen", "table": "item", "max_length": 2}]})
    reader = RequestReader(schema, {"item": "integer", "seen": "integer"})
    rows = [{"seen": one} for one in ([1, 2, 3], None, [4], [5, 6, 7])]
    found = reader.read({"item": 7}, rows)
    assert found.bags.ids.tolist() == [7, 2, 3, 4, 6, 7]
    assert found.bags.offsets.tolist() == [0, 1, 3, 3, 4, 6]
    assert reader.read({"seen": [1, 2, 3]}, {"item": [7, 8]}).bags.ids.tolist() == [7, 8, 2, 3]
    assert reader.read({"seen": 3}, pa.table({"item": [7, 8]})).bags.ids.tolist() == [7, 8, 3]


def test_damaged_folders_are_named(served_run, tmp_path):
    def damaged(name, change):
        folder = tmp_path / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(served_run[1], folder)
        (path,) = folder.rglob(name)
        change(path)
        return folder

    def cut(path):
        path.write_bytes(path.read_bytes()[:-64])

    def flip(path):
        content = bytearray(path.read_bytes())
        content[-1] ^= 255
        path.write_bytes(content)

    for name, change, match in [
        ("rows.bin", cut, "rows.bin is damaged: it has"),
        ("rows.bin", lambda path: path.unlink(), "rows.bin is missing"),
        ("dense.onnx", flip, "dense.onnx is damaged: its checksum"),
        ("schema.yaml", lambda path: path.write_text("ids: [user, shop]\n"), "schema.yaml is damaged"),
        ("served.json", flip, "served.json is damaged"),
        ("served.json", lambda path: path.unlink(), "is no folder to serve from.*rowhaul export"),
        ("served.json", lambda path: path.write_text('{"format": "x"}'), "is no manifest"),
    ]:
        with pytest.raises(CheckpointError, match=match):
            Scorer(damaged(name, change), backend="onnx")
    late = damaged("rows.bin", flip)
    with pytest.raises(CheckpointError, match=r"rows\.bin is damaged: its checksum is not"):
        Scorer(late, verify=True)


def test_rows_of_another_export_are_refused(served_run, tmp_path, log_folder, log_schema):
    folder = tmp_path / "copy"
    shutil.copytree(served_run[1], folder)
    serve(served_run[0], tmp_path / "again", dense=("pt2",))
    (mine,), (theirs,) = folder.rglob("rows.bin"), (tmp_path / "again").rglob("rows.bin")
    shutil.copy(theirs, mine)  # of the same size
    with pytest.raises(CheckpointError, match="belongs to another export"):
        Scorer(folder)


def test_choices_that_are_not_there(served_run, tmp_path):
    with pytest.raises(ConfigError, match="backend must be one of auto, dots, onnx, pt2"):
        Scorer(served_run[1], backend="tensorrt")
    strict = Scorer(served_run[1], on_unknown="error")
    with pytest.raises(UnknownKeyError, match="feature 'user': key 5"):
        strict.score({"user": 5}, [{"item": "item-1", "tags": [1], "price": 1}])
    assert json.loads((served_run[1] / "served.json").read_text())["compared"]["unseen_ids"] > 100
