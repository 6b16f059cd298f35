"""The pipeline axis, for hosts that exchange whole models: which stage has which parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.collectives import Communicator
from thinwire.collectives.gather import gather_bytes

VALUE_BYTES = 4


def _nothing() -> None:
    pass


@dataclass
class StageAxis:
    """The parameters of each stage of a model.

    Attributes:
        mesh: the pipeline axis.
        skeleton: the whole model, without memory.
        names: the parameters of each stage, in order. A weight that two stages use belongs to its owner.
        after_write: called after another object has written this stage's weights.
    """

    mesh: DeviceMesh
    skeleton: nn.Module
    names: tuple[tuple[str, ...], ...]
    after_write: Callable[[], None] = _nothing

    def __post_init__(self) -> None:
        self._shapes = {name: param.shape for name, param in self.skeleton.named_parameters()}

    @property
    def own(self) -> tuple[str, ...]:
        """The parameters of this rank's stage."""
        return self.names[self.mesh.get_local_rank()]

    def of_stages(self, names: Collection[str]) -> list[list[str]]:
        """For each stage, those of `names` that it has."""
        wanted = set(names)
        return [[name for name in stage if name in wanted] for stage in self.names]

    def gather(self, values: Mapping[str, Tensor], names: Collection[str], comm: Communicator) -> dict[str, Tensor]:
        """All parameters in `names`, fp32, from the stages that have them. A collective over `comm`, the stages."""
        stages, width = self.of_stages(names), self._width(names)
        own = [values[name].float().flatten() for name in stages[comm.rank]]
        flat = torch.cat([*own, torch.zeros(width - sum(value.numel() for value in own))])
        rows: Tensor = comm.wait(comm.all_gather_exact(flat))
        found: dict[str, Tensor] = {}
        for stage, row in zip(stages, rows, strict=True):
            at = 0
            for name in stage:
                shape = self._shapes[name]
                found[name], at = row[at : at + shape.numel()].view(shape), at + shape.numel()
        return found

    def gather_bytes(self, names: Collection[str], comm: Communicator) -> int:
        """Payload bytes that a rank sends in `gather`."""
        return sum(gather_bytes(comm.topology, VALUE_BYTES * self._width(names)).values())

    def _width(self, names: Collection[str]) -> int:
        """Elements of the largest stage: the packets of all stages have this length."""
        return max(sum(self._shapes[name].numel() for name in stage) for stage in self.of_stages(names))


def skeleton_of(model: nn.Module) -> nn.Module:
    """A copy of a model without memory for its tensors. Tied weights stay tied."""
    without: dict[int, Tensor] = {}
    for param in model.parameters():
        empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
        without[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
    for buffer in model.buffers():
        without[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, without)
