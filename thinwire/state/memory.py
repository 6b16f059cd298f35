"""What a method remembers of each parameter between steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.checkpoint import Debt
from thinwire.collectives import Topology
from thinwire.state.portable import Owed


class Memory:
    """What a method remembers of each parameter: tensors by (parameter name, kind), such as an error to be fed back."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, Tensor]] = {}

    def peek(self, name: str, kind: str) -> Tensor | None:
        """The tensor that is held, if any."""
        return self.held.get(name, {}).get(kind)

    def get(self, name: str, kind: str, *shape: int) -> Tensor:
        """The fp32 tensor of this shape that is held, zeros the first time."""
        kinds = self.held.setdefault(name, {})
        if kind not in kinds:
            kinds[kind] = torch.zeros(shape)
        return kinds[kind]

    def put(self, name: str, kind: str, tensor: Tensor) -> None:
        """Hold this tensor from now on."""
        self.held.setdefault(name, {})[kind] = tensor

    def kind(self, kind: str) -> dict[str, Tensor]:
        """The tensors of this kind that are held, by parameter."""
        return {name: kinds[kind] for name, kinds in self.held.items() if kind in kinds}

    def forget(self) -> list[str]:
        """Drop every tensor with a value that is not finite; the names of their parameters."""
        odd = {name: [k for k, t in kinds.items() if not torch.isfinite(t).all()] for name, kinds in self.held.items()}
        for name, kinds in odd.items():
            for kind in kinds:
                del self.held[name][kind]
        return [name for name, kinds in odd.items() if kinds]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for kinds in self.held.values() for tensor in kinds.values())

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Copies of all that is held."""
        return {name: {kind: t.clone() for kind, t in kinds.items()} for name, kinds in self.held.items()}

    def debts(self, kind: str, owed_as: str, grid: Topology) -> list[Debt]:
        """The tensors of this kind, each of a whole parameter and of one rank's gradient, as what is owed."""
        held = self.kind(kind).items()
        return [Debt(owed_as, name, f"{name}/{kind}", 0, 0, t.numel(), 1 / grid.world_size) for name, t in held]

    def owe(self, kind: str, owed_as: str, shapes: Mapping[str, torch.Size], owed: Owed) -> None:
        """Hold what is owed to each of these tensors, in its shape; nothing of this kind else."""
        for name, shape in shapes.items():
            self.held.get(name, {}).pop(kind, None)
            if (value := owed(owed_as, name)) is not None:
                self.put(name, kind, value.view(shape))

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Hold copies of what state_dict gave, and nothing else."""
        self.held = {name: {kind: t.clone() for kind, t in kinds.items()} for name, kinds in state.items()}
