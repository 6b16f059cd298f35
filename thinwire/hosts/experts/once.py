"""Sends each row into a node only once, for all of its experts there; their weighted sum comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.hosts.experts.trip import ExpertWire, Trip
from thinwire.methods.experts.traffic import number_size, numbers_bytes
from thinwire.models.experts import Experts, dtype_of_work, mixed
from thinwire.models.fused import FusedExperts
from thinwire.models.order import Order
from thinwire.models.row_hooks import row_hooks
from thinwire.models.seam import module_of

# Whole numbers that travel beside weights, by their bytes.
NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass
class Once:
    """A layer in two hops: between the ranks at the same place of all nodes, then inside each node.

    The rank at which a token enters a node sends its row to the experts in that node, weights their results, and sends
    back the sum: with experts e in node g, y = sum_g sum_(e in g) w_e e(x).

    Attributes:
        outer: wire between nodes; each node counts as one expert.
        exact: the same ranks without codecs, for the weights of a token's experts.
        inner: wire inside this node, between its experts.
    """

    outer: ExpertWire
    exact: ExpertWire
    inner: ExpertWire

    def forward(
        self, experts: Experts | FusedExperts, x: Tensor, index: Tensor, weights: Tensor, tokens: Tensor
    ) -> Tensor:
        """See Experts. A collective. tokens: see ExpertWire.row_numbers."""
        num_nodes, per_node, top_k = self.outer.placement.experts, self.inner.placement.experts, index.shape[1]
        node = index // per_node
        enters = (node[:, None] == torch.arange(num_nodes, device=x.device)[:, None]).any(-1)
        at, token = enters.t().nonzero(as_tuple=True)
        order = Order(token, token, enters.sum(0))
        # Its experts elsewhere are none here.
        own = torch.where(node[token] == at[:, None], index[token] - at[:, None] * per_node, per_node)

        def work(rows: Tensor, order: Order) -> Tensor:
            return work_on(self.inner, experts, rows, order.counts)

        def of_node(there: Tensor, _: Tensor) -> Tensor:
            trip = Trip(self.exact, order.counts)
            told = Tell.apply(trip, weights[token], own, per_node)
            weights_there, own_there = Came.apply(trip, top_k, per_node, told)
            return mixed(there, own_there.long(), weights_there, per_node, experts.weigh_inputs, work)

        hooks = row_hooks(module_of(experts))
        rows = hooks.run("before_dispatch", x[token].to(dtype_of_work(x, experts.weights[0])))
        trip = Trip(self.outer, order.counts, self.outer.row_numbers(order, tokens))
        back = hooks.run("after_combine", trip.through(rows, of_node))
        return back.new_zeros(len(x), x.shape[1]).index_add(0, token, back).to(x.dtype)


class Tell(torch.autograd.Function):
    """Starts to send the weights of each token's experts, and the experts' numbers. Returns a token for `Came`."""

    @staticmethod
    def forward(ctx: Any, trip: Trip, weights: Tensor, numbers: Tensor, most: int) -> Tensor:
        ctx.trip = trip
        trip.depart(beside(weights.detach(), numbers, most))
        return weights.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *tokens: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.trip.collect(), None, None


class Came(torch.autograd.Function):
    """Waits for the weights and numbers that `Tell` sends. Gradients of the weights alone return."""

    @staticmethod
    def forward(ctx: Any, trip: Trip, top_k: int, most: int, token: Tensor) -> tuple[Tensor, Tensor]:
        ctx.trip, ctx.token = trip, token.detach()
        weights, numbers = apart(trip.arrive(0), top_k, most)
        ctx.mark_non_differentiable(numbers)
        return weights, numbers

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.trip.go_back(0, grads[0], is_backward=True)
        return None, None, None, ctx.token


def beside(weights: Tensor, numbers: Tensor, most: int) -> Tensor:
    """Weights [n, k] and numbers [n, k], 0 to `most`, in one tensor [n, k + c] of the weights' dtype, bit for bit.

    Numbers up to 255 take a byte each; c columns have room for them.
    """
    top_k, size = weights.shape[1], weights.dtype.itemsize
    kind = NUMBERS[number_size(most)]
    room = numbers_bytes(top_k, most, size) // kind.itemsize
    own = F.pad(numbers.to(kind), (0, room - top_k)).view(weights.dtype)
    return torch.cat([weights, own], 1)


def apart(both: Tensor, top_k: int, most: int) -> tuple[Tensor, Tensor]:
    """The inverse of `beside`."""
    numbers = both[:, top_k:].contiguous().view(NUMBERS[number_size(most)])
    return both[:, :top_k].contiguous(), numbers[:, :top_k].contiguous()


def work_on(
    wire: ExpertWire, experts: Experts | FusedExperts, rows: Tensor, counts: Tensor,
    weights: tuple[Tensor, ...] = (), numbers: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Send rows, sorted by expert, to the experts of a wire's ranks, and return the experts' outputs. A collective.

    weights: the weights of this rank's experts; by default its own part. numbers: see Trip.
    """
    weights = weights or experts.weights
    rows = rows.to(dtype_of_work(rows, weights[0]))
    return Trip(wire, counts, numbers).through(rows, lambda rows, counts: experts.product(rows, counts, weights))
