"""Refuses models, optimizers and codecs with which ranks can't share experts."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from thinwire.errors import ConfigError, Problems, nearest_divisor
from thinwire.methods.experts import ExpertParallel, ExpertPlacement, place_experts
from thinwire.methods.experts.options import CODED, in_groups
from thinwire.models.moe import MoE
from thinwire.models.seam import experts_of, module_of
from thinwire.state.elementwise import needs_whole_tensors


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, options: ExpertParallel) -> None:
    """Raise ConfigError for an optimizer that has state of whole experts, or that needs whole matrices."""
    if options.slices > 1 and needs_whole_tensors(optimizer):
        name = type(optimizer).__name__
        raise ConfigError(
            f"{name} needs whole matrices, which slices={options.slices} of experts cuts; nearest: slices=1"
        )
    held = {id(param) for experts in experts_of(model).values() for param in module_of(experts).parameters()}
    if any(id(param) in held for param in optimizer.state):
        raise ConfigError("the optimizer has taken steps with whole experts: make a new one")


def check_experts(model: nn.Module, options: ExpertParallel, world_size: int) -> ExpertPlacement:
    """Where a model's experts lie on `world_size` ranks. Raises ConfigError that lists everything that does not fit."""
    problems = Problems()
    if not isinstance(options.parallel, str) and world_size % options.parallel:
        near = nearest_divisor(options.parallel, world_size)
        problems.messages.append(
            f"--experts.parallel {options.parallel}: must divide the {world_size} ranks; nearest: {near}"
        )
    placement = None
    with problems.collect():
        first = next(iter(experts_of(model).values()))
        if options.slices > 1 and not first.is_sliceable:
            why = "pruning keeps other values of" if is_parametrized(module_of(first)) else "transformers keeps"
            raise ConfigError(
                f"--experts.slices {options.slices}: {why} an expert's hidden units in several ranges, so its experts "
                "lie whole on a rank; nearest: --experts.slices 1"
            )
        with problems.collect():
            placement = place_experts(options, first.num_experts, first.inner if first.is_sliceable else 1, world_size)
        problems.note(check_groups, options, first.width)
    problems.note(check_limit, model, options)
    problems.raise_any()
    assert placement is not None
    return placement


def check_limit(model: nn.Module, options: ExpertParallel) -> None:
    """Raise ConfigError for a capacity that the model's layers can't have, or that differs from the one they have."""
    if options.capacity is None:
        return
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not layers:
        raise ConfigError(
            f"capacity {options.capacity:g}: {type(model).__name__} has no layers of thinwire, which alone drop rows; "
            "nearest: leave capacity out"
        )
    for config in (layer.config for layer in layers):
        if config.capacity_factor not in (0, options.capacity):
            raise ConfigError(
                f"capacity {options.capacity:g} and the model's capacity_factor {config.capacity_factor:g}: both are "
                f"the most rows of an expert; nearest: capacity {config.capacity_factor:g}"
            )
        replace(config, capacity_factor=options.capacity)


def check_groups(options: ExpertParallel, width: int) -> None:
    """Raise ConfigError for codecs whose groups do not end at the end of a row of `width` elements."""
    problems = Problems()
    for name in CODED:
        codec = options.fitted(width).codec(name)
        if codec is not None and width % codec.block:
            problems.messages.append(
                f"--experts.{name} {codec}: its groups of {codec.block} must end where the rows of {width} end; "
                f"nearest: --experts.{name} {in_groups(codec, math.gcd(width, codec.block))}"
            )
    problems.raise_any()
