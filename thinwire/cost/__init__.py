"""What a step would cost, as arithmetic; no process, no tensor."""

from thinwire.cost.network import Network, Traffic

__all__ = ["Network", "Traffic"]
