"""Checks of what the fronts are given: zero, compress_ddp, compress_fsdp, parallelize and pipeline."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import nn

from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S
from thinwire.errors import ConfigError, fits, type_name


class ArgumentRule(NamedTuple):
    """What an argument must be. hint: its type; None may be given besides if `optional`. least: its lowest number."""

    hint: Any
    least: float = -math.inf
    optional: bool = False
    # What the message names where the value can't be read as one that is allowed.
    nearest: Any = None


RULES = {
    "local_size": ArgumentRule(int, 1, optional=True),
    "bucket_numel": ArgumentRule(int, 1, optional=True),
    "dead_steps": ArgumentRule(int, 0, nearest=0),
    "seed": ArgumentRule(int, nearest=0),
    # A millisecond: a message that may take no time at all always comes too late.
    "timeout_s": ArgumentRule(float, 1e-3, nearest=DEFAULT_TIMEOUT_S),
    "stages": ArgumentRule(int, 1, nearest=1),
    "tensor": ArgumentRule(int, 1, nearest=1),
    "overlap": ArgumentRule(bool, nearest=False),
    "checked": ArgumentRule(bool, nearest=False),
    "announce": ArgumentRule(bool, nearest=True),
}


def check_arguments(front: str, model: object, optimizer: object = None, /, **given: Any) -> None:
    """Raise ConfigError for an argument of `front` of a wrong type or below its least number.

    Args:
        model: must be an nn.Module.
        optimizer: None, or an object with the param_groups of an optimizer.
        given: arguments by name; those without a rule are not checked.
    """
    what = f"{front} got a {type(model).__name__} as its model"
    if isinstance(optimizer, nn.Module) and hasattr(model, "param_groups"):
        raise ConfigError(f"{what} and a {type(optimizer).__name__} as its optimizer: the model comes first")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{what}: must be a torch.nn.Module; nearest: the model itself, such as {front}(model, ...)")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise ConfigError(
            f"{front} got a {type(optimizer).__name__} as its optimizer: must be an optimizer over the model's "
            "parameters; nearest: torch.optim.AdamW(model.parameters())"
        )
    for name, rule in RULES.items():
        if name in given:
            _check(f"{front}: {name} {given[name]!r}", given[name], rule)


def _check(what: str, value: Any, rule: ArgumentRule) -> None:
    if rule.optional and value is None:
        return
    kind = type_name(rule.hint) + (" or None" if rule.optional else "")
    if not fits(value, rule.hint):
        try:
            close = max(rule.hint(value), rule.least) if rule.hint is not bool else rule.nearest
        except (TypeError, ValueError, OverflowError):
            close = rule.nearest
        raise ConfigError(f"{what}: must be {kind}; nearest: {close}")
    if not value >= rule.least:
        raise ConfigError(f"{what}: must be {kind}, at least {rule.least:g}; nearest: {rule.least:g}")


def check_instance(method: object) -> None:
    """Raise ConfigError for a method's name or class in place of the method."""
    if isinstance(method, str):
        raise ConfigError(f"{method!r} is a name: give the method itself, as thinwire.strategy_named({method!r})")
    if isinstance(method, type):
        raise ConfigError(f"{method.__name__} is a class: give the method itself, as {method.__name__}()")


def check_max_norm(max_norm: object) -> None:
    """Raise ConfigError for what is no norm to clip to."""
    # A tensor of one number serves too.
    if getattr(max_norm, "shape", None) == ():
        return
    if not fits(max_norm, float) or not max_norm >= 0:  # type: ignore[operator]
        raise ConfigError(f"max_norm {max_norm!r}: must be a number, at least 0; nearest: 1.0")
