"""This rank's pieces of the parameters in the place of the parameters, for the user's optimizer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.layout.buckets import Bucket, Slot
from thinwire.state.elementwise import is_elementwise


def shard_param_groups(inner: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> list[tuple[Slot, Tensor, int, int]]:
    """Put this rank's pieces of the masters in the place of the parameters, group by group."""
    slots = {id(slot.param): slot for bucket in buckets for slot in bucket.slots}
    pieces: list[tuple[Slot, Tensor, int, int]] = []
    for group in inner.param_groups:
        own = [slots[id(param)] for param in group["params"] if id(param) in slots]
        group["params"] = []
        for slot in own:
            start, end = slot.bucket.shard_range(slot)
            held = inner.state.pop(slot.param, None)
            if end > start:
                piece = slot.bucket.master[start:end]
                pieces.append((slot, piece, start, end))
                group["params"].append(piece)
                if held:
                    first = start + slot.bucket.shard_start - slot.start
                    inner.state[piece] = _piece_of_state(held, slot.param, slice(first, first + end - start))
    return pieces


def _piece_of_state(held: dict[str, Any], param: Tensor, piece: slice) -> dict[str, Any]:
    """What the optimizer remembers of a parameter, for a piece of its flat elements."""
    return {
        key: value.flatten()[piece].float().clone() if is_elementwise(value, param) else copy.deepcopy(value)
        for key, value in held.items()
    }
