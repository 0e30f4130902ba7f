"""Shared fixtures: a small click log with something to learn."""

import signal

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, settings

from click_logs import click_log
from rowhaul.data.schema import Schema

torch.set_num_threads(1)

# How long an example takes, or is drawn, says nothing on a machine that others use, too.
settings.register_profile("rowhaul", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rowhaul")

# Folders whose tests start processes: these come last, the longest first, when the others have compiled the
# kernels. Several processes that start together would each compile them.
SLOW = ("faults", "tests", "train", "cli", "cluster", "testbed")


def pytest_collection_modifyitems(items):
    """Order the folders."""
    ranks = {folder: rank for rank, folder in enumerate(SLOW, start=1)}
    items.sort(key=lambda item: ranks.get(item.path.parent.name, 0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file's tests run in one process; all that shape links do so too, since there is one bridge."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return "testbed" if nodeid.startswith("tests/testbed/") else super()._split_scope(nodeid)

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def _one_thread():
    """Tables are grouped by the number of threads, which some tests and commands change."""
    yield
    torch.set_num_threads(1)


@pytest.fixture
def default_sigint():
    """Restore SIGINT for a test that sends it: background jobs ignore it, and so do their children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def log_schema():
    return Schema.from_dict({"label": "click", "dense": ["price"], "ids": ["user", "item", "tags"]})


@pytest.fixture(scope="session")
def log_folder(tmp_path_factory, log_schema):
    """Training data in two files, test data in ``test/``, and the schema beside them."""
    folder = tmp_path_factory.mktemp("log")
    (folder / "test").mkdir()
    log_schema.write(folder / "schema.yaml")
    for part in range(2):
        pq.write_table(click_log(3000, part), folder / f"part-{part}.parquet", row_group_size=700)
    pq.write_table(click_log(2000, 7), folder / "test" / "part-0.parquet")
    return folder


@pytest.fixture(scope="session")
def served_run(tmp_path_factory, log_folder, log_schema):
    """A run, and a folder to serve it from with both kinds of graphs; copy what you change."""
    from served_models import serve, train

    folder = tmp_path_factory.mktemp("served")
    run = train(folder / "run", log_folder, log_schema)
    serve(run, folder / "served", dense=("onnx", "pt2"))
    return run, folder / "served"
