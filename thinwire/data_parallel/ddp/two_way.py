"""Gradients compressed on the way to a slice's owner and on the way back, with error feedback on both sides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec, RandomK, derive_seed
from thinwire.collectives import Topology
from thinwire.collectives.algorithms import (
    Link,
    Lost,
    all_gather,
    all_reduce_bytes,
    reduce_scatter,
    slice_length,
    together,
)
from thinwire.collectives.exchange import Rounds
from thinwire.data_parallel.ddp.reductions import (
    FP32,
    OPERATION,
    Bucket,
    Memory,
    Reduction,
    Step,
    seed_of,
    sum_over_ranks,
)
from thinwire.data_parallel.ddp.segments import Segments
from thinwire.data_parallel.ddp.strategies import OnDDP
from thinwire.data_parallel.gradient_codecs import GradientCodec
from thinwire.errors import ConfigError

FP32_BYTES = 4


@dataclass(frozen=True)
class TwoWay(OnDDP):
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
    together, into messages of about so much fp32; while one travels the next is compressed. threads: that compress.
    find_unused_parameters: as for ddp.

    Raises ConfigError for values that the codec refuses or does not take.
    Source: Zhong, Xie, Zheng and Lin, "Compressed Communication for Distributed Training: Adaptive Methods and System"
    (2021).
    """

    uses_learning_rates = True

    codec: str = "sign"
    density: float | None = None
    bits: int | None = None
    error_feedback: bool | None = None
    min_bytes: int = 1_024_000
    chunk_bytes: int = 4_096_000
    threads: int = 2
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
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
    """Elements [start, end) of a parameter, in one slice of `length` for each rank; zeros fill up the last ones."""

    name: str
    number: int
    start: int
    end: int
    length: int


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
        sums, *totals = yield from together(
            sum_over_ranks(link.part(0), dense),
            *(self._sum(link.part(n), chunk, grads, step, ratios) for n, chunk in enumerate(chunks, 1)),
        )
        with link.timed("decode_s", OPERATION):
            for grad, total in zip(dense, sums, strict=True):
                grad.copy_(total)
            for chunk, slices in zip(chunks, totals, strict=True):
                for piece, part in zip(chunk, slices.split([piece.length for piece in chunk], dim=1), strict=True):
                    whole = part.reshape(-1)[: piece.end - piece.start]
                    grads[piece.name].view(-1)[piece.start : piece.end].copy_(whole)
            bucket.flat.div_(link.topology.world_size)

    def _sum(
        self, link: Link, chunk: list[Piece], grads: dict[str, Tensor], step: Step, ratios: dict[str, float]
    ) -> Rounds[Tensor]:
        """The sum over ranks of some pieces, slice by slice: fp32 [world_size, n]."""
        grid, operation = link.topology, OPERATION
        lengths = tuple(piece.length for piece in chunk)
        seeds = tuple(derive_seed(seed_of(self.seed, step.number, piece.name), piece.number) for piece in chunk)
        is_shared, threads = self.method.codec == "randomk", self.method.threads
        push = Segments(self.push, lengths, seeds, is_shared, threads)
        pull = Segments(self.pull, lengths, seeds, is_shared, threads)
        with link.timed("encode_s", operation):
            own = link.scratch("own", grid.world_size, sum(lengths), dtype=torch.float32)
            for piece, place in zip(chunk, own.split(lengths, dim=1), strict=True):
                grad = grads[piece.name].view(-1)[piece.start : piece.end]
                padded = torch.nn.functional.pad(grad, (0, place.numel() - grad.numel()))
                place.copy_(padded.view(place.shape))
            lost = self._lost(link, chunk, ratios) if self.method.feeds_back else None
        between = grid.num_nodes > 1
        shard = yield from reduce_scatter(
            link, own.view(-1), FP32 if between else push, push, seed=self.seed, operation=operation, lost=lost
        )
        total = yield from all_gather(
            link, shard, pull, seed=self.seed, counter=link.rank * sum(lengths), operation=operation,
            lost=None if lost is None else lost.gather,
        )  # fmt: skip
        if lost is not None:
            self._keep(chunk, lost)
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
            end = min(start + most, shape.numel())
            length = slice_length(end - start, grid.world_size, self.push, self.pull)
            yield Piece(name, number, start, end, length)

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
        lost = Lost.zeros(grid, sum(piece.length for piece in chunk))
        lost = Lost(None if between else lost.intra, lost.inter, lost.gather)
        for piece, worker, server in _by_piece(chunk, lost):
            for kind, place in (("worker", worker), ("server", server)):
                held = self.memory.peek(piece.name, f"{kind} {piece.number}")
                if held is not None:
                    torch.mul(held, ratios[piece.name], out=place)
        return lost

    def _keep(self, chunk: list[Piece], lost: Lost) -> None:
        for piece, worker, server in _by_piece(chunk, lost):
            self.memory.put(piece.name, f"worker {piece.number}", worker.clone())
            self.memory.put(piece.name, f"server {piece.number}", server.clone())

    def residuals(self) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {}
        for name, kinds in self.memory.held.items():
            for number in range(sum(kind.startswith("server") for kind in kinds)):
                worker, server = kinds[f"worker {number}"], kinds[f"server {number}"]
                assert self._grid is not None
                lost = Lost(worker, None, server) if worker.dim() == 3 else Lost(None, worker, server)
                found.setdefault(name, []).append(lost.by_slices(self._grid, self._rank).view(-1))
        return {name: torch.cat(parts) for name, parts in found.items()}

    def forget(self) -> list[str]:
        return self.memory.forget()

    def state_dict(self) -> dict[str, Any]:
        return self.memory.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.memory.load_state_dict(state)

    # ---------------------------------------------------------------- what is said of it

    def sent_bytes(self, shapes: Mapping[str, torch.Size], grid: Topology) -> int:
        dense = sum(shape.numel() for shape in shapes.values() if not self._is_compressed(shape))
        total = all_reduce_bytes(dense, grid, FP32, FP32, FP32)
        for name, shape in shapes.items():
            for piece in self._pieces(name, shape, grid):
                intra = FP32 if grid.num_nodes > 1 else self.push
                total += all_reduce_bytes(grid.world_size * piece.length, grid, intra, self.push, self.pull)
        return total

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


def _by_piece(chunk: list[Piece], lost: Lost) -> Iterator[tuple[Piece, Tensor, Tensor]]:
    """Each piece with its part of what workers lost and of what the server lost."""
    worker = lost.inter if lost.inter is not None else lost.intra
    assert worker is not None and lost.gather is not None
    lengths = [piece.length for piece in chunk]
    yield from zip(chunk, worker.split(lengths, dim=-1), lost.gather.split(lengths), strict=True)
