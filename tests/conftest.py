"""Shared fixtures: a small click log with something to learn."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rowhaul.data.schema import Schema

torch.set_num_threads(1)


def click_log(num_samples, seed):
    """A log whose clicks depend on user, item and price; tags are multi-valued and sometimes empty."""
    random = np.random.default_rng(seed)
    user = random.zipf(1.3, num_samples) % 200
    item = random.zipf(1.2, num_samples) % 300
    price = random.normal(size=num_samples)
    taste = np.random.default_rng(99).normal(size=(200, 2))
    kind = np.random.default_rng(98).normal(size=(300, 2))
    logit = (taste[user] * kind[item]).sum(1) + price
    tags = [random.integers(0, 20, size=n).tolist() for n in random.integers(0, 4, num_samples)]
    return pa.table(
        {
            "click": (random.random(num_samples) < 1 / (1 + np.exp(-logit))).astype(np.int8),
            "price": price.astype(np.float32),
            "user": user.astype(np.int64) * 7919,
            "item": pa.array([f"item-{number}" for number in item]),
            "tags": pa.array(tags, type=pa.list_(pa.int64())),
        }
    )


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
