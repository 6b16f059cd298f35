"""What a residency does not work with."""

from __future__ import annotations

from collections.abc import Collection

from thinwire.methods.sharded import ShardedMethod


def why_not_resident(method: object, axes: Collection[str]) -> str:
    """Why parts of training by this method, on these axes of a mesh, can't lie on a disk; empty: they can."""
    if not isinstance(method, ShardedMethod):
        name = getattr(method, "name", type(method).__name__)
        return f"residency: {name} keeps all it has in memory; nearest that does not: sdp4bit, zero or frontier"
    if beside := sorted(set(axes) - {"data"}):
        return f"residency beside an axis {beside[0]}: not served; nearest: data alone"
    return ""
