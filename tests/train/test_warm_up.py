"""A stamp says that the kernels of a run are cached: only where they are."""

import os
import subprocess
import sys

import pytest

from rowhaul import _kernels
from rowhaul.data.schema import Schema
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed import warm_up

CONFIG = {
    "batch_size": 40,
    "model": {"name": "dlrm", "embedding_dim": 4, "options": {"bottom": [8], "top": [8, 4]}},
    "cluster": {"workers": 2},
}
SCHEMA = {"label": "clk", "dense": ["age_level"], "ids": ["user", "cate_id"]}


@pytest.fixture
def stamp(tmp_path, monkeypatch):
    """Where the stamp goes, and a way to warm up."""
    path = tmp_path / "stamp"
    monkeypatch.setattr(warm_up, "_stamp", lambda config, schema: path)
    return path


def compile_kernels():
    warm_up.compile_kernels(TrainConfig.from_dict(CONFIG), Schema.from_dict(SCHEMA))


def test_a_warm_up_that_raised_leaves_no_stamp(stamp, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(warm_up, "_KEYS", 0)  # no ids to draw samples from: every rank raises
        compile_kernels()
    assert not stamp.exists()
    if not _kernels.num_not_cached():  # where this installation can be written
        compile_kernels()
        assert stamp.exists()


PROGRAM = f"""
import resource, sys, warnings
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from rowhaul.data.schema import Schema
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed import warm_up

stamp = Path(sys.argv[1], "stamp")
warm_up._stamp = lambda config, schema: stamp
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # no file can be written: a full disk
from small import small
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    small()
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
assert "cannot be written" in str(caught[0].message)
warm_up.compile_kernels(TrainConfig.from_dict({CONFIG!r}), Schema.from_dict({SCHEMA!r}))
print(stamp.exists())
"""


@pytest.mark.slow
def test_a_kernel_that_found_no_room_on_disk_leaves_no_stamp(tmp_path):
    (tmp_path / "small.py").write_text(
        "from rowhaul._kernels import kernel\n\n\n@kernel\ndef small():\n    return 1\n"
    )
    os.utime(tmp_path / "small.py", (1, 1))  # older than the process, or nothing would be saved at all
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert done.stdout.split() == ["False"], done.stderr
