"""The wires of one way of rows: among which ranks, with which codecs, in how many hops and messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from thinwire.collectives import Communicator
from thinwire.collectives.all_to_all import Room
from thinwire.collectives.two_hops import Rooms
from thinwire.hosts.experts.once import Once
from thinwire.hosts.experts.trip import ExpertWire
from thinwire.methods.experts import ExpertParallel, ExpertPlacement, check_once
from thinwire.methods.experts.options import CODED


def wire_of(
    options: ExpertParallel,
    placement: ExpertPlacement,
    comm: Communicator,
    members: Sequence[int],
    stride: int,
    seed: int,
) -> ExpertWire:
    """The wire of one way among the ranks of `comm`. members: their numbers among all ranks that train the model."""
    # Of each group that exchanges slices, the rank at this one's place.
    step = options.gathered
    among, on = range(comm.rank % step, placement.ranks, step), placement.over(step)
    grid, num_chunks, num_back = comm.topology, options.num_chunks, options.num_back
    has_hops = options.route == "2dh" and min(grid.num_nodes, grid.local_size) > 1
    dispatch, combine, gradients, weights = map(options.codec, CODED)
    first, apart = members[among[0]], step * stride
    hops = [Rooms() for _ in range(max(num_chunks, num_back))] if has_hops else ()
    return ExpertWire(
        comm, on, among, dispatch, combine, gradients, weights, first, apart, seed, hops=hops,
        num_chunks=num_chunks, num_back=num_back,
    )  # fmt: skip


def entering(wire: ExpertWire) -> Once:
    """The wires of a layer whose rows enter a node once. Raises ConfigError if several nodes share an expert."""
    grid, placement, rank = wire.comm.topology, wire.placement, wire.comm.rank
    check_once("once", placement.slices, grid.world_size, grid.local_size)
    place, first = grid.local_rank(rank), grid.rank(grid.node(rank), 0)
    between, inside = range(place, grid.world_size, grid.local_size), range(first, first + grid.local_size)
    nodes = ExpertPlacement(grid.num_nodes, grid.num_nodes)
    of_node = ExpertPlacement(placement.experts // grid.num_nodes, grid.local_size, placement.slices)
    start, far = wire.first + place * wire.step, grid.local_size * wire.step
    outer = replace(wire, placement=nodes, members=between, first=start, step=far, room=Room())
    exact = replace(outer, dispatch=None, combine=None, gradients=None, room=Room(), between=None)
    inner = ExpertWire(wire.comm, of_node, inside, first=wire.first + first * wire.step, step=wire.step, seed=wire.seed)
    return Once(outer, exact, inner)
