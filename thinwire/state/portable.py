"""Saves and loads the user's optimizer and its weights in pieces that any layout can load; the same for every host."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.checkpoint import WEIGHTS, Piece, Snapshot, Source
from thinwire.errors import ConfigError
from thinwire.optim import SummingOptimizer
from thinwire.optim.sums import Record
from thinwire.state.elementwise import is_elementwise, state_kinds
from thinwire.state.replicas import check_layout, check_state

log = logging.getLogger("thinwire")

OPTIMIZER = "optimizer"
REPLICA = "replica"
# Moments that an optimizer divides by 1 - beta^t at its step t, and the number of beta in its `betas`.
MOMENTS = {"exp_avg": 0, "exp_avg_sq": 1, "exp_avg_projected": 0, "exp_avg_sq_projected": 1}
# Kinds of numbers under which `betas` are saved.
BETAS = ("beta1", "beta2")
# Kinds of numbers that no optimizer holds: betas, and the marks of records.
NOT_HELD = (*BETAS, "by_rows")


@dataclass(frozen=True)
class Held:
    """The tensor of a parameter that the user's optimizer steps: elements [offset, offset + n) of `numel`.

    is_copy: every rank holds the whole parameter.
    """

    tensor: Tensor
    numel: int
    offset: int = 0
    is_copy: bool = False

    def piece(self, values: Tensor | None = None) -> Piece:
        """These elements of the parameter, or of another tensor of its shape, as a Piece."""
        flat = (self.tensor if values is None else values).detach().view(-1)
        return Piece(self.numel, self.offset, flat, self.is_copy)

    def record(self, record: Record, values: Tensor) -> Piece:
        """State without an entry for each element, as a Piece."""
        return Piece(record.numel, record.offset, values.detach().view(-1), self.is_copy)


class StateDict(Source):
    """The result of `state_dict_of` on this rank, read like a checkpoint. Only the same layout can load it."""

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        check_state(state_dict, "numbers", "tensors", "param_groups")
        self._begin(0, 1)
        self._parts, self._tensors = {0: state_dict["numbers"]}, state_dict["tensors"]
        self._index = {name: [] for name in self._tensors}
        self._offsets: Mapping[str, int] = state_dict.get("offsets", {})

    def holds(self, name: str, numel: int) -> bool:
        """True: the layout is the same, and pieces without elements were not saved."""
        return True

    def fits(self, layout: Mapping[str, Any]) -> bool:
        """True. Raises ConfigError that names every difference if the layout is another."""
        check_layout(layout, self.layout)
        self.is_same = True
        return True

    def read(self, pieces: Mapping[str, Piece]) -> None:
        for name, piece in pieces.items():
            # States on a disk are read a sub-group at a time.
            offset = self.place_piece(name, piece).offset
            first = offset - self._offsets.get(name, offset)
            piece.values.copy_(self._tensors[name].view(-1)[first : first + piece.values.numel()])

    def numel_of(self, name: str) -> int:
        return self._tensors[name].numel() if name in self._tensors else 0

    def note(self, what: str, became: str, why: str = "") -> None:
        if became != "carried":
            log.warning("thinwire: load_state_dict: %s: %s: %s", what, became, why)


def state_dict_of(snapshot: Snapshot, param_groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A snapshot, and the options of the optimizer's groups such as lr, copied into numbers, strings and tensors."""
    numbers, pieces = replace(snapshot, shares=[]).to_json(0)
    return {
        "numbers": numbers,
        # Copies: torch.save would write the whole storage for a view of it.
        "tensors": {name: piece.values.clone() for name, piece in pieces.items()},
        "offsets": {name: piece.offset for name, piece in pieces.items()},
        "param_groups": [{key: value for key, value in group.items() if key != "params"} for group in param_groups],
    }


