"""Checks what a residency can be combined with."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from thinwire.collectives import Topology
from thinwire.errors import ConfigError, Problems
from thinwire.methods.memory.residency import AT_ONCE, Residency
from thinwire.methods.outer.base import Connected, IslandsMethod
from thinwire.methods.sharded import ShardedMethod

# Axes beside which layers can be computed again: what they send is the same each time.
AGAIN = {"sequence", "expert"}


def resident_method(
    method: object, axes: Collection[str] = (), residency: Residency | None = None
) -> ShardedMethod:  # fmt: skip
    """The method whose state can lie on a disk beside these axes of a mesh: itself, or the one inside each island.

    residency: if it is known. Raises ConfigError if there is none.
    """
    axes = set(axes) - {"data"}
    if (outer := islands_method(method)) is not None:
        method, axes = outer.inner, axes - {"island"}
    if not isinstance(method, ShardedMethod):
        name = getattr(method, "name", type(method).__name__)
        raise ConfigError(
            f"residency: {name} keeps all it has in memory; nearest that does not: sdp4bit, zero or frontier"
        )
    if residency is not None and residency.only_recomputes:
        axes -= AGAIN
    if beside := sorted(axes):
        near = ", or --activations recompute and nothing else of it" if axes <= AGAIN else ""
        asked = f" with activations {residency.activations}" if residency and residency.sampled is not None else ""
        why = ", because its micro-batches overlap" if "pipeline" in axes else ""
        raise ConfigError(f"residency{asked} beside an axis {beside[0]}: not supported{why}; nearest: data alone{near}")
    return method


def islands_method(method: object) -> IslandsMethod | None:
    """The method of the islands; None: it has none."""
    method = method.method if isinstance(method, Connected) else method
    return method if isinstance(method, IslandsMethod) else None


def outer_bytes(method: object, model: nn.Module, topology: Topology) -> dict[str, int]:
    """What the first rank of an island has in memory of the parameters that islands exchange, by name.

    topology: of an island.
    """
    outer = islands_method(method)
    if outer is None:
        return {}
    both, inner = (
        each.plan(model, grid, 1).other
        for each, grid in ((outer, Topology(2, topology.world_size)), (outer.inner, topology))
    )
    return {name: num_bytes for name, num_bytes in both.items() if name not in inner}


def check_outer(residency: Residency, method: object) -> None:
    """Raise ConfigError for options that don't suit islands, or a method of islands."""
    outer = islands_method(method)
    if outer is None:
        return
    problems, what = Problems(), f"residency: {outer.name} trains islands"
    if residency.durable:
        problems.messages.append(
            f"{what}, which agree on a step only when they exchange; nearest: checkpoints, without durable"
        )
    if outer.climb is not None:
        problems.messages.append(f"{what} uphill, with all weights and gradients at once; nearest: leave ascent out")
    if outer.outer().correction is not None:
        problems.messages.append(
            f"{what} and corrects gradients by masters that are all in memory; nearest: leave the correction out"
        )
    problems.raise_any()


def check_across(residency: Residency, optimizer: str, *, streams: bool) -> None:
    """Raise ConfigError for options that don't suit an optimizer that looks across matrices. streams: see it."""
    what = f"residency: {optimizer} looks across matrices, and "
    problems = Problems()
    if not streams:
        problems.messages.append(f"{what}would hold all of them at once; nearest: adamw or apollo")
    if not residency.codec.traits.lossless:
        problems.messages.append(
            f"{what}--residency.states {residency.states} rounds state that each element has; nearest: "
            "--residency.states fp32"
        )
    if residency.gradients == "disk":
        problems.messages.append(
            f"{what}needs a gradient more than once in a step; nearest: --residency.gradients memory, or, for an "
            f"Apollo that limits its updates, {AT_ONCE}"
        )
    problems.raise_any()


def check_at_once(residency: Residency, optimizer: str, *, limits: bool, max_norm: float = 0) -> None:
    """Raise ConfigError for gradients that can't be stepped as they arrive.

    limits: whether the optimizer limits each update by itself. max_norm: to which gradients are clipped; 0: not at all.
    """
    if residency.gradients != AT_ONCE:
        return
    problems = Problems()
    if not limits:
        problems.messages.append(
            f"residency: gradients step, and {optimizer} does not limit its own updates; nearest: apollo with a limit, "
            "or --residency.gradients memory"
        )
    if max_norm:
        problems.messages.append(
            f"residency: gradients step, before the norm of all is known that --grad-clip {max_norm:g} needs; nearest: "
            "--grad-clip 0"
        )
    problems.raise_any()
