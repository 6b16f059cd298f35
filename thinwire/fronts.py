"""Methods for islands in your own training loop, together with the hosts that run them."""

from __future__ import annotations

import thinwire.islands.library
import thinwire.islands.meetings
import thinwire.islands.ticks  # noqa: F401
from thinwire.methods.islands.dadao import DADAO
from thinwire.methods.islands.diloco import DiLoCo
from thinwire.methods.islands.fedfix import FedFix
from thinwire.methods.islands.gossip import Gossip
from thinwire.methods.islands.local_sgd import LocalSGD
from thinwire.methods.islands.sparseloco import SparseLoCo
from thinwire.methods.islands.streaming_diloco import StreamingDiLoCo

__all__ = ["DADAO", "DiLoCo", "FedFix", "Gossip", "LocalSGD", "SparseLoCo", "StreamingDiLoCo"]
