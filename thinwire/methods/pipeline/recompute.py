"""Chooses the activations that are kept; others are computed again just before their backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from thinwire.cost import Network
from thinwire.errors import ConfigError, nearest
from thinwire.methods.pipeline.costs import Costs
from thinwire.methods.pipeline.plan import BACKWARD, FORWARD, INPUT, RECOMPUTE, Action, Plan
from thinwire.methods.pipeline.simulate import simulate

MODES = {
    "never": "all activations are kept",
    "except-last": "kept where the backward follows its forward with no other forward between",
    "always": "a visit keeps its input alone",
}
AUTO = "auto"
# Of a trained parameter in fp32, besides its weight: its gradient, two moments, and a packet of one of them.
MORE_BYTES = 16


def recompute(plan: Plan, mode: str) -> Plan:
    """The plan with a forward again right before each backward of a visit that kept only its input.

    It needs no gradient, so a rank computes it while it would wait for one. mode: one of MODES. Raises ConfigError for
    any other mode, and for a plan that recomputes already.
    Source: GPipe (NeurIPS 2019), section 2.3; torchgpipe, section 3.2, whose "except_last" does the same for its
    schedule.
    """
    if mode not in MODES:
        raise ConfigError(f"recompute {mode!r} is unknown{nearest(mode, MODES)}")
    if any(action.kind == RECOMPUTE for order in plan.orders for action in order):
        raise ConfigError("the plan recomputes already: give recompute() the plan without")
    if mode == "never":
        return plan
    return replace(plan, orders=tuple(tuple(_with(order, mode == "except-last")) for order in plan.orders))


def keeping(plan: Plan) -> Plan:
    """The plan without what it recomputes: the inverse of `recompute`."""
    orders = (tuple(action for action in order if action.kind != RECOMPUTE) for order in plan.orders)
    return replace(plan, orders=tuple(orders))


def fastest_within(
    plan: Plan, costs: Costs, network: Network | None = None, memory: Sequence[float] | None = None
) -> Plan:
    """The plan in the mode that `simulate` finds fastest of those whose activations fit; if none fits, "always".

    memory: bytes for the activations of each rank; None: all fit. Among equally fast modes, the one that computes
    least again.
    """
    if memory is None:
        return plan
    made = {mode: recompute(plan, mode) for mode in MODES}
    steps = {mode: simulate(each, costs, network) for mode, each in made.items()}
    fits = [mode for mode, step in steps.items() if all(a <= b for a, b in zip(step.peak_bytes, memory, strict=True))]
    return made[min(fits, key=lambda mode: steps[mode].makespan_s, default="always")]


def mode_of(plan: Plan) -> Literal["never", "except-last", "always"]:
    """The mode of MODES in which a plan recomputes."""
    again = sum(action.kind == RECOMPUTE for order in plan.orders for action in order)
    if not again:
        return "never"
    return "always" if again == sum(map(len, plan.paths)) else "except-last"


def _with(order: Sequence[Action], except_last: bool) -> Iterator[Action]:
    last_forward: Action | None = None
    for action in order:
        if action.kind == FORWARD:
            last_forward = action
        is_last = last_forward is not None and last_forward.visit == action.visit
        if action.kind in (BACKWARD, INPUT) and not (except_last and is_last):
            yield Action(RECOMPUTE, *action.visit)
        yield action
