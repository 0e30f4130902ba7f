"""Skewed click logs shaped like public data sets, with ids that co-occur and labels that can be learned."""

from rowhaul.data.generate.bayes import BayesFacts
from rowhaul.data.generate.generator import LogGenerator
from rowhaul.data.generate.presets import preset_named, preset_names
from rowhaul.data.generate.raw import write_raw
from rowhaul.data.generate.spec import DenseField, Entity, IdField, Preset

__all__ = [
    "BayesFacts",
    "DenseField",
    "Entity",
    "IdField",
    "LogGenerator",
    "Preset",
    "preset_named",
    "preset_names",
    "write_raw",
]
