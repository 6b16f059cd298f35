"""The user's optimizer and its weights, in pieces that any layout can take; the same for every host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.checkpoint import WEIGHTS, Piece, Snapshot, Source
from thinwire.errors import ConfigError
from thinwire.state.elementwise import is_elementwise, state_of_twin

OPTIMIZER = "optimizer"
REPLICA = "replica"


@dataclass(frozen=True)
class Held:
    """What the user's optimizer steps of a parameter: `tensor` is elements [offset, offset + n) of `numel`.

    is_copy: every rank holds the whole.
    """

    tensor: Tensor
    numel: int
    offset: int = 0
    is_copy: bool = False

    def piece(self, values: Tensor | None = None) -> Piece:
        """These elements of the parameter, or of another tensor like it."""
        flat = (self.tensor if values is None else values).detach().view(-1)
        return Piece(self.numel, self.offset, flat, self.is_copy)


def add_optimizer(snapshot: Snapshot, inner: torch.optim.Optimizer, held: Mapping[str, Held]) -> Snapshot:
    """Put weights and what the optimizer holds of them into the snapshot, by parameter.

    Raises ConfigError for state that is neither a number nor has an entry for each element, such as a matrix's factors.
    """
    for name, mine in held.items():
        snapshot.pieces[f"{WEIGHTS}/{name}"] = mine.piece()
        for kind, value in inner.state.get(mine.tensor, {}).items():
            if is_elementwise(value, mine.tensor):
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
    """Fill the weights, and give the optimizer what was saved of them, whatever the layout was.

    A parameter keeps its place only where everything that the optimizer holds of it is there, but for flags, which are
    then those of a new one: it starts anew otherwise.
    """
    kinds = state_of_twin(inner)
    pieces = {f"{WEIGHTS}/{name}": mine.piece() for name, mine in held.items()}
    inner.state.clear()
    fresh = 0
    for name, mine in held.items():
        state = _state_for(source, kinds, name, mine, pieces)
        if state:
            inner.state[mine.tensor] = state
        fresh += not state and bool(kinds)
    source.read(pieces)
    _report(source, kinds, fresh, len(held))


def _state_for(
    source: Source, kinds: Mapping[str, Any], name: str, mine: Held, pieces: dict[str, Piece]
) -> dict[str, Any]:
    """The optimizer's state of a parameter, whose pieces are added to those to be read; empty where some is missing."""
    state: dict[str, Any] = {}
    wanted: dict[str, Piece] = {}
    for kind, like in kinds.items():
        number = source.scalar(kind, name)
        if isinstance(like, Tensor) and like.dim() and source.has(f"{OPTIMIZER}/{kind}/{name}"):
            state[kind] = torch.empty_like(mine.tensor, memory_format=torch.contiguous_format)
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


def _report(source: Source, kinds: Mapping[str, Any], fresh: int, num_held: int) -> None:
    source.note("weights", "carried", f"from {source.world_size} rank(s), in pieces")
    there = {*source.kinds(OPTIMIZER), *source.scalar_kinds}
    carried = sorted(there & kinds.keys())
    if carried and fresh < num_held:
        source.note(f"optimizer: {', '.join(carried)}", "carried", "in pieces, by parameter")
    if fresh:
        source.note("optimizer", "starts anew", f"for {fresh} of {num_held} parameters, of which not all was saved")
    if lost := sorted(there - kinds.keys()):
        source.note(f"optimizer: {', '.join(lost)}", "dropped", "this optimizer does not hold it")
