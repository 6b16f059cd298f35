"""Checks of what `thinwire.place` and `Placement.apply` are given."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire import _compat
from thinwire.cost import Machine
from thinwire.errors import ConfigError, fits, nearest
from thinwire.hosts.arguments import check_arguments
from thinwire.placement.runner import Placed


def check_placed(
    model: nn.Module, inputs: object, machine: Machine, method: object, methods: Collection[str], *, leaves: object,
    groups: object, seconds: object, states: object,
) -> None:  # fmt: skip
    """Raise ConfigError for an argument of `thinwire.place` of a wrong type or out of its range."""
    check_arguments("place", model)
    check_whole(model)
    if not isinstance(machine, Machine):
        near = f"thinwire.cost.Machine.read({machine!r})" if isinstance(machine, str) else "thinwire.calibrate(comm)"
        raise ConfigError(f"machine {machine!r}: must be a thinwire.cost.Machine; nearest: {near}")
    for name, least in (("memory_bytes", machine.memory_bytes), ("base_bytes", machine.base_bytes)):
        if not fits(least, float) or not least >= 0:
            near = "math.inf, no limit" if name == "memory_bytes" else "0"
            raise ConfigError(f"{name} {least!r} of the machine: must be a number, at least 0; nearest: {near}")
    if not isinstance(method, str) or method not in methods:
        raise ConfigError(f"method {method!r}: no way to place a model{nearest(str(method), methods)}")
    if not fits(states, int) or states < 0:  # type: ignore[operator]
        near = str(max(0, round(states))) if fits(states, float) and math.isfinite(states) else "2"  # type: ignore
        raise ConfigError(
            f"states {states!r}: the tensors that an optimizer keeps of a weight, a whole number; nearest: {near}"
        )
    _check_inputs(inputs)
    _check_names(leaves, groups)
    if seconds is not None:
        _check_seconds(seconds)


def check_whole(model: nn.Module) -> None:
    """Raise ConfigError for a model that is compiled, or of which a part has been placed."""
    if _compat.is_compiled(model):
        raise ConfigError(f"this {type(model).__name__} is compiled: must be a plain model; nearest: the one before it")
    for name, module in model.named_modules():
        if isinstance(getattr(module.forward, "__self__", None), Placed):
            what = f"module {name!r}" if name else f"this {type(module).__name__}"
            raise ConfigError(
                f"{what} has been placed, and each rank has a part of it; nearest: the model, built again"
            )


def check_trains(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError for what is no optimizer, or has none of the model's parameters."""
    check_arguments("Placement.apply", model, optimizer)
    own = {id(param) for param in model.parameters()}
    if not any(id(param) in own for group in optimizer.param_groups for param in group["params"]):
        raise ConfigError(
            f"no parameter of this {type(optimizer).__name__} is one of the placed {type(model).__name__}: must be "
            "over its parameters; nearest: an optimizer over model.parameters() of the model that was given to place"
        )


def _check_inputs(inputs: object) -> None:
    if not isinstance(inputs, (Tensor, list, tuple, Mapping)):
        raise ConfigError(
            f"inputs {inputs!r}: must be a tensor, a list by position or a dict by name; nearest: (tensor, ...)"
        )
    values: list[Any] = list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)
    for value in values if not isinstance(inputs, Tensor) else ():
        if hasattr(value, "__array_interface__") and not isinstance(value, Tensor) and getattr(value, "shape", True):
            raise ConfigError(f"inputs: a {type(value).__name__} must be a tensor; nearest: torch.as_tensor of it")


def _check_names(leaves: object, groups: object) -> None:
    names = leaves if isinstance(leaves, Collection) else [None]
    for leaf in names if not isinstance(leaves, (str, type)) else ():
        if not isinstance(leaf, str) and not (isinstance(leaf, type) and issubclass(leaf, nn.Module)):
            raise ConfigError(f"leaves {leaves!r}: must be a list of modules' names or classes; nearest: []")
    for group in groups if isinstance(groups, Collection) and not isinstance(groups, str) else [groups]:
        if not isinstance(group, (str, Collection)) or not all(isinstance(name, str) for name in group):
            raise ConfigError(f"groups {groups!r}: must be a list of lists of names that share a rank; nearest: []")


def _check_seconds(seconds: object) -> None:
    if not isinstance(seconds, Mapping):
        raise ConfigError(f"seconds {seconds!r}: must be (forward, backward) by the name of a node; nearest: None")
    for name, pair in seconds.items():
        is_pair = fits(pair, tuple[float, ...]) and len(pair) == 2
        if not is_pair or not all(math.isfinite(each) and each >= 0 for each in pair):
            near = _pair_near(pair)
            raise ConfigError(
                f"seconds of {name!r}, {pair!r}: must be (forward, backward), each finite and at least 0; nearest: "
                f"{near}"
            )


def _pair_near(pair: Any) -> tuple[float, ...]:
    both: Any = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else (pair, 0.0)
    return tuple(max(0.0, each) if fits(each, float) and math.isfinite(each) else 0.0 for each in both)
