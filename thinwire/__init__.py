"""Train large language models on machines joined by slow links."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.registry import StrategyRow

__version__ = "0.1.0"

# Loaded when a name is first asked for: `thinwire --help` needs no torch. `__init__.pyi` tells type checkers the same.
# Classes of strategies are found by their rows in `thinwire.registry`.
_HOMES: dict[str, tuple[str, ...]] = {
    "thinwire.adapters": ("attach",),
    "thinwire.calibration": ("calibrate", "measure_links"),
    "thinwire.codecs": (
        "Cast", "Codec", "CountSketch", "GaussianSketch", "Hadamard", "Identity", "Integer", "Natural", "NonzeroRows",
        "RandomK", "Sign", "Threshold", "TopK", "Twice", "Zstd",
    ),
    "thinwire.collectives": (
        "Communicator", "ElasticPeers", "Peers", "Topology", "WorldPeers", "faults", "host_meeting",
    ),
    "thinwire.compose": ("PipelinedModel", "Stage", "parallelize", "pipeline"),
    "thinwire.errors": ("ConfigError", "CorruptMessageError", "MismatchError", "PeerLostError", "ThinwireError"),
    "thinwire.expansion.expand": ("Expanded", "expand"),
    "thinwire.hosts.ddp.attach": ("CompressedDDP", "compress_ddp"),
    "thinwire.hosts.experts": ("ExpertRanks", "expert_parallel"),
    "thinwire.hosts.fsdp.compress": ("CompressedFSDP", "compress_fsdp"),
    "thinwire.islands.library": ("Islands",),
    "thinwire.methods.slope_log": ("SlopeLog",),
    "thinwire.hosts.forward.optimizer": ("ForwardOptimizer", "forward_only"),
    "thinwire.hosts.sequence": ("SequenceRanks", "ring_attention", "sequence_parallel", "ulysses_attention"),
    "thinwire.hosts.sharded.optimizer": ("ShardedOptimizer",),
    "thinwire.hosts.offload.hollow": ("hollow",),
    "thinwire.hosts.sharded.weights": ("whole",),
    "thinwire.hosts.sharded.wrap": ("zero",),
    "thinwire.state.watchdog": ("DeadGradientError",),
    "thinwire.layout.formats": ("Strategy",),
    "thinwire.losses": ("cut_cross_entropy", "cut_loss"),
    "thinwire.methods.experts": ("ExpertParallel",),
    "thinwire.methods.interface": ("Method",),
    "thinwire.methods.memory": ("Residency",),
    "thinwire.methods.pipeline.border": ("Border",),
    "thinwire.methods.pipeline.options": ("Pipeline",),
    "thinwire.methods.sequence": ("SequenceParallel",),
    "thinwire.methods.sharded": ("ShardedMethod",),
    "thinwire.models.kept": ("keep",),
    "thinwire.models.row_hooks": ("row_hooks",),
    "thinwire.optim": (
        "Apollo", "ApolloMini", "DGCSGD", "DionOptimizer", "InverseFisher", "LANS", "MFAC", "Muon", "OneBitAdamW",
    ),
    "thinwire.placement": ("Placed", "Placement", "place"),
    "thinwire.planner.plan": ("plan",),
    "thinwire.pruning.folder": ("unpack",),
    "thinwire.pruning.prune": ("Pruned", "prune"),
    "thinwire.registry": ("STRATEGIES", "strategy_named"),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    elif name == "__all__":
        value = __dir__()
    # Other names are asked for too, such as those of modules, and must not bring torch.
    elif not name[0].isupper() or name not in (classes := _classes()):
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    else:
        from thinwire.methods.front import Front

        value = classes[name].cls
        if issubclass(value, Front):
            importlib.import_module("thinwire.fronts")
    globals()[name] = value
    return value


def _classes() -> dict[str, StrategyRow]:
    """Rows of `STRATEGIES` by the name of the class."""
    from thinwire.registry import STRATEGIES

    return {row.name: row for row in STRATEGIES.values()}


def __dir__() -> list[str]:
    return sorted({*_MODULE_OF, *_classes(), "__version__"})
