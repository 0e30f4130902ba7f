"""Files, streams, schemas: raw logs and Parquet in, batches of ids, dense numbers and labels out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rowhaul._lazy import lazy_exports

if TYPE_CHECKING:
    from rowhaul.data.files import find_schema as find_schema
    from rowhaul.data.generate.folder import generate_folder as generate_folder
    from rowhaul.data.generate.generator import LogGenerator as LogGenerator
    from rowhaul.data.generate.spec import Preset as Preset
    from rowhaul.data.keys import hash_string as hash_string
    from rowhaul.data.keys import hash_strings as hash_strings
    from rowhaul.data.preparing import prepare as prepare
    from rowhaul.data.samples import Samples as Samples
    from rowhaul.data.schema import Schema as Schema
    from rowhaul.data.stream import SampleStream as SampleStream

_EXPORTS = {
    "files": "find_schema",
    "generate.folder": "generate_folder",
    "generate.generator": "LogGenerator",
    "generate.spec": "Preset",
    "keys": "hash_string hash_strings",
    "preparing": "prepare",
    "samples": "Samples",
    "schema": "Schema",
    "stream": "SampleStream",
}
__all__, __getattr__ = lazy_exports("rowhaul.data", _EXPORTS)
