"""The ranks' check of every step: 8 bytes per rank, sent in the background and read in the next step."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thinwire.collectives import Communicator
from thinwire.errors import ThinwireError
from thinwire.hosts.fsdp.unit import GatheredUnit
from thinwire.state.watchdog import Watchdog


class UnequalStepError(ThinwireError, RuntimeError):
    """Ranks used different parameters in a step, or did not load weights together."""


class Watched:
    """The norm of the gradient, with each element counted once on the mesh, and the parameters that had one.

    The ranks' values of a step are read in the next step, so no rank waits for them.
    """

    def __init__(self, comm: Communicator, units: Sequence[GatheredUnit], dog: Watchdog) -> None:
        self.comm, self.units, self.dog = comm, units, dog
        self.steps = 0
        self._said: Future[Tensor] | None = None
        self._reduced = 0
        self._with_gradient: set[str] = set()
        self._left_out: list[str] = []
        self._num_loads = 0

    @property
    def bytes_per_step(self) -> int:
        """Payload bytes that this rank sends."""
        return 8 * (self.comm.world_size - 1)

    def note_reduction(self, unit: GatheredUnit, present: Sequence[int]) -> None:
        """Note that the gradients of these parameters of a unit are being reduced."""
        self._reduced = zlib.crc32(repr((unit.index, *present)).encode(), self._reduced)
        self._with_gradient.update(unit.names[i] for i in present)

    def note_load(self) -> None:
        """Note that a module has loaded weights."""
        self._num_loads += 1

    def before_step(self, *_: object) -> None:
        """Optimizer pre-hook. Raises DeadGradientError and UnequalStepError about the previous step."""
        if self._said is not None:
            self._read(self.comm.wait(self._said))
        self.steps += 1
        trained = [name for unit in self.units for name in (unit.names[i] for i in unit.trained())]
        self._left_out = [name for name in trained if name not in self._with_gradient]
        self._said = self.comm.all_gather_exact(self._word())
        self._reduced = 0
        self._with_gradient.clear()

    def _word(self) -> Tensor:
        by_copies: dict[int, list[Tensor]] = {}
        for unit in self.units:
            for param in unit.params:
                if isinstance(grad := param.sharded.grad, DTensor):
                    by_copies.setdefault(self._copies_of(grad), []).append(grad.to_local())
        squares = sum(float(nn.utils.get_total_norm(grads)) ** 2 / copies for copies, grads in by_copies.items())
        events = (self._num_loads % 128) << 24 | self._reduced & 0xFFFFFF
        return torch.cat([torch.tensor([squares**0.5]).view(torch.int32), torch.tensor([events], dtype=torch.int32)])

    def _read(self, words: Tensor) -> None:
        ranks = self.comm.global_ranks
        events = words[:, 1].tolist()
        odd = [rank for rank, event in zip(ranks, events, strict=True) if event != events[0]]
        if len({event >> 24 for event in events}) > 1:
            raise UnequalStepError(
                f"before step {self.steps} rank(s) {odd} loaded weights and rank {ranks[0]} did not, or the other way "
                "round: load a checkpoint on all ranks, then go on from it"
            )
        if odd:
            names = f"here {', '.join(map(repr, self._left_out[:3]))} had no gradient; " if self._left_out else ""
            raise UnequalStepError(
                f"in step {self.steps} rank(s) {odd} had gradients of other parameters than rank {ranks[0]}, and FSDP2 "
                f"adds up gradients of different parameters: {names}use the same parameters on all ranks, or call "
                "set_reduce_scatter_unused_params(True) on every FSDP module, and go on from a checkpoint before it"
            )
        self.dog.note(math.sqrt(float(words[:, 0].view(torch.float32).double().square().sum())), self.steps)

    def _copies_of(self, tensor: DTensor) -> int:
        """Number of ranks that hold the same elements of the tensor, inside and outside its own mesh."""
        mesh = tensor.device_mesh
        cut = [mesh.size(i) for i, placement in enumerate(tensor.placements) if not placement.is_replicate()]
        return self.comm.world_size // math.prod(cut)
