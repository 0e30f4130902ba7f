"""What a run keeps of its stream besides the model."""

import json
import resource
from collections import deque
from types import SimpleNamespace

import pytest

from rowhaul.data.sources.source import SetAside
from rowhaul.train.run_stream import SET_ASIDE_FILE, keep_set_aside


@pytest.fixture
def limit():
    """Bound the size of files, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def places(path):
    return [int(json.loads(line)["where"]) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("size", [0, 130, 20_000])
def test_what_is_set_aside_waits_while_the_disk_is_full(size, tmp_path, limit):
    path, stream = tmp_path / SET_ASIDE_FILE, SimpleNamespace(set_aside=deque())

    def keep(*numbers):
        stream.set_aside.extend(SetAside(str(one), "no JSON", "x" * 20) for one in numbers)
        keep_set_aside(tmp_path, stream)

    keep(0, 1)
    whole = path.read_bytes()
    limit(size)
    keep(*range(2, 300))
    assert path.read_bytes()[: len(whole)] == whole
    assert len(places(path)) == 2  # nothing by halves
    keep(*range(300, 1500))
    limit(resource.RLIM_INFINITY)
    keep(1500)
    assert not stream.set_aside
    assert places(path) == [0, 1, *range(500, 1501)]  # those that fit into memory
