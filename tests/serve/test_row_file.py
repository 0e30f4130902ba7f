"""The file of rows: whatever format rows are in, it gives the vectors that training reads, to the bit."""

import os
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from served_models import held_out, train, unseen

from rowhaul.checkpoint.progress import Counter
from rowhaul.data.columns import offsets_of
from rowhaul.errors import CheckpointError, ConfigError, UnknownKeyError
from rowhaul.export.serving.row_file import UnknownIds, write_rows
from rowhaul.nn import KeyedJaggedTensor
from rowhaul.serve.row_file import RowFile
from rowhaul.serve.rows import IdBags, MappedRows, ServedFeature
from rowhaul.store import TableSpec
from rowhaul.train import load_trained
from rowhaul.train.run_folder import open_saved

PAGE = Path(__file__).parents[2] / "docs" / "row-file.md"
FORMATS = {
    "whole": {},
    "bfloat16": {"row_dtype": "bfloat16"},
    "float16": {"row_dtype": "float16"},
    "int8": {"row_dtype": "int8"},
    "pruned": {"prune": {"chunks": 3, "ratio": "0.5", "tail": "zeros", "period": 3, "cold_start": 1}},
    "budget": {"prune": {"budget": "24KiB"}, "on_unknown": "tail"},
    "float64": {"precision": "float64", "on_unknown": "default"},
}


def code(language):
    """The only block of a language on the page."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return found


def reader_in_python():
    """The class of the page, without the example below it."""
    names = {}
    exec(code("python").partition("\nabout = ")[0], names)
    return names["Rows"]


def written(run, path):
    """The file of a run's rows, and its trainer."""
    reader, trainer = open_saved(str(run)), load_trained(str(run))
    configs = trainer.collection.embedding_bag_configs()
    specs = {one.name: TableSpec(one.name, one.embedding_dim, *one.initial_range) for one in configs}
    unknown = UnknownIds(trainer.config.on_unknown, trainer.config.seed, specs)
    tables = [one.name for one in configs]
    write_rows(reader, tables, unknown, path, 3, Counter(1, lambda done, total: None))
    features = [
        ServedFeature(one.name, one.name, place * one.embedding_dim) for place, one in enumerate(configs)
    ]
    width = sum(one.embedding_dim for one in configs)
    return RowFile(path), features, width, trainer


def bags_of(samples):
    num_features, num_samples = samples.lengths.shape
    first = np.arange(num_features + 1) * num_samples
    return IdBags(samples.values, offsets_of(samples.lengths.reshape(-1)), first, num_samples)


QUICK = ("whole", "int8", "pruned", "budget")


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=[] if one in QUICK else [pytest.mark.slow]) for one in FORMATS],
)
def rows_of(request, tmp_path_factory, log_folder, log_schema):
    folder = tmp_path_factory.mktemp("rows")
    run = train(folder / "run", log_folder, log_schema, "legacy", dim=5, **FORMATS[request.param])
    return request.param, written(run, folder / "rows.bin"), folder


def test_pooled_vectors_are_those_of_training(rows_of, log_folder, log_schema):
    _, (file, features, width, trainer), _ = rows_of
    samples = unseen(held_out(log_folder, log_schema))
    trainer.model.eval()
    ids = KeyedJaggedTensor(
        samples.features,
        torch.from_numpy(samples.values),
        lengths=torch.from_numpy(samples.lengths.reshape(-1)),
        stride=300,
    )
    expected = trainer.collection(ids).values().detach().numpy()
    found, num_unknown = MappedRows(file, features, width).pool(bags_of(samples))
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)
    assert np.any(found)
    kind = rows_of[0]
    assert (num_unknown.sum() > 100) == (kind != "budget")


def test_shared_features_are_pooled_once_and_copied(rows_of, log_folder, log_schema):
    _, (file, features, width, _), _ = rows_of
    rows, samples = MappedRows(file, features, width), held_out(log_folder, log_schema, 20)
    user = samples.values[:1]
    others = samples.values[20:]
    lengths = np.concatenate([[1], samples.lengths[1:].reshape(-1)])
    shared = IdBags(np.concatenate([user, others]), offsets_of(lengths), np.array([0, 1, 21, 41]), 20)
    repeated = IdBags(
        np.concatenate([np.repeat(user, 20), others]),
        offsets_of(np.concatenate([np.ones(20, np.int64), lengths[1:]])),
        np.array([0, 20, 40, 60]),
        20,
    )
    assert np.array_equal(rows.pool(shared)[0], rows.pool(repeated)[0])


