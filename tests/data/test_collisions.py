"""Keys shared by two strings are found, in memory, in files and in files that have to be split again."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rowhaul.data import collisions
from rowhaul.data.collisions import find_collisions
from rowhaul.data.folder.writer import Chunk
from rowhaul.data.schema import Schema


@dataclass
class Words:
    """A source whose strings are numbers and whose key is theirs modulo ``modulus``: it must collide."""

    words: dict[str, list[np.ndarray]]
    modulus: int
    files: tuple[Path, ...] = ()

    @property
    def schema(self) -> Schema:
        return Schema.from_dict({"ids": [{"name": "a", "table": "t"}, {"name": "b", "table": "t"}, "c"]})

    @property
    def string_features(self) -> tuple[str, ...]:
        return tuple(self.words)

    def chunks(self, position, bad_lines, seed=0):
        for columns in zip(*self.words.values(), strict=True):
            keys = [words if seed else words % self.modulus for words in columns]
            arrays = [pa.array(keys[0]), pa.array(keys[1]), pa.array([[key] for key in keys[2]] + [])]
            yield Chunk(pa.RecordBatch.from_arrays(arrays, list(self.words)), {}, 0.0)


@pytest.mark.parametrize("in_memory", [1 << 21, 300, 20])
def test_collisions_are_counted_by_table(tmp_path, monkeypatch, in_memory):
    monkeypatch.setattr(collisions, "_PAIRS_IN_MEMORY", in_memory)
    rng = np.random.default_rng(3)
    words = {name: [rng.integers(0, 5000, 400) for _ in range(6)] for name in "abc"}
    source = Words(words, modulus=1000)
    expected = {}
    for table, names in (("t", "ab"), ("c", "c")):
        distinct = np.unique(np.concatenate([run for name in names for run in words[name]]))
        expected[table] = len(distinct) - len(np.unique(distinct % 1000))
    assert find_collisions(source, tmp_path / "scratch") == expected
    assert min(expected.values()) > 100
    source.modulus = 1 << 40
    assert find_collisions(source, tmp_path / "scratch") == {"t": 0, "c": 0}
