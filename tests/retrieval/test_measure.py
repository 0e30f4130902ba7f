"""How often an index finds a user's own item."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowhaul.data.schema import Schema
from rowhaul.retrieval import item_vectors, write_index
from rowhaul.retrieval.measure import measure_index
from rowhaul.train import TrainConfig, load_trained, train_run

SCHEMA = Schema.from_dict({"label": "liked", "ids": ["user", "movie"]})
ITEMS = 20


def put(path, liked, movies):
    table = {"liked": liked, "user": list(range(len(liked))), "movie": pa.array(movies, pa.int64())}
    pq.write_table(pa.table(table), path)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("towers")
    log = put(folder / "log.parquet", [n % 2 for n in range(200)], [n % ITEMS for n in range(200)])
    config = {"batch_size": 50, "model": {"name": "two_tower", "embedding_dim": 4}}
    train_run(TrainConfig.from_dict(config), SCHEMA, log, out=folder / "run")
    return load_trained(folder / "run")


def test_samples_without_an_item_do_not_hide_those_of_others(trained, tmp_path):
    index = write_index(tmp_path / "items", *item_vectors(trained))
    log = put(tmp_path / "some.parquet", [1, 1, 1, 0, 1, 1], [None, 3, 7, 5, 9, None])
    measured = measure_index(index, trained, log, k=ITEMS)
    assert (measured.hit_rate, measured.users) == (1.0, 6)
    without = put(tmp_path / "none.parquet", [1, 1], [None, None])
    assert measure_index(index, trained, without, k=ITEMS).hit_rate is None
