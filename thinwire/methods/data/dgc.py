"""DGC: each node sends the largest thousandth of its accumulated momentum and keeps the rest for later steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from thinwire.codecs import Codec, Threshold, TopK
from thinwire.collectives.gather import all_gather_packets, gather_bytes
from thinwire.collectives.link import Link
from thinwire.collectives.reduce import added
from thinwire.collectives.rounds import Rounds
from thinwire.errors import ConfigError
from thinwire.methods.options import CONTRACTION, check_types, codec_of
from thinwire.methods.plannable import Plannable, Tunable, codec_errors, densities
from thinwire.methods.reduction import OPERATION, Step, seed_of
from thinwire.methods.whole_step import Compressed, OnWholeStep, WholeStep, check_clip, is_compressed
from thinwire.optim import DGCSGD
from thinwire.state.memory import MeanMerge, Place, Residual
from thinwire.table import Row

DEFAULT_STAGE = 25
# Share of the run that the warm-up of the density takes, if the run's length is known.
WARMUP_SHARE = 0.1


@dataclass(frozen=True)
class DGC(OnWholeStep, Plannable):
    """Sparse gradients with momentum correction: every node sends the largest `density` of its accumulated gradients.

        g  local gradient, clipped                            u <- m u + g          v <- v + u
        v's largest entries travel and are cleared in v; with factor_masking in u too
        w <- w - lr (1/N) sum over N nodes of the entries that travelled

    With nesterov, u <- m (u + g) and v <- v + u + g. Tensors with fewer than two dimensions travel in fp32, with the
    momentum on their mean. Takes SGD without momentum, or DGCSGD.

    Raises ConfigError for values out of range. Source: Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression"
    (ICLR 2018), sections 3.1 to 3.3.
    """

    optimizers: ClassVar[tuple[str, ...]] = ("dgc-sgd", "sgd-plain")
    optimizers_reason: ClassVar[str] = "keeps the momentum of SGD itself"
    not_on_zero: ClassVar[str] = "keeps gradients back on every node, while zero knows only the sum of what it is given"

    density: float = 0.001
    """Share of each group of elements of a tensor that travels; from 1 / group to 1."""
    momentum: float = 0.9
    """Factor m of the momentum; from 0 to below 1."""
    nesterov: bool = False
    """Use Nesterov's form of the momentum."""
    clip: float = 1.0
    """Largest 2-norm of a rank's gradient, in units of the square root of the number of ranks; 0: no clipping."""
    factor_masking: bool = True
    """Also clear the momentum of the entries that were sent."""
    warmup: tuple[float, ...] = (0.25, 0.0625, 0.015625, 0.004)
    """Densities of the first stages, one after the other; an empty list: no warm-up."""
    warmup_steps: int | None = None
    """Steps of each stage of the warm-up, at least 1; by default all stages take a tenth of a training run, or 25
    steps each in your own loop."""
    values: str = "fp32"
    """Codec of the values that travel. What it loses is sent later."""
    group: int = 1 << 16
    """Elements of a tensor that compete with each other; from 1 to 2^24."""
    stride: int = 32
    """Estimate the bound on what travels from every stride-th element; from 1 (the exact bound) to the group."""

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum {self.momentum} of dgc: must be at least 0 and below 1; the usual: 0.9")
        check_clip(self.name, self.clip)
        if self.warmup_steps is not None and self.warmup_steps < 1:
            raise ConfigError(f"warmup_steps {self.warmup_steps} of dgc: must be at least 1, or give an empty warmup")
        if self.warmup_steps is not None and not self.warmup:
            raise ConfigError(f"warmup_steps {self.warmup_steps} of dgc has no effect without a warmup: leave it out")
        if not self.momentum and (self.nesterov or not self.factor_masking):
            raise ConfigError("nesterov and factor_masking of dgc change nothing at momentum 0: leave them out")
        for density in (*self.warmup, self.density):
            self.codec(density)

    @property
    def name(self) -> str:
        return "dgc"

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return (self.codec(self.density),)

    @property
    def stage_steps(self) -> int:
        """Steps at each density of the warm-up."""
        return DEFAULT_STAGE if self.warmup_steps is None else self.warmup_steps

    @property
    def settled_after(self) -> int:
        return len(self.warmup) * self.stage_steps

    def codec(self, density: float) -> Codec:
        """Codec that selects and packs the entries of one tensor."""
        values = codec_of(self, "values", CONTRACTION)
        if self.stride == 1:
            return TopK(density, self.group, values)
        return Threshold(density, self.group, values, self.stride)

    def density_at(self, step: int) -> float:
        """Density of a step; steps count from 0."""
        stage = step // self.stage_steps
        return self.warmup[stage] if stage < len(self.warmup) else self.density

    @property
    def uniform(self) -> float:
        return self.density

    def candidates(self, shape: torch.Size, span: float) -> list[float]:
        return densities(self.density, span, self.group) if is_compressed(shape) else []

    def errors(self, x: Tensor, settings: Sequence[float]) -> list[float]:
        return codec_errors(x, [self.codec(density) for density in settings])

    def size(self, shape: torch.Size, setting: float) -> int:
        return self.codec(setting).packet_bytes(shape.numel())

    def for_run(self, num_steps: int, num_warmup_steps: int) -> DGC:
        """The same method with the length of the warm-up's stages filled in, if none is stated; see PlannedByRun."""
        if self.warmup_steps is not None or not self.warmup:
            return self
        return replace(self, warmup_steps=max(1, round(WARMUP_SHARE * num_steps / len(self.warmup))))

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        if isinstance(optimizer, DGCSGD):
            return
        if optimizer is None:
            raise ConfigError(
                "dgc was given no optimizer, and corrects the momentum of SGD: give it yours, thinwire.DGCSGD, or "
                "torch.optim.SGD with momentum=0"
            )
        kind = type(optimizer).__name__
        if not isinstance(optimizer, torch.optim.SGD):
            raise ConfigError(
                f"dgc corrects the momentum of SGD, which {kind} is not: what it sends in rare large portions would be "
                "scaled again; take thinwire.DGCSGD, or torch.optim.SGD with momentum=0"
            )
        if momenta := [group["momentum"] for group in optimizer.param_groups if group["momentum"]]:
            raise ConfigError(
                f"momentum {momenta[0]} of SGD: dgc keeps the momentum itself, so it would be applied twice; set "
                "momentum=0, or take thinwire.DGCSGD, in which only weight decay has momentum"
            )

    def reduction(self, place: Place, seed: int) -> SparseMean:
        return SparseMean(self, place, seed)


