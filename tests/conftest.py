"""Shared fixtures: a small click log with something to learn."""

import pyarrow.parquet as pq
import pytest
import torch

from click_logs import click_log
from rowhaul.data.schema import Schema

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """A file's tests run in one process; all that shape links do so too, since there is one bridge."""
    for item in items:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group("testbed" if folder == "testbed" else str(item.path)))


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
