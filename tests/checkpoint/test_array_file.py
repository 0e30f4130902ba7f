"""Files written in pieces are safetensors, and are read as its library reads them."""

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from rowhaul.checkpoint import array_file
from rowhaul.checkpoint.array_file import ArrayFile, as_array, as_tensor, pieces, read_header
from rowhaul.checkpoint.local_storage import LocalStorage
from rowhaul.errors import DamagedCheckpointError

KINDS = ["float64", "float32", "float16", "int64", "int32", "int16", "int8"]
KINDS += ["uint64", "uint32", "uint16", "uint8", "bool"]
SHAPES = [(), (0, 4), (7,), (3, 5), (2, 1, 3)]


def arrays():
    random = np.random.default_rng(3)
    return {
        f"{kind} ü{number}": random.integers(0, 2, shape).astype(kind)
        for kind in KINDS
        for number, shape in enumerate(SHAPES)
    }


def tensors():
    kinds = [
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
        torch.bool,
        torch.float64,
    ]
    made = {f"{kind}": torch.randn(3, 5).to(kind) for kind in kinds}
    return {**made, "transposed": torch.arange(6).reshape(2, 3).T, "scalar": torch.tensor(2.5), **odd()}


def odd():
    """Tensors without or with one element, of any stride."""
    return {f"odd{size}": torch.arange(3.0).as_strided((size,), (0,)) for size in (0, 1)}


def whole(given):
    return b"".join(bytes(piece) for piece in pieces(given))


@pytest.mark.parametrize("piece_bytes", [5, 64, 1 << 20])
def test_a_file_has_the_bytes_that_the_library_writes(piece_bytes, monkeypatch):
    monkeypatch.setattr(array_file, "PIECE_BYTES", piece_bytes)
    assert whole(arrays()) == safetensors.numpy.save(arrays())
    torch.manual_seed(1)
    given = tensors()
    library = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in given.items()}
    assert whole(given) == safetensors.torch.save(library)
    assert whole({}) == safetensors.numpy.save({})


def test_what_the_library_writes_is_read():
    parts, content = read_header(np.frombuffer(safetensors.numpy.save(arrays()), np.uint8), "f")
    for name, expected in arrays().items():
        found = as_array(parts[name], content)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert (found == expected).all()
    torch.manual_seed(1)
    given = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors().items()}
    parts, content = read_header(np.frombuffer(bytearray(safetensors.torch.save(given)), np.uint8), "f")
    for name, expected in given.items():
        found = as_tensor(parts[name], content)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        same = found.reshape(-1).view(torch.uint8) == expected.reshape(-1).view(torch.uint8)
        assert same.all()


def test_some_rows_are_read_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(array_file, "PIECE_BYTES", 7)
    table = np.arange(60, dtype=np.float32).reshape(20, 3)
    safetensors.numpy.save_file({"values": table, "none": table[:0]}, tmp_path / "f", {"made by": "them"})
    with LocalStorage().open(tmp_path / "f") as opened:
        file = ArrayFile(opened, "f")
        assert sorted(file.keys()) == ["none", "values"]
        assert (file.get_tensor("values") == table).all()
        assert (file.get_slice("values")[4:9] == table[4:9]).all()
        assert file.get_slice("values")[19:25].shape == (1, 3)
        assert file.get_slice("none")[0:3].shape == (0, 3)
        assert file.get_slice("values").get_shape() == [20, 3]


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 8, b"\xff" * 40, b"\x02\0\0\0\0\0\0\0[]", b"\x10\0\0\0\0\0\0\0{"]
)
def test_other_files_are_refused(content):
    with pytest.raises(DamagedCheckpointError, match="f is damaged: it is no safetensors file"):
        read_header(np.frombuffer(content, np.uint8), "f")


def test_arrays_cannot_lie_outside_of_their_file():
    content = bytearray(safetensors.numpy.save({"a": np.zeros(4, np.int64)}))
    content[:] = content.replace(b"[0,32]", b"[8,40]")
    with pytest.raises(DamagedCheckpointError):
        read_header(np.frombuffer(bytes(content), np.uint8), "f")
