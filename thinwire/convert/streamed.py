"""A model whose weights are read when they are used, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from thinwire.hosts.offload.hollow import is_hollow

# Asking a weight for these is no use of its values.
GETTERS: tuple[Any, ...] = Tensor.shape, Tensor.dtype, Tensor.device
PASSIVE = {getter.__get__ for getter in GETTERS}


class StreamedModel(nn.Module):
    """A model for inference, of which the first use of a hollow weight reads it, and the use of another one frees it.

    Args:
        model: weights that have memory stay as they are.
        read: gives a weight by its name in the model.
        keeps: weights that were read stay in memory.
    """

    def __init__(self, model: nn.Module, read: Callable[[str], Tensor], *, keeps: bool = False) -> None:
        super().__init__()
        self.model = model
        self._reading = ReadWhenUsed(model, read, keeps=keeps)

    @torch.no_grad()
    def forward(self, *args: Any) -> Any:
        """What the model returns."""
        with self._reading:
            return self.model(*args)


class ReadWhenUsed(TorchFunctionMode):
    """A context in which a function of torch that is given a hollow weight gets its values; see StreamedModel.

    A view of a weight keeps the weight's memory, so it outlives the weight.
    """

    def __init__(self, model: nn.Module, read: Callable[[str], Tensor], *, keeps: bool) -> None:
        super().__init__()
        self._read, self._keeps = read, keeps
        self._names = {param: name for name, param in model.named_parameters() if is_hollow(param)}
        self._shapes = {param: param.data for param in self._names}
        self._here: list[nn.Parameter] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in PASSIVE:
            used = list(_weights_in([*args, *kwargs.values()]))
            self._bring([param for param in used if param in self._names])
        return func(*args, **kwargs)

    def _bring(self, used: list[nn.Parameter]) -> None:
        missing = [param for param in used if is_hollow(param)]
        if missing and not self._keeps:
            for param in self._here:
                if not any(param is other for other in used):
                    param.data = self._shapes[param]
            self._here = [param for param in used if not is_hollow(param)]
        for param in missing:
            param.data = self._read(self._names[param]).to(param.dtype)
            self._here.append(param)


def _weights_in(values: Any) -> Iterator[nn.Parameter]:
    """The parameters in nested sequences."""
    for value in values:
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, list | tuple):
            yield from _weights_in(value)
