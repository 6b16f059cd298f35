"""Shared by DGC and 1-bit Adam: all gradients of a step at once, clipped by rank, averaged by node, cut into slices.

Inside a node gradients are summed in fp32, and local rank i keeps slice i of every parameter. A method's state exists
once per node, in local_size parts. Each method defines what crosses between nodes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.collectives.link import Link
from thinwire.collectives.reduce import added, reduce_in_node
from thinwire.collectives.rounds import Rounds
from thinwire.collectives.together import together
from thinwire.errors import ConfigError
from thinwire.layout.layout import Layout
from thinwire.methods.ddp import DDPMethod
from thinwire.methods.reduction import FP32, FP32_BYTES, OPERATION, Bucket, Reduction, Step, sum_bytes, sum_over_ranks
from thinwire.state.memory import KeptSpan, Place
from thinwire.table import Row

# What came out, whole, by name; and what to call once it is known to be finite, before memory of the link is reused.
Compressed = tuple[dict[str, Tensor], Callable[[], None]]
# (dense means, what came out, whether all of it is finite)
ExchangedStep = tuple[dict[str, Tensor], dict[str, Tensor], bool]


class OnWholeStep(DDPMethod):
    """A method on DDP whose reduction is a WholeStep; all parameters must be used in every step."""

    whole_step: ClassVar[bool] = True
    find_unused_parameters: ClassVar[bool] = False

    def bind(
        self,
        reduction: Reduction,
        trained: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        assert isinstance(reduction, WholeStep)
        reduction.bind(trained, optimizer)


class WholeStep(Reduction):
    """A Reduction that holds buckets until the last has come, then takes all gradients of the step in one job.

    So results and messages do not depend on buckets, a rank's gradient can be clipped by its whole norm, and memory
    changes only where all that was received is finite: a step that is skipped leaves it as it was.

    clip: c > 0: every rank's gradient is scaled to a 2-norm of at most c sqrt(P) before anything else. P independent
    gradients of that norm have a mean of norm c. 0: no clipping.
    Source: DGC (ICLR 2018), section 3.2: there gradients count 1/P of the mean, and are clipped at c / sqrt(P).
    """

    def __init__(self, clip: float, place: Place) -> None:
        super().__init__(place)
        self.clip = clip
        self.shapes, self.grid, self.rank = place.shapes, place.grid, place.rank
        self._held: dict[str, Tensor] = {}

    @abstractmethod
    def bind(self, trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None) -> None:
        """Set the optimizer that takes the steps."""

    @abstractmethod
    def reduce(self, link: Link, grads: dict[str, Tensor], step: Step) -> Rounds[None]:
        """Overwrite the gradients of a step, by name in the model's order, once all messages have arrived."""

    @abstractmethod
    def compress(self, link: Link, grads: dict[str, Tensor], scale: float, step: Step) -> Rounds[Compressed]:
        """The results for the compressed parameters."""

    def unit(self) -> int:
        """Slices are multiples of this many elements."""
        return 1

    def run(self, link: Link, bucket: Bucket, step: Step) -> Rounds[None]:
        self._held.update(zip(bucket.names, bucket.grads, strict=True))
        if bucket.last:
            grads = {name: self._held[name] for name in self.shapes}
            self._held.clear()
            yield from self.reduce(link, grads, step)

    def local_scale(self, grads: Mapping[str, Tensor]) -> float:
        """The factor by which this rank's gradient is clipped.

        1 for a gradient that is not finite, which must stay visible.
        """
        if not self.clip:
            return 1.0
        norm, limit = float(nn.utils.get_total_norm(list(grads.values()))), self.clip * self.grid.world_size**0.5
        return limit / norm if math.isfinite(norm) and norm > limit else 1.0

    def dense_mean(self, link: Link, grads: Mapping[str, Tensor], scale: float, vote: float = 0.0) -> Rounds[Any]:
        """({name: mean over ranks}, sum of votes) by one all_reduce in fp32."""
        own = [grad.mul(scale) for grad in grads.values()]
        *sums, votes = yield from sum_over_ranks(link, [*own, torch.tensor([vote])])
        means = {name: total.div_(link.topology.world_size) for name, total in zip(grads, sums, strict=True)}
        return means, float(votes)

    def exchange(self, link: Link, grads: dict[str, Tensor], scale: float, step: Step) -> Rounds[ExchangedStep]:
        """Dense means and compressed outputs, side by side, and whether all of them are finite."""
        dense = {name: grad for name, grad in grads.items() if not is_compressed(grad.shape)}
        large = {name: grad for name, grad in grads.items() if is_compressed(grad.shape)}
        (means, _), (outs, remember) = yield from together(
            self.dense_mean(link.part(0), dense, scale), self.compress(link.part(1), large, scale, step)
        )
        if is_finite := all(bool(torch.isfinite(out).all()) for out in [*means.values(), *outs.values()]):
            remember()
        return means, outs, is_finite

    def node_mean(self, link: Link, grads: Mapping[str, Tensor], scale: float) -> Rounds[dict[str, Tensor]]:
        """This local rank's slices, by name, of the mean over the node; scratch of the link."""
        size = self.grid.local_size
        layout = Layout.of({name: grad.shape for name, grad in grads.items()}, size, self.unit())
        laid = link.scratch("laid", size, layout.width, dtype=torch.float32)
        layout.pack(grads.values(), laid).mul_(scale)
        mean = (yield from reduce_in_node(link, laid.view(-1), operation=OPERATION)).div_(size)
        return dict(zip(grads, mean.split(layout.lengths), strict=True))

    def slice_length(self, shape: torch.Size) -> int:
        """Elements of a slice of a parameter: ceil(n / local_size), rounded up to a multiple of `unit`."""
        return Layout.of({"": shape}, self.grid.local_size, self.unit()).width

    def slice_of(self, tensor: Tensor) -> Tensor:
        """This local rank's slice of a whole parameter-like tensor, flat, with zeros behind its end."""
        length, first = self.slice_length(tensor.shape), self.grid.local_rank(self.rank)
        own = tensor.reshape(-1)[first * length : (first + 1) * length]
        return F.pad(own, (0, length - own.numel()))

    def slice_shape(self, name: str, shape: torch.Size) -> torch.Size | None:
        """The shape of the state for a compressed parameter: its slice, flat."""
        return torch.Size([self.slice_length(shape)]) if is_compressed(shape) else None

    def slice_spans(self, name: str, shape: torch.Size) -> Iterator[KeptSpan]:
        """Spans of state that exists once per node: this local rank's slice, or whole and the same on every rank."""
        ranks, nodes = self.grid.world_size, self.grid.num_nodes
        if not is_compressed(shape):
            yield KeptSpan(0, 0, shape.numel(), ranks, ranks)
            return
        length = self.slice_length(shape)
        first = self.grid.local_rank(self.rank) * length
        yield KeptSpan(0, first, min(length, shape.numel() - first), nodes, nodes)

    def exact_bytes(self) -> dict[str, int]:
        """Payload of `dense_mean`, which carries one number more, and of `node_mean`."""
        shapes, grid = self.shapes, self.grid
        dense = [*(shape.numel() for shape in shapes.values() if not is_compressed(shape)), 1]
        slices = sum(self.slice_length(shape) for shape in shapes.values() if is_compressed(shape))
        inside = (grid.local_size - 1) * FP32_BYTES * slices
        return added(sum_bytes(dense, grid, FP32), {"intra": inside, "inter": 0})

    def common_rows(self) -> list[Row]:
        """Rows on clipping and nodes."""
        rows: list[Row] = []
        if self.clip:
            limit = self.clip * self.grid.world_size**0.5
            effect = f"each rank's gradient to a norm of {limit:.3g}, before it is compressed"
            rows.append((f"clip {self.clip:g}", effect, "clip sqrt(ranks); clipping what comes out has no effect"))
        else:
            rows.append(("clip 0", "nothing is clipped", "clipping what comes out would lose what was sent"))
        if self.grid.local_size > 1:
            rows.append(("inside a node", "dense mean in fp32, one memory per node", "the link is taken to be fast"))
        return rows


def is_compressed(shape: torch.Size) -> bool:
    """Whether a parameter is compressed: two dimensions or more, and not empty. Norms and biases travel in fp32."""
    return len(shape) > 1 and shape.numel() > 0


def check_clip(name: str, clip: float) -> None:
    """Raise ConfigError for a clip below 0."""
    if not 0 <= clip < float("inf"):
        raise ConfigError(f"clip {clip} of {name}: must be at least 0, which is no clipping; nearest: 0")
