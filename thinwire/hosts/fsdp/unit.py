"""Parameters that FSDP2 gathers and reduces together, and the codec of each.

FSDP2 cuts a parameter along one dimension into equal parts, one for each rank; the last is padded with zeros to that
size. A rank's shard of a module is the concatenation of its parts of all parameters. A gather's buffer is the shards of
all ranks one after the other, as bytes if parameters have different dtypes. So is a reduction's buffer, without the
parameters that got no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire._compat.fsdp import FSDPGroup, FSDPParameter
from thinwire.codecs import Cast, Codec, Identity
from thinwire.errors import ThinwireError
from thinwire.hosts.dense import check_dense
from thinwire.layout.formats import WireFormat
from thinwire.layout.sections import Sections
from thinwire.state.replicas import fingerprint

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALF = {torch.bfloat16: Cast("bf16"), torch.float16: Cast("fp16")}


class StaleWeightsError(ThinwireError, RuntimeError):
    """Weights were written in a way that other ranks can't notice."""


class LayoutError(ThinwireError, RuntimeError):
    """This version of torch lays out FSDP2's buffers differently from what thinwire expects."""


def at_most(codec: Codec, dtype: torch.dtype) -> Codec:
    """An exact codec that uses no more bits than `dtype`: 16 bits for values that have 16 bits already."""
    return HALF.get(dtype, codec) if codec == Identity() else codec


@dataclass(eq=False)
class GatheredUnit:
    """The parameters of a module, which FSDP2 gathers and reduces together, in their order in its buffers.

    Attributes:
        index: number of the unit.
        wires: the codecs of each parameter. Parameters of dtypes that no codec takes, such as int8 and float64, travel
            as they are.
        num_shards: number of ranks over which a parameter is cut.
        reached: the parameters that got a gradient since the last reduction.
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
        """The dtype of FSDP2's buffer; uint8 if the parameters' dtypes differ."""
        return self.dtypes[0] if len(set(self.dtypes)) == 1 else torch.uint8

    @property
    def coded(self) -> list[int]:
        """Indices of the parameters that codecs take."""
        return [i for i, dtype in enumerate(self.dtypes) if dtype in FLOATS]

    @property
    def numel(self) -> int:
        """Elements of one rank's part of the parameters that codecs take, padded."""
        return sum(self.params[i].shard_numel for i in self.coded)

    @property
    def raw_bytes(self) -> int:
        """Bytes of one rank's part of the other parameters, in whole words: packets that follow must start at one."""
        num_bytes = self.shard_bytes - sum(self.params[i].shard_numel * self.dtypes[i].itemsize for i in self.coded)
        return -(-num_bytes // 8) * 8

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's part of all parameters when gathered."""
        return sum(p.shard_numel * dtype.itemsize for p, dtype in zip(self.params, self.dtypes, strict=True))

    def split(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        """Split a rank's part of FSDP2's buffer into the values that codecs take, flat, and the bytes of the rest."""
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
        """Fill a rank's part of FSDP2's buffer; the inverse of `split`."""
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
        """The dtype in which gradients are summed."""
        trained = self.trained()
        return self.group.reduce_dtype or self.dtypes[trained[0] if trained else 0]

    def reached_hook(self, number: int) -> Callable[[Tensor], None]:
        """A hook that notes that autograd reached a parameter.

        It raises ConfigError for a gradient that can't be reduced.
        """

        def hook(whole: Tensor) -> None:
            check_dense(self.names[number], whole.grad)
            self.reached.add(number)

        return hook

    def trained(self) -> list[int]:
        """Indices of the parameters that get gradients."""
        return [i for i, param in enumerate(self.params) if param.sharded.requires_grad]

    def weights(self) -> Sections:
        """The codec of a rank's part of the weights."""
        return self._sections(self.coded, [at_most(w.weights, d) for w, d in zip(self.wires, self.dtypes, strict=True)])

    def weights_exact(self) -> Sections:
        """A lossless codec of a rank's part of the weights."""
        return self._sections(self.coded, [at_most(Identity(), dtype) for dtype in self.dtypes])

    def gradients(self, present: Sequence[int], num_pieces: int = 1) -> tuple[Sections, Sections]:
        """The codecs of a rank's part of the gradients of `present`, or of one of `num_pieces` equal pieces of each.

        The first is for the hop inside a node, the second for the hop between nodes.
        """
        intra = self._sections(present, [wire.intra for wire in self.wires], num_pieces)
        return intra, self._sections(present, [wire.inter for wire in self.wires], num_pieces)

    def _sections(self, present: Sequence[int], codecs: Sequence[Codec], num_pieces: int = 1) -> Sections:
        parts = [(codecs[i], -(-self.params[i].shard_numel // num_pieces)) for i in present]
        return Sections.of(parts, [-(-self.params[i].most_numel // num_pieces) for i in present])

    def take_reached(self, numel: int) -> list[int]:
        """The parameters whose gradients are in a reduction of `numel` elements per rank. Clears the record.

        Raises LayoutError if that is not certain.
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
        """A value that differs after every change that torch counts."""
        return Version.of(self.params)

    def fingerprint(self) -> list[int]:
        """A value that differs after any change of this rank's part."""
        return [fingerprint(param.shard_data) for param in self.params]


@dataclass(frozen=True, eq=False)
class Version:
    """The tensors that hold a unit's weights, and the number of writes to each."""

    tensors: list[Tensor]
    counts: list[int]

    @classmethod
    def of(cls, params: Sequence[FSDPParameter]) -> Version:
        """The present version of these parameters."""
        rows = [param.version() for param in params]
        return cls([t for row in rows for t in (row[0], row[2])], [n for row in rows for n in (row[1], row[3])])

    def is_that_of(self, other: Version) -> bool:
        """Whether nothing was written since `other`."""
        return self.counts == other.counts and all(a is b for a, b in zip(self.tensors, other.tensors, strict=True))
