"""Options of a card, as a person types them."""

import pytest

from rowhaul.cli.run import RunOptions


def options(**flags):
    return RunOptions(None, [], None, None, None, [], flags)


def test_memory_of_a_card_needs_a_card(rowhaul, log_folder):
    code, _, err = rowhaul("train", "--data", f"{log_folder}/*.parquet", "--device-memory", "8GiB")
    assert code == 2
    assert "device_memory is 8GiB, but device is cpu" in " ".join(err.split())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ("cuda", 8 << 30)),
        ({"device": "cpu"}, ("cpu", 0)),  # what the card had does not matter there
        ({"device_memory": "2GiB"}, ("cuda", 2 << 30)),
        ({"device_memory": "0"}, ("cuda", 0)),
    ],
)
def test_a_resumed_run_moves_between_devices(flags, expected):
    config = options(**flags).read_config({"device": "cuda", "device_memory": "8GiB"})
    assert (config.device, config.device_bytes) == expected
