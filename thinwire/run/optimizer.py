"""The optimizer of a run, over the parameters of its model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from thinwire.errors import ConfigError, nearest, type_rule
from thinwire.layout.layers import layers_of
from thinwire.layout.mesh import MeshShape
from thinwire.methods.interface import Method
from thinwire.methods.options import fits
from thinwire.methods.outer.base import IslandsMethod
from thinwire.optim import JOINT, MATRIXWISE, MESHED, NAMED, OPTIMIZERS, WHOLE, make_optimizer, options_of_optimizer
from thinwire.optim.matrices import is_matrix
from thinwire.run.spelled import options_in


def name_of(optimizer: str) -> str:
    """The name in `NAME[option=value,...]`."""
    return optimizer.partition("[")[0]


def read_optimizer(text: str, fitting: Iterable[str] = OPTIMIZERS) -> tuple[str, dict[str, Any]]:
    """The name and the options in `NAME` or `NAME[option=value,...]`.

    fitting: names to suggest. Raises ConfigError, with all that is wrong: an unknown name or option, or a value
    that the optimizer refuses.
    """
    name, (note, inside) = name_of(text), (f"--optimizer {text}: ", text[len(name_of(text)) :])
    if name not in OPTIMIZERS:
        raise ConfigError(f"--optimizer {name}: no such optimizer{nearest(name, fitting)}")
    if inside and not inside.endswith("]"):
        raise ConfigError(f"{note}must be NAME or NAME[option=value,...]; nearest: {name}")
    options, known, wrong = options_in(inside[1:-1], note), options_of_optimizer(name), []
    for key, value in options.items():
        if key not in known:
            wrong.append(f"{note}{name} has no option {key!r}{nearest(key, known)}")
        elif not fits(value, known[key]):
            wrong.append(f"{note}{key} = {value!r}: {type_rule(value, known[key])}")
    if wrong:
        raise ConfigError(*wrong)
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    if not options:
        # Nothing is left to refuse, and torch's optimizers load its compiler.
        return name, options
    one = torch.empty(1 << 16, 1 << 16, device="meta") if name in NAMED else torch.zeros(1, 1)
    try:
        # Over one matrix, for what the optimizer itself refuses.
        if name in NAMED:
            make_optimizer(name, [{"params": [("one", one)]}], 0.1, **options, matrices="one")
        else:
            make_optimizer(name, [{"params": [one]}], 0.1, **options)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{note}{error}") from None
    return name, options


def check_fits(name: str, strategy: Method) -> None:
    """Raise ConfigError for an optimizer that a strategy can't drive."""
    if name not in strategy.optimizers:
        whose = f"--inner {strategy.inner.name}" if isinstance(strategy, IslandsMethod) else f"strategy {strategy.name}"
        raise ConfigError(
            f"--optimizer {name} does not fit {whose}, which {strategy.optimizers_reason}"
            f"{nearest(name, strategy.optimizers)}"
        )


def check_mesh(name: str, shape: MeshShape, slices: int = 1) -> None:
    """Raise ConfigError for an optimizer that can't step what a mesh leaves a rank, or slices of experts."""
    if name in WHOLE and name not in MESHED and shape.tensor > 1:
        raise ConfigError(f"--optimizer {name} needs whole tensors, which --mesh {shape} cuts{nearest(name, MESHED)}")
    parts = [axis for axis in ("pipeline", "expert") if shape.sizes.get(axis, 1) > 1]
    if name in JOINT and parts:
        raise ConfigError(
            f"--optimizer {name} looks across all parameters, of which ranks of the {parts[0]} axis have others"
            f"{nearest(name, MESHED)}"
        )
    if name in WHOLE and slices > 1:
        raise ConfigError(f"--optimizer {name} needs whole matrices, which --experts.slices {slices} cuts")


def limits_itself(text: str) -> bool:
    """Whether the optimizer `NAME[option=value,...]` bounds the norm of each update, in place of clipping."""
    name, options = read_optimizer(text)
    return name in NAMED and options.get("limit", 1) is not None


def optimizer_over(text: str, model: nn.Module, lr: float, weight_decay: float, seed: int) -> torch.optim.Optimizer:
    """The optimizer `NAME[option=value,...]` over all trainable parameters.

    Parameters with fewer than two dimensions have no weight decay.

    Muon and Dion orthogonalise the matrices of layers, and Apollo projects them. Embeddings and heads, which lie in no
    layer, take AdamW's step. seed: of projections. Raises ConfigError for a model without layers if the optimizer needs
    them.
    """
    name, options = read_optimizer(text)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    matrices, vectors = ([n for n, p in trained.items() if (p.dim() >= 2) == wide] for wide in (True, False))
    decay = {"weight_decay": weight_decay}
    layers = set(layers_of(model))
    inside = {param for layer in layers for param in layer.parameters()}
    groups: list[dict[str, Any]] = [{"params": matrices, **decay}, {"params": vectors, "weight_decay": 0.0}]
    if name in MATRIXWISE:

        def turns(param: nn.Parameter) -> bool:
            return param in inside and is_matrix(param)

        groups[:1] = [
            {"params": [n for n in matrices if turns(trained[n]) == orthogonal], **decay, "orthogonal": orthogonal}
            for orthogonal in (True, False)
        ]
    if name in NAMED:
        paths = [path for path, module in model.named_modules() if module in layers]
        if not paths:
            raise ConfigError(f"--optimizer {name}: the model has no layers, in a ModuleList; nearest: adamw")
        options |= {"matrices": "|".join(rf"^{re.escape(path)}\." for path in paths), "seed": seed}
    for group in groups:
        group["params"] = [(n, trained[n]) if name in NAMED else trained[n] for n in group["params"]]
    return make_optimizer(name, [group for group in groups if group["params"]], lr, **options)
