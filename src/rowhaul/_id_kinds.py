"""What the 64-bit keys of a feature were made from; the same id read in two ways is two keys.

The integer 7 has the key 7, the text "7" its hash, and the hexadecimal "10" the key 16. Prepared data and
runs record the kind of each feature, so that a model is not asked about keys that it cannot know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INTEGER, TEXT, HEX = "integer", "text", "hex"
# Stored as integers by a version that did not record what they were made from.
UNRECORDED = "int64"
KINDS_FACT, ORIGINS_FACT = "key_kinds", "key_origins"


def kind_facts(kinds: Mapping[str, str]) -> dict[str, Any]:
    """What a checkpoint keeps of the kinds of its features."""
    return {KINDS_FACT: dict(kinds), ORIGINS_FACT: True}


def kinds_in(facts: Mapping[str, Any]) -> dict[str, str]:
    """The kinds that a checkpoint or an export recorded; earlier versions knew only the column's type."""
    kinds: dict[str, str] = facts.get(KINDS_FACT) or {}
    if facts.get(ORIGINS_FACT):
        return dict(kinds)
    return {name: UNRECORDED if kind == INTEGER else kind for name, kind in kinds.items()}


def join_kinds(one: str, other: str) -> str | None:
    """The kind of two that may be the same, None if they are not."""
    if UNRECORDED in (one, other):
        return UNRECORDED
    return one if one == other else None
