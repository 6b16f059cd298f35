"""Options of expert parallelism: ranks and slices of the experts, and the codecs of rows that travel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from thinwire.codecs import Codec
from thinwire.errors import ConfigError, Problems, nearest
from thinwire.methods.options import EXACT, FIXED_SIZE, FP32, SAME_EACH_TIME, check_types, codec_or_none

# As many as Tutel has.
MOST_CHUNKS = 32
AUTO = "auto"
SAME: Final = "same"
MOVES = ("tokens", "slices", "experts")
CODED = ("dispatch", "combine", "gradients", "weights")


def in_groups(codec: Codec, size: int) -> str:
    """The text of a codec with groups of `size`, or of bf16, which has no groups, if the codec can't have that size."""
    text = str(codec).replace(f"/{codec.block}", f"/{size}", 1)
    try:
        return text if Codec.parse(text).block == size else "bf16"
    except ConfigError:
        return "bf16"


@dataclass(frozen=True)
class ExpertParallel:
    """Spreads the experts of each layer over neighbouring ranks, to which the tokens' rows travel; see ExpertPlacement.

    Raises ConfigError for values that can't work.
    """

    parallel: int | Literal["auto"] = 1
    """Ranks that share the experts of a layer. Each has tokens of its own.

    auto: in `thinwire train`, the number that needs the fewest seconds on the links, which are measured."""
    slices: int = 1
    """Ranks that share one expert, in slices of its hidden units; divides parallel."""
    move: str = "tokens"
    """What travels. tokens: each row, to all ranks of its expert.

    slices: these ranks exchange their slices, and a row goes to one of them; slices=R: a row goes to R of them, and
    each part of slices / R of them exchanges its slices; experts: every rank gathers all experts, and rows stay. auto,
    here and below: in `thinwire train`, what needs the fewest seconds in a simulated layer."""
    route: Literal["linear", "2dh", "once", "auto"] = "linear"
    """Path of rows. linear: from each rank to each; 2dh: inside a node first, then one message from node to node.

    once: a token enters each node once, and one sum comes back."""
    chunks: int | Literal["auto"] = 1
    """Parts, 1 to 32, into which the rows of a layer are cut: experts work on one while others travel."""
    chunks_back: int | Literal["same", "auto"] = SAME
    """The same in backward, in which experts work twice as long: same, as many as chunks; or a number that divides
    chunks, or is a multiple of it. auto: the same, half or twice as many."""
    capacity: float | None = None
    """Capacity factor, which bounds the rows that an expert takes of a rank's tokens: a second name of
    --moe.capacity-factor. By default the model's own."""
    dispatch: str = FP32
    """Codec of rows to their experts, such as bf16 or int8/64:nearest; fp32: as they are. It draws by
    a row's number alone."""
    combine: str = FP32
    """Codec of what experts return, such as bf16 or int8/64:nearest; fp32: as it is."""
    gradients: str = FP32
    """Codec of the gradients of all that travels, such as bf16 or int8/64; fp32: as they are."""
    weights: str = FP32
    """Codec of weights that move, such as bf16 or int8/64:nearest; fp32: as they are. It must
    round the same way each time."""
    once_a_step: bool | Literal["auto"] = False
    """Gather weights that move in a step's first micro-batch alone, and send their gradients after its last.

    Whole weights of all layers then stay in memory through the step, and the sum of their gradients. auto: in `thinwire
    train`, where that needs fewer seconds."""
    release: int | Literal["now", "auto"] = "now"
    """When gradients of all weights leave in backward. now: as they are ready; a number: that many bytes in each
    layer, while its experts compute, and the rest at the end.

    auto: in `thinwire train`, as many as pass while the layer leaves the link alone."""

    def __post_init__(self) -> None:
        problems = Problems()
        with problems.collect():
            check_types(self)
            for name in ("parallel", "slices"):
                if getattr(self, name) != "auto" and getattr(self, name) < 1:
                    raise ConfigError(f"{name} {getattr(self, name)}: must be at least 1; nearest: 1")
            for name in ("chunks", "chunks_back"):
                if not isinstance(num := getattr(self, name), str) and not 1 <= num <= MOST_CHUNKS:
                    near = min(max(num, 1), MOST_CHUNKS)
                    raise ConfigError(f"{name} {num}: must be 1 to {MOST_CHUNKS}; nearest: {near}")
            self._check_move()
            if self.capacity is not None and not math.isfinite(self.capacity):
                raise ConfigError(f"capacity {self.capacity}: must be a finite number; nearest: 0.0, which is no limit")
            if not isinstance(self.release, str) and self.release < 0:
                raise ConfigError(f"release {self.release}: must be at least 0; nearest: 0")
        problems.messages += self._unfit()
        for name in CODED:
            problems.note(self.codec, name)
        problems.raise_any()

    def _check_move(self) -> None:
        """Raise ConfigError for a word that is none of those above, and for a number of ranks that can't be."""
        name, has_number, number = self.move.partition("=")
        if self.move == "slices" and self.slices == 1:
            raise ConfigError("move 'slices' with 1 slice: no two ranks share an expert; nearest: 'tokens'")
        if not has_number and name in (*MOVES, AUTO):
            return
        divisors = [n for n in range(2, self.slices) if self.slices % n == 0]
        if name != "slices" or not number.isdecimal():
            raise ConfigError(f"move {self.move!r}: no such choice{nearest(name, (*MOVES, 'slices=2', AUTO))}")
        if int(number) not in divisors:
            near = min(divisors, key=lambda each: abs(each - int(number)), default=0)
            words = f"slices={near}" if near else "slices" if self.slices > 1 else "tokens"
            raise ConfigError(
                f"move {self.move!r}: a row goes to some of the {self.slices} ranks of its expert, not one or all; "
                f"their number divides these; nearest: {words!r}"
            )

    @property
    def moves_slices(self) -> bool:
        """Whether ranks of an expert exchange their slices, all of them or some."""
        return self.move.startswith("slices")

    @property
    def gathered(self) -> int:
        """Number of neighbouring ranks that exchange their slices, if any do; 1: none."""
        if not self.moves_slices:
            return 1
        return self.slices // int(self.move.partition("=")[2] or 1)

    def _unfit(self) -> Iterator[str]:
        """Why options do not fit each other; what is still to be chosen fits."""
        if self.chunks not in (1, AUTO) and (self.move == "experts" or self.route == "once"):
            why = "no rows travel" if self.move == "experts" else "what goes back is a sum over all rows of a node"
            what = f"move {self.move!r}" if self.move == "experts" else f"route {self.route!r}"
            yield f"chunks {self.chunks} with {what}: {why}; nearest: 1"
        chunks, back = self.chunks, self.chunks_back
        if not isinstance(back, str) and not isinstance(chunks, str) and max(chunks, back) % min(chunks, back):
            near = min((n for n in range(1, MOST_CHUNKS + 1) if max(n, chunks) % min(n, chunks) == 0),
                       key=lambda n: abs(n - back))  # fmt: skip
            yield f"chunks_back {back} with chunks {chunks}: one must divide the other; nearest: {near}"
        if not isinstance(back, str) and chunks == AUTO:
            yield f"chunks_back {back} with chunks {AUTO!r}: both are found, or neither; nearest: {AUTO!r}"
        if back not in (1, SAME, AUTO) and (self.move == "experts" or self.route == "once"):
            yield f"chunks_back {back} with move {self.move!r}, route {self.route!r}: rows go in one; nearest: {SAME!r}"
        still = dict.fromkeys(("dispatch", "combine"), "rows") if self.move == "experts" else {"weights": "weights"}
        if self.move == AUTO or (self.moves_slices and self.slices > 1):
            still = {}
        for name, what in still.items():
            if (stated := getattr(self, name)) not in (FP32, EXACT):
                yield f"{name} {stated!r} with move {self.move!r}: no {what} travel; nearest: {FP32!r}"
        if self.release not in ("now", AUTO) and self.move == "experts":
            yield f"release {self.release} with move 'experts': there are no rows between which to be; nearest: 'now'"
        if self.once_a_step and not (self.move in ("experts", AUTO) or (self.moves_slices and self.slices > 1)):
            yield f"once_a_step {self.once_a_step} with move {self.move!r}: no weights travel; nearest: False"
        if self.route not in ("linear", AUTO) and self.move not in ("tokens", AUTO):
            why = "it is for rows that go to all ranks"
            yield f"route {self.route!r} with move {self.move!r}: {why}; nearest: 'linear'"

    def check_stated(self) -> None:
        """Raise ConfigError where something is still to be chosen."""
        plain = (("parallel", 1), ("move", "tokens"), ("route", "linear"), ("chunks", 1), ("chunks_back", SAME))
        for name, near in (*plain, ("once_a_step", False), ("release", "now")):
            if getattr(self, name) == AUTO:
                raise ConfigError(f"{name} {AUTO!r}: thinwire train chooses it, a library states it; nearest: {near!r}")

    @property
    def num_chunks(self) -> int:
        """Parts of a layer's rows; to be asked where they are stated."""
        assert not isinstance(self.chunks, str)
        return self.chunks

    @property
    def num_back(self) -> int:
        """The same in backward."""
        return self.num_chunks if isinstance(self.chunks_back, str) else self.chunks_back

    @property
    def in_backward(self) -> ExpertParallel:
        """The options with the parts of the backward."""
        return replace(self, chunks=self.num_back, chunks_back=SAME)

    def codec(self, name: str) -> Codec | None:
        """The codec of one of CODED; None: rows travel as they are."""
        return codec_or_none(self, name, *([SAME_EACH_TIME] if name == "weights" else []), FIXED_SIZE)

    @property
    def tells(self) -> bool:
        """Whether rows travel to their experts with their numbers: what comes back is rounded at random by them."""
        return any(codec is not None and codec.traits.draws for codec in map(self.codec, ("combine", "gradients")))

    def fitted(self, width: int) -> ExpertParallel:
        """The same options for rows of `width` elements: groups without a stated size end where a row ends."""
        found = {name: (getattr(self, name), self.codec(name)) for name in CODED}
        changed = {
            name: in_groups(codec, math.gcd(width, codec.block))
            for name, (text, codec) in found.items()
            if codec is not None and width % codec.block and "/" not in text
        }
        return replace(self, **changed)  # type: ignore[arg-type]

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs whose kernels are compiled before the workers start."""
        return tuple(codec for codec in map(self.codec, CODED) if codec is not None)
