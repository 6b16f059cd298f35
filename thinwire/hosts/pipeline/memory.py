"""What the activations of a pipeline's stages take, before a step has run, and the memory that is left for them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from thinwire.calibration.machine import machine_mark
from thinwire.collectives import Communicator
from thinwire.device import free_bytes, random_state, set_random_state
from thinwire.hosts.offload.activations import kept_bytes
from thinwire.methods.pipeline import Costs

# Of the memory that is free, what activations may take; tensors that are no activations need some for a moment.
USED = 0.9


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch's activations by chunk, and what is free for activations on each stage.

    kept, inputs: see Costs. free: of the rank of the stage that has least. spread: see SpreadCosts.kept.
    """

    kept: tuple[float, ...]
    inputs: tuple[float, ...]
    free: tuple[float, ...]
    spread: float = 0.0

    def costs(self, costs: Costs) -> Costs:
        """The costs with these bytes."""
        spread = replace(costs.spread, kept=self.spread)
        return replace(costs, kept_bytes=self.kept, input_bytes=self.inputs, spread=spread)

    @classmethod
    def of_all(
        cls, own: Mapping[int, tuple[float, float]], num_chunks: int, stage: int, num_stages: int,
        more_bytes: float, device: torch.device, everyone: Communicator, can_recompute: bool,
    ) -> Activations:  # fmt: skip
        """What all ranks say of their stages; equal on all of them. A collective over `everyone`.

        own: by chunk of this rank, kept and input bytes. more_bytes: of this rank, for what is no activation and still
        to come. can_recompute: without it nothing is limited.
        """
        marks = everyone.wait(everyone.all_gather_exact(torch.tensor([machine_mark()]))).flatten().tolist()
        free = USED * free_bytes(device, marks.count(machine_mark())) - more_bytes
        told = torch.zeros(2 + 2 * num_chunks, dtype=torch.float64)
        told[:2] = torch.tensor([stage, free if can_recompute else torch.inf])
        for chunk, sizes in own.items():
            told[2 + 2 * chunk : 4 + 2 * chunk] = torch.tensor(sizes)
        rows = everyone.wait(everyone.all_gather_exact(told)).view(-1, len(told))
        sizes_of = rows[:, 2:].amax(0).view(num_chunks, 2)
        of_stages = [float(rows[rows[:, 0] == each, 1].min()) for each in range(num_stages)]
        if not all(bool(value < torch.inf) for value in of_stages):
            of_stages = [float("inf")] * num_stages
        return cls(tuple(sizes_of[:, 0].tolist()), tuple(sizes_of[:, 1].tolist()), tuple(of_stages))


def kept_by(
    chunk: nn.Module, hidden: tuple[int, ...] | None, dtype: torch.dtype, like: Any, *, is_alone: bool = True
) -> tuple[float, float]:
    """Bytes that a forward of a chunk keeps for its backward, its input included, and those of its input.

    Counted on tensors without memory, or by a forward of zeros where a model computes with their values.

    hidden: shape of what arrives; None: nothing. like: (tokens, targets); only shapes count. is_alone: a forward sends
    nothing; others run, on all ranks that it needs.
    """
    params = [*chunk.parameters(), *chunk.buffers()]
    device = params[0].device if params else torch.device("cpu")
    random = random_state()

    def count(mode: FakeTensorMode | None) -> tuple[float, float]:
        with mode or nullcontext(), torch.enable_grad():
            given = tuple(torch.zeros(each.shape, dtype=torch.int64, device=device) for each in like)
            arrived = None if hidden is None else torch.zeros(hidden, dtype=dtype, device=device, requires_grad=True)
            weights = [param if mode is None else mode.from_tensor(param) for param in params]
            own = [] if arrived is None else [arrived]
            found = kept_bytes(chunk, arrived, given, besides=[*weights, *given, *own])
        num_bytes = float(sum(each.nbytes for each in own))
        return found + num_bytes, num_bytes

    try:
        return count(FakeTensorMode(allow_non_fake_inputs=True) if is_alone else None)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError):
        return count(None)
    finally:
        set_random_state(random)
