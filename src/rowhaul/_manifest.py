"""Manifests: JSON that says what a folder holds, with a checksum of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

_CHECKSUM = "xxh3"


def write_manifest(manifest: Mapping[str, Any]) -> bytes:
    """Return a manifest as text, with a checksum of its own."""
    plain = json.loads(json.dumps(manifest))  # as it will be read
    whole = {**plain, _CHECKSUM: _digest(plain)}
    return json.dumps(whole, indent=1, ensure_ascii=False).encode()


def checksum_agrees(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest is what was written; those of older versions have no checksum."""
    return manifest.get(_CHECKSUM, "") in ("", _digest(manifest))


def _digest(manifest: Mapping[str, Any]) -> str:
    rest = {name: entry for name, entry in manifest.items() if name != _CHECKSUM}
    return xxhash.xxh3_64_hexdigest(json.dumps(rest, sort_keys=True).encode())
