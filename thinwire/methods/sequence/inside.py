"""Which strategies average the gradients of ranks that share sequences, and why others can't."""

from __future__ import annotations

from thinwire.errors import ConfigError
from thinwire.methods.ddp import DDPMethod
from thinwire.methods.fsdp import FSDPMethod
from thinwire.methods.interface import Method
from thinwire.methods.outer.base import Connected
from thinwire.methods.sharded import ShardedMethod


def check_strategy(method: Method | Connected) -> None:
    """Raise ConfigError for a strategy whose ranks do not compute with the same weights in every forward."""
    if not isinstance(method, ShardedMethod | DDPMethod | FSDPMethod):
        name = method.method.name if isinstance(method, Connected) else method.name
        raise ConfigError(
            f"{name} can't train sequences over several ranks: these need the same weights in every forward, and all "
            "gradients averaged in every step; nearest that can: zero, sdp4bit or ddp"
        )
