"""Rows in a real Redis are those of the checkpoint, to the bit."""

import json

import numpy as np
import pytest
import redis
from served_models import train

from redis_server import RedisServer
from rowhaul.errors import ConfigError, StorageError
from rowhaul.export.redis import export_to_redis
from rowhaul.train.run_folder import open_saved


@pytest.fixture
def server(tmp_path):
    """The address of a database of a Redis of our own."""
    redis_server = RedisServer(tmp_path)
    redis_server.start()
    yield redis_server.url(3)
    redis_server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"row_dtype": "bfloat16"}], ids=["whole", "bfloat16"])
def test_every_row_is_there(server, tmp_path, log_folder, log_schema, settings):
    reader = open_saved(str(train(tmp_path / "run", log_folder, log_schema, **settings)))
    made = export_to_redis(reader, server)
    client, num_rows = redis.Redis.from_url(server), 0
    about = json.loads(client.get("rowhaul:about"))
    assert about["tables"]["user"] == {"dim": 4, "dtype": "float32"}
    for table in about["tables"]:
        for keys, records in reader.rows(table):
            for key, record in zip(keys.tolist(), records, strict=True):
                found = np.frombuffer(client.get(f"rowhaul:{table}:{key}"), "<f4")
                assert np.array_equal(found, record[:4])
                num_rows += 1
    assert made.num_rows == num_rows > 400
    with pytest.raises(ConfigError, match="has an export already"):
        export_to_redis(reader, server)


@pytest.mark.slow
def test_shared_rows_and_an_absent_redis_are_named(tmp_path, log_folder, log_schema):
    budget = train(tmp_path / "run", log_folder, log_schema, prune={"budget": "24KiB"})
    with pytest.raises(ConfigError, match="are shared by ids"):
        export_to_redis(open_saved(str(budget)), "redis://127.0.0.1:1/0")
    plain = train(tmp_path / "plain", log_folder, log_schema)
    with pytest.raises(StorageError, match=r"redis://:\*\*\*@127\.0\.0\.1:1/0: Redis cannot be written"):
        export_to_redis(open_saved(str(plain)), "redis://:hidden@127.0.0.1:1/0")
