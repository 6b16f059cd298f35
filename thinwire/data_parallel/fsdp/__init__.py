"""Plug-ins for torch's FSDP2: how its shards are gathered and its gradients reduced."""

from thinwire.data_parallel.fsdp.strategies import FSDP, ZeroPP

__all__ = ["FSDP", "ZeroPP"]
