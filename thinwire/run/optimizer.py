"""The optimizer of a run, over the parameters of its model."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire.layout.layers import layers_of
from thinwire.optim import MATRIXWISE, NAMED, make_optimizer


def optimizer_over(name: str, model: nn.Module, lr: float, weight_decay: float, seed: int) -> torch.optim.Optimizer:
    """The optimizer `name` over all trainable parameters. Those with fewer than two dimensions have no weight decay.

    Muon and Dion orthogonalise the matrices of layers, and Apollo projects them. Embeddings and heads, which lie in no
    layer, take AdamW's step. seed: of projections. Raises ConfigError for a model without layers if the optimizer needs
    them.
    """
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    matrices, vectors = ([n for n, p in trained.items() if (p.dim() >= 2) == wide] for wide in (True, False))
    decay = {"weight_decay": weight_decay}
    layers = set(layers_of(model))
    inside = {param for layer in layers for param in layer.parameters()}
    groups: list[dict[str, Any]] = [{"params": matrices, **decay}, {"params": vectors, "weight_decay": 0.0}]
    if name in MATRIXWISE:
        groups[:1] = [
            {"params": [n for n in matrices if (trained[n] in inside) == orthogonal], **decay, "orthogonal": orthogonal}
            for orthogonal in (True, False)
        ]
    options: dict[str, Any] = {}
    if name in NAMED:
        paths = [path for path, module in model.named_modules() if module in layers]
        if not paths:
            raise ConfigError(f"--optimizer {name}: the model has no layers, in a ModuleList; nearest: adamw")
        options = {"matrices": "|".join(rf"^{re.escape(path)}\." for path in paths), "seed": seed}
    for group in groups:
        group["params"] = [(n, trained[n]) if name in NAMED else trained[n] for n in group["params"]]
    return make_optimizer(name, [group for group in groups if group["params"]], lr, **options)
