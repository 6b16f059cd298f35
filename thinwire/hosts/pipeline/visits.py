"""One micro-batch on one chunk: forward, recomputation, and backward, whole or in halves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thinwire import _compat
from thinwire.device import RandomState, random_state, set_random_state


class VisitState:
    """What a rank keeps of one micro-batch on one chunk, from its forward to the end of its backward.

    input: what arrived, in memory of its own; None at the start of a path. bridged: what earlier chunks give this one
    besides. recomputed: the forward keeps only its inputs and the state of the random generators.
    """

    def __init__(
        self, chunk: nn.Module, input: Tensor | None, micro_batch: Any, bridged: Sequence[Tensor] = (), *,
        recomputed: bool,
    ) -> None:  # fmt: skip
        self.chunk = chunk
        self.input, self.bridged = input, list(bridged)
        # After a backward, of what this chunk was given.
        self.gradients_of_given: list[Tensor] = []
        self._given: list[Tensor] = []
        self.micro_batch = micro_batch
        self.recomputed = recomputed
        self._output: Tensor | None = None
        self._gradient: Tensor | float | None = None
        self._groups: list[dict[str, Any]] | None = None

    def forward(self) -> tuple[Tensor, ...]:
        """The chunk's output and what it gives later chunks, detached. The graph stays in this object."""
        for each in (self.input, *self.bridged):
            if each is not None and each.is_floating_point():
                each.requires_grad_()
        if self.recomputed:
            self._random = random_state()
            with torch.no_grad():
                return as_tuple(self.chunk(self.input, self.micro_batch, *self.bridged))
        return self._with_graph()

    def recompute(self) -> None:
        """Run the forward again with the same random numbers. The generators' states are as before afterwards."""
        with _replayed(self._random):
            self._with_graph()

    def backward(self, gradient: Tensor | float, of_bridged: Sequence[Tensor] = ()) -> Tensor | None:
        """Add the weights' gradients to theirs. Return the gradient of the input.

        gradient: of the output; a number if the output is a loss. of_bridged: of what the chunk gave later ones.
        """
        output = self._taken()
        pairs = [(output, _as_tensor(gradient, output)), *zip(self._given, of_bridged, strict=True)]
        pairs = [(each, own) for each, own in pairs if each.requires_grad]
        if pairs:
            torch.autograd.backward([each for each, _ in pairs], [own for _, own in pairs])
        of_given = ((each, each.grad) for each in self.bridged)
        self.gradients_of_given = [torch.zeros_like(each) if own is None else own for each, own in of_given]
        self.bridged, self._given = [], []
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

    def _with_graph(self) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            output, *self._given = as_tuple(self.chunk(self.input, self.micro_batch, *self.bridged))
        result = (output.detach(), *(each.detach() for each in self._given))
        if output.ndim and not self._given:
            # Of an output that is on its way only the graph behind it is needed: its memory is the message's alone.
            # What is given besides may have been computed from it.
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


def as_tuple(output: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The output of a chunk and what it gives later ones, as a tuple."""
    return output if isinstance(output, tuple) else (output,)


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
