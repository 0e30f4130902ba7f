"""The known name that a misspelt one was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A question to add to an error message; empty where no known name is near."""
    near = difflib.get_close_matches(given.lower(), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
