"""The first weights of a model whose parameters are never all in memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinwire.models.llama import Llama

# torch draws normal numbers in groups of so many: drawn in strips of whole groups, a matrix has the same bits.
GROUP, STRIP_NUMEL = 16, 1 << 22


class FirstWeights:
    """The first values of each parameter of a Llama by name, in any order: those of `build_model` with this seed.

    It holds no weights. Before each strip of rows that it draws, it notes the generator's state, with which a strip
    that was passed over is drawn when it is asked for.
    """

    def __init__(self, model: Llama, seed: int) -> None:
        """model: only names and shapes are used, so it may be on the device "meta"."""
        self._model, self._generator = model, torch.Generator().manual_seed(seed)
        self._shapes = {name: param.shape for name, param in model.named_parameters()}
        self._coming = iter([(name, first) for name in self._shapes for first in self._strips(name)])
        self._states: dict[tuple[str, int], Tensor] = {}

    def __call__(self, name: str) -> Tensor:
        """The first values of a parameter, fp32 on the CPU."""
        if name not in self._shapes:
            raise KeyError(name)
        return self.part(name, slice(0, self._shapes[name][0]), slice(None))

    def part(self, name: str, rows: slice, columns: slice) -> Tensor:
        """The first values of some rows and columns of a matrix, with one strip of it in memory at a time."""
        shape, step = self._shapes[name], self._strips(name).step
        if len(shape) < 2:
            return self._draw(name, 0)[rows]
        found = torch.empty(0)
        for first in self._strips(name)[rows.start // step : -(-rows.stop // step)]:
            drawn = self._draw(name, first)
            if len(drawn) == rows.stop - rows.start and drawn[:, columns].shape == drawn.shape:
                return drawn
            if not found.numel():
                found = drawn.new_empty(rows.stop - rows.start, *drawn[0, columns].shape)
            own = slice(max(first, rows.start), min(first + len(drawn), rows.stop))
            found[own.start - rows.start : own.stop - rows.start] = drawn[own.start - first : own.stop - first, columns]
        return found

    def _strips(self, name: str) -> range:
        """The first rows of a parameter's strips. A vector is one, and a matrix that is no whole groups."""
        shape = self._shapes[name]
        if len(shape) < 2 or shape.numel() % GROUP:
            return range(0, shape[0], shape[0])
        width = shape[1:].numel()
        unit = GROUP // math.gcd(GROUP, width)
        return range(0, shape[0], max(unit, STRIP_NUMEL // width // unit * unit))

    def _draw(self, name: str, first: int) -> Tensor:
        """The strip that begins with this row."""
        if (name, first) in self._states:
            reached = self._generator.get_state()
            self._generator.set_state(self._states[name, first])
            values = self._values(name, first)
            self._generator.set_state(reached)
            return values
        for coming in self._coming:
            self._states[coming] = self._generator.get_state()
            values = self._values(*coming)
            if coming == (name, first):
                return values
        raise KeyError(name)

    def _values(self, name: str, first: int) -> Tensor:
        shape, step = self._shapes[name], self._strips(name).step
        return self._model.first(name, torch.Size([min(step, shape[0] - first), *shape[1:]]), self._generator)
