"""Methods with one number to set, such as a rank, a density or bits: what L-GreCo plans for each parameter."""

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
    """A reduction with a setting of its own for every parameter; `run` reads them once, where it begins.

    settings: by parameter name, where it is not the uniform one. watch: called with a parameter's name and what is
    compressed of it on this rank, memory included, in every step, while it is set.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.settings: dict[str, float] = {}
        self.watch: Callable[[str, Tensor], None] | None = None


class Plannable(DDPMethod):
    """What a method offers to be planned; its reductions are Tunable."""

    @property
    def uniform(self) -> float:
        """The setting of a parameter for which none is chosen."""
        raise NotImplementedError

    def candidates(self, shape: torch.Size, span: float) -> list[float]:
        """Settings for a gradient of this shape, from uniform / span to uniform * span, the uniform one among them.

        None where it is not compressed.
        """
        raise NotImplementedError

    def errors(self, x: Tensor, settings: Sequence[float]) -> list[float]:
        """|x - C(x)|, the 2-norm, for each of the settings."""
        raise NotImplementedError

    def size(self, shape: torch.Size, setting: float) -> int:
        """Bytes in which one gradient travels."""
        raise NotImplementedError

    def reduction(self, place: Place, seed: int) -> Tunable:
        raise NotImplementedError


def codec_errors(x: Tensor, codecs: Sequence[Codec]) -> list[float]:
    """|x - C(x)| for each of the codecs."""
    flat = x.reshape(-1)
    return [float((flat - codec.decode(codec.encode(flat), flat.numel())).norm()) for codec in codecs]


def densities(uniform: float, span: float, group: int) -> list[float]:
    """Steps of sqrt(2) from uniform / span to uniform * span, as far as one element of `group` and all of them."""
    steps = math.floor(2 * math.log2(span) + 1e-9)
    ladder = [uniform * 2 ** (step / 2) for step in range(-steps, steps + 1)]
    return [density for density in ladder if 1 / group <= density <= 1]
