"""Checks the layout of FSDP2's buffers: gathers a known pattern in place of the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire._compat.fsdp import FSDPParameter
from thinwire.hosts.fsdp.unit import FLOATS, GatheredUnit, LayoutError

# A prime, so that neither rows nor shards repeat; its numbers are exact in bf16.
PATTERN = 251


def pattern_of(number: int, param: FSDPParameter) -> Tensor:
    """Whole numbers in the shape and dtype of `param`, different for each parameter of a module.

    Raw parameters: as bytes.
    """
    is_coded = param.dtype in FLOATS
    numel = param.shape.numel() * (1 if is_coded else param.dtype.itemsize)
    positions = torch.arange(numel, device=param.shard_data.device).mul_(31).add_(7 * number + 1).remainder_(PATTERN)
    if is_coded:
        return positions.sub_(PATTERN // 2).to(param.dtype).view(param.shape)
    return positions.to(torch.uint8).view(param.dtype).view(param.shape)


def expected_shards(unit: GatheredUnit, values: Sequence[Tensor]) -> Tensor:
    """The buffer that FSDP2 should make of whole parameters `values`: uint8 [num_shards, shard_bytes]."""
    shards = torch.zeros(unit.num_shards, unit.shard_bytes, dtype=torch.uint8, device=values[0].device)
    start = 0
    for param, value in zip(unit.params, values, strict=True):
        for rank, piece in enumerate(value.chunk(unit.num_shards, dim=param.shard_dim)):
            octets = bits(piece)
            shards[rank, start : start + octets.numel()].copy_(octets)
        start += param.shard_numel * value.itemsize
    return shards


def bits(values: Tensor) -> Tensor:
    """The values' bytes, flat."""
    return values.detach().reshape(-1).contiguous().view(torch.uint8)


@torch.no_grad()
def check_layout_of(unit: GatheredUnit) -> None:
    """Gather a known pattern in place of the weights, and compare FSDP2's result with it. Sends nothing.

    Every rank knows all shards of the pattern. FSDP2's input must be the rank's own weights in the expected order and
    dtypes, and its whole parameters must show the pattern. The weights are not changed. Raises LayoutError for any
    difference.
    """
    patterns = [pattern_of(number, param) for number, param in enumerate(unit.params)]
    shards = expected_shards(unit, patterns)
    own = torch.cat([bits(p.shard_data.to(dtype)) for p, dtype in zip(unit.params, unit.dtypes, strict=True)])
    handed: list[str] = []

    class Pattern:
        def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: object, async_op: bool = False) -> None:
            octets = output_tensor.view(torch.uint8)
            if octets.numel() != shards.numel() or output_tensor.dtype != unit.dtype:
                handed.append(f"a buffer of {octets.numel()} bytes of {output_tensor.dtype}, not {shards.numel()}")
                return
            if not torch.equal(bits(input_tensor), own):
                handed.append("this rank's weights in another order")
            octets.copy_(shards.view(-1))

    restored = unit.group.set_comms(Pattern(), None)
    try:
        unit.group.module.reshard()
        unit.group.module.unshard()
        for name, param, pattern in zip(unit.names, unit.params, patterns, strict=True):
            if unit.num_shards > 1 and not handed and not torch.equal(bits(param.whole_data), bits(pattern)):
                handed.append(f"other values in {name!r}")
    finally:
        unit.group.module.reshard()
        unit.group.set_comms(*restored)
    if handed:
        raise LayoutError(
            f"torch {torch.__version__} lays out the buffers of FSDP2 in a way that thinwire does not know: for the "
            f"module of {unit.names[0]!r} a known pattern came back with {handed[0]}; use torch 2.11 to 2.13, and tell "
            "thinwire's authors of this version"
        )
