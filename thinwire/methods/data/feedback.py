"""Codecs with error feedback on DDP: every rank's packets go to every rank, what a packet lost joins the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.checkpoint import Debt
from thinwire.codecs import (
    Codec,
    Identity,
    Integer,
    Threshold,
    TopK,
    derive_seed,
)
from thinwire.codecs.integer import WIDTHS
from thinwire.collectives import Topology
from thinwire.collectives.gather import all_gather_packets, gather_bytes
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.methods.data.plannable import Plannable, codec_errors, densities
from thinwire.methods.data.reductions import (
    FP32_BYTES,
    OPERATION,
    Bucket,
    Step,
    seed_of,
)
from thinwire.methods.options import check_types
from thinwire.state.clipping import Clip
from thinwire.state.memory import Memory
from thinwire.state.portable import GRADIENTS, Owed

# Vectors and smaller tensors are not worth a codec: they travel as they are.
MIN_ELEMENTS = 256
# Packets start at whole 8-byte words of a message.
WORD_BYTES = 8


def is_compressed(shape: torch.Size) -> bool:
    """Whether a gradient of this shape goes through the codec; norms, biases and tiny ones travel in fp32."""
    return len(shape) >= 2 and shape.numel() >= MIN_ELEMENTS


class WithFeedback(Plannable):
    """What makes a codec with one number to set a method on DDP, and one that L-GreCo can plan."""

    def codec(self, setting: float) -> Codec:
        """The codec at a setting."""
        raise NotImplementedError

    def settings(self, span: float) -> list[float]:
        """The settings from uniform / span to uniform * span, ascending."""
        raise NotImplementedError

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Its kernels take the setting as an argument: one codec stands for all."""
        return (self.codec(self.uniform),)

    def candidates(self, shape: torch.Size, span: float) -> list[float]:
        return self.settings(span) if is_compressed(shape) else []

    def errors(self, x: Tensor, settings: Sequence[float]) -> list[float]:
        return codec_errors(x, [self.codec(setting) for setting in settings])

    def size(self, shape: torch.Size, setting: float) -> int:
        return self.codec(setting).packet_bytes(shape.numel())

    def reduction(self, world_size: int, seed: int) -> FeedbackMean:
        return FeedbackMean(self, seed)


@dataclass(frozen=True)
class EFTopK(WithFeedback):
    """Top-k with error feedback: the largest part of each gradient travels, the rest waits for the next step.

    density: k / n, in every group of `group` elements of a matrix; values travel as bf16. stride: the bound on what
    travels is estimated from every stride-th element, as DGC's; 1: the exact largest. Vectors and tensors under 256
    elements travel in fp32. find_unused_parameters: as for ddp. Raises ConfigError for what the codec refuses.
    Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with memory" (NeurIPS 2018).
    """

    density: float = 0.01
    group: int = 4096
    stride: int = 1
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        self.codec(self.density)

    @property
    def name(self) -> str:
        return "ef-topk"

    @property
    def uniform(self) -> float:
        return self.density

    def codec(self, setting: float) -> Codec:
        return TopK(setting, self.group) if self.stride == 1 else Threshold(setting, self.group, stride=self.stride)

    def settings(self, span: float) -> list[float]:
        return densities(self.density, span, self.group)


@dataclass(frozen=True)
class EFInteger(WithFeedback):
    """Integers of a few bits with error feedback: each gradient is rounded to the nearest, the rest waits.

    bits: 2, 3, 4, 6 or 8. group: elements of a matrix that share a bf16 scale. Vectors and tensors under 256 elements
    travel in fp32. find_unused_parameters: as for ddp. Raises ConfigError for what the codec refuses.
    Source: Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes" (ICML 2019).
    """

    bits: int = 4
    group: int = 64
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        self.codec(self.bits)

    @property
    def name(self) -> str:
        return "ef-integer"

    @property
    def uniform(self) -> float:
        return self.bits

    def codec(self, setting: float) -> Codec:
        # Nearest, since a memory needs a contraction, which stochastic rounding to 2 bits is not.
        return Integer(int(setting), self.group, "nearest", "bf16")

    def settings(self, span: float) -> list[float]:
        return [bits for bits in WIDTHS if self.bits / span <= bits <= self.bits * span]


@dataclass(frozen=True)
class Section:
    """Where a gradient's packet lies in the message of its bucket."""

    codec: Codec
    num_elements: int
    start: int
    stop: int

    def of(self, message: Tensor) -> Tensor:
        return message[self.start : self.stop]


