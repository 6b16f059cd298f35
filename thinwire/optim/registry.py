"""The optimizers that `--optimizer` knows, each with the settings that suit language models."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, get_type_hints

import torch

from thinwire.errors import ConfigError, nearest
from thinwire.optim.apollo import Apollo, ApolloMini
from thinwire.optim.dgc_sgd import DGCSGD
from thinwire.optim.dion import DionOptimizer
from thinwire.optim.lans import LANS
from thinwire.optim.mfac import MFAC
from thinwire.optim.muon import Muon
from thinwire.optim.onebit_adam import OneBitAdamW

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, betas=(0.9, 0.95), fused=True),
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "sgd-plain": torch.optim.SGD,
    "lans": LANS,
    "muon": Muon,
    "dion": DionOptimizer,
    "apollo": Apollo,
    "apollo-mini": ApolloMini,
    "mfac": MFAC,
    "dgc-sgd": DGCSGD,
    "onebit-adam": OneBitAdamW,
}
# Elementwise optimizers: a tensor can be cut anywhere.
ELEMENTWISE = ("adamw", "sgd", "sgd-plain")
# Optimizers that draw by the names of parameters.
NAMED = ("apollo", "apollo-mini")
# Optimizers whose update of one parameter depends on all others.
JOINT = ("mfac",)
# Optimizers that make the updates of matrices orthonormal, and take groups that say of which.
MATRIXWISE = ("muon", "dion")
# Optimizers that take parts of matrices on a tensor axis, whose ranks bring them together.
MESHED = (*ELEMENTWISE, *MATRIXWISE)
# Arguments that have flags of their own or follow from the model, and torch's switches of how a step is computed.
GIVEN = {
    "params", "lr", "weight_decay", "orthogonal", "matrices", "seed", "foreach", "fused", "maximize", "capturable",
    "differentiable",
}  # fmt: skip
# Optimizers of methods that cut tensors: the others' ranks sum what looks across pieces.
SHARDED = (*MESHED, *NAMED, *JOINT)
# Optimizers that look across the elements of a tensor.
WHOLE = ("lans", *MATRIXWISE, *NAMED, *JOINT)
# Optimizers that take any gradient and have no communication of their own.
GENERAL = (*ELEMENTWISE, *WHOLE)


def make_optimizer(name: str, groups: list[dict[str, Any]], lr: float, **options: Any) -> torch.optim.Optimizer:
    """The optimizer registered under `name` over these parameter groups; raises ConfigError that names the nearest."""
    if name not in OPTIMIZERS:
        raise ConfigError(f"unknown optimizer {name!r}{nearest(name, OPTIMIZERS)}")
    return OPTIMIZERS[name](groups, lr=lr, **options)


def options_of_optimizer(name: str) -> dict[str, Any]:
    """The options of a registered optimizer that a run may state, and their types."""
    maker = OPTIMIZERS[name]
    cls: Any = maker.func if isinstance(maker, partial) else maker
    found: dict[str, Any] = {}
    for base in cls.__mro__[: cls.__mro__.index(torch.optim.Optimizer)]:
        if "__init__" not in vars(base):
            continue
        hints = get_type_hints(base.__init__)
        for key, argument in inspect.signature(base.__init__).parameters.items():
            if key in hints and key not in GIVEN and argument.kind is not argument.VAR_KEYWORD:
                # torch's betas may be tensors, which no text can state.
                found[key] = tuple[float, float] if key == "betas" else hints[key]
    return found
