"""EF21 and DIANA: ranks send differences from an estimate of their gradient that all ranks share."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from thinwire.codecs import Codec, Identity, derive_seed
from thinwire.collectives.gather import gather_bytes
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.errors import ConfigError
from thinwire.methods.ddp import DDPMethod
from thinwire.methods.options import FIXED_SIZE, check_types, codec_of
from thinwire.methods.packets import message_bytes, sections_of, sums_of
from thinwire.methods.reduction import OPERATION, Bucket, Reduction, Step, is_large_matrix, seed_of
from thinwire.state.memory import MeanMerge, Place
from thinwire.table import Row

# Elements by which a codec's error is measured.
SAMPLE = 1 << 16


@dataclass(frozen=True)
class EF21(DDPMethod):
    """Compressed differences: each rank's estimate h_r of its gradient moves towards it by the difference sent.

        v_r <- v_r + fresh (g_r - v_r)               EF21-SGDM; v_r = g_r where fresh is 1
        c_r  = C(v_r - h_r)
        out  = h + mean over ranks of c_r
        h_r <- h_r + shift c_r;  h <- h + shift mean of c_r

    With shift 1, out is the new h: EF21, for a codec that is a contraction. With a smaller shift, at most 1 / (1 +
    omega) where E|C(x) - x|^2 <= omega |x|^2, it is DIANA, for an unbiased codec. As gradients settle, they are sent
    more and more exactly, so training converges with a constant step size where plain error feedback ends in noise.
    Vectors and tensors under 256 elements travel in fp32.

    Raises ConfigError for values out of range, and for a codec that neither form can use.
    Source: Richtarik, Sokolov and Fatkhullin, "EF21" (NeurIPS 2021), algorithm 2; Fatkhullin, Tyurin and Richtarik,
    "Momentum provably improves error feedback!" (NeurIPS 2023), algorithm 1; Mishchenko et al., "Distributed learning
    with compressed gradient differences" (2019), algorithm 1.
    """

    codec: str = "topk1%"
    """Codec C of the differences; see `thinwire codecs`."""
    fresh: float = 1.0
    """Share of the new gradient in the momentum that is sent, above 0 to 1; by default the gradient itself."""
    shift: float | None = None
    """How far an estimate follows what is sent, above 0 to 1; 1, EF21, needs a contraction, and less, DIANA, an
    unbiased codec. By default 1 for a contraction, else 1 / (1 + omega) by the codec's error of normal values."""
    find_unused_parameters: bool = False
    """DDP's own option; set it for a model that leaves out parameters in some steps."""

    def __post_init__(self) -> None:
        check_types(self)
        for option in ("fresh", "shift"):
            value = getattr(self, option)
            if value is not None and not 0 < value <= 1:
                nearest = 1 if value > 1 else 0.1
                raise ConfigError(f"{option} {value} of ef21: must be above 0 and at most 1; nearest: {nearest}")
        traits = self.make().traits
        if self.shift == 1 and not traits.contraction:
            hint = "no shift, which suits it" if traits.unbiased else "topk1%, sign or int4:nearest"
            raise ConfigError(f"codec {self.codec} of ef21 with shift 1: must be a contraction; nearest: {hint}")
        if self.shift is None and not traits.contraction and not traits.unbiased:
            hint = "topk1%, sign, int4:nearest or int2"
            raise ConfigError(f"codec {self.codec} of ef21: must be a contraction or unbiased; nearest: {hint}")
        if self.shift is not None and self.shift < 1 and not traits.unbiased:
            raise ConfigError(f"codec {self.codec} of ef21 with shift {self.shift}: must be unbiased; nearest: shift 1")

    @property
    def name(self) -> str:
        return "ef21"

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return (self.make(),)

    def make(self) -> Codec:
        """Codec C of the differences."""
        return codec_of(self, "codec", FIXED_SIZE)

    @property
    def pace(self) -> float:
        """How far an estimate follows what is sent: `shift`, or what suits the codec."""
        if self.shift is not None:
            return self.shift
        codec = self.make()
        return 1.0 if codec.traits.contraction else fitting_shift(codec)

    def reduction(self, place: Place, seed: int) -> Reduction:
        return DifferenceMean(self, place, seed)


