"""What Muon asks of a host that gives it pieces of matrices: to bring them together, and the results back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from thinwire.codecs import derive_seed
from thinwire.collectives import Communicator
from thinwire.hosts.tensor import TensorAxis
from thinwire.methods.matrices import CutMatrices
from thinwire.optim.muon import Muon, Shards, orthogonalised
from thinwire.table import Row

Parts = Mapping[str, tuple[torch.Size, Sequence[tuple[int, int]]]]


@dataclass(frozen=True)
class JoinedMatrices:
    """The matrices that each of some groups of ranks has cut, of which this rank is a member.

    held: this rank's pieces of the parameters, by name. seed: of the step under way. tensor: the axis that cuts what
    these ranks see as a whole, if any.
    """

    groups: Sequence[tuple[Communicator, CutMatrices]]
    held: Mapping[str, Tensor]
    seed: Callable[[], int]
    tensor: TensorAxis | None = None

    @classmethod
    def of(
        cls,
        muon: Muon,
        held: Mapping[str, Tensor],
        parts: Sequence[tuple[Communicator, Parts]],
        seed: Callable[[], int],
        tensor: TensorAxis | None = None,
    ) -> JoinedMatrices:
        """Let `muon` step pieces. parts: of the parameters that each group has cut; see CutMatrices."""
        groups = [(comm, CutMatrices.of(own, comm.topology, muon.codec)) for comm, own in parts]
        joined = cls(groups, held, seed, tensor)
        shapes = {name: shape for _, own in parts for name, (shape, _) in own.items()}
        if tensor is not None:
            shapes |= {name: cut.shape for name, cut in tensor.cuts.items() if name in shapes}
        muon.shards = Shards({piece: name for name, piece in held.items()}, shapes, joined.turn)
        return joined

    def turn(self, directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's pieces of the orthogonalised matrices, by parameter; zeros stand for what has no gradient."""
        seed = self.seed()
        turned: dict[str, Tensor] = {}
        for comm, cut in self.groups:
            own = {name for name in self.held if name in cut.names}
            pieces = {
                name: directions[name] if name in directions else torch.zeros_like(self.held[name]) for name in own
            }
            wholes = comm.wait(comm.submit(partial(cut.collect, held=pieces, seed=seed)))
            # In the order of all ranks of a tensor axis, on which the same matrices have the same owners.
            results = {
                number: self._orthogonalised(cut.matrices[number].name, wholes[number]) for number in sorted(wholes)
            }
            turned |= comm.wait(comm.submit(partial(cut.spread, wholes=results, held=pieces, seed=derive_seed(seed))))
        return turned

    def _orthogonalised(self, name: str, whole: Tensor) -> Tensor:
        return orthogonalised(whole) if self.tensor is None else self.tensor.orthogonalised(name, whole)

    @property
    def bytes_per_step(self) -> int:
        """Payload that this rank sends in a step."""
        return sum(sum(cut.sent_bytes(comm.rank).values()) for comm, cut in self.groups)

    def rows(self) -> list[Row]:
        """A row of (asked for, in effect, why)."""
        total, cut = (
            sum(counts) for counts in zip(*((len(c.matrices), c.num_cut) for _, c in self.groups), strict=True)
        )
        codec, sent = self.groups[0][1].codec, self.bytes_per_step / 1e6
        why = f"pieces travel as {codec}, {sent:.3f} MB from this rank in a step"
        return [("orthogonal updates", f"{total} matrices, {cut} of them cut over ranks", why)]
