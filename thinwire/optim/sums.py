"""Optimizers whose updates need whole matrices: they step pieces of a matrix, and sum partial results over ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.codecs.grammar import read
from thinwire.errors import ConfigError
from thinwire.optim.parameterwise import ADAMW_KINDS, Parameterwise, adamw

# [first, last) of elements, or of rows of a sum.
PieceSpan = tuple[int, int]
# What the update of one parameter yields, and is sent: tensors of [rows, width], by the name of the sum.
Values = dict[str, Tensor]
Update = Generator[Values, Values, None]
Bring = Callable[[Tensor, bool], AbstractContextManager[None]]


@dataclass(frozen=True)
class Sum:
    """A sum over ranks, of rows of `width` numbers.

    Args:
        adds: for each rank, the rows to which it adds; it has no numbers for other rows.
        wants: for each rank, the rows whose totals it receives.
        codec: of what travels; a rank's own numbers stay exact.
        alike: all ranks that want a row get the same bits; a rank that alone adds to it takes it as decoded, too.
    """

    width: int
    adds: tuple[PieceSpan, ...]
    wants: tuple[PieceSpan, ...]
    codec: Codec
    alike: bool = False


class Part(NamedTuple):
    """What the rank numbered `rank` has of a parameter `name` of this shape.

    spans: for each rank, its elements [first, last) of the flat whole. options: those of the parameter's group; only
    options that never change may be used.
    """

    name: str
    shape: torch.Size
    spans: tuple[PieceSpan, ...]
    rank: int
    options: Mapping[str, Any]

    @property
    def own(self) -> PieceSpan:
        """This rank's elements."""
        return self.spans[self.rank]


class Record(NamedTuple):
    """State without an entry for each element: `shape` here, elements [offset, ...) of `numel` on all ranks."""

    shape: torch.Size
    numel: int
    offset: int