class SparseMean(WholeStep, Tunable):
    """The mean over nodes of the entries that DGC sends.

    State: `unsent`, v, of this local rank's slices, once a node, and `velocity`, u, also of the dense tensors. Without
    momentum and clipping, output + v = the mean gradients. With momentum m and no masking,
    (1 - m) (output + v) + m u equals them.
    """

    def __init__(self, method: DGC, place: Place, seed: int) -> None:
        super().__init__(method.clip, place)
        self.method, self.seed = method, seed
        # Clipping comes before compression.
        unsent = Residual("unsent sums of velocities", after_clip=None)
        self.velocity = self.state.add(
            "velocity", MeanMerge("velocities"), self._velocity_shape, self.slice_spans, row="velocities"
        )
        self.unsent = self.state.add("unsent", unsent, self.slice_shape, self.slice_spans, row="unsent")
        self._unchecked: list[Row] = []

    def _velocity_shape(self, name: str, shape: torch.Size) -> torch.Size:
        return self.slice_shape(name, shape) or shape

    def bind(self, trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None) -> None:
        momenta = {group["momentum"] for group in optimizer.param_groups} if isinstance(optimizer, DGCSGD) else set()
        if momenta - {self.method.momentum}:
            reason = f"dgc's is {self.method.momentum:g}: where they are equal, this is SGD with momentum"
            self._unchecked = [("momentum of weight decay", ", ".join(f"{m:g}" for m in sorted(momenta)), reason)]

    def reduce(self, link: Link, grads: dict[str, Tensor], step: Step) -> Rounds[None]:
        means, outs, is_finite = yield from self.exchange(link, grads, self.local_scale(grads), step)
        with link.timed("decode_s", OPERATION):
            for name, mean in means.items():
                outs[name] = self._contribution(name, mean)
                if is_finite:
                    self._advance(name, mean)
            for name, out in outs.items():
                grads[name].copy_(out)

    def compress(self, link: Link, grads: dict[str, Tensor], scale: float, step: Step) -> Rounds[Compressed]:
        codecs = self._codecs(grads, step.number)
        fresh = yield from self.node_mean(link, grads, scale)
        sizes = [g.numel() for g in fresh.values()]
        total = link.scratch("accumulated", sum(sizes), dtype=torch.float32)
        sums = dict(zip(fresh, total.split(sizes), strict=True))
        packet = link.scratch("packet", sum(codecs[name].packet_bytes(g.numel()) for name, g in fresh.items()))
        with link.timed("encode_s", OPERATION):
            for name, part in self._parts(packet, fresh, codecs).items():
                self._contribution(name, fresh[name], sums[name]).add_(self.unsent[name])
                if self.watch:
                    self.watch(name, sums[name])
                codecs[name].encode(sums[name], seed=seed_of(self.seed, step.number, name), out=part)
        gathered = yield from all_gather_packets(link, packet, OPERATION)
        with link.timed("decode_s", OPERATION):
            outs = self._mean_of(gathered, fresh, codecs)
        sent = self._parts(gathered[link.local_rank, link.node], fresh, codecs)
        return outs, partial(self._remember, sent, fresh, sums, codecs)

    def _codecs(self, names: Iterable[str], step: int) -> dict[str, Codec]:
        """Codec of each compressed parameter in a step, after the warm-up with its own density if one was chosen."""
        method = self.method
        chosen = {} if step < method.settled_after else self.settings
        return {name: method.codec(chosen.get(name, method.density_at(step))) for name in names}

    def _contribution(self, name: str, g: Tensor, out: Tensor | None = None) -> Tensor:
        """This step's contribution: m u + g, or m (u + g) + g. State changes only once the step is known finite."""
        out = torch.empty_like(g) if out is None else out
        out.copy_(self.velocity[name])
        if self.method.nesterov:
            out.add_(g)
        return out.mul_(self.method.momentum).add_(g)

    def _advance(self, name: str, g: Tensor) -> Tensor:
        """u <- m u + g, or m (u + g)."""
        u = self.velocity[name]
        return u.add_(g).mul_(self.method.momentum) if self.method.nesterov else u.mul_(self.method.momentum).add_(g)

    def _remember(
        self,
        sent: Mapping[str, Tensor],
        fresh: Mapping[str, Tensor],
        sums: Mapping[str, Tensor],
        codecs: Mapping[str, Codec],
    ) -> None:
        """Advance u and v, and clear the entries that were sent. v keeps the rounding error of their values."""
        for name, g in fresh.items():
            u = self._advance(name, g)
            values = codecs[name].decode(sent[name], g.numel())
            torch.sub(sums[name], values, out=self.unsent[name])
            if self.method.factor_masking:
                u.masked_fill_(values != 0, 0.0)

    def _parts(self, packet: Tensor, fresh: Mapping[str, Tensor], codecs: Mapping[str, Codec]) -> dict[str, Tensor]:
        """Each parameter's part of the last dimension, by name."""
        sizes = [codecs[name].packet_bytes(g.numel()) for name, g in fresh.items()]
        return dict(zip(fresh, packet.split(sizes, dim=-1), strict=True))

    def _mean_of(self, gathered: Tensor, fresh: Mapping[str, Tensor], codecs: Mapping[str, Codec]) -> dict[str, Tensor]:
        """Sum of the nodes' entries, in order, divided by their number; whole parameters."""
        grid, outs = self.grid, {}
        for name, parts in self._parts(gathered, fresh, codecs).items():
            out = torch.zeros(grid.local_size, fresh[name].numel())
            for node in range(grid.num_nodes):
                for i in range(grid.local_size):
                    codecs[name].decode_add(parts[i, node], out[i])
            shape = self.shapes[name]
            outs[name] = out.div_(grid.num_nodes).view(-1)[: shape.numel()].view(shape)
        return outs

    def sent_bytes(self) -> dict[str, int]:
        slices = {name: self.slice_length(shape) for name, shape in self.shapes.items() if is_compressed(shape)}
        codecs = self._codecs(slices, self.method.settled_after)
        packet_bytes = sum(codecs[name].packet_bytes(length) for name, length in slices.items())
        return added(self.exact_bytes(), gather_bytes(self.grid, packet_bytes))

    def rows(self) -> list[Row]:
        method, shapes, num_sparse = self.method, self.shapes, sum(map(is_compressed, self.shapes.values()))
        stages = ", ".join(f"{density:g}" for density in method.warmup)
        warmup = (f"{stages} for {method.stage_steps} steps each", "warm-up") if method.warmup else ("none", "")
        effect = f"{num_sparse} of {len(shapes)} as {method.codec(method.density)}, the others in fp32"
        kinds = [("gradients", effect, "one all_gather"), ("densities before", *warmup)]
        return [*kinds, *self.common_rows(), *self._unchecked]
