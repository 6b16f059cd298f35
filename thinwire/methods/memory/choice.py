"""Decides what of a training lies in memory and what on a disk, where nobody has stated it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from thinwire.methods.memory.floor import Floor
from thinwire.methods.memory.placement import placed
from thinwire.methods.memory.residency import FP32_BYTES, KEEP, RECOMPUTE, RECOMPUTE_FROM_DISK, Residency
from thinwire.methods.memory.setup import Setup

# Of the budget, what the floor may take for a way to be chosen: with activations, and without.
FULL_SHARE, BARE_SHARE = 0.9, 2 / 3
# Of a forward and its backward, for each weight and token; of them with layers computed again.
OPERATIONS, WITH_AGAIN = 6, 8
# Another way must take less than this share of the first one's seconds, because rates differ from start to start.
SOONER = 0.9


@dataclass(frozen=True)
class StepRates:
    """Tokens of a micro-batch; and what a rank does in a second: operations, bytes of its disk, and to other nodes."""

    tokens: int
    flops: float
    read: float
    written: float
    sent: float = math.inf


def seconds(way: Residency, setup: Setup, rates: StepRates) -> tuple[float, float, float]:
    """Seconds of a rank's step for computing, for its disk and for its link; reading ahead hides the shorter ones."""
    each = WITH_AGAIN if way.recomputes else OPERATIONS
    operations = each * setup.model_bytes / FP32_BYTES * rates.tokens * setup.micro_batches
    moved = sum(part.read / rates.read + part.written / rates.written for part in placed(way, setup))
    return operations / rates.flops, moved, setup.plan.sent_on("inter") / rates.sent


def soonest(ways: Sequence[Residency], first: Residency, setup: Setup, rates: StepRates) -> Residency:
    """The way whose step takes fewest seconds; `first`, unless another one is clearly sooner."""
    first = first if first in ways else min(ways, key=lambda way: _cost(way, setup))
    found = min(ways, key=lambda way: (max(seconds(way, setup, rates)), _cost(way, setup)))
    is_sooner = max(seconds(found, setup, rates)) < SOONER * max(seconds(first, setup, rates))
    return found if is_sooner else first


def moves_nothing(way: Residency, setup: Setup) -> bool:
    """Whether no other way can take fewer seconds: nothing is computed again, and nothing moves to or from a disk."""
    return _cost(way, setup) == (False, 0)


def settled(residency: Residency, setup: Setup, rates: StepRates | None = None) -> Residency:
    """The residency with `auto` decided for weights, gradients and activations.

    rates: take the `soonest` way that fits; None: not known, and the following holds.

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
    if not (ways := [way for way in found if _fits(way, setup)]):
        return min(found, key=lambda way: _least(way, setup))
    first = min(ways, key=lambda way: _cost(way, setup))
    return first if rates is None else soonest(fitting(residency, setup), first, setup, rates)


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
        may_spill = residency.store is not None or residency.needs_store
        is_counted = setup.kept is not None and RECOMPUTE_FROM_DISK in setup.kept
        activations += [RECOMPUTE_FROM_DISK] if is_counted and may_spill else []
    return [replace(residency, gradients=g, activations=a) for a in activations for g in gradients]


def _least(way: Residency, setup: Setup) -> int:
    return Floor.of(way, setup).step_bytes


def _fits(way: Residency, setup: Setup) -> bool:
    """Whether a way leaves enough of the budget to what is not counted."""
    share = BARE_SHARE if setup.kept is None else FULL_SHARE
    return _least(way, setup) <= share * (way.memory_bytes or 0)
