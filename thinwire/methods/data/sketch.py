"""Linear sketches on DDP: a few random projections of each gradient, drawn anew in every step; optionally private."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from thinwire.codecs import Codec, derive_seed
from thinwire.codecs.sketch import LinearSketch
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.errors import ConfigError
from thinwire.layout.zeros import describe_zeros
from thinwire.methods.ddp import DDPMethod
from thinwire.methods.options import CodecRule, check_types, codec_of
from thinwire.methods.privacy import check_accountant, epsilon
from thinwire.methods.reduction import (
    FP32,
    OPERATION,
    Bucket,
    Reduction,
    Step,
    is_large_matrix,
    seed_of,
    sum_bytes,
    sum_over_ranks,
)
from thinwire.state.memory import Place, Residual
from thinwire.table import Row

SKETCH = CodecRule(
    lambda codec: isinstance(codec, LinearSketch), "must be countsketch or gaussiansketch, of which sums travel"
)
# Numbers of steps for which the start-up table states epsilon.
FORESEEN_STEPS = (100, 1000, 10_000)


@dataclass(frozen=True)
class Sketch(DDPMethod):
    """Each gradient matrix travels as n / ratio random sums of its elements, drawn anew in every step.

    y_r = R_t g_r on rank r, with R_t from (seed, step, parameter), the same on all ranks and E[R_t^T R_t] = I. Sums of
    sketches are sketches of sums, so the y_r are added up like gradients, and g = R_t^T (1/P) sum_r y_r. This is
    unbiased, and |g|^2 is about 1 + ratio times the mean gradient's, so it needs a smaller learning rate. Vectors and
    tensors under 256 elements travel in fp32.

    With a biased codec, the best contraction R_t^T y / (1 + ratio) is decoded instead, and its loss is added to the
    next gradient. With noise, every rank adds its part of the noise before it sends anything.

    Raises ConfigError for a codec that is no sketch, noise without clip, a biased codec with clip, and
    noise if the package dp-accounting is missing.
    Source: Song, Wang, Yu and Zhang, "Sketching for first order method" (ICML 2023).
    """

    codec: str = "countsketch4/4096"
    """Codec of matrices: countsketch, an element in one sum, with a random sign, or gaussiansketch, in all sums of its
    group. With :biased it is decoded with the least error, and what is lost is added to the next gradient."""
    clip: float = 0.0
    """Scale all that a rank sends in a step to a 2-norm of at most this; 0: no clipping."""
    noise: float = 0.0
    """Standard deviation of the Gaussian noise in the sum over ranks, in multiples of clip; 0: no noise."""
    delta: float = 1e-5
    """Delta of the (epsilon, delta) of differential privacy that is reported; above 0 and below 1."""
    noise_seed: int | None = None
    """Seed of noise that anybody who knows it can repeat, so that it protects nothing: for experiments. By default
    the system's own randomness."""
    find_unused_parameters: bool = False
    """DDP's own option; set it for a model that leaves out parameters in some steps."""

    def __post_init__(self) -> None:
        check_types(self)
        codec_of(self, "codec", SKETCH)
        for option in ("clip", "noise"):
            value = getattr(self, option)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{option} {value} of sketch: must be at least 0; nearest: 0")
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta {self.delta} of sketch: must be above 0 and below 1, such as 1e-5")
        if self.noise and not self.clip:
            raise ConfigError(f"noise {self.noise} of sketch is a multiple of clip, which is 0: set clip, such as 1.0")
        if self.clip and self.feedback:
            raise ConfigError(
                f"codec {self.codec!r} of Sketch would send later what clip takes away: leave out one of the two"
            )
        if self.noise_seed is not None and not self.noise:
            raise ConfigError(f"noise_seed {self.noise_seed} of sketch has no effect without noise: leave it out")
        if self.delta != type(self).delta and not self.noise:
            raise ConfigError(f"delta {self.delta} of sketch has no effect without noise: leave it out")
        if self.noise:
            check_accountant()

    @property
    def name(self) -> str:
        return "sketch"

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return (self.linear,)

    @property
    def single_bucket(self) -> bool:
        """Whether one bucket holds all gradients: a norm over all sent values needs all of them."""
        return self.clip > 0

    @property
    def linear(self) -> LinearSketch:
        """Sketch of a matrix."""
        return cast(LinearSketch, codec_of(self, "codec", SKETCH))

    @property
    def feedback(self) -> bool:
        """Whether losses are added to the next gradient."""
        return not self.linear.unbiased

    def reduction(self, place: Place, seed: int) -> SketchMean:
        return SketchMean(self, place, seed)


def clip_(values: Tensor, bound: float) -> Tensor:
    """Scale to a 2-norm of at most `bound`, in place. NaN stays NaN, and inf becomes NaN."""
    norm = values.norm(dtype=torch.float64)
    return values if norm <= bound else values.mul_(bound / norm)


@dataclass(frozen=True)
class SketchSection:
    """Place of a gradient's sums, or of the gradient itself, in the message of its bucket."""

    name: str
    grad: Tensor
    compressed: bool
    values: slice


