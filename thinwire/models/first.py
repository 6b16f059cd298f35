"""The first weights of a model whose parameters are never all in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.models.llama import Llama


class FirstWeights:
    """The first values of each parameter of a Llama by name, in any order: those of `build_model` with this seed.

    It holds no weights. Before each matrix that it draws, it notes the generator's state, with which a matrix that was
    passed over is drawn when it is asked for.
    """

    def __init__(self, model: Llama, seed: int) -> None:
        """model: only names and shapes are used, so it may be on the device "meta"."""
        self._model, self._generator = model, torch.Generator().manual_seed(seed)
        self._shapes = {name: param.shape for name, param in model.named_parameters()}
        self._coming = iter(self._shapes)
        self._states: dict[str, Tensor] = {}

    def __call__(self, name: str) -> Tensor:
        """The first values of a parameter, fp32 on the CPU."""
        if name in self._states:
            reached = self._generator.get_state()
            self._generator.set_state(self._states[name])
            values = self._draw(name)
            self._generator.set_state(reached)
            return values
        for coming in self._coming:
            self._states[coming] = self._generator.get_state()
            values = self._draw(coming)
            if coming == name:
                return values
        raise KeyError(name)

    def _draw(self, name: str) -> Tensor:
        return self._model.first(name, self._shapes[name], self._generator)
