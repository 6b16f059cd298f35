"""What lies where in the flat buffers that FSDP2 hands over, and which codec each part of them takes.

A rank's shard of a module is the concatenation of its parts of all parameters: a parameter is cut along one dimension
into world_size parts, the first ones of equal size and the last padded with zeros to that size. A gather's buffer is
the shards of all ranks one after the other; so is a reduction's, without the parameters that got no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from thinwire._compat import FSDPGroup, FSDPParameter
from thinwire.codecs import Cast, Codec, Identity
from thinwire.errors import ConfigError, ThinwireError
from thinwire.layout.formats import WireFormat
from thinwire.layout.sections import Sections
from thinwire.state.replicas import fingerprint

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALF = {torch.bfloat16: Cast("bf16"), torch.float16: Cast("fp16")}
# A prime, so that neither rows nor shards repeat; its numbers are exact in bf16.
PATTERN = 251


class StaleWeightsError(ThinwireError, RuntimeError):
    """Weights were written in a way that can't be noticed on all ranks."""


class LayoutError(ThinwireError, RuntimeError):
    """This torch lays out FSDP2's buffers in another way than thinwire knows."""


def at_most(codec: Codec, dtype: torch.dtype) -> Codec:
    """An exact codec for values that are `dtype` already: 16 bits are enough for 16 bits."""
    return HALF.get(dtype, codec) if codec == Identity() else codec


@dataclass(eq=False)
class Unit:
    """What FSDP2 gathers and reduces together: a module's parameters in their order in its buffers.

    index: number of the unit. wires: how each parameter travels. dtype: of the gathered weights. reached: parameters
    that have had a gradient since the last reduction.
    """

    index: int
    group: FSDPGroup
    names: list[str]
    wires: list[WireFormat]
    world_size: int
    dtype: torch.dtype = torch.float32
    reached: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.params: list[FSDPParameter] = self.group.params

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's part of all parameters, padded."""
        return sum(param.shard_numel for param in self.params)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Of the gradients' sum."""
        return self.group.reduce_dtype or self.dtype

    def reached_hook(self, number: int) -> Callable[[Tensor], None]:
        """What notes that autograd reached a parameter."""

        def hook(_: Tensor) -> None:
            self.reached.add(number)

        return hook

    def trained(self) -> list[int]:
        """The parameters that get gradients."""
        return [i for i, param in enumerate(self.params) if param.sharded.requires_grad]

    def weights(self) -> Sections:
        """The codec of a rank's part of the weights."""
        return self._sections(range(len(self.params)), "weights")

    def gradients(self, present: Sequence[int]) -> tuple[Sections, Sections]:
        """The codecs of a rank's part of the gradients of `present`, inside a node and between nodes."""
        return self._sections(present, "intra"), self._sections(present, "inter")

    def _sections(self, present: Sequence[int], way: str) -> Sections:
        codecs = [at_most(getattr(wire, way), self.dtype if way == "weights" else torch.float32) for wire in self.wires]
        return Sections.of([(codecs[i], self.params[i].shard_numel) for i in present])

    def take_reached(self, numel: int) -> list[int]:
        """The parameters whose gradients FSDP2 put into a reduction of `numel` elements a rank; forgets them.

        Raises LayoutError where that can't be known.
        """
        reached, trained = sorted(self.reached), self.trained()
        self.reached.clear()
        for present in (reached, trained):
            if sum(self.params[i].shard_numel for i in present) == numel:
                return present
        raise LayoutError(
            f"{self.names[0]!r} and its module: FSDP2 reduces {numel} elements a rank, which is neither the parameters "
            f"that autograd reached nor all: freeze or unfreeze parameters before compress_fsdp, not after"
        )

    def version(self) -> Version:
        """What differs after a change that torch counts."""
        return Version.of(self.params)

    def fingerprint(self) -> list[int]:
        """What differs after any change of this rank's part."""
        return [fingerprint(param.shard_data) for param in self.params]


@dataclass(frozen=True, eq=False)
class Version:
    """The tensors that hold a unit's weights, and how often each was written."""

    tensors: list[Tensor]
    counts: list[int]

    @classmethod
    def of(cls, params: Sequence[FSDPParameter]) -> Version:
        """As they are now."""
        rows = [param.version() for param in params]
        return cls([t for row in rows for t in (row[0], row[2])], [n for row in rows for n in (row[1], row[3])])

    def is_that_of(self, other: Version) -> bool:
        """Whether nothing was written in between."""
        return self.counts == other.counts and all(a is b for a, b in zip(self.tensors, other.tensors, strict=True))


def pattern_of(number: int, param: nn.Parameter) -> Tensor:
    """Whole numbers from -125 to 125 in the shape of `param`, others for another parameter of the module."""
    positions = (
        torch.arange(param.numel(), device=param.device)
        .mul_(31)
        .add_(7 * number + 1)
        .remainder_(PATTERN)
        .sub_(PATTERN // 2)
    )
    return positions.view(param.shape).float()


def expected_shards(unit: Unit, values: Sequence[Tensor]) -> Tensor:
    """What thinwire takes FSDP2's buffer to be for whole parameters `values`: fp32 [world_size, shard_numel]."""
    shards = torch.zeros(unit.world_size, unit.shard_numel, device=values[0].device)
    start = 0
    for param, value in zip(unit.params, values, strict=True):
        assert isinstance(param.sharded, DTensor)
        (placement,) = param.sharded.placements
        assert isinstance(placement, Shard)
        pieces = value.chunk(unit.world_size, dim=placement.dim)
        for rank, piece in enumerate(pieces):
            shards[rank, start : start + piece.numel()].copy_(piece.flatten())
        start += param.shard_numel
    return shards


@torch.no_grad()
def check_layout_of(unit: Unit) -> None:
    """Gather a known pattern in the place of the weights, and compare what FSDP2 makes of it; nothing is sent.

    Every rank knows all shards of the pattern. What FSDP2 hands in must be the rank's own weights in the order that
    thinwire expects, and what it shows as whole parameters must be the pattern. Sets `unit.dtype`. The weights are not
    touched. Raises LayoutError where either differs, ConfigError for parameters of several types in one module.
    """
    patterns = [pattern_of(number, param.sharded) for number, param in enumerate(unit.params)]
    shards = expected_shards(unit, patterns)
    own = torch.cat([param.shard_data for param in unit.params])
    handed: list[str] = []

    class Pattern:
        def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: object, async_op: bool = False) -> None:
            unit.dtype = output_tensor.dtype
            if unit.dtype not in FLOATS:
                # FSDP2 gathers parameters of several types together as bytes.
                what = "they are of several types" if unit.dtype == torch.uint8 else "codecs take at most 32 bits"
                raise ConfigError(
                    f"the parameters of {unit.names[0]!r}'s module are gathered as {unit.dtype}, and {what}: make "
                    "them float32, bfloat16 or float16, or set param_dtype in MixedPrecisionPolicy"
                )
            if output_tensor.numel() != shards.numel():
                handed.append(f"a buffer of {output_tensor.numel()} elements, not {shards.numel()}")
                return
            if not torch.equal(input_tensor.float(), own.to(input_tensor.dtype).float()):
                handed.append("this rank's weights in another order")
            output_tensor.copy_(shards.view(-1))

    restored = unit.group.set_comms(Pattern(), None)
    try:
        unit.group.module.reshard()
        unit.group.module.unshard()
        for name, param, pattern in zip(unit.names, unit.params, patterns, strict=True):
            if unit.world_size > 1 and not handed and not torch.equal(param.whole.float(), pattern):
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
