"""Gradients compressed on the way to a slice's owner and on the way back, with error feedback on both sides."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from thinwire.codecs import Codec, RandomK, derive_seed
from thinwire.collectives import staging
from thinwire.collectives.feedback import Lost
from thinwire.collectives.gather import all_gather
from thinwire.collectives.link import Link
from thinwire.collectives.reduce import added, all_reduce_bytes, reduce_scatter
from thinwire.collectives.rounds import Rounds
from thinwire.collectives.together import together
from thinwire.errors import ConfigError
from thinwire.layout.layout import Layout, Span
from thinwire.layout.sections import Sections
from thinwire.layout.zeros import describe_zeros
from thinwire.methods.ddp import DDPMethod
from thinwire.methods.options import check_types, codec_of, with_feedback
from thinwire.methods.reduction import (
    FP32,
    FP32_BYTES,
    OPERATION,
    Bucket,
    Reduction,
    Step,
    seed_of,
    sum_bytes,
    sum_over_ranks,
)
from thinwire.state.memory import Kept, KeptSpan, Merge, Place, Residual
from thinwire.table import Row


@dataclass(frozen=True)
class TwoWay(DDPMethod):
    """Every rank is the server of its slice of every gradient: it gets compressed pieces and sends a compressed sum.

    For the gradient g_i of rank i, and slice j, which rank j owns:
        push    c_i = C(g_i + (lr_before/lr) e_i)                     e_i <- error of C
        pull    c   = C(sum_i c_i + (lr_before/lr) e)                 e   <- error of C, on the slice's owner
        g becomes c / P
    Inside a node gradients are summed in fp32 first, so i counts nodes; with a single node, it counts ranks. A message
    that is ready travels while others are compressed, and the communication thread runs other jobs.

    Raises ConfigError for a codec that is no contraction with error feedback, or not unbiased without.
    Source: Zhong, Xie, Zheng and Lin, "Compressed Communication for Distributed Training: Adaptive Methods and System"
    (2021).
    """

    uses_learning_rates = True
    not_on_zero = "sends gradients back, which zero does not; ZeroCompressed is its way there"

    codec: str = "sign/512"
    """Codec of the gradients of matrices, such as topk1%/1024, randomk1%:bf16:biased (all ranks draw the same elements)
    or int4."""
    error_feedback: bool | None = None
    """Keep what the codec loses, in both directions, and send it later.

    By default on, except with an unbiased codec."""
    min_bytes: int = 1_024_000
    """Tensors of fewer fp32 bytes, and vectors, travel in fp32; at least 0."""
    chunk_bytes: int = 4_096_000
    """Cut large tensors, and join small ones, into messages of about this many fp32 bytes; at least 65536."""
    threads: int = 2
    """Threads that compress, a message each; at least 1."""
    find_unused_parameters: bool = False
    """DDP's own option; set it for a model that leaves out parameters in some steps."""

    def __post_init__(self) -> None:
        check_types(self)
        with_feedback(self, "codec", self.error_feedback)
        for option, lowest in (("min_bytes", 0), ("chunk_bytes", 1 << 16), ("threads", 1)):
            value = getattr(self, option)
            if value < lowest:
                raise ConfigError(f"{option} {value} of two-way: must be at least {lowest}; nearest: {lowest}")

    @property
    def name(self) -> str:
        return "two-way"

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return self.push, self.pull

    @property
    def feeds_back(self) -> bool:
        """Whether the codec's errors are kept."""
        return with_feedback(self, "codec", self.error_feedback)[1]

    @property
    def push(self) -> Codec:
        """C on the way to the owner."""
        return codec_of(self, "codec")

    @property
    def pull(self) -> Codec:
        """C on the way back. All ranks have drawn the same elements, so their sum needs no scale of its own."""
        push = self.push
        return replace(push, unbiased=False) if isinstance(push, RandomK) else push

    def reduction(self, place: Place, seed: int) -> Reduction:
        return TwoWayMean(self, place, seed)


