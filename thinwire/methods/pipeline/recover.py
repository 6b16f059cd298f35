"""CheckFree: rebuilds a lost stage from its neighbours, without a checkpoint."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from thinwire.errors import ConfigError

NONE, SWAP = "none", "swap"
# How the layers of a lost stage begin, by name.
RECOVERIES = {
    NONE: "a lost stage ends the run",
    "average": "the mean of the layers before and after, weighted by the norms of their last gradients",
    SWAP: "the first two stages, and the last two, are copies of each other, and learn it; others as by average",
    "uniform": "the mean of the layers before and after",
    "copy": "the layers before",
    "random": "as a new model's",
}
# The mean needs a stage between two others, a swap two pairs.
FEWEST_STAGES, FEWEST_SWAPPED = 3, 4
# What each recovery of a stage multiplies its learning rate with, so that it moves away from its neighbours; at most.
LR_FACTOR, MOST_LR_FACTOR = 1.1, 1.5
# Added to each norm: a mean of stages without a gradient is even.
NORM_FLOOR = 1e-4


def neighbours(stage: int, num_stages: int) -> tuple[int, ...]:
    """The stages before and after; the ends have one neighbour."""
    return tuple(other for other in (stage - 1, stage + 1) if 0 <= other < num_stages)


def sources(how: str, stage: int, num_stages: int) -> tuple[int, ...]:
    """The stages whose layers a lost stage starts with. An end copies its only neighbour."""
    beside = neighbours(stage, num_stages)
    if how == SWAP:
        pairs = {0: 1, 1: 0, num_stages - 1: num_stages - 2, num_stages - 2: num_stages - 1}
        return (pairs[stage],) if stage in pairs else beside
    return {"random": (), "copy": beside[:1]}.get(how, beside)


def check_recovery(how: str, num_stages: int) -> None:
    """Raise ConfigError for fewer stages than this recovery needs."""
    fewest, why = FEWEST_STAGES, "none lies between two others"
    if how == SWAP:
        fewest, why = FEWEST_SWAPPED, "the first two and the last two must be others"
    if how != NONE and num_stages < fewest:
        raise ConfigError(
            f"recover {how!r} with {num_stages} stages: {why}; nearest: recover {NONE!r} "
            f"(--pipeline.recover {NONE}), or {fewest} stages"
        )


def beyond_recovery(lost: Collection[int], num_stages: int, *, tied: bool) -> str:
    """Why a run can't continue after a loss; empty: it can. tied: whether the ends share a weight."""
    gone = sorted(lost)
    if together := [stage for stage in gone if stage + 1 in lost]:
        return f"stages {together[0]} and {together[0] + 1} were lost together, and each is the other's neighbour"
    if tied and {0, num_stages - 1} <= set(gone):
        return "the first and the last stage were lost together, and with them the weight that they share"
    return ""


def healthy_replica(
    lost: Collection[int], there: Collection[tuple[int, int]], num_stages: int, *, tied: bool
) -> int | None:
    """The first replica of the pipeline that has everything from which the lost stages are rebuilt.

    None: there is none.

    there: the (stage, replica) pairs whose state is left. tied: see `beyond_recovery`.
    """
    needed = {other for stage in lost for other in neighbours(stage, num_stages)}
    needed |= {num_stages - 1} if tied and 0 in lost else set()
    replicas = sorted({replica for _, replica in there})
    return next((each for each in replicas if all((stage, each) in there for stage in needed)), None)


def between(before: Tensor, after: Tensor, norm_before: float, norm_after: float) -> Tensor:
    """(n_b W_b + n_a W_a) / (n_b + n_a): weights of a lost stage from those of its neighbours.

    Args:
        before, after: W_b, W_a, the neighbours' weights, of equal shape.
        norm_before, norm_after: the 2-norms of their last gradients; n_b and n_a are these plus 1e-4.

    Source: "All is Not Lost: LLM Recovery without Checkpoints", Algorithm 1.
    """
    n_before, n_after = norm_before + NORM_FLOOR, norm_after + NORM_FLOOR
    return torch.lerp(before, after, n_after / (n_before + n_after))


def counterpart(layer: int, num_layers: int, of: int) -> int:
    """The layer of a stage with `of` layers at the same relative position as `layer` in a stage with num_layers."""
    return layer * of // num_layers


def lr_factor(num_recoveries: int) -> float:
    """The factor of a stage's learning rate after this many recoveries."""
    return min(LR_FACTOR**num_recoveries, MOST_LR_FACTOR)
