"""Cases of a parametrised test of which a few run in `make test` and all in `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Mark all cases but these as slow."""
    return [one if one in quick else _slow(one) for one in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
