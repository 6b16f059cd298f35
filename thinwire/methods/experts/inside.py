"""Which strategies average the gradients of ranks that hold different experts, and why others can't."""

from __future__ import annotations

from thinwire.errors import ConfigError
from thinwire.layout.formats import LevelFormat
from thinwire.methods.interface import Method
from thinwire.methods.outer.base import Connected, IslandsMethod
from thinwire.methods.sharded import ShardedMethod


def averages_apart(method: Method | Connected) -> bool:
    """Whether a strategy averages each whole parameter over the ranks that hold it."""
    return isinstance(method, ShardedMethod) and not isinstance(method.matrix(), LevelFormat)


def check_data_method(method: Method | Connected) -> None:
    """Raise ConfigError for a strategy that averages each parameter over all ranks, or cuts weights over them.

    Of islands that of their ranks counts, and they must not climb: a rank's gradient of the experts has all ranks'
    tokens, that of the rest has its own.
    """
    method = method.method if isinstance(method, Connected) else method
    if isinstance(method, IslandsMethod) and method.climb is not None:
        raise ConfigError(
            f"ascent {method.ascent:g} in {method.name}, and experts over several ranks: a rank climbs along the "
            "gradient of its own tokens, and experts have that of all ranks' tokens; nearest: leave ascent out"
        )
    if averages_apart(method.inner if isinstance(method, IslandsMethod) else method):
        return
    name = f"{method.inner.name} in {method.name}" if isinstance(method, IslandsMethod) else method.name
    raise ConfigError(
        f"{name} can't train experts over several ranks: it takes all ranks for replicas of every parameter; those "
        "that can: zero, zero-bf16, zero-compressed, sdp4bit and its variants"
    )