@functools.cache
def fitting_shift(codec: Codec) -> float:
    """1 / (1 + omega) in two digits, the same on all ranks; omega: |C(x) - x|^2 / |x|^2 of normal values x."""
    x = torch.randn(SAMPLE, generator=torch.Generator().manual_seed(0))
    off = codec.decode(codec.encode(x), SAMPLE).double() - x
    omega = float(off.square().sum() / x.double().square().sum())
    return float(f"{1 / (1 + omega):.2g}")


class DifferenceMean(Reduction):
    """EF21's reduction, with its state by large matrix.

    If a rank's packet is not finite in a step, the state does not change on any rank.

    State:
        estimate: h_r, of this rank.
        mean: h.
        momentum: v_r, if fresh is below 1.
    """

    def __init__(self, method: EF21, place: Place, seed: int) -> None:
        super().__init__(place)
        self.method, self.codec, self.pace, self.seed = method, method.make(), method.pace, seed
        row = "estimates of gradients"
        self.estimate = self.state.add("estimate", MeanMerge(row), self._large, row=row)
        self.mean = self.state.add("mean", MeanMerge(f"mean of {row}"), self._large, row=row)
        self.momentum = self.state.add("momentum", MeanMerge("momentum of gradients"), self._moving, row="momentum")

    def run(self, link: Link, bucket: Bucket, step: Step) -> Rounds[None]:
        grads = dict(zip(bucket.names, bucket.grads, strict=True))
        sections = sections_of({name: grad.shape for name, grad in grads.items()}, self._codec)
        message = torch.zeros(message_bytes(sections), dtype=torch.uint8)
        fresh = {name: self._fresh(name, grad) for name, grad in grads.items()}
        with link.timed("encode_s", OPERATION):
            for name, section in sections.items():
                x = fresh[name] - self.estimate[name] if is_large_matrix(grads[name].shape) else fresh[name]
                seed = derive_seed(seed_of(self.seed, step.number, name), link.rank)
                section.codec.encode(x, seed=seed, out=section.of(message))
        totals = yield from sums_of(link, message, sections)
        for (name, section), total in zip(sections.items(), totals, strict=True):
            grad = grads[name]
            total = total.div_(link.topology.world_size).view(grad.shape)
            if not is_large_matrix(grad.shape):
                grad.copy_(total)
                continue
            torch.add(self.mean[name], total, out=grad)
            if torch.isfinite(total).all():
                sent = section.codec.decode(section.of(message), section.num_elements).view(grad.shape)
                self.estimate[name].add_(sent, alpha=self.pace)
                self.mean[name].add_(total, alpha=self.pace)
                if self.method.fresh < 1:
                    self.momentum[name] = fresh[name]

    def _fresh(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """v_r after this gradient; the gradient itself if there is no v_r."""
        if self.method.fresh == 1 or not is_large_matrix(grad.shape):
            return grad
        held = self.momentum.get(name)
        return grad.clone() if held is None else torch.lerp(held, grad, self.method.fresh)

    def _codec(self, name: str, shape: torch.Size) -> Codec:
        return self.codec if is_large_matrix(shape) else Identity()

    @staticmethod
    def _large(name: str, shape: torch.Size) -> torch.Size | None:
        return shape if is_large_matrix(shape) else None

    def _moving(self, name: str, shape: torch.Size) -> torch.Size | None:
        return self._large(name, shape) if self.method.fresh < 1 else None

    def sent_bytes(self) -> dict[str, int]:
        return gather_bytes(self.place.grid, message_bytes(sections_of(self.place.shapes, self._codec)))

    def rows(self) -> list[Row]:
        num_large, method = len(self.estimate.shapes()), self.method
        way = "EF21" if self.pace == 1 else f"DIANA, shift {self.pace:g}"
        if method.shift is None and self.pace < 1:
            way += " by the codec's error"
        held = f"{sum(self.state.kept_bytes().values()) / 1e6:.1f} MB are held for it"
        what = "the gradient" if method.fresh == 1 else f"its momentum, of which {method.fresh:g} is new in each step"
        return [
            ("gradients", f"{num_large} of {len(self.place.shapes)} as {self.codec}", "every rank's packets to all"),
            ("what is sent", f"how far {what} is from its estimate ({way})", held),
        ]