class PagedRecords(Protocol):
    """Holds records that are read in pages."""

    def made(self, piece: Tensor, shape: torch.Size) -> Tensor:
        """Zeros [rows, width] for a piece. The tensor stands for them; `pages` alone reads and changes them."""
        ...

    def holds(self, values: Tensor) -> bool:
        """Whether a tensor stands for a record that was made here."""
        ...

    def pages(self, values: Tensor, num_rows: int, *, changes: bool) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, a page with these rows in memory), in order. changes: what is written into pages stays."""
        ...


@dataclass(frozen=True)
class Shards:
    """What a host gives an optimizer that steps pieces.

    Args:
        parts: for each piece, what it is a part of.
        total: (number of the round, what this rank adds, by parameter) -> the totals that this rank wants; a
            collective. By default nothing is cut.
        bring: (piece, whether its step ends with it) -> a context with the piece and its state in memory, for pieces
            that pass through it.
        paged: where records lie that are read in pages; None: in memory.
    """

    parts: Mapping[Tensor, Part]
    total: Callable[[int, Mapping[str, Values]], Mapping[str, Values]] = lambda number, partials: partials
    bring: Bring = lambda piece, is_last: nullcontext()
    paged: PagedRecords | None = None


class SummingOptimizer(Parameterwise):
    """An optimizer of pieces of matrices: each rank adds partial results to sums, and gets the totals it needs.

    `_across` is a generator, `totals = yield partials`, once for each of `num_rounds` rounds. All matrices take a round
    together, with one message for each pair of ranks. Where one rank has the whole matrix, totals are partials. `sums`
    describes what is summed, so that the bytes are known before anything runs. Other tensors take AdamW's step, with
    the group's `betas`, `eps` and `weight_decay`.

    streams: whether pieces may pass through memory, each whenever a part of its update needs it. starts_bare: whether
    the first part needs the gradient alone, and what is read in pages. paged_kind: the kind of state that is read in
    pages; none by default. operation: what the meter calls the
    sums. codec: of the sums that may lose digits. is_joint: whether a sum is over
    parameters too, so that each rank must have a part of all of them.
    """

    needs_whole_tensors = True
    is_joint: ClassVar[bool] = False
    streams: ClassVar[bool] = False
    starts_bare: ClassVar[bool] = False
    paged_kind: ClassVar[str | None] = None
    title: ClassVar[str]
    num_rounds: ClassVar[int]
    operation: ClassVar[str]
    codec: Codec
    shards: Shards | None = None

    def __getstate__(self) -> dict[str, Any]:
        """See Parameterwise. Raises ConfigError once it steps pieces: the ranks' sums are not a copy's."""
        if self.shards is not None:
            raise ConfigError(
                f"{self.title} sums over ranks, and a copy would be in none of the sums: copy it before a method "
                "shards it; nearest: its state_dict()"
            )
        return super().__getstate__()

    @property
    def limits_itself(self) -> bool:
        """Whether an update bounds its own norm, so that gradients need not be clipped, and needs no other tensor's."""
        return False

    @abstractmethod
    def is_across(self, param: Tensor, group: Mapping[str, Any]) -> bool:
        """Whether the update of a whole parameter of this group depends on several of its elements together."""

    @abstractmethod
    def sums(self, parts: Mapping[str, Part]) -> dict[str, Sequence[dict[str, Sum]]]:
        """The sums of these parameters, by parameter, round and name of the sum; the same on all ranks."""

    @abstractmethod
    def _across(self, param: Tensor, grad: Tensor, part: Part, group: dict[str, Any]) -> Update:
        """Update a piece of a matrix, or all of it."""

    @abstractmethod
    def num_kept(self, part: Part) -> int:
        """How many numbers the state of such a piece holds."""

    def num_paged(self, part: Part) -> int:
        """How many of these numbers are read in pages, at the start of an update and in each round."""
        return 0

    @property
    def page_bytes(self) -> int:
        """The most bytes of such a page."""
        return 0

    @abstractmethod
    def _kinds(self) -> dict[str, Any]:
        """See `kinds`, of what looks across."""

    def records_of(self, part: Part) -> dict[str, Record]:
        """For the kinds of state without an entry for each element of a piece: where they lie."""
        return {}

    def records(self, param: Tensor) -> dict[str, Record]:
        """The same for a parameter of this optimizer, or a piece."""
        return {} if (part := self.part_of(param)) is None else self.records_of(part)

    def marks(self, param: Tensor) -> dict[str, float]:
        """Numbers that say of what a parameter's records are, which their sizes do not; they are saved with them."""
        return {}

    def check_marks(self, param: Tensor, saved: Mapping[str, float]) -> None:
        """Raise ConfigError for saved records with other marks than the parameter's. Some may be missing."""

    def name_of(self, param: Tensor) -> str:
        """The name of a whole parameter, if the optimizer uses names."""
        return ""

    @property
    def matrices(self) -> list[Tensor]:
        """The parameters, or pieces of them, whose updates need their whole matrix."""
        return [p for group in self.param_groups for p in group["params"] if self._part(p, group) is not None]

    def part_of(self, param: Tensor) -> Part | None:
        """What a parameter of this optimizer is a part of; None if its update needs no other elements."""
        found = (group for group in self.param_groups if any(p is param for p in group["params"]))
        return self._part(param, next(found, {}))

    def kinds(self, param: Tensor) -> dict[str, Any]:
        """What the state of a parameter holds, by kind: numbers, and a tensor of one element for each tensor."""
        return self._kinds() if self.part_of(param) is not None else dict(ADAMW_KINDS)

    def join(self, shards: Shards) -> None:
        """Step pieces from now on. Of the state of whole matrices, a rank keeps its own part."""
        self.shards = shards
        for param in shards.parts:
            for kind, record in self.records(param).items():
                state, paged = self.state.get(param, {}), shards.paged if kind == self.paged_kind else None
                if kind not in state:
                    continue
                is_own, is_paged = state[kind].shape == record.shape, paged is not None
                if is_own and (paged is None or paged.holds(state[kind])):
                    continue
                first = 0 if is_own else record.offset
                own = state[kind].flatten()[first:][: record.shape.numel()].view(record.shape)
                state[kind] = self._paged(param, own) if is_paged else own.clone()

    def _paged(self, param: Tensor, values: Tensor) -> Tensor:
        """A record with these values, where records are read in pages."""
        found = self._new_record(param, values.shape)
        for rows, page in self.pages(found, changes=True):
            page.copy_(values[rows])
        return found

    def _new_record(self, param: Tensor, shape: torch.Size) -> Tensor:
        """Zeros [rows, width], fp32, of a state that is read in pages."""
        if self.shards is None or self.shards.paged is None:
            return torch.zeros(shape, device=param.device)
        return self.shards.paged.made(param, shape)

    def pages(self, values: Tensor, *, changes: bool = False) -> Iterator[tuple[slice, Tensor]]:
        """See PagedRecords."""
        num_rows = self.page_bytes // (values.shape[1] * values.element_size())
        if self.shards is not None and self.shards.paged is not None:
            yield from self.shards.paged.pages(values, num_rows, changes=changes)
            return
        for first in range(0, len(values), num_rows):
            rows = slice(first, first + num_rows)
            yield rows, values[rows]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; where matrices are cut, a collective."""
        self._updates: list[tuple[str, Tensor, Update]] = []
        loss = super().step(closure)
        names, sent = [name for name, _, _ in self._updates], list[Values]()
        for _, param, update in self._updates:
            with nullcontext() if self.starts_bare else self._brought(param):
                sent.append(next(update))
        for number in range(self.num_rounds):
            received, sent = self._totals(number, names, sent), []
            for (_, param, update), values in zip(self._updates, received, strict=True):
                with self._brought(param, is_last=number == self.num_rounds - 1):
                    sent.append(_resume(update, values))
        self._updates.clear()
        return loss

    def _brought(self, param: Tensor, *, is_last: bool = False) -> AbstractContextManager[None]:
        """A context with a parameter and its state in memory."""
        return nullcontext() if self.shards is None else self.shards.bring(param, is_last)

    def _totals(self, number: int, names: Sequence[str], sent: Sequence[Values]) -> list[Values]:
        """What the updates are sent for what they have yielded."""
        if self.shards is None:
            return list(sent)
        totals = self.shards.total(number, dict(zip(names, sent, strict=True)))
        return [totals[name] for name in names]

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        part = self._part(param, group)
        if part is None:
            with self._brought(param, is_last=True):
                adamw(self.state[param], param, grad, group)
        else:
            self._updates.append((part.name, param, self._across(param, grad, part, group)))

    def _part(self, param: Tensor, group: Mapping[str, Any]) -> Part | None:
        if self.shards is not None:
            return self.shards.parts.get(param)
        if not group or not self.is_across(param, group):
            return None
        return Part(self.name_of(param), param.shape, ((0, param.numel()),), 0, group)


def _resume(update: Update, totals: Values) -> Values:
    """What the update yields next; nothing where it ends."""
    try:
        return update.send(totals)
    except StopIteration:
        return {}


def codec_of_sums(optimizer: str, text: str) -> Codec:
    """The codec of this text. Raises ConfigError for text that is no codec, or for a codec of variable length."""
    codec = read(text)
    if codec.has_variable_length:
        raise ConfigError(f"{optimizer} codec {text}: its packets differ in length; leave zstd out")
    return codec
