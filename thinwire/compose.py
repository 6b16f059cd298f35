"""Fifth floor: a method meets its host."""

from __future__ import annotations

# A host registers itself for its kind of method.
import thinwire.hosts.ddp.optimizer
import thinwire.hosts.fsdp.optimizer
import thinwire.hosts.islands.library
import thinwire.hosts.islands.optimizer
import thinwire.hosts.islands.own_pace
import thinwire.hosts.islands.ticks
import thinwire.hosts.one_byte.optimizer
import thinwire.hosts.sharded.levels_wrap
import thinwire.hosts.sharded.wrap  # noqa: F401
from thinwire.hosts.interface import apply

__all__ = ["apply"]