def load_param_groups(param_groups: Sequence[dict[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Set the options of the optimizer's groups to those in a `state_dict_of`."""
    for group, saved in zip(param_groups, state_dict["param_groups"], strict=True):
        group.update(copy.deepcopy(saved))


def add_optimizer(snapshot: Snapshot, inner: torch.optim.Optimizer, held: Mapping[str, Held]) -> Snapshot:
    """Add the weights, and the optimizer's state for them, to the snapshot, by parameter.

    State without an entry for each element is saved as a tensor of its own, in which each rank has the rows that the
    optimizer's `records` name. Raises ConfigError for any other state that is not a number, such as factors of a
    matrix.
    """
    groups = group_of(inner)
    for name, mine in held.items():
        snapshot.pieces[f"{WEIGHTS}/{name}"] = mine.piece()
        state, records = inner.state.get(mine.tensor, {}), records_of(inner, mine)
        if state:
            add_betas(snapshot, name, groups[id(mine.tensor)])
            for kind, mark in marks_of(inner, mine).items():
                snapshot.scalars.setdefault(kind, {})[name] = mark
        for kind, value in state.items():
            if kind in records:
                if value.numel():
                    snapshot.pieces[f"{OPTIMIZER}/{kind}/{name}"] = mine.record(records[kind], value)
            elif is_elementwise(value, mine.tensor):
                snapshot.pieces[f"{OPTIMIZER}/{kind}/{name}"] = mine.piece(value)
            elif isinstance(value, Tensor) and value.numel() != 1:
                raise ConfigError(
                    f"{kind!r}, which {type(inner).__name__} holds of {name!r}, has no entry for each element: it "
                    "can't be saved in pieces; use an elementwise optimizer such as AdamW or SGD"
                )
            elif value is not None:
                number = value.item() if isinstance(value, Tensor) else value
                snapshot.scalars.setdefault(kind, {})[name] = number
    return snapshot


@torch.no_grad()
def restore_optimizer(source: Source, inner: torch.optim.Optimizer, held: Mapping[str, Held]) -> None:
    """Load the weights and the optimizer's state, whatever layout saved them.

    A parameter's state is loaded only if all of it was saved; otherwise that parameter starts with fresh state. Missing
    flags get the values of a new optimizer.
    """
    kinds_of, groups = state_kinds(inner, [mine.tensor for mine in held.values()]), group_of(inner)
    pieces = {f"{WEIGHTS}/{name}": mine.piece() for name, mine in held.items()}
    inner.state.clear()
    fresh = 0
    for (name, mine), kinds in zip(held.items(), kinds_of, strict=True):
        check_marks(source, inner, name, mine)
        state = state_for(source, kinds, name, mine, pieces, records=records_of(inner, mine))
        if state:
            inner.state[mine.tensor] = state
        # A rank may have no element of a parameter, and so nothing to take over.
        fresh += not state and mine.tensor.numel() > 0 and is_lost(source, kinds, name)
    source.read(pieces)
    rescaled = {
        kind
        for name, mine in held.items()
        for kind in rescale(source, name, inner.state.get(mine.tensor, {}), groups.get(id(mine.tensor), {}))
    }
    report_optimizer(source, {kind for kinds in kinds_of for kind in kinds}, fresh, len(held), rescaled)


def is_lost(source: Source, kinds: Mapping[str, Any], name: str) -> bool:
    """Whether a parameter without a whole state should have one: part of it was saved, or no state of any parameter.

    A parameter that never had a gradient has none.
    """
    own = any(source.has(f"{OPTIMIZER}/{kind}/{name}") or source.scalar(kind, name) is not None for kind in kinds)
    return own or (bool(kinds) and not any(source.has_any(f"{OPTIMIZER}/{kind}") for kind in kinds))


def state_for(
    source: Source,
    kinds: Mapping[str, Any],
    name: str,
    mine: Held,
    pieces: dict[str, Piece],
    into: Mapping[str, Tensor] | None = None,
    records: Mapping[str, Record] | None = None,
) -> dict[str, Any]:
    """The optimizer's state of a parameter; empty if some of it was not saved. Adds what must be read to `pieces`.

    into: the tensors to read into, by kind; of other kinds, new ones. records: the places of the kinds without an entry
    for each element; a saved one of another size counts as missing.
    """
    state: dict[str, Any] = {}
    wanted: dict[str, Piece] = {}
    for kind, like in kinds.items():
        number = source.scalar(kind, name)
        if records and kind in records:
            key, record = f"{OPTIMIZER}/{kind}/{name}", records[kind]
            given = None if into is None else into.get(kind)
            state[kind] = torch.zeros(record.shape, device=mine.tensor.device) if given is None else given
            piece = mine.record(record, state[kind])
            # A mesh may have cut it.
            if not source.holds(key, source.place_piece(key, piece).numel):
                return {}
            if record.shape.numel():
                wanted[key] = piece
        elif isinstance(like, Tensor) and like.dim() and source.has(f"{OPTIMIZER}/{kind}/{name}"):
            new = None if into is None else into.get(kind)
            new = torch.empty_like(mine.tensor, memory_format=torch.contiguous_format) if new is None else new
            state[kind] = new
            wanted[f"{OPTIMIZER}/{kind}/{name}"] = mine.piece(state[kind])
        elif number is not None:
            # A fused optimizer counts steps on the device, others on the CPU.
            is_tensor = isinstance(like, Tensor)
            state[kind] = (
                torch.tensor(number, dtype=like.dtype, device=like.device) if is_tensor else type(like)(number)
            )
        elif isinstance(like, bool):
            # A flag that the other optimizer does not know, such as whether a variance is frozen.
            state[kind] = like
        elif like is not None:
            return {}
    pieces.update(wanted)
    return state


def records_of(inner: torch.optim.Optimizer, mine: Held) -> dict[str, Record]:
    """For each kind of optimizer state without an entry for each element, where it lies."""
    return inner.records(mine.tensor) if isinstance(inner, SummingOptimizer) else {}


def marks_of(inner: torch.optim.Optimizer, mine: Held) -> dict[str, float]:
    """The marks of that state, see SummingOptimizer."""
    return inner.marks(mine.tensor) if isinstance(inner, SummingOptimizer) else {}


def check_marks(source: Source, inner: torch.optim.Optimizer, name: str, mine: Held) -> None:
    """Raise ConfigError if the records of a parameter that were saved are of something else than this optimizer's."""
    if isinstance(inner, SummingOptimizer):
        saved = {kind: source.scalar(kind, name) for kind in inner.marks(mine.tensor)}
        inner.check_marks(mine.tensor, {kind: mark for kind, mark in saved.items() if mark is not None})


def group_of(inner: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """The optimizer's group of each tensor, by the tensor's id. Tensors without elements on this rank have none."""
    return {id(tensor): group for group in inner.param_groups for tensor in group["params"]}


def add_betas(snapshot: Snapshot, name: str, group: Mapping[str, Any]) -> None:
    """Save the betas of a parameter, so that an optimizer with other betas can rescale the moments."""
    for kind, beta in zip(BETAS, group.get("betas", ()), strict=False):
        snapshot.scalars.setdefault(kind, {})[name] = float(beta)


def rescale(source: Source, name: str, state: Mapping[str, Any], group: Mapping[str, Any]) -> Iterator[str]:
    """Rescale loaded moments for this optimizer's betas: m (1 - beta^t) / (1 - b^t), with b the beta that was saved.

    Divided by 1 - beta^t at step t, they then equal what the saved optimizer used. A frozen variance is not divided, as
    if its beta were 0. Yields the kinds that were changed.
    """
    for kind, number in MOMENTS.items():
        if kind not in state or "betas" not in group:
            continue
        is_variance, beta, was = number == 1, group["betas"][number], source.scalar(BETAS[number], name)
        if is_variance:
            beta = 0.0 if state.get("frozen") else beta
            was = 0.0 if source.scalar("frozen", name) else was
        step = float(state["step"])
        if was not in (None, beta) and step >= 1:
            state[kind].mul_((1 - beta**step) / (1 - was**step))
            yield kind


def report_optimizer(source: Source, kinds: set[str], fresh: int, num_held: int, rescaled: Iterable[str]) -> None:
    """Note in the load report what became of weights and optimizer: `fresh` of `num_held` parameters start anew."""
    source.note("weights", "carried", f"from {source.world_size} rank(s), in pieces")
    there = {*source.kinds(OPTIMIZER), *source.scalar_kinds}.difference(NOT_HELD)
    carried = sorted(there & kinds)
    if carried and fresh < num_held:
        source.note(f"optimizer: {', '.join(carried)}", "carried", "in pieces, by parameter")
    if changed := sorted(set(rescaled)):
        why = "to this optimizer's betas, so that a step has the moments that it would have had"
        source.note(f"optimizer: {', '.join(changed)}", "transformed", why)
    if fresh:
        source.note("optimizer", "starts anew", f"for {fresh} of {num_held} parameters, whose state was saved in part")
    if lost := sorted(there - kinds):
        source.note(f"optimizer: {', '.join(lost)}", "dropped", "this optimizer does not hold it")
