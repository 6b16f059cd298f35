"""One micro-batch on one chunk: forward, recomputation, and backward, whole or in halves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thinwire import _compat
from thinwire.device import RandomState, random_state, set_random_state


class VisitState:
    """What a rank keeps of one micro-batch on one chunk, from its forward to the end of its backward.

    input: what arrived, in memory of its own; None at the start of a path. recomputed: the forward keeps only its input
    and the state of the random generators.
    """

    def __init__(self, chunk: nn.Module, input: Tensor | None, micro_batch: Any, *, recomputed: bool) -> None:
        self.chunk = chunk
        self.input = input
        self.micro_batch = micro_batch
        self.recomputed = recomputed
        self._output: Tensor | None = None
        self._gradient: Tensor | float | None = None
        self._groups: list[dict[str, Any]] | None = None

    def forward(self) -> Tensor:
        """The chunk's output, detached. The graph stays in this object."""
        if self.input is not None and self.input.is_floating_point():
            self.input.requires_grad_()
        if self.recomputed:
            self._random = random_state()
            with torch.no_grad():
                return self.chunk(self.input, self.micro_batch)
        return self._with_graph()

    def recompute(self) -> None:
        """Run the forward again with the same random numbers. The generators' states are as before afterwards."""
        with _replayed(self._random):
            self._with_graph()

    def backward(self, gradient: Tensor | float) -> Tensor | None:
        """Add the weights' gradients to theirs. Return the gradient of the input.

        gradient: of the output; a number if the output is a loss.
        """
        output = self._taken()
        if output.requires_grad:
            torch.autograd.backward(output, _as_tensor(gradient, output))
        return self._gradient_of_input()

    def backward_input(self, gradient: Tensor | float) -> Tensor | None:
        """Return only the gradient of the input. Without an input, keep the gradient for `backward_weight`."""
        if self.input is None:
            self._gradient = gradient
            return None
        output = self._taken()
        self._groups = _compat.input_gradients(output, _as_tensor(gradient, output), self.input, self._weights())
        return self._gradient_of_input()

    def backward_weight(self) -> None:
        """Add the weights' gradients, which `backward_input` left out."""
        if self._groups is None:
            assert self._gradient is not None
            self.backward(self._gradient)
        else:
            _compat.weight_gradients(self._weights(), self._groups)
        self._groups = self._gradient = None

    def _with_graph(self) -> Tensor:
        with torch.enable_grad():
            output = self.chunk(self.input, self.micro_batch)
        result = output.detach()
        if output.ndim:
            # Of an output that is on its way only the graph behind it is needed: its memory is the message's alone.
            output.data = output.data.new_empty(()).expand(output.shape)
        self._output = output
        return result

    def _taken(self) -> Tensor:
        output, self._output = self._output, None
        assert output is not None
        return output

    def _gradient_of_input(self) -> Tensor | None:
        if self.input is None:
            return None
        gradient = self.input.grad
        gradient = torch.zeros_like(self.input) if gradient is None else gradient
        self.input = None
        return gradient

    def _weights(self) -> list[nn.Parameter]:
        return [param for param in self.chunk.parameters() if param.requires_grad]


def _as_tensor(gradient: Tensor | float, output: Tensor) -> Tensor:
    return gradient if isinstance(gradient, Tensor) else torch.full_like(output, gradient)


@contextmanager
def _replayed(state: RandomState) -> Iterator[None]:
    now = random_state()
    set_random_state(state)
    try:
        yield
    finally:
        set_random_state(now)
