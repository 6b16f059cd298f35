"""Methods that send the gradient of an embedding by its rows: those that no token of the step has do not travel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

from thinwire.collectives import Topology
from thinwire.layout.buckets import DEFAULT_BUCKET_NUMEL, BucketLayout, Unit
from thinwire.layout.layers import looked_up
from thinwire.layout.levels import Levels
from thinwire.methods.interface import Method, MethodPlan
from thinwire.methods.options import check_types
from thinwire.methods.sharded import ShardedMethod
from thinwire.table import Row


@dataclass(frozen=True, kw_only=True)
class RowsMethod(ShardedMethod):
    """A method on the sharded host that can leave out rows of zeros of an embedding's gradient, see `NonzeroRows`.

    Only weights that nothing but embeddings use have such rows. Every packet travels in the shorter of its two forms,
    and its head says in which. So ranks need no agreement, what arrives has the same bits, and no packet is longer than
    a whole one by more than its head.
    """

    embedding_rows: Literal["auto", "on", "off"] = "auto"
    """Leave rows of zeros out of the gradients of untied embeddings; training has the same bits. on, off, or auto: of
    embeddings with more than 524,288 elements. With on, a small one has a bucket of its own, which may cost more bytes
    than its zeros."""

    def __post_init__(self) -> None:
        check_types(self)

    def tables(self, model: nn.Module, trained: Mapping[str, Tensor]) -> dict[str, int]:
        """See ShardedMethod."""
        if self.embedding_rows == "off":
            return {}
        least, names = DEFAULT_BUCKET_NUMEL if self.embedding_rows == "auto" else 0, looked_up(model)
        return {
            name: tensor.shape[1]
            for name, tensor in trained.items()
            if name in names and tensor.dim() == 2 and tensor.numel() > least
        }

    def describe(self, levels: Levels, units: Sequence[Unit]) -> list[Row]:
        """Rows of (asked for, in effect, why)."""
        return [*super().describe(levels, units), self._row(units)]

    def _row(self, units: Sequence[Unit]) -> Row:
        asked, found = f"embedding_rows {self.embedding_rows}", list(tables_in(units))
        if found:
            names = ", ".join(layout.names[0] for layout in found)
            why = "the same bits in fewer bytes" if self.embedding_rows == "auto" else "each has a bucket of its own"
            return asked, f"rows of zeros don't travel in the gradient of {names}", why
        if self.embedding_rows == "off":
            return asked, "gradients of embeddings travel whole", "as asked"
        wire = self.matrix()
        if not wire.by_rows(wire.block, wire.block).has_rows:
            return asked, "no effect", f"blocks of {wire.inter} share bytes in a packet"
        least = f" of more than {DEFAULT_BUCKET_NUMEL:,} elements" if self.embedding_rows == "auto" else ""
        return asked, "no effect", f"no untied embedding{least} is trained"


def tables_in(units: Sequence[Unit]) -> Iterator[BucketLayout]:
    """The layouts whose gradients travel by rows."""
    return (layout for unit in units for layout in unit.layouts if layout.row_width)


def by_tokens(
    plan: MethodPlan, method: Method, model: nn.Module, topology: Topology, num_tokens: int
) -> tuple[MethodPlan, list[Row]]:
    """The plan with the gradients of embeddings of which a rank's step has at most `num_tokens` rows; and notes on it.

    The rows are spread evenly over the ranks that own them.
    """
    if not isinstance(method, RowsMethod) or topology.world_size == 1:
        return plan, []
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    units = method.units(model, trained, [method.levels(topology)], lambda _: 0, None)
    sent, rows = dict(plan.sent), list[Row]()
    for layout in tables_in(units):
        (span,), here, whole, less = layout.spans, min(num_tokens, layout.spans[0].shape[0]), 0, 0
        fewer = layout.gradients_by_rows(here)
        for operation, level, num_bytes in layout.sent(1, 1):
            if operation == "gradients":
                sent[operation, level] += fewer[level] - num_bytes
                whole, less = whole + num_bytes, less + fewer[level]
        told = f"{less / 1e6:.3f} MB of its gradient leave a rank in a step, whole {whole / 1e6:.3f} MB"
        rows.append((f"embedding_rows of {span.name}", told, f"at most {here:,} of its {span.shape[0]:,} rows"))
    return replace(plan, sent=sent), rows
