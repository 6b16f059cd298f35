"""Checks what a residency can be combined with."""

from __future__ import annotations

from collections.abc import Collection

from thinwire.errors import ConfigError
from thinwire.methods.sharded import ShardedMethod


def resident_method(method: object, axes: Collection[str] = ()) -> ShardedMethod:
    """The method itself, if parts of its state can lie on a disk beside these axes of a mesh. Raises ConfigError."""
    if not isinstance(method, ShardedMethod):
        name = getattr(method, "name", type(method).__name__)
        raise ConfigError(
            f"residency: {name} keeps all it has in memory; nearest that does not: sdp4bit, zero or frontier"
        )
    if beside := sorted(set(axes) - {"data"}):
        raise ConfigError(f"residency beside an axis {beside[0]}: not supported; nearest: data alone")
    return method
