"""Optimizers that look across the elements of a matrix: they step pieces of it, and sum over ranks what they must."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.codecs.grammar import read
from thinwire.errors import ConfigError
from thinwire.optim.parameterwise import ADAMW_KINDS, Parameterwise, adamw

# [first, last) of elements, or of rows of a sum.
Span = tuple[int, int]
# What the update of one parameter yields, and is sent: tensors of [rows, width], by the name of the sum.
Values = dict[str, Tensor]
Update = Generator[Values, Values, None]


@dataclass(frozen=True)
class Sum:
    """A sum over ranks, of rows of `width` numbers.

    Args:
        adds: the rows to which each rank adds; of other rows it knows nothing.
        wants: the rows whose totals each rank is sent.
        codec: what travels is in it; a rank's own numbers are exact.
        alike: all that want a row are sent the same bits, and who adds it, alone, takes it as it was sent.
    """

    width: int
    adds: tuple[Span, ...]
    wants: tuple[Span, ...]
    codec: Codec
    alike: bool = False


class Part(NamedTuple):
    """What the rank numbered `rank` has of a parameter `name` of this shape.

    spans: the elements [first, last) of each rank, of the flat whole. options: of the parameter's group, of which only
    those count that never change.
    """

    name: str
    shape: torch.Size
    spans: tuple[Span, ...]
    rank: int
    options: Mapping[str, Any]

    @property
    def own(self) -> Span:
        """The elements of this rank."""
        return self.spans[self.rank]


class Record(NamedTuple):
    """State with no entry for each element: `shape` here, elements [offset, ...) of `numel` of all ranks together."""

    shape: torch.Size
    numel: int
    offset: int


@dataclass(frozen=True)
class Shards:
    """What a host gives an optimizer that steps pieces.

    Args:
        parts: what each piece is a part of.
        total: (number of the round, what this rank adds, by parameter) -> the totals it wants; a collective. By default
            nothing is cut.
    """

    parts: Mapping[Tensor, Part]
    total: Callable[[int, Mapping[str, Values]], Mapping[str, Values]] = lambda number, partials: partials


class SummingOptimizer(Parameterwise):
    """An optimizer whose update of a matrix yields what this rank's piece adds to sums, and is sent totals.

    `_across` is a generator, `totals = yield partials`, once for each of `num_rounds` rounds; all matrices take a round
    together, in one message a pair of ranks. Where one rank has the whole, totals are partials. `sums` says what is
    summed, from which the bytes follow before anything runs. Other tensors take AdamW's step, with the group's `betas`,
    `eps` and `weight_decay`.

    title: what messages call it. operation: what the meter calls the sums. codec: of those that may be lossy.
    """

    needs_whole_tensors = True
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

    @abstractmethod
    def is_across(self, param: Tensor, group: Mapping[str, Any]) -> bool:
        """Whether the update of a whole parameter of this group looks across its elements."""

    @abstractmethod
    def sums(self, parts: Mapping[str, Part]) -> dict[str, Sequence[dict[str, Sum]]]:
        """The sums of these parameters, by name, round and name of the sum; the same on all ranks."""

    @abstractmethod
    def _across(self, param: Tensor, grad: Tensor, part: Part, group: dict[str, Any]) -> Update:
        """Update a piece of a matrix, or all of it."""

    @abstractmethod
    def num_kept(self, part: Part) -> int:
        """Numbers in the state of such a piece."""

    @abstractmethod
    def _kinds(self) -> dict[str, Any]:
        """See `kinds`, of what looks across."""

    def records(self, param: Tensor) -> dict[str, Record]:
        """Where the kinds of state lie that have no entry for each element of a piece."""
        return {}

    def name_of(self, param: Tensor) -> str:
        """The name of a whole parameter, if names matter."""
        return ""

    @property
    def matrices(self) -> list[Tensor]:
        """The parameters whose updates look across their elements, or pieces of them."""
        return [p for group in self.param_groups for p in group["params"] if self._part(p, group) is not None]

    def part_of(self, param: Tensor) -> Part | None:
        """What a parameter of the optimizer is a part of; None for those that do not look across."""
        found = (group for group in self.param_groups if any(p is param for p in group["params"]))
        return self._part(param, next(found, {}))

    def kinds(self, param: Tensor) -> dict[str, Any]:
        """What the state of a parameter holds, by kind: numbers, and a tensor of one element for each tensor."""
        return self._kinds() if self.part_of(param) is not None else dict(ADAMW_KINDS)

    def join(self, shards: Shards) -> None:
        """Step pieces from now on. Of what is remembered of whole matrices, a rank keeps its own."""
        self.shards = shards
        for param in shards.parts:
            for kind, record in self.records(param).items():
                if kind in (state := self.state.get(param, {})) and state[kind].shape != record.shape:
                    own = state[kind].flatten()[record.offset :][: record.shape.numel()]
                    state[kind] = own.view(record.shape).clone()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; where matrices are cut, a collective."""
        self._updates: list[tuple[str, Update]] = []
        loss = super().step(closure)
        names, updates = [name for name, _ in self._updates], [update for _, update in self._updates]
        sent = [next(update) for update in updates]
        for number in range(self.num_rounds):
            received = sent
            if self.shards is not None:
                totals = self.shards.total(number, dict(zip(names, sent, strict=True)))
                received = [totals[name] for name in names]
            sent = [_resume(update, values) for update, values in zip(updates, received, strict=True)]
        self._updates.clear()
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        part = self._part(param, group)
        if part is None:
            adamw(self.state[param], param, grad, group)
        else:
            self._updates.append((part.name, self._across(param, grad, part, group)))

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
    """The codec that is written so. Raises ConfigError for one that can't be read, or is of variable length."""
    codec = read(text)
    if codec.has_variable_length:
        raise ConfigError(f"{optimizer} codec {text}: its packets differ in length; leave zstd out")
    return codec
