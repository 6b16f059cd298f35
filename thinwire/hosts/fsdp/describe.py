"""The start-up table of a model that FSDP2 shards: what was asked for, what is in effect, why they differ."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from thinwire.layout.formats import describe_formats
from thinwire.table import Row, sent_row

# `compress` defines it and imports this file.
CompressedFSDP = Any


def rows_of(compressed: CompressedFSDP) -> list[Row]:
    """All rows of the table."""
    comm, method = compressed.comm, compressed.method
    cut = f"{len(compressed.units)} FSDP2 module(s), {compressed.num_parameters:,} parameters"
    rows: list[Row] = [
        (f"strategy {method.name}", cut, "torch's layout checked with a pattern"),
        ("topology", str(comm.topology), comm.topology_reason),
    ]
    if comm.world_size == 1:
        return [*rows, ("compression", "none", "a single rank sends nothing: weights and gradients stay exact")]
    rows += [*_mesh(compressed), *describe_formats(method, compressed.shards.grid), *_raw(compressed)]
    rows += [
        *_replicas(compressed),
        _reshard(compressed),
        _secondary(compressed),
        _memory(compressed),
        *_overlap(compressed),
        *_tables(compressed),
    ]
    return [*rows, _watch(compressed), sent_row(compressed.bytes_per_step, compressed.uncompressed_bytes_per_step)]


def _tables(compressed: CompressedFSDP) -> list[Row]:
    """A row about an option of `RowsMethod` that was asked for."""
    is_asked = getattr(compressed.method, "embedding_rows", "off") == "on"
    return [("embedding_rows on", "no effect", "FSDP2's buffers have one length")] if is_asked else []


def _mesh(compressed: CompressedFSDP) -> list[Row]:
    shards, replicas, world_size = compressed.shards, compressed.replicas, compressed.comm.world_size
    if shards.size == world_size:
        return []
    tensor = world_size // (shards.size * replicas.size)
    sizes = f"replicate {replicas.size} x shard {shards.size} x tensor {tensor}"
    return [("mesh", sizes, "tensor parallelism's own messages are torch's" if tensor > 1 else "")]


def _replicas(compressed: CompressedFSDP) -> list[Row]:
    if compressed.replicas.size == 1:
        return []
    grid, (first, *_) = compressed.replicas.grid, compressed.reductions
    wire = compressed.method.matrix()
    codec = wire.inter if grid.num_nodes > 1 else wire.intra
    sent = sum(reduction.replica_bytes() for reduction in compressed.reductions) / 1e6
    unsaid = "; the gather of the sums has no error feedback" if first.memories[-1] is not None else ""
    return [
        (
            "gradients over replicas",
            f"{codec}, for sums and their gather",
            f"{sent:.3f} MB, in FSDP2's all_reduce{unsaid}",
        )
    ]


def _raw(compressed: CompressedFSDP) -> list[Row]:
    rows: list[Row] = []
    if num_bytes := sum(unit.raw_bytes for unit in compressed.units):
        rows.append(("weights of other types", f"{num_bytes / 1e6:.3f} MB a rank, as they are", "codecs take floats"))
    if any(unit.gradient_dtype == torch.float64 for unit in compressed.units):
        rows.append(("gradients in float64", "summed in fp32", "codecs take at most 32 bits"))
    return rows


def _reshard(compressed: CompressedFSDP) -> Row:
    dropping = sum(unit.group.backward_group_size(compressed.model) > 0 for unit in compressed.units)
    shown = f"in {dropping} of {len(compressed.units)} modules" if dropping else "off"
    gathers = "as fully_shard requested: gathered for forward and for backward" if dropping else "one gather a step"
    return "reshard after forward", shown, gathers


def _secondary(compressed: CompressedFSDP) -> Row:
    asked, kept = "secondary partition", f"{compressed.kept_bytes / 1e6:.3f} MB a rank"
    if compressed.differences:
        return "reference of differences", kept, "fp32, once a node; it gathers inside"
    if compressed.secondary:
        return asked, kept, "packets; gathers of unchanged weights stay in a node"
    if not compressed.method.secondary:
        return asked, "off", "every gather crosses between nodes"
    return asked, "off", "all ranks are on one node"


def _memory(compressed: CompressedFSDP) -> Row:
    memory = compressed.reductions[0].memories[0]
    if memory is None:
        return "error feedback", "off", "loco=True: the codecs' losses of one step are added to the next"
    held = compressed.num_parameters * (1 + 1 / compressed.shards.grid.local_size) / 1e6
    return "error feedback", str(memory), f"about {held:.3f} MB a rank, 8 bits"


def _overlap(compressed: CompressedFSDP) -> list[Row]:
    on = "on" if compressed.overlap else "off"
    waits: Counter[str] = Counter()
    for reduction in compressed.reductions:
        waits.update(reduction.waits)
    known = {u.group.reads_gradient_at_once(u.gradient_dtype) for u in compressed.units} - {""}
    why = "; ".join(known) or "; ".join(f"{n} waited: {reason}" for reason, n in waits.items())
    return [
        ("gathers overlap", on, "one module ahead, in the order of the first forward"),
        ("reductions overlap", "off" if known else "on", why or "backward ends when all are complete"),
    ]


def _watch(compressed: CompressedFSDP) -> Row:
    if compressed.watched is None:
        return "dead and unequal gradients", "not watched", "give compress_fsdp the optimizer"
    limit = compressed.watched.dog.limit
    dead = f"stop after {limit} dead steps in a row" if limit else "dead ones not watched"
    return "dead and unequal gradients", dead, "8 bytes a peer and step"
