"""The names of presets, which need no torch; `build` has their sizes."""

from __future__ import annotations

from thinwire.errors import ConfigError, nearest

NAMES = ("tiny", "demo", "125m", "350m", "1b", "moe-tiny", "moe-demo")


def check_preset(name: str) -> None:
    """Raise ConfigError that names the nearest preset, for a name that is neither a preset nor hf:DIR."""
    if name not in NAMES and not name.startswith("hf:"):
        raise ConfigError(f"model {name!r}: no such preset, nor hf:DIR{nearest(name, NAMES)}")