class SketchMean(Reduction):
    """g = R^T (1/P) sum_r R g_r; with feedback, x_r = g_r + e_r in place of g_r, and e_r = x_r - gamma R^T R x_r."""

    def __init__(self, method: Sketch, place: Place, seed: int) -> None:
        super().__init__(place)
        self.method = method
        self.codec = method.linear
        self.world_size = place.grid.world_size
        self.seed = seed
        self.error = self.state.add("error", Residual(), self._error_shape, row="error feedback")
        self.num_noisy = 0
        self.state.add_attributes(self, "num_noisy")
        self._secret = secrets.randbits(64) if method.noise_seed is None else method.noise_seed

    def run(self, link: Link, bucket: Bucket, step: Step) -> Rounds[None]:
        places = list(self._places(bucket))
        values = torch.empty(places[-1].values.stop if places else 0)
        packets: dict[str, Tensor] = {}
        errors: dict[str, Tensor] = {}
        with link.timed("encode_s", OPERATION):
            for place in places:
                if not place.compressed:
                    values[place.values] = place.grad.reshape(-1)
                    continue
                x = (place.grad + (self.error[place.name] if self.method.feedback else 0.0)).reshape(-1)
                packet = self.codec.encode(x, seed=seed_of(self.seed, step.number, place.name))
                values[place.values] = self.codec.sums(packet)
                packets[place.name] = packet
                if self.method.feedback:
                    errors[place.name] = x.sub_(self.codec.decode(packet, x.numel())).view(place.grad.shape)
            self.protect_(values, link.rank, step.number)
        sums = yield from sum_over_ranks(link, [values[place.values] for place in places])
        with link.timed("decode_s", OPERATION):
            for place, total in zip(places, sums, strict=True):
                out = total.div_(self.world_size)
                if place.compressed:
                    self.codec.sums(packets[place.name]).copy_(out)
                    out = self.codec.decode(packets[place.name], place.grad.numel())
                place.grad.copy_(out.view(place.grad.shape))
        for name, error in errors.items():
            self.error[name] = error
        self.num_noisy += self.method.noise > 0

    def _places(self, bucket: Bucket) -> Iterator[SketchSection]:
        start = 0
        for name, grad in zip(bucket.names, bucket.grads, strict=True):
            stop = start + self._num_values(grad.shape)
            yield SketchSection(name, grad, is_large_matrix(grad.shape), slice(start, stop))
            start = stop

    def _num_values(self, shape: torch.Size) -> int:
        return -(-shape.numel() // self.method.linear.ratio) if is_large_matrix(shape) else shape.numel()

    def _error_shape(self, name: str, shape: torch.Size) -> torch.Size | None:
        return shape if self.method.feedback and is_large_matrix(shape) else None

    def protect_(self, values: Tensor, rank: int, step: int) -> None:
        """Clip the values that leave this rank, and add its part of the noise: 1/P of the variance."""
        if self.method.clip:
            clip_(values, self.method.clip)
        if self.method.noise:
            generator = torch.Generator().manual_seed(derive_seed(self._secret, step, rank))
            part = self.method.noise * self.method.clip / math.sqrt(self.world_size)
            values.add_(torch.randn(values.shape, generator=generator), alpha=part)

    def sent_bytes(self) -> dict[str, int]:
        numels = map(self._num_values, self.place.shapes.values())
        return sum_bytes(numels, self.place.grid, FP32)

    def rows(self) -> list[Row]:
        shapes = self.place.shapes
        thin = sum(map(is_large_matrix, shapes.values()))
        rows = [
            ("gradients", f"{thin} of {len(shapes)} as {self.codec}, the others in fp32", "drawn anew in every step"),
            ("what they lose", *self._loss_row()),
        ]
        return [*rows, *describe_zeros([self.codec]), *self._privacy_rows()]

    def _loss_row(self) -> tuple[str, str]:
        if self.method.feedback:
            return "is added to the next gradient", f"decoded at about 1/{1 + self.method.linear.ratio}"
        return (
            f"is noise of {self.method.linear.ratio} times a gradient's energy",
            "unbiased: take a smaller learning rate",
        )

    def _privacy_rows(self) -> Iterator[Row]:
        if self.method.clip:
            yield f"clip {self.method.clip:g}", "all that a rank sends in a step, as one vector", ""
        if not self.method.noise:
            return
        told = {steps: epsilon(self.method.noise, steps, self.method.delta) for steps in FORESEEN_STEPS}
        ahead = ", ".join(f"{value:.3g} after {steps:,} steps" for steps, value in told.items())
        so_far = epsilon(self.method.noise, self.num_noisy, self.method.delta)
        yield f"noise {self.method.noise:g} x clip", f"epsilon {ahead}", f"delta {self.method.delta:g}"
        yield f"epsilon so far, {self.num_noisy} steps", f"{so_far:.3g}", "unit: all that one rank ever sends, or zeros"
        if self.method.noise_seed is not None:
            yield f"noise_seed {self.method.noise_seed}", "no privacy", "anyone who knows it can remove the noise"