class TwoWayMean(Reduction):
    """State by piece: `worker`, e_i, and `server`, e of this rank's slice; and the last learning rates.

    Both errors are in units of the sum over ranks, in the shapes of Lost.
    """

    def __init__(self, method: TwoWay, place: Place, seed: int) -> None:
        super().__init__(place)
        self.method, self.push, self.pull = method, method.push, method.pull
        self.grid, self.seed = place.grid, seed
        is_kept = method.feeds_back and self.grid.world_size > 1
        pieces = (piece for name, shape in place.shapes.items() for piece in self._pieces(name, shape))
        self._kept = {_key(piece): piece for piece in pieces if is_kept}
        # Ranks keep errors of their own gradients, or one on each node that of the node's slice.
        holders = self.grid.num_nodes if self.grid.num_nodes > 1 else self.grid.world_size
        self.worker, self.server = self._add("worker", _worker_of, holders), self._add("server", _server_of, 1)
        self.last_lr = self.state.add("lr", Merge.OWN)

    def run(self, link: Link, bucket: Bucket, step: Step) -> Rounds[None]:
        grads = dict(zip(bucket.names, bucket.grads, strict=True))
        dense = [grad for grad in grads.values() if not self._is_compressed(grad.shape)]
        pieces = [p for name, grad in grads.items() for p in self._pieces(name, grad.shape)]
        ratios = {piece.name: 1.0 for piece in pieces}
        if self.method.feeds_back:
            ratios = {name: self._ratio(name, step) for name in ratios}
        chunks = list(self._chunks(pieces))
        helped = replace(link, pool=_pool(self.method.threads))
        sums, *totals = yield from together(
            sum_over_ranks(link.part(0), dense),
            *(self._sum(helped.part(n), chunk, grads, step, ratios) for n, chunk in enumerate(chunks, 1)),
        )
        with link.timed("decode_s", OPERATION):
            for grad, total in zip(dense, sums, strict=True):
                grad.copy_(total)
            for chunk, total in zip(chunks, totals, strict=True):
                for piece, whole in zip(chunk.spans, chunk.unpack(total), strict=True):
                    piece.part(grads[piece.name]).copy_(whole)
            bucket.flat.div_(link.topology.world_size)

    def _sum(
        self, link: Link, chunk: Layout, grads: dict[str, Tensor], step: Step, ratios: dict[str, float]
    ) -> Rounds[Tensor]:
        """The sum over ranks of some pieces, slice by slice: fp32 [world_size, n]."""
        grid, operation = link.topology, OPERATION
        between = grid.num_nodes > 1
        seeds = [
            derive_seed(seed_of(self.seed, step.number, piece.name), piece.offset // self._piece_numel)
            for piece in chunk.spans
        ]
        is_shared = isinstance(self.push, RandomK)
        push, pull = (
            Sections.alone(codec, chunk.lengths, seeds, is_shared=is_shared) for codec in (self.push, self.pull)
        )
        own = link.scratch("own", chunk.rows, chunk.width, dtype=torch.float32)

        def lay_out() -> Lost | None:
            chunk.pack((piece.part(grads[piece.name]) for piece in chunk.spans), own)
            return self._lost(chunk, ratios) if self.method.feeds_back else None

        lost = yield from link.work("encode_s", operation, lay_out)
        shard = yield from reduce_scatter(
            link, own.view(-1), FP32 if between else push, push, seed=self.seed, operation=operation, lost=lost
        )
        total = yield from all_gather(
            link, shard, pull, seed=self.seed, counter=link.rank * chunk.width, operation=operation,
            lost=None if lost is None else lost.gather,
        )  # fmt: skip
        if lost is not None:
            for piece, worker, server in self._by_piece(chunk, lost):
                self.worker[_key(piece)], self.server[_key(piece)] = worker.clone(), server.clone()
        return total

    def _is_compressed(self, shape: torch.Size) -> bool:
        return len(shape) >= 2 and FP32_BYTES * shape.numel() >= max(self.method.min_bytes, 1)

    @property
    def _block(self) -> int:
        """Slices are whole blocks of both codecs."""
        return math.lcm(self.push.block, self.pull.block)

    @property
    def _piece_numel(self) -> int:
        """The most elements of a piece of a parameter."""
        unit = self._block * self.grid.world_size
        return max(unit, self.method.chunk_bytes // FP32_BYTES // unit * unit)

    def _pieces(self, name: str, shape: torch.Size) -> Iterator[Span]:
        """A parameter in pieces of at most about chunk_bytes, cut at ends of slices and blocks.

        Empty if it travels in fp32.
        """
        if not self._is_compressed(shape):
            return
        most = self._piece_numel
        for start in range(0, shape.numel(), most):
            yield Span(name, torch.Size([min(most, shape.numel() - start)]), offset=start)

    def _beside(self, pieces: Sequence[Span]) -> Layout:
        """A message of these pieces."""
        return Layout.beside(pieces, self.grid.world_size, self._block)

    def _chunks(self, pieces: list[Span]) -> Iterator[Layout]:
        """Messages of neighbouring pieces that have about chunk_bytes together."""
        chunk: list[Span] = []
        for piece in pieces:
            if chunk and FP32_BYTES * sum(p.numel for p in [*chunk, piece]) > self.method.chunk_bytes:
                yield self._beside(chunk)
                chunk = []
            chunk.append(piece)
        if chunk:
            yield self._beside(chunk)

    def _ratio(self, name: str, step: Step) -> float:
        """lr of the last step divided by this step's, the factor of an error; 1 if either is unknown."""
        now, before = step.lrs.get(name, 0.0), self.last_lr.get(name)
        if now > 0:
            self.last_lr[name] = torch.tensor(now, dtype=torch.float64)
        return float(before) / now if before is not None and now > 0 else 1.0

    def _lost(self, chunk: Layout, ratios: dict[str, float]) -> Lost:
        """The errors of a chunk's pieces side by side, scaled to this step's learning rate."""
        lost = self._zeros(chunk)
        for piece, worker, server in self._by_piece(chunk, lost):
            for kept, place in ((self.worker, worker), (self.server, server)):
                if (held := kept.get(_key(piece))) is not None:
                    torch.mul(held, ratios[piece.name], out=place)
        return lost

    def _zeros(self, chunk: Layout, device: torch.device = staging.CPU) -> Lost:
        """Zero errors: for what a rank sends to nodes (with one node, to ranks), and for its slice's sum."""
        lost = Lost.zeros(self.grid, chunk.width, device)
        return replace(lost, intra=None) if self.grid.num_nodes > 1 else lost

    def _by_piece(self, chunk: Layout, lost: Lost) -> Iterator[tuple[Span, Tensor, Tensor]]:
        """Each piece with its part of the workers' and of the server's errors, as views."""
        workers, servers = _worker_of(lost).split(chunk.lengths, dim=-1), _server_of(lost).split(chunk.lengths)
        yield from zip(chunk.spans, workers, servers, strict=True)

    def _add(self, kind: str, part_of: Callable[[Lost], Tensor], holders: int) -> Kept:
        """Keep a part of the errors of each piece. holders: number of ranks that keep each element."""
        shapes = {key: part_of(self._alone(piece)).shape for key, piece in self._kept.items()}
        spans_of = partial(self._spans, part_of, holders)
        return self.state.add(kind, Residual(), spans_of=spans_of, shapes=shapes, row="error feedback")

    def _alone(self, piece: Span) -> Lost:
        """Errors of one piece, without memory."""
        return self._zeros(self._beside([piece]), torch.device("meta"))

    def _spans(
        self, part_of: Callable[[Lost], Tensor], holders: int, key: str, shape: torch.Size
    ) -> Iterator[KeptSpan]:
        """The spans of the parameter to which one part of a piece's errors belongs, without the padding of slices."""
        piece = self._kept[key]
        lost = self._alone(piece)
        for tensor, start, place, length in lost.places(self.grid, self.place.rank):
            if tensor is part_of(lost):
                length = min(length, piece.numel - place)
                yield KeptSpan(start, piece.offset + place, length, self.grid.world_size, holders, piece.name)

    def sent_bytes(self) -> dict[str, int]:
        shapes, grid = self.place.shapes, self.grid
        dense = [shape.numel() for shape in shapes.values() if not self._is_compressed(shape)]
        total = sum_bytes(dense, grid, FP32)
        intra = FP32 if grid.num_nodes > 1 else self.push
        for name, shape in shapes.items():
            for piece in self._pieces(name, shape):
                total = added(total, all_reduce_bytes(self._beside([piece]).numel, grid, intra, self.push, self.pull))
        return total

    def rows(self) -> list[Row]:
        method, shapes = self.method, self.place.shapes
        large = [shape for shape in shapes.values() if self._is_compressed(shape)]
        memory = f"{4e-6 * sum(shape.numel() for shape in large):.3f} MB a rank, and what it owns of that"
        feedback = ("on", memory) if method.feeds_back else ("off", "the codec is unbiased")
        return [
            (
                "gradients",
                f"{len(large)} of {len(shapes)} as {self.push}",
                f"the others in fp32: vectors, and what has less than {method.min_bytes:,} bytes",
            ),
            ("gradients on the way back", f"{self.pull}", ""),
            ("error feedback, both sides", *feedback),
            ("messages", f"of {method.chunk_bytes:,} bytes before compression", f"by {method.threads} thread(s)"),
            *describe_zeros([self.push, self.pull]),
        ]


def _worker_of(lost: Lost) -> Tensor:
    """The errors on the way to the owner."""
    worker = lost.inter if lost.inter is not None else lost.intra
    assert worker is not None
    return worker


def _server_of(lost: Lost) -> Tensor:
    """The owner's errors on the way back."""
    assert lost.gather is not None
    return lost.gather


def _key(piece: Span) -> str:
    return f"{piece.name} {piece.offset}"


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads of this process that pack and unpack; the kernels release Python's lock."""
    return ThreadPoolExecutor(threads, thread_name_prefix="thinwire-codec")
