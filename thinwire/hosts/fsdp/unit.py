"""What FSDP2 gathers and reduces together, and which codec each part of it takes.

A rank's shard of a module is the concatenation of its parts of all parameters: a parameter is cut along one dimension
into equal parts, one for each rank, the last padded with zeros to that size. A gather's buffer is the shards of all
ranks one after the other, as bytes where parameters have different types; so is a reduction's, without the parameters
that got no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire._compat import FSDPGroup, FSDPParameter
from thinwire.codecs import Cast, Codec, Identity
from thinwire.errors import ThinwireError
from thinwire.hosts.dense import check_dense
from thinwire.layout.formats import WireFormat
from thinwire.layout.sections import Sections
from thinwire.state.replicas import fingerprint

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALF = {torch.bfloat16: Cast("bf16"), torch.float16: Cast("fp16")}


class StaleWeightsError(ThinwireError, RuntimeError):
    """Weights were written in a way that can't be noticed on all ranks."""


class LayoutError(ThinwireError, RuntimeError):
    """This torch lays out FSDP2's buffers in another way than thinwire knows."""


def at_most(codec: Codec, dtype: torch.dtype) -> Codec:
    """An exact codec for values that are `dtype` already: 16 bits are enough for 16 bits."""
    return HALF.get(dtype, codec) if codec == Identity() else codec


@dataclass(eq=False)
class GatheredUnit:
    """What FSDP2 gathers and reduces together: a module's parameters in their order in its buffers.

    index: number of the unit. wires: how each parameter travels; those of types that no codec takes, such as int8 and
    float64, travel as they are. num_shards: ranks that a parameter is cut for. reached: parameters that have had a
    gradient since the last reduction.
    """

    index: int
    group: FSDPGroup
    names: list[str]
    wires: list[WireFormat]
    num_shards: int
    reached: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.params: list[FSDPParameter] = self.group.params
        self.dtypes = [param.dtype for param in self.params]

    @property
    def dtype(self) -> torch.dtype:
        """The type of FSDP2's buffer: bytes where the parameters differ."""
        return self.dtypes[0] if len(set(self.dtypes)) == 1 else torch.uint8

    @property
    def coded(self) -> list[int]:
        """The parameters that codecs take."""
        return [i for i, dtype in enumerate(self.dtypes) if dtype in FLOATS]

    @property
    def numel(self) -> int:
        """Elements of one rank's part of the parameters that codecs take, padded."""
        return sum(self.params[i].shard_numel for i in self.coded)

    @property
    def raw_bytes(self) -> int:
        """Bytes of one rank's part of the others, in whole words: packets that follow must begin at one."""
        num_bytes = self.shard_bytes - sum(self.params[i].shard_numel * self.dtypes[i].itemsize for i in self.coded)
        return -(-num_bytes // 8) * 8

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's part of all parameters, as they are gathered."""
        return sum(p.shard_numel * dtype.itemsize for p, dtype in zip(self.params, self.dtypes, strict=True))

    def split(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        """A rank's part of FSDP2's buffer: what codecs take, one dimension, and the bytes of the rest."""
        if self.dtype in FLOATS:
            return shard, shard.new_empty(0, dtype=torch.uint8)
        values, rest = [shard.new_empty(0, dtype=torch.float32)], [shard.new_empty(0, dtype=torch.uint8)]
        padding = self.raw_bytes
        for dtype, piece in zip(self.dtypes, self._pieces(shard), strict=True):
            if dtype in FLOATS:
                values.append(piece.clone().view(dtype).float())
            else:
                rest.append(piece)
                padding -= piece.numel()
        return torch.cat(values), torch.cat([*rest, shard.new_zeros(padding, dtype=torch.uint8)])

    def join(self, values: Tensor, rest: Tensor, out: Tensor) -> None:
        """Fill a rank's part of FSDP2's buffer with what `split` gives of it."""
        if self.dtype in FLOATS:
            out.copy_(values)
            return
        for param, dtype, piece in zip(self.params, self.dtypes, self._pieces(out), strict=True):
            if dtype in FLOATS:
                piece.copy_(values[: param.shard_numel].to(dtype).view(torch.uint8))
                values = values[param.shard_numel :]
            else:
                piece.copy_(rest[: piece.numel()])
                rest = rest[piece.numel() :]

    def _pieces(self, shard: Tensor) -> tuple[Tensor, ...]:
        sizes = [param.shard_numel * dtype.itemsize for param, dtype in zip(self.params, self.dtypes, strict=True)]
        return shard.view(torch.uint8).split(sizes)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The type of the gradients' sum."""
        trained = self.trained()
        return self.group.reduce_dtype or self.dtypes[trained[0] if trained else 0]

    def reached_hook(self, number: int) -> Callable[[Tensor], None]:
        """What notes that autograd reached a parameter; raises ConfigError for a gradient that can't be reduced."""

        def hook(whole: Tensor) -> None:
            check_dense(self.names[number], whole.grad)
            self.reached.add(number)

        return hook

    def trained(self) -> list[int]:
        """The parameters that get gradients."""
        return [i for i, param in enumerate(self.params) if param.sharded.requires_grad]

    def weights(self) -> Sections:
        """The codec of a rank's part of the weights."""
        return self._sections(self.coded, [at_most(w.weights, d) for w, d in zip(self.wires, self.dtypes, strict=True)])

    def weights_exact(self) -> Sections:
        """A codec of a rank's part of the weights that loses nothing."""
        return self._sections(self.coded, [at_most(Identity(), dtype) for dtype in self.dtypes])

    def gradients(self, present: Sequence[int], num_pieces: int = 1) -> tuple[Sections, Sections]:
        """The codecs of a rank's part of the gradients of `present`, or of one of so many equal pieces of each.

        The first for the hop inside a node, the second for the hop between nodes.
        """
        intra = self._sections(present, [wire.intra for wire in self.wires], num_pieces)
        return intra, self._sections(present, [wire.inter for wire in self.wires], num_pieces)

    def _sections(self, present: Sequence[int], codecs: Sequence[Codec], num_pieces: int = 1) -> Sections:
        parts = [(codecs[i], -(-self.params[i].shard_numel // num_pieces)) for i in present]
        return Sections.of(parts, [-(-self.params[i].most_numel // num_pieces) for i in present])

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
        """The version of these parameters as they are now."""
        rows = [param.version() for param in params]
        return cls([t for row in rows for t in (row[0], row[2])], [n for row in rows for n in (row[1], row[3])])

    def is_that_of(self, other: Version) -> bool:
        """Whether nothing was written in between."""
        return self.counts == other.counts and all(a is b for a, b in zip(self.tensors, other.tensors, strict=True))