class FeedbackMean:
    """g = (1/P) sum_r C(x_r) with x_r = g_r + e_r, after which e_r = x_r - C(x_r).

    A rank's packets of one bucket are one message, which every other rank gets; sums are taken in fp32 in rank order.
    """

    def __init__(self, method: WithFeedback, seed: int) -> None:
        self.method = method
        self.seed = seed
        self.memory = Memory()
        self.settings: dict[str, float] = {}
        self.watch: Callable[[str, Tensor], None] | None = None

    def run(self, link: Link, bucket: Bucket, step: Step) -> Rounds[None]:
        sections = self._sections({name: grad.shape for name, grad in zip(bucket.names, bucket.grads, strict=True)})
        message = torch.zeros(sum(padded(section) for section in sections.values()), dtype=torch.uint8)
        errors: dict[str, Tensor] = {}
        with link.timed("encode_s", OPERATION):
            for (name, section), grad in zip(sections.items(), bucket.grads, strict=True):
                x = (grad + self._error(name, grad.shape)).reshape(-1)
                if self.watch:
                    self.watch(name, x)
                seed = derive_seed(seed_of(self.seed, step.number, name), link.rank)
                packet = section.codec.encode(x, seed=seed, out=section.of(message))
                if not section.codec.traits.lossless:
                    errors[name] = x.sub_(section.codec.decode(packet, x.numel())).view(grad.shape)
        gathered = yield from all_gather_packets(link, message, OPERATION)
        grid = link.topology
        with link.timed("decode_s", OPERATION):
            for section, grad in zip(sections.values(), bucket.grads, strict=True):
                total = torch.zeros(section.num_elements)
                for rank in range(grid.world_size):
                    section.codec.decode_add(section.of(gathered[grid.local_rank(rank), grid.node(rank)]), total)
                grad.copy_(total.div_(grid.world_size).view(grad.shape))
        for name, error in errors.items():
            self.memory.put(name, "error", error)

    def _error(self, name: str, shape: torch.Size) -> Tensor | float:
        return self.memory.get(name, "error", *shape) if is_compressed(shape) else 0.0

    def _sections(self, shapes: Mapping[str, torch.Size]) -> dict[str, Section]:
        """The layout of a message that holds gradients of these shapes, in their order."""
        sections: dict[str, Section] = {}
        start = 0
        for name, shape in shapes.items():
            setting = self.settings.get(name, self.method.uniform)
            codec = self.method.codec(setting) if is_compressed(shape) else Identity()
            section = Section(codec, shape.numel(), start, start + codec.packet_bytes(shape.numel()))
            sections[name] = section
            start += padded(section)
        return sections

    def sent_bytes(self, shapes: Mapping[str, torch.Size], grid: Topology) -> dict[str, int]:
        return gather_bytes(grid, sum(padded(section) for section in self._sections(shapes).values()))

    def kept_bytes(self, shapes: Mapping[str, torch.Size], grid: Topology) -> dict[str, int]:
        return {"error feedback": FP32_BYTES * sum(shape.numel() for shape in filter(is_compressed, shapes.values()))}

    def rows(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, str, str]]:
        thin, codec = list(filter(is_compressed, shapes.values())), self.method.codec(self.method.uniform)
        held = FP32_BYTES * sum(shape.numel() for shape in thin)
        return [
            (
                "gradients",
                f"{len(thin)} of {len(shapes)} as {codec}, the others in fp32",
                "every rank's packets to all",
            ),
            ("what they lose", "is added to the next gradient", f"{held / 1e6:.1f} MB are held for it"),
        ]

    def forgive(self, clip: Clip) -> None:
        # Old sparse errors do more harm than good in front of Adam: measured, docs/methods/error-feedback.md.
        for error in self.residuals().values():
            error.mul_(clip.factor)

    def forget(self) -> list[str]:
        return self.memory.forget()

    def residuals(self) -> dict[str, Tensor]:
        return self.memory.kind("error")

    def debts(self, shapes: Mapping[str, torch.Size], grid: Topology, rank: int) -> list[Debt]:
        return [debt.below("memory") for debt in self.memory.debts("error", GRADIENTS, grid)]

    def owe(self, shapes: Mapping[str, torch.Size], grid: Topology, rank: int, owed: Owed) -> None:
        thin = {name: shape for name, shape in shapes.items() if is_compressed(shape)}
        self.memory.owe("error", GRADIENTS, thin, owed)

    def state_dict(self) -> dict[str, Any]:
        return {"memory": self.memory.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.memory.load_state_dict(state["memory"])


def padded(section: Section) -> int:
    """Bytes of a message that the packet takes, up to the next packet's start."""
    return -(-(section.stop - section.start) // WORD_BYTES) * WORD_BYTES
