"""Train large language models on machines joined by slow links."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Loaded when a name is first asked for: `thinwire --help` needs no torch. `__init__.pyi` tells type checkers the same.
_HOMES: dict[str, tuple[str, ...]] = {
    "thinwire.adapters": ("attach",),
    "thinwire.codecs": (
        "Cast", "Codec", "CountSketch", "GaussianSketch", "Hadamard", "Identity", "Integer", "Natural", "RandomK",
        "Sign", "Threshold", "TopK", "Twice", "Zstd",
    ),
    "thinwire.collectives": (
        "Communicator", "ElasticPeers", "Peers", "Topology", "WorldPeers", "faults", "host_meeting",
    ),
    "thinwire.compose": ("Stage", "parallelize"),
    "thinwire.errors": ("ConfigError", "CorruptMessageError", "MismatchError", "PeerLostError", "ThinwireError"),
    "thinwire.hosts.ddp.attach": ("CompressedDDP", "compress_ddp"),
    "thinwire.hosts.fsdp.compress": ("CompressedFSDP", "compress_fsdp"),
    # Methods that make their context too, where the host that runs it is loaded.
    "thinwire.hosts.islands.fronts": (
        "DADAO", "DiLoCo", "FedFix", "Gossip", "LocalSGD", "SparseLoCo", "StreamingDiLoCo",
    ),
    "thinwire.hosts.islands.library": ("Islands",),
    "thinwire.methods.slope_log": ("SlopeLog",),
    "thinwire.hosts.forward.optimizer": ("ForwardOptimizer", "forward_only"),
    "thinwire.hosts.sharded.optimizer": ("ShardedOptimizer",),
    "thinwire.hosts.sharded.wrap": ("zero",),
    "thinwire.state.watchdog": ("DeadGradientError",),
    "thinwire.layout.formats": ("Strategy",),
    "thinwire.methods.data.ddp": ("DDP",),
    "thinwire.methods.data.dgc": ("DGC",),
    "thinwire.methods.data.demo": ("DeMo",),
    "thinwire.methods.data.dion": ("Dion",),
    "thinwire.methods.data.ef21": ("EF21",),
    "thinwire.methods.data.feedback": ("EFInteger", "EFTopK"),
    "thinwire.methods.data.frontier": ("Frontier",),
    "thinwire.methods.data.fsdp": ("FSDP",),
    "thinwire.methods.data.lgreco": ("LGreCo",),
    "thinwire.methods.data.one_byte": ("OneByte",),
    "thinwire.methods.data.onebit_adam": ("OneBitAdam",),
    "thinwire.methods.data.powersgd": ("PowerSGD",),
    "thinwire.methods.data.sdp4bit": ("SDP4Bit",),
    "thinwire.methods.data.sketch": ("Sketch",),
    "thinwire.methods.data.torch_powersgd": ("TorchPowerSGD",),
    "thinwire.methods.data.two_way": ("TwoWay",),
    "thinwire.methods.data.zero": ("Zero", "ZeroBF16"),
    "thinwire.methods.data.zero_compressed": ("ZeroCompressed",),
    "thinwire.methods.data.zeropp": ("ZeroPP",),
    "thinwire.methods.interface": ("Method",),
    "thinwire.methods.pipeline.border": ("Border",),
    "thinwire.methods.sharded": ("ShardedMethod",),
    "thinwire.optim": ("DGCSGD", "LANS", "Muon", "OneBitAdamW"),
    "thinwire.registry": ("STRATEGIES", "strategy_named"),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [*_MODULE_OF, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
