"""The forward of a pipeline alone, for held-out loss and samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.collectives import Communicator
from thinwire.hosts.pipeline.part import StagePart
from thinwire.hosts.pipeline.runner import Runner
from thinwire.hosts.pipeline.vocabulary import whole_logits
from thinwire.methods.pipeline import Plan
from thinwire.methods.pipeline.plan import AGREE, BACKWARD, EMBED, FORWARD, SCATTER, SCORE, TRAIN, ordered, straight
from thinwire.models.generation import padded


class StageForward:
    """Runs one micro-batch through all stages, without gradients.

    Args:
        part: this rank's part of the model.
        comm: over the pipeline.
        running: makes the runner of a plan.
    """

    def __init__(self, part: StagePart, comm: Communicator, running: Callable[[Plan], Runner]) -> None:
        self.part, self.comm, self._running = part, comm, running

    @torch.no_grad()
    def __call__(self, tokens: Tensor, targets: Tensor | None = None, *, only: int | None = None) -> Tensor:
        """See PipelineStage.forward."""
        made = self.part.made
        output = self._runner.evaluate([(tokens, targets)], [1.0])
        source = made.home[-1]
        shape: list[int] = []
        if targets is None and made.vocabulary is not None:
            own = output if only is None else output[:, only : only + 1]
            logits = self.comm.wait(self.comm.all_gather_exact(own.to(made.dtype).contiguous()))
            return whole_logits(logits, made.vocabulary.size)
        if targets is None:
            output = output if only is None or self.comm.rank != source else output[:, only : only + 1]
            sizes = torch.tensor([*output.shape] if output.ndim else [0, 0, 0])
            shape = self.comm.wait(self.comm.all_gather_exact(sizes)).view(-1, 3)[source].tolist()
        # Autocast may have left it in another dtype where the head is.
        dtype = made.dtype
        whole = output.to(dtype).contiguous() if self.comm.rank == source else output.new_empty(shape, dtype=dtype)
        self.comm.wait(self.comm.broadcast_(whole, source))
        return whole

    @cached_property
    def _runner(self) -> Runner:
        """The runner of a plan for one micro-batch, whose backwards are never run."""
        home = self.part.made.home
        barriers = self.part.options.barriers if self.part.vocabulary is not None else 0
        orders = []
        for rank in range(self.comm.world_size):
            own = [chunk for chunk in range(len(home)) if home[chunk] == rank]
            order = [(FORWARD, chunk, 0) for chunk in own]
            spread = [[(EMBED, rank, 0)], [(kind, rank, 0) for kind in (SCORE, AGREE, TRAIN)], [(SCATTER, rank, 0)]]
            first, head, last = spread if barriers else ([], [], [])
            orders.append(ordered(first + order + head + [(BACKWARD, *each[1:]) for each in order[::-1]] + last))
        return self._running(Plan(home, straight(len(home), 1), tuple(orders), barriers))


class LastLogits(nn.Module):
    """A pipeline in the form in which a text generator calls a model: it returns the logits of the last token only.

    forward: see PipelineStage.forward. model: has `max_seq_len`. multiple: see `padded`.
    """

    def __init__(self, forward: Callable[..., Tensor], model: nn.Module, multiple: int = 1) -> None:
        super().__init__()
        self.logits_of, self.model, self.multiple = forward, model, multiple
        self.max_seq_len: Any = model.max_seq_len

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, 1, vocab]. A collective over the pipeline."""
        return self.logits_of(padded(tokens, self.multiple, self.max_seq_len), only=tokens.shape[1] - 1)
