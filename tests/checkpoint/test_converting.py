"""Checkpoints whose values another type of rows cannot hold."""

import numpy as np
import pytest
import row_checkpoints

from rowhaul.checkpoint.converting import convert
from rowhaul.errors import CheckpointError

ROWS = {7: 1.0, -9: 70_000.0, 12: 2.0}


def test_values_that_float16_cannot_hold_are_refused(tmp_path):
    reader = row_checkpoints.write(tmp_path / "from", {"items": ROWS})
    message = (
        r"from: table 'items': float16 cannot hold the value 70000\.0 of key -9, .* 65,504: use bfloat16"
    )
    with pytest.raises(CheckpointError, match=message):
        convert(reader, tmp_path / "to", "float16")
    assert [path.name for path in tmp_path.iterdir()] == ["from"]
    made = convert(reader, tmp_path / "to", "bfloat16")
    found = {
        int(key): one for keys, records in made.rows("items") for key, one in zip(keys, records, strict=True)
    }
    assert found[-9][:2] == pytest.approx([70_000, -70_000], rel=0.01)


def test_infinities_stay_as_they_are(tmp_path):
    reader = row_checkpoints.write(tmp_path / "from", {"items": {1: np.inf, 2: 3.0}})
    made = convert(reader, tmp_path / "to", "float16")
    ((_, records),) = made.rows("items")
    assert records[:, :2].tolist() == [[np.inf, -np.inf], [3.0, -3.0]]
