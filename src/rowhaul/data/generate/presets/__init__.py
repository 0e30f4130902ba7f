"""The presets by name."""

from __future__ import annotations

from rowhaul.data.generate.presets.criteo import CRITEO, CRITEO_SEARCH, CRITEO_TERABYTE
from rowhaul.data.generate.presets.others import AVAZU, MOVIELENS, TAOBAO
from rowhaul.data.generate.spec import Preset
from rowhaul.errors import ConfigError

_PRESETS = {
    preset.name: preset for preset in (CRITEO, CRITEO_TERABYTE, CRITEO_SEARCH, AVAZU, MOVIELENS, TAOBAO)
}


def preset_names() -> tuple[str, ...]:
    """The names that `preset_named` knows."""
    return tuple(_PRESETS)


def preset_named(name: str) -> Preset:
    """The preset of this name."""
    if name not in _PRESETS:
        raise ConfigError(f"unknown preset {name!r}; known are {', '.join(_PRESETS)}")
    return _PRESETS[name]