def test_the_reader_in_python_finds_the_same_rows(rows_of, log_folder, log_schema):
    kind, (file, features, width, _), folder = rows_of
    reader, rows = reader_in_python()(folder / "rows.bin"), MappedRows(file, features, width)
    samples = unseen(held_out(log_folder, log_schema, 40))
    first_ids = np.split(samples.values, np.cumsum(samples.lengths.sum(axis=1))[:-1])
    for place, (feature, ids) in enumerate(zip(features, first_ids, strict=True)):
        for key in ids[:25].tolist():
            found, num_unknown = _one(rows, place, key)
            expected = found[0, feature.column : feature.column + 5]
            if num_unknown and kind in ("bfloat16", "float16", "int8"):
                assert np.allclose(reader.row(feature.table, key), expected, atol=1e-4)  # not rounded
            else:
                assert np.array_equal(reader.row(feature.table, key), expected), (kind, feature, key)


def _one(rows, place, key):
    """Pool one id of one feature; the others have none."""
    lengths = [int(one == place) for one in range(3)]
    found, unknown = rows.pool(IdBags(np.array([key]), offsets_of(np.array(lengths)), np.arange(4), 1))
    return found, int(unknown.sum())


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler (gcc) is installed")
def test_the_reader_in_c_finds_the_same_rows(rows_of, log_folder, log_schema, tmp_path):
    kind, (file, features, width, _), folder = rows_of
    (tmp_path / "rows.c").write_text(code("c"))
    build = ["gcc", "-O2", "-Wall", "-Werror", "-o", tmp_path / "rows", tmp_path / "rows.c"]
    subprocess.run(build, check=True, timeout=200)
    rows, samples = MappedRows(file, features, width), unseen(held_out(log_folder, log_schema, 10), 0.4)
    for key in samples.values[:10].tolist():
        command = [tmp_path / "rows", folder / "rows.bin", "user", str(key)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        if kind in ("pruned", "budget"):
            assert "shared or pruned" in done.stderr
            continue
        found, num_unknown = _one(rows, 0, key)
        away = np.array(done.stdout.split(), np.float64) - found[0, :5]
        rounded = num_unknown and kind in ("bfloat16", "float16", "int8")
        assert np.abs(away).max() <= (1e-4 if rounded else 1e-7), kind


def test_what_unknown_ids_read_can_be_chosen(tmp_path, log_folder, log_schema):
    run = train(tmp_path / "run", log_folder, log_schema, "legacy", dim=5)
    file, features, width, _ = written(run, tmp_path / "rows.bin")
    assert not np.any(_one(MappedRows(file, features, width, "default"), 1, 10**15)[0])
    first = _one(MappedRows(file, features, width, "init"), 1, 10**15)[0]
    assert np.any(first)
    assert np.array_equal(_one(MappedRows(file, features, width, "tail"), 1, 10**15)[0], first)
    with pytest.raises(
        UnknownKeyError, match="feature 'item': key 1000000000000000 of table 'item' was never"
    ):
        _one(MappedRows(file, features, width, "error"), 1, 10**15)
    with pytest.raises(ConfigError, match="on_unknown must be one of"):
        MappedRows(file, features, width, "zeros")
    with pytest.raises(CheckpointError, match="has no table 'shop', which feature 'shop' reads"):
        MappedRows(file, [*features, ServedFeature("shop", "shop", 0)], width)


def descriptors_of(path):
    """How many descriptors of this process lead to a file."""
    found, file = 0, path.stat()
    for one in os.listdir("/dev/fd"):
        with suppress(OSError):  # the one of the listing
            found += os.path.samestat(os.fstat(int(one)), file)
    return found


def test_files_that_are_mapped_are_not_kept_open(rows_of):
    """A server maps a file for each delta and rank, and may open about a thousand."""
    path = rows_of[2] / "rows.bin"
    files = [RowFile(path) for _ in range(20)]
    assert descriptors_of(path) == 0
    assert all(np.array_equal(one.data, np.fromfile(path, np.uint8)) for one in files[::19])


def test_damaged_files_are_named(tmp_path, log_folder, log_schema):
    run = train(tmp_path / "run", log_folder, log_schema, "legacy", dim=5)
    written(run, tmp_path / "rows.bin")
    whole = (tmp_path / "rows.bin").read_bytes()

    def refused(content, match):
        path = tmp_path / "bad.bin"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=match):
            RowFile(path)

    refused(b"", "is empty")
    refused(whole[:40], "it has 40 bytes")
    refused(whole[:-64], "bytes, and its header says")
    refused(b"x" + whole[1:], "is no file of rows")
    refused(whole[:8] + b"\x09" + whole[9:], "version 9")
    refused(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], "its header has another checksum")
    with pytest.raises(CheckpointError, match="belongs to another export"):
        RowFile(tmp_path / "rows.bin", "0" * 16)
    with pytest.raises(CheckpointError, match="is missing"):
        RowFile(tmp_path / "absent.bin")
