"""Random numbers: alike on all ranks of a tensor axis where tensors are whole, each rank's own where they are cut."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from thinwire.codecs.random import derive_seed
from thinwire.device import RandomState, random_state, seed_generators, set_random_state

# Calling one calls nothing by itself.
CONTAINERS = nn.ModuleList | nn.ModuleDict


class OwnDraws:
    """Has a rank of a tensor axis draw numbers of its own between a matrix cut by columns and the next, cut by rows.

    There each rank has other heads and features, whose dropout must not be the same; everywhere else each rank has the
    same tensors, and must drop the same. The common generators draw one number, which with the rank seeds the own ones,
    and go on behind the cut part as if nothing else had been drawn. So their state is all there is to save, or to
    bring back where a forward is computed again. Ranks must have been seeded alike.
    Source: Shoeybi et al., "Megatron-LM" (2019), appendix B.2.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._common: RandomState | None = None

    def begin(self) -> None:
        """Draw own numbers from now on."""
        if self._common is None:
            drawn = int(torch.randint(2**62, ()))
            self._common = random_state()
            seed_generators(derive_seed(drawn, self.rank) >> 1)

    def end(self) -> None:
        """Draw common numbers from now on."""
        if self._common is not None:
            set_random_state(self._common)
            self._common = None

    def draw_apart(self, model: nn.Module, cuts: dict[nn.Module, int | None]) -> None:
        """Begin behind matrices that are cut by columns, in training, and end before those that are cut by rows.

        cuts: {matrix: dimension along which its weight is cut}. At the latest it ends with the forward of the module
        that has the first matrix, also where that forward fails, or is computed again as far as it is needed.
        """
        for owner in model.modules():
            columns = [each for each in parts_of(owner) if cuts.get(each) == 0]
            for matrix in columns:
                matrix.register_forward_hook(lambda matrix, _, output: self._behind(matrix, output))
            if columns:
                owner.register_forward_hook(lambda *_: self.end(), always_call=True)
        for matrix in (each for each, dim in cuts.items() if dim == 1):
            matrix.register_forward_pre_hook(lambda *_: self.end())

    def _behind(self, matrix: nn.Linear, output: Tensor) -> None:
        if isinstance(output, DTensor):
            is_part = any(isinstance(placement, Shard) for placement in output.placements)
        else:
            # A head may give a loss.
            is_part = output.dim() > 0 and output.shape[-1] != matrix.out_features
        if matrix.training and is_part:
            self.begin()


def parts_of(module: nn.Module) -> list[nn.Module]:
    """The modules that a module's forward may call: its children, and those in its lists."""
    if isinstance(module, CONTAINERS):
        return []
    found = list(module.children())
    for each in found:
        if isinstance(each, CONTAINERS):
            found += each.children()
    return found
