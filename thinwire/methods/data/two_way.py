"""Gradients compressed on the way to a slice's owner and on the way back, with error feedback on both sides."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.checkpoint import Debt
from thinwire.codecs import Codec, RandomK, derive_seed
from thinwire.collectives import Topology
from thinwire.collectives.feedback import Lost
from thinwire.collectives.gather import all_gather
from thinwire.collectives.link import Link
from thinwire.collectives.reduce import added, all_reduce_bytes, reduce_scatter, slice_length
from thinwire.collectives.rounds import Rounds
from thinwire.collectives.together import together
from thinwire.errors import ConfigError
from thinwire.layout.segments import Segments
from thinwire.layout.slices import Slices
from thinwire.methods.data.ddp import DDPMethod
from thinwire.methods.data.reductions import (
    FP32,
    OPERATION,
    Bucket,
    Reduction,
    Step,
    seed_of,
    sum_over_ranks,
)
from thinwire.methods.gradient_codecs import GradientCodec
from thinwire.methods.options import check_types
from thinwire.state.clipping import Clip
from thinwire.state.memory import Memory
from thinwire.state.portable import GRADIENTS, Owed

FP32_BYTES = 4


@dataclass(frozen=True)
class TwoWay(DDPMethod):
    """Every rank is the server of its slice of every gradient: it takes compressed pieces and gives a compressed sum.

    For the gradient g_i of rank i, and slice j, which rank j owns:
        push    c_i = C(g_i + (lr_before/lr) e_i)                     e_i <- what C lost
        pull    c   = C(sum_i c_i + (lr_before/lr) e)                 e   <- what C lost, on the slice's owner
        g takes the value c / P
    Inside a node gradients are summed in fp32 first, so that i counts nodes; where there is one node, it counts ranks.
    codec: "sign", "topk", "randomk" (all ranks draw the same elements), "natural" (powers of two) or "integer".
    density: of topk and randomk, 0.01 by default. bits: of natural and integer, 4 by default. error_feedback: keep e_i
    and e. By default on for sign, topk and randomk; off, randomk, natural and integer take their unbiased form.
    min_bytes: smaller tensors, and vectors, travel in fp32. chunk_bytes: large tensors are cut, and small ones put
    together, into messages of about so much fp32. threads: that compress, a message each; one that is ready travels
    while others are compressed, and the communication thread serves other jobs. find_unused_parameters: as for ddp.

    Raises ConfigError for values that the codec refuses or does not take.
    Source: Zhong, Xie, Zheng and Lin, "Compressed Communication for Distributed Training: Adaptive Methods and System"
    (2021).
    """

    uses_learning_rates = True
    not_on_zero = "sends gradients back, which zero does not; ZeroCompressed is its way there"

    codec: str = "sign"
    density: float | None = None
    bits: int | None = None
    error_feedback: bool | None = None
    min_bytes: int = 1_024_000
    chunk_bytes: int = 4_096_000
    threads: int = 2
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        self.push  # noqa: B018  what does not fit each other shall be said now
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
    def gradient_codec(self) -> GradientCodec:
        """C by its name and options."""
        return GradientCodec("two-way", self.codec, self.density, self.bits, self.error_feedback)

    @property
    def feeds_back(self) -> bool:
        """Whether what C loses is kept."""
        return self.gradient_codec.feeds_back

    @property
    def push(self) -> Codec:
        """C on the way to the owner."""
        return self.gradient_codec.make()

    @property
    def pull(self) -> Codec:
        """C on the way back. All ranks have drawn the same elements, so their sum needs no scale of its own."""
        push = self.push
        return replace(push, unbiased=False) if isinstance(push, RandomK) else push

    def reduction(self, world_size: int, seed: int) -> Reduction:
        return TwoWayMean(self, seed)


@dataclass(frozen=True)
class Piece:
    """Elements [start, end) of a parameter."""

    name: str
    number: int
    start: int
    end: int

    def of(self, grads: Mapping[str, Tensor]) -> Tensor:
        """The piece of its gradient, flat, a view."""
        return grads[self.name].view(-1)[self.start : self.end]


class TwoWayMean:
    """What is remembered, by parameter and piece: `worker`, e_i, and `server`, e of this rank's slice; and the `lr`.

    Both are in units of the sum over ranks.
    """

    def __init__(self, method: TwoWay, seed: int) -> None:
        self.method, self.push, self.pull = method, method.push, method.pull
        self.seed = seed
        self.memory = Memory()
        self._grid: Topology | None = None
        self._rank = 0

    def run(self, link: Link, bucket: Bucket, step: Step) -> Rounds[None]:
        self._grid, self._rank = link.topology, link.rank
        grads = dict(zip(bucket.names, bucket.grads, strict=True))
        dense = [grad for grad in grads.values() if not self._is_compressed(grad.shape)]
        pieces = [p for name, grad in grads.items() for p in self._pieces(name, grad.shape, link.topology)]
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
                for piece, whole in zip(chunk, self._slices(chunk, link.topology).unpack(total), strict=True):
                    piece.of(grads).copy_(whole)
            bucket.flat.div_(link.topology.world_size)

    def _sum(
        self, link: Link, chunk: list[Piece], grads: dict[str, Tensor], step: Step, ratios: dict[str, float]
    ) -> Rounds[Tensor]:
        """The sum over ranks of some pieces, slice by slice: fp32 [world_size, n]."""
        grid, operation, slices = link.topology, OPERATION, self._slices(chunk, link.topology)
        between = grid.num_nodes > 1
        seeds = tuple(derive_seed(seed_of(self.seed, step.number, piece.name), piece.number) for piece in chunk)
        is_shared = self.method.codec == "randomk"
        push = Segments(self.push, slices.lengths, seeds, is_shared)
        pull = Segments(self.pull, slices.lengths, seeds, is_shared)
        own = link.scratch("own", grid.world_size, slices.length, dtype=torch.float32)

        def lay_out() -> Lost | None:
            slices.pack((piece.of(grads) for piece in chunk), own)
            return self._lost(link, chunk, ratios) if self.method.feeds_back else None

        lost = yield from link.work("encode_s", operation, lay_out)
        shard = yield from reduce_scatter(
            link, own.view(-1), FP32 if between else push, push, seed=self.seed, operation=operation, lost=lost
        )
        total = yield from all_gather(
            link, shard, pull, seed=self.seed, counter=link.rank * slices.length, operation=operation,
            lost=None if lost is None else lost.gather,
        )  # fmt: skip
        if lost is not None:
            for piece, worker, server in self._by_piece(chunk, lost, grid):
                self.memory.put(piece.name, f"worker {piece.number}", worker.clone())
                self.memory.put(piece.name, f"server {piece.number}", server.clone())
        return total

    # ---------------------------------------------------------------- what travels together

    def _is_compressed(self, shape: torch.Size) -> bool:
        return len(shape) >= 2 and FP32_BYTES * shape.numel() >= max(self.method.min_bytes, 1)

    def _pieces(self, name: str, shape: torch.Size, grid: Topology) -> Iterator[Piece]:
        """A parameter in pieces of at most about chunk_bytes, cut where slices and blocks end; none if it is dense."""
        if not self._is_compressed(shape):
            return
        unit = slice_length(1, grid.world_size, self.push, self.pull) * grid.world_size
        most = max(unit, self.method.chunk_bytes // FP32_BYTES // unit * unit)
        for number, start in enumerate(range(0, shape.numel(), most)):
            yield Piece(name, number, start, min(start + most, shape.numel()))

    def _slices(self, chunk: Sequence[Piece], grid: Topology) -> Slices:
        return Slices.of((piece.end - piece.start for piece in chunk), grid.world_size, self.push, self.pull)

    def _chunks(self, pieces: list[Piece]) -> Iterator[list[Piece]]:
        """Neighbours that make up about chunk_bytes."""
        chunk: list[Piece] = []
        for piece in pieces:
            if chunk and FP32_BYTES * sum(p.end - p.start for p in [*chunk, piece]) > self.method.chunk_bytes:
                yield chunk
                chunk = []
            chunk.append(piece)
        if chunk:
            yield chunk

    # ---------------------------------------------------------------- what is remembered

    def _ratio(self, name: str, step: Step) -> float:
        """lr of the last step over this one's, by which an error weighs more or less; 1 where either is not known."""
        now, before = step.lrs.get(name, 0.0), self.memory.peek(name, "lr")
        if now > 0:
            self.memory.put(name, "lr", torch.tensor(now, dtype=torch.float64))
        return float(before) / now if before is not None and now > 0 else 1.0

    def _lost(self, link: Link, chunk: list[Piece], ratios: dict[str, float]) -> Lost:
        """The errors of a chunk's pieces side by side, worth what they are at this step's learning rate."""
        grid = link.topology
        between = grid.num_nodes > 1
        lost = Lost.zeros(grid, self._slices(chunk, grid).length)
        lost = Lost(None if between else lost.intra, lost.inter, lost.gather)
        for piece, worker, server in self._by_piece(chunk, lost, grid):
            for kind, place in (("worker", worker), ("server", server)):
                held = self.memory.peek(piece.name, f"{kind} {piece.number}")
                if held is not None:
                    torch.mul(held, ratios[piece.name], out=place)
        return lost

    def _by_piece(self, chunk: list[Piece], lost: Lost, grid: Topology) -> Iterator[tuple[Piece, Tensor, Tensor]]:
        """Each piece with its part of what workers lost and of what the server lost, as views."""
        worker = lost.inter if lost.inter is not None else lost.intra
        assert worker is not None and lost.gather is not None
        lengths = self._slices(chunk, grid).lengths
        yield from zip(chunk, worker.split(lengths, dim=-1), lost.gather.split(lengths), strict=True)

    def residuals(self) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {}
        for name, kinds in self.memory.held.items():
            for number in range(sum(kind.startswith("server") for kind in kinds)):
                lost = self._lost_of(name, number)
                assert lost is not None and self._grid is not None
                found.setdefault(name, []).append(lost.by_slices(self._grid, self._rank).view(-1))
        return {name: torch.cat(parts) for name, parts in found.items()}

    def debts(self, shapes: Mapping[str, torch.Size], grid: Topology, rank: int) -> list[Debt]:
        pieces = [piece for name, shape in shapes.items() for piece in self._pieces(name, shape, grid)]
        return [debt for piece in pieces for debt in self._debts_of(piece, grid, rank)]

    def owe(self, shapes: Mapping[str, torch.Size], grid: Topology, rank: int, owed: Owed) -> None:
        self._grid, self._rank, self.memory = grid, rank, Memory()
        for name, shape in shapes.items():
            # One rank sends nothing, so that nothing is lost, and nobody pays what was.
            value = owed(GRADIENTS, name) if self.method.feeds_back and grid.world_size > 1 else None
            for piece in self._pieces(name, shape, grid) if value is not None else ():
                assert value is not None
                length = self._slices([piece], grid).length
                whole = F.pad(value[piece.start : piece.end], (0, grid.world_size * length - piece.end + piece.start))
                zeros = Lost.zeros(grid, length)
                lost = Lost(None if grid.num_nodes > 1 else zeros.intra, zeros.inter, zeros.gather)
                lost.owe(whole, grid, rank)
                for _, worker, server in self._by_piece([piece], lost, grid):
                    self.memory.put(name, f"worker {piece.number}", worker)
                    self.memory.put(name, f"server {piece.number}", server)

    def _debts_of(self, piece: Piece, grid: Topology, rank: int) -> Iterator[Debt]:
        """What lies where of the piece's errors, without what fills slices up."""
        if (lost := self._lost_of(piece.name, piece.number)) is None:
            return
        for tensor, start, place, length in lost.places(grid, rank):
            path = f"{piece.name}/{'server' if tensor is lost.gather else 'worker'} {piece.number}"
            length = min(length, piece.end - piece.start - place)
            yield Debt(GRADIENTS, piece.name, path, start, piece.start + place, max(length, 0), 1 / grid.world_size)

    def _lost_of(self, name: str, number: int) -> Lost | None:
        """The errors that are held of a piece."""
        worker, server = (self.memory.peek(name, f"{kind} {number}") for kind in ("worker", "server"))
        if worker is None or server is None:
            return None
        return Lost(worker, None, server) if worker.dim() == 3 else Lost(None, worker, server)

    def forgive(self, clip: Clip) -> None:
        for kinds in self.memory.held.values():
            for kind in kinds.keys() - {"lr"}:
                kinds[kind].mul_(clip.share)

    def forget(self) -> list[str]:
        return self.memory.forget()

    def state_dict(self) -> dict[str, Any]:
        return self.memory.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.memory.load_state_dict(state)

    # ---------------------------------------------------------------- what is said of it

    def sent_bytes(self, shapes: Mapping[str, torch.Size], grid: Topology) -> dict[str, int]:
        dense = [shape.numel() for shape in shapes.values() if not self._is_compressed(shape)]
        total = Slices.of(dense, grid.world_size, FP32).all_reduce_bytes(grid, FP32)
        for name, shape in shapes.items():
            for piece in self._pieces(name, shape, grid):
                intra = FP32 if grid.num_nodes > 1 else self.push
                length = self._slices([piece], grid).length
                total = added(total, all_reduce_bytes(grid.world_size * length, grid, intra, self.push, self.pull))
        return total

    def kept_bytes(self, shapes: Mapping[str, torch.Size], grid: Topology) -> dict[str, int]:
        if not self.method.feeds_back:
            return {}
        pieces = [piece for name, shape in shapes.items() for piece in self._pieces(name, shape, grid)]
        length = sum(self._slices([piece], grid).length for piece in pieces)
        worker = grid.num_nodes if grid.num_nodes > 1 else grid.local_size
        return {"error feedback": 4 * length * (worker + 1)}

    def rows(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, str, str]]:
        method = self.method
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
        ]


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads of this process that pack and unpack; the kernels leave Python's lock alone."""
    return ThreadPoolExecutor(threads, thread_name_prefix="thinwire-codec")
