"""Graphs of PyTorch: those of Rowhaul are opened, those that would run something are not."""

import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from rowhaul.errors import CheckpointError
from rowhaul.publishing.graphs import GraphWriter
from rowhaul.serve.dense import open_graph
from rowhaul.serve.program import load_program


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def graph(served_run):
    return next(served_run[1].glob("base-*/dense.pt2"))


def changed(graph, path, change):
    """A copy of an archive, whose files, by their names within it, were changed."""
    with zipfile.ZipFile(graph) as given:
        root = given.namelist()[0].partition("/")[0]
        files = {name.removeprefix(f"{root}/"): given.read(name) for name in given.namelist()}
    change(files)
    with zipfile.ZipFile(path, "w") as made:
        for name, content in files.items():
            made.writestr(f"{root}/{name}", content)
    return path


def saved(what):
    sink = io.BytesIO()
    torch.save(what, sink)
    return sink.getvalue()


def evil_inputs(files, evil):
    files["data/sample_inputs/model.pt"] = saved(evil)


def evil_inputs_in_capitals(files, evil):  # PyTorch finds them all the same
    del files["data/sample_inputs/model.pt"]
    files["data/sample_inputs/MODEL.PT"] = saved(evil)


def evil_weight(files, evil):
    name = "data/weights/model_weights_config.json"
    files[name] = files[name].replace(b'"use_pickle": false', b'"use_pickle": true', 1)
    files["data/weights/weight_0"] = saved(evil)


def evil_old_weights(files, evil):
    files["data/weights/model.pt"] = saved({"model": evil})


def evil_constant(files, evil):
    name = "data/constants/model_constants_config.json"
    entry = b'"x": {"path_name": "opaque_obj_0", "is_param": false, "use_pickle": %s, "tensor_meta": null}'
    files[name] = b'{"config": {' + entry % b"true" + b"}}"
    files["data/constants/opaque_obj_0"] = pickle.dumps(evil)


def evil_constant_not_said_to_be_one(files, evil):
    evil_constant(files, evil)
    name = "data/constants/model_constants_config.json"
    files[name] = files[name].replace(b'"use_pickle": true', b'"use_pickle": false')


def evil_library(files, evil):
    files["data/aotinductor/model/model.so"] = b"\x7fELF"


CHANGES = [
    *(evil_inputs, evil_inputs_in_capitals, evil_weight, evil_old_weights),
    *(evil_constant, evil_constant_not_said_to_be_one, evil_library),
]


@pytest.mark.parametrize("change", CHANGES)
def test_an_archive_that_would_run_something_is_not_opened(change, graph, tmp_path):
    ran = tmp_path / "ran"
    path = changed(graph, tmp_path / "dense.pt2", lambda files: change(files, Runs(ran)))
    for opened in (
        load_program,
        lambda path: open_graph(path, "pt2", True),
        lambda path: GraphWriter({"pt2": path}, []),
    ):
        with pytest.raises(CheckpointError, match=r"is not opened: .*export the model again"):
            opened(path)
    assert not ran.exists()


def test_an_archive_of_older_versions_is_not_opened_if_it_would_run_something(tmp_path):
    path, ran = tmp_path / "dense.pt2", tmp_path / "ran"
    for name in ("serialized_example_inputs.pt", "serialized_state_dict.json"):
        with zipfile.ZipFile(path, "w") as made:
            made.writestr("serialized_exported_program.json", "{}")
            made.writestr(name, saved(Runs(ran)))
        with pytest.raises(CheckpointError, match=f"its {name}"):
            load_program(path)
    assert not ran.exists()


def test_what_is_no_archive_is_named(tmp_path):
    (tmp_path / "dense.pt2").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="is no archive of a graph"):
        load_program(tmp_path / "dense.pt2")


def test_graphs_of_rowhaul_are_opened_as_pytorch_opens_them(graph, tmp_path):
    own, theirs = load_program(graph), torch.export.load(graph)
    assert own.state_dict.keys() == theirs.state_dict.keys()
    assert all(torch.equal(one, theirs.state_dict[name]) for name, one in own.state_dict.items())
    weights = {name.removeprefix("model."): one + 1 for name, one in own.state_dict.items()}
    GraphWriter({"pt2": graph}, weights).write(weights, tmp_path)
    again = load_program(tmp_path / "dense.pt2").state_dict
    assert all(np.array_equal(again[name].detach(), one.detach() + 1) for name, one in own.state_dict.items())
