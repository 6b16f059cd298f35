"""Codecs with error feedback on DDP: every rank's packets go to every rank, and losses join the next packets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs import Codec, Identity, Integer, Natural, TopK, derive_seed
from thinwire.codecs.integer import WIDTHS
from thinwire.collectives.gather import gather_bytes
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.layout.zeros import describe_zeros
from thinwire.methods.options import CodecRule, check_types, codec_of
from thinwire.methods.packets import message_bytes, sections_of, sums_of
from thinwire.methods.plannable import Plannable, Tunable, codec_errors, densities
from thinwire.methods.reduction import OPERATION, Bucket, Step, is_large_matrix, seed_of
from thinwire.state.memory import Place, Residual
from thinwire.table import Row


class WithFeedback(Plannable):
    """Base of methods on DDP whose codec has one numeric setting, which L-GreCo can plan."""

    codec: str
    # The type of the codec, and the name of its field that is the setting.
    rule: ClassVar[CodecRule]
    setting: ClassVar[str]

    @property
    def uniform(self) -> float:
        return float(getattr(self.codecs[0], self.setting))

    def codec_at(self, setting: float) -> Codec:
        """The codec at a setting."""
        (codec,) = self.codecs
        return replace(codec, **{self.setting: type(getattr(codec, self.setting))(setting)})  # type: ignore[type-var]

    def settings(self, span: float) -> list[float]:
        """The settings from uniform / span to uniform * span, ascending."""
        raise NotImplementedError

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """A single codec: its kernels take the setting as an argument."""
        return (codec_of(self, "codec", self.rule),)

    def candidates(self, shape: torch.Size, span: float) -> list[float]:
        return self.settings(span) if is_large_matrix(shape) else []

    def errors(self, x: Tensor, settings: Sequence[float]) -> list[float]:
        return codec_errors(x, [self.codec_at(setting) for setting in settings])

    def size(self, shape: torch.Size, setting: float) -> int:
        return self.codec_at(setting).packet_bytes(shape.numel())

    def reduction(self, place: Place, seed: int) -> FeedbackMean:
        return FeedbackMean(self, place, seed)


@dataclass(frozen=True)
class EFTopK(WithFeedback):
    """Top-k with error feedback: the largest part of each gradient is sent, the rest is kept for the next step.

    Vectors and tensors under 256 elements travel in fp32.

    Raises ConfigError for another codec.
    Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with memory" (NeurIPS 2018).
    """

    rule = CodecRule(
        lambda codec: isinstance(codec, TopK), "must be topk or threshold, of which L-GreCo plans the density"
    )
    setting = "density"

    codec: str = "topk1%/4096"
    """Codec of gradients: topk, or threshold, which estimates the bound on what travels."""
    find_unused_parameters: bool = False
    """DDP's own option; set it for a model that leaves out parameters in some steps."""

    def __post_init__(self) -> None:
        check_types(self)
        codec_of(self, "codec", self.rule)

    @property
    def name(self) -> str:
        return "ef-topk"

    def settings(self, span: float) -> list[float]:
        (codec,) = self.codecs
        assert isinstance(codec, TopK)
        return densities(codec.density, span, codec.group)


@dataclass(frozen=True)
class EFInteger(WithFeedback):
    """Integers of a few bits with error feedback: each gradient is rounded to nearest, and the rest is kept.

    Vectors and tensors under 256 elements travel in fp32.

    Raises ConfigError for another codec.
    Source: Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes" (ICML 2019).
    """

    # With stochastic rounding, few bits are no contraction, but error feedback needs one.
    rule = CodecRule(
        lambda codec: isinstance(codec, Integer | Natural) and codec.rounding == "nearest",
        "must be of integers or powers of two, rounded to nearest, of which L-GreCo plans the bits",
    )
    setting = "bits"

    codec: str = "int4/64:bf16:nearest"
    """Codec of gradients: integers or powers of two, rounded to nearest."""
    find_unused_parameters: bool = False
    """DDP's own option; set it for a model that leaves out parameters in some steps."""

    def __post_init__(self) -> None:
        check_types(self)
        codec_of(self, "codec", self.rule)

    @property
    def name(self) -> str:
        return "ef-integer"

    def settings(self, span: float) -> list[float]:
        return [bits for bits in WIDTHS if self.uniform / span <= bits <= self.uniform * span]


class FeedbackMean(Tunable):
    """g = (1/P) sum_r C(x_r) with x_r = g_r + e_r; then e_r = x_r - C(x_r).

    A rank's packets of one bucket form one message, which goes to every other rank. Sums are taken in fp32 in rank
    order.
    """

    def __init__(self, method: WithFeedback, place: Place, seed: int) -> None:
        super().__init__(place)
        self.method = method
        self.seed = seed
        # Old sparse errors do more harm than good in front of Adam: measured, docs/methods/error-feedback.md.
        residual = Residual(after_clip="factor")
        self.error = self.state.add("error", residual, self._large, row="error feedback")

    def run(self, link: Link, bucket: Bucket, step: Step) -> Rounds[None]:
        shapes = {name: grad.shape for name, grad in zip(bucket.names, bucket.grads, strict=True)}
        sections = sections_of(shapes, self._codec)
        message = torch.zeros(message_bytes(sections), dtype=torch.uint8)
        errors: dict[str, Tensor] = {}
        with link.timed("encode_s", OPERATION):
            for (name, section), grad in zip(sections.items(), bucket.grads, strict=True):
                x = (grad + (self.error[name] if is_large_matrix(grad.shape) else 0.0)).reshape(-1)
                if self.watch:
                    self.watch(name, x)
                seed = derive_seed(seed_of(self.seed, step.number, name), link.rank)
                packet = section.codec.encode(x, seed=seed, out=section.of(message))
                if not section.codec.traits.lossless:
                    errors[name] = x.sub_(section.codec.decode(packet, x.numel())).view(grad.shape)
        totals = yield from sums_of(link, message, sections)
        for total, grad in zip(totals, bucket.grads, strict=True):
            grad.copy_(total.div_(link.topology.world_size).view(grad.shape))
        for name, error in errors.items():
            self.error[name] = error

    @staticmethod
    def _large(name: str, shape: torch.Size) -> torch.Size | None:
        return shape if is_large_matrix(shape) else None

    def _codec(self, name: str, shape: torch.Size) -> Codec:
        setting = self.settings.get(name, self.method.uniform)
        return self.method.codec_at(setting) if is_large_matrix(shape) else Identity()

    def sent_bytes(self) -> dict[str, int]:
        return gather_bytes(self.place.grid, message_bytes(sections_of(self.place.shapes, self._codec)))

    def rows(self) -> list[Row]:
        num_large, codec = len(self.error.shapes()), self.method.codecs[0]
        effect = f"{num_large} of {len(self.place.shapes)} as {codec}, the others in fp32"
        held = f"{self.error.planned_bytes / 1e6:.1f} MB are held for it"
        return [
            ("gradients", effect, "every rank's packets to all"),
            ("what they lose", "is added to the next gradient", held),
            *describe_zeros(self.method.codecs),
        ]
