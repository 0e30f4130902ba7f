"""The testbed is no part of the package: it is imported from the top of the repository."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from rowhaul.simulate.links import parse_links  # noqa: E402  # after sys.path
from testbed import ShapedNetwork, TestbedUnavailable  # noqa: E402  # after sys.path
from testbed import network as networking  # noqa: E402  # after sys.path


@pytest.fixture(scope="session", autouse=True)
def _testbed_possible():
    try:
        networking.check_available()
    except TestbedUnavailable as reason:
        pytest.skip(f"no testbed here: {reason}")


@pytest.fixture(scope="session")
def network(_testbed_possible):
    """Two workers of 20 Mbit/s, one of 5, and a store of 100."""
    with ShapedNetwork(
        parse_links("20mbit*2,5mbit", 3, "links"), parse_links("100mbit", 1, "stores")
    ) as made:
        yield made
