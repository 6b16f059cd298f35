"""Sends each row into a node only once, for all of its experts there; their weighted sum comes back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from thinwire.hosts.experts.trip import ExpertWire, Trip
from thinwire.models.fused import FusedExperts
from thinwire.models.moe import Experts, dtype_of_work, mixed


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

    def forward(self, experts: Experts | FusedExperts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """See Experts. A collective."""
        num_nodes, per_node, top_k = self.outer.placement.experts, self.inner.placement.experts, index.shape[1]
        node = index // per_node
        enters = (node[:, None] == torch.arange(num_nodes, device=x.device)[:, None]).any(-1)
        at, token = enters.t().nonzero(as_tuple=True)
        counts = enters.sum(0)
        # Its experts elsewhere are none here.
        own = torch.where(node[token] == at[:, None], index[token] - at[:, None] * per_node, per_node)
        work = partial(work_on, self.inner, experts)

        def of_node(there: Tensor, _: Tensor) -> Tensor:
            told = Trip(self.exact, counts).here(torch.cat([weights[token], own.to(weights.dtype)], 1))
            chosen = told[:, top_k:].detach().long()
            return mixed(there, chosen, told[:, :top_k], per_node, experts.weigh_inputs, work)

        back = Trip(self.outer, counts).through(x[token].to(dtype_of_work(x, experts.weights[0])), of_node)
        return back.new_zeros(len(x), x.shape[1]).index_add(0, token, back).to(x.dtype)


def work_on(
    wire: ExpertWire, experts: Experts | FusedExperts, rows: Tensor, counts: Tensor, weights: tuple[Tensor, ...] = ()
) -> Tensor:
    """Send rows, sorted by expert, to the experts of a wire's ranks, and return the experts' outputs. A collective.

    weights: the weights of this rank's experts; by default its own part.
    """
    weights = weights or experts.weights
    rows = rows.to(dtype_of_work(rows, weights[0]))
    return Trip(wire, counts).through(rows, lambda rows, counts: experts.product(rows, counts, weights))
