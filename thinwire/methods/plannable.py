"""Methods with one numeric setting, such as a rank, a density or bits, which L-GreCo plans for each parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.methods.ddp import DDPMethod
from thinwire.methods.reduction import Reduction
from thinwire.state.memory import Place


class Tunable(Reduction):
    """A reduction with a setting for every parameter. `run` reads the settings once, when it begins.

    Args:
        settings: by parameter name; others use the uniform setting.
        watch: if set, called in every step with a parameter's name and the values compressed on this rank, its error
            memory included.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.settings: dict[str, float] = {}
        self.watch: Callable[[str, Tensor], None] | None = None


class Plannable(DDPMethod):
    """The interface of a method that can be planned. Its reductions are Tunable."""

    @property
    def uniform(self) -> float:
        """Setting of a parameter that has no planned one."""
        raise NotImplementedError

    def candidates(self, shape: torch.Size, span: float) -> list[float]:
        """Settings for a gradient of this shape, from uniform / span to uniform * span, including the uniform one.

        Empty if the gradient is not compressed.
        """
        raise NotImplementedError

    def errors(self, x: Tensor, settings: Sequence[float]) -> list[float]:
        """|x - C(x)|, the 2-norm, for each of the settings."""
        raise NotImplementedError

    def size(self, shape: torch.Size, setting: float) -> int:
        """Bytes that one gradient takes."""
        raise NotImplementedError

    def reduction(self, place: Place, seed: int) -> Tunable:
        raise NotImplementedError


def codec_errors(x: Tensor, codecs: Sequence[Codec]) -> list[float]:
    """|x - C(x)| for each of the codecs."""
    flat = x.reshape(-1)
    return [float((flat - codec.decode(codec.encode(flat), flat.numel())).norm()) for codec in codecs]


def densities(uniform: float, span: float, group: int) -> list[float]:
    """Densities in steps of sqrt(2) from uniform / span to uniform * span; at least 1 / group, at most 1."""
    steps = math.floor(2 * math.log2(span) + 1e-9)
    ladder = [uniform * 2 ** (step / 2) for step in range(-steps, steps + 1)]
    return [density for density in ladder if 1 / group <= density <= 1]
