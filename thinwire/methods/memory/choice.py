"""Decides what of a training lies in memory and what on a disk, where nobody has stated it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from thinwire.methods.memory.floor import Floor
from thinwire.methods.memory.placement import placed
from thinwire.methods.memory.residency import KEEP, RECOMPUTE, RECOMPUTE_FROM_DISK, Residency
from thinwire.methods.memory.setup import Setup

# Of the budget, what the floor may take for a way to be chosen: with activations, and without.
FULL_SHARE, BARE_SHARE = 0.9, 2 / 3


def settled(residency: Residency, setup: Setup) -> Residency:
    """The residency with `auto` decided for weights, gradients and activations.

    Weights lie where a step takes fewer seconds: less computing first, then fewer bytes of the disk, which the rest of
    the budget decides, see `placed`; and in memory where both are alike. What travels between ranks is the same.

    Gradients move less than what a step moves anyway; to compute layers again takes a third more time. So of the ways
    that fit, the first of these is taken: both in memory; gradients on the disk; layers computed again; both; the
    inputs of layers on the disk, too.
    """
    asked = residency.weights
    places: list[Literal["auto", "memory", "disk"]] = ["memory", "disk"] if asked == "auto" else [asked]
    if residency.memory_bytes is None:
        return _ways(replace(residency, weights=places[0]), setup)[0]
    found = [_fitting(replace(residency, weights=place), setup) for place in places]
    fitting = [way for way in found if _fits(way, setup)]
    return (
        min(fitting, key=lambda way: _cost(way, setup)) if fitting else min(found, key=lambda way: _least(way, setup))
    )


def fitting(residency: Residency, setup: Setup) -> list[Residency]:
    """All ways that fit the budget, with `auto` decided for weights, gradients and activations; none without one."""
    if residency.memory_bytes is None:
        return []
    places: list[Literal["memory", "disk"]] = ["memory", "disk"]
    if residency.weights != "auto":
        places = [residency.weights]
    ways = [way for place in places for way in _ways(replace(residency, weights=place), setup)]
    return [way for way in ways if _fits(way, setup)]


def _cost(way: Residency, setup: Setup) -> tuple[bool, int]:
    """Whether layers are computed again, and the bytes that a step moves to and from the disk."""
    return way.recomputes, sum(part.read + part.written for part in placed(way, setup))


def _fitting(residency: Residency, setup: Setup) -> Residency:
    """The first of the ways that fit, or the one that needs least."""
    ways = _ways(residency, setup)
    return next((way for way in ways if _fits(way, setup)), min(ways, key=lambda way: _least(way, setup)))


def _ways(residency: Residency, setup: Setup) -> list[Residency]:
    """What may become of gradients and activations, in order of what they cost."""
    gradients, activations = [residency.gradients], [residency.activations]
    if residency.gradients == "auto":
        stays = setup.across is not None or residency.optimizer == "memory"
        gradients = ["memory"] if stays else ["memory", "disk"]
        gradients += ["step"] if setup.at_once else []
    if residency.activations == "auto":
        activations = [KEEP] if setup.kept is None else [KEEP, RECOMPUTE]
        activations = [RECOMPUTE] if residency.is_sliced else activations
        activations += [RECOMPUTE_FROM_DISK] if setup.kept is not None and RECOMPUTE_FROM_DISK in setup.kept else []
    return [replace(residency, gradients=g, activations=a) for a in activations for g in gradients]


def _least(way: Residency, setup: Setup) -> int:
    return Floor.of(way, setup).step_bytes


def _fits(way: Residency, setup: Setup) -> bool:
    """Whether a way leaves enough of the budget to what is not counted."""
    share = BARE_SHARE if setup.kept is None else FULL_SHARE
    return _least(way, setup) <= share * (way.memory_bytes or 0)
