"""How many bytes of payload a rank sends in each collective, known before it runs; sizes in bytes or fp32 elements."""

from __future__ import annotations

from thinwire.collectives.topology import Topology

FP32_BYTES = 4


def all_gather_bytes(grid: Topology, packet_bytes: int) -> int:
    """A packet to each other node, then all of this column's packets to each other rank of the node."""
    return (grid.num_nodes - 1) * packet_bytes + (grid.local_size - 1) * grid.num_nodes * packet_bytes


def all_to_all_nodes_bytes(grid: Topology, packet_bytes: int) -> int:
    """A packet to each other node."""
    return (grid.num_nodes - 1) * packet_bytes


def reduce_in_node_bytes(grid: Topology, slice_elements: int) -> int:
    """An fp32 slice to each other rank of the node."""
    return (grid.local_size - 1) * FP32_BYTES * slice_elements


def all_reduce_bytes(grid: Topology, num_elements: int) -> int:
    """In fp32: the slices of a reduce_scatter over both levels, then the all_gather of one slice from each rank."""
    slice_bytes = FP32_BYTES * -(-num_elements // grid.world_size)
    scattered = (grid.local_size - 1) * grid.num_nodes * slice_bytes + (grid.num_nodes - 1) * slice_bytes
    return scattered + all_gather_bytes(grid, slice_bytes)
