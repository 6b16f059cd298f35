"""A stage of a pipeline that is called like an optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from thinwire.checkpoint import Snapshot, Source
from thinwire.compose.stage import Stage, check_passes
from thinwire.hosts.interface import ParallelOptimizer
from thinwire.hosts.pipeline.part import models_own
from thinwire.hosts.pipeline.stage import PipelineStage
from thinwire.hosts.tensor import TensorAxis
from thinwire.islands.optimizer import INSIDE
from thinwire.table import Row, announce as announce_table


class PipelinedModel(Stage):
    """A Stage whose model is cut over several ranks, through which micro-batches pass.

    A micro-batch is (tokens, targets), the same on all ranks of a pipeline. After `parallelize` the model on each rank
    holds the weights of this rank's layers only. Calling it on all ranks of the pipeline at once runs the pipeline's
    forward, without training.

    Attributes:
        pipeline: runs the steps.
        tensor: the axis that cuts the weights of a stage, if any.
        holders: the ranks of this stage; empty: all.
    """

    def __init__(
        self, model: nn.Module, optimizer: ParallelOptimizer, rows: Sequence[Row], pipeline: PipelineStage,
        tensor: TensorAxis | None = None, holders: Sequence[int] = (), *, announces: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(model, optimizer, [*rows, *pipeline.describe()], tensor)
        # Rows of embedding and head may be on all stages; a tensor axis is not beside them.
        self._cut = tensor or pipeline.part.rows
        self._holders = tuple(holders)
        # Whether the first rank prints what is found with the first micro-batches.
        self.announces = announces
        self.pipeline: PipelineStage = pipeline
        self.borders = pipeline.borders
        model.forward = pipeline.forward

    def forward_backward(self, batches: Sequence[Any], loss: Callable[[Any, Any], Tensor] = models_own) -> float:
        """Run all forwards and backwards of a step. Micro-batches are weighted by their number of tokens.

        loss: must return the result of `module(*batch)`. Returns the loss on the rank with the head, and 0 elsewhere;
        after `reduce` every rank has it as `optimizer.mean_loss`. Raises ConfigError for a number of batches that does
        not fit the plan.
        """
        with self._gradients_of_a_step(batches, loss):
            found = self.pipeline.settle(batches, loss)
            if self.announces and self.optimizer.everyone.rank == 0:
                announce_table(found)
            return self.pipeline.forward_backward(batches, loss)

    def next_loss(self, batches: Sequence[Any], loss: Callable[[Any, Any], Tensor] = models_own) -> float:
        check_passes(batches, loss)
        return self.pipeline.next_loss(batches, loss)

    def update(self, max_norm: float = math.inf) -> Tensor:
        norm = super().update(max_norm)
        self.pipeline.keep_copies()
        return norm

    @property
    def lr_factor(self) -> float:
        return self.pipeline.lr_factor

    def describe(self) -> list[Row]:
        """See Stage. The rows about the method of the data axis describe the replicas of one stage."""
        rows, num = self.optimizer.describe(), self.optimizer.comm.world_size
        own = [row for row in rows if row[0].startswith(INSIDE)] or rows
        outer = [*self._rows, *self.pipeline.plans.on_recompute, *(row for row in rows if row not in own)]
        if num == 1:
            name, effect, _ = own[0]
            return [*outer, (name, effect, "one replica of each stage: it averages and sends nothing")]
        return [*outer, own[0], *((f"{num} replicas: {asked}", effect, why) for asked, effect, why in own[1:])]

    @property
    def uncompressed_bytes_per_step(self) -> float:
        return 8 * self.pipeline.part.num_parameters * (1 - 1 / self.optimizer.everyone.world_size)

    def snapshot(self) -> Snapshot:
        snapshot = super().snapshot()
        # Of what replicas of a stage all hold, other stages hold nothing.
        snapshot.pieces = {name: replace(piece, holders=self._holders) for name, piece in snapshot.pieces.items()}
        times = [self.pipeline.recoveries.get(stage, 0) for stage in range(self.pipeline.num_stages)]
        snapshot.common |= {"micro_batches": self.pipeline.num_before, "recoveries": times}
        snapshot.common |= {"pipeline_plan": self.pipeline.plans.kept()}
        return snapshot

    def restore(self, source: Source) -> None:
        super().restore(source)
        if self.pipeline.part.options.delta:
            source.is_same = source.is_exact = False
            source.note("last messages of sequences", "dropped", "differences at borders begin anew")
        times = source.common.get("recoveries", [])
        if len(times) == self.pipeline.num_stages:
            self.pipeline.recoveries = dict(enumerate(times))
        elif any(times):
            source.note("larger learning rates of recovered stages", "dropped", "the stages are others")
        self.pipeline.restore(source.common.get("micro_batches", 0))
        if told := self.pipeline.plans.take(source.common.get("pipeline_plan", {})):
            source.note("paths of micro-batches", told, "they were planned for measured links")

    def adopt_weights(self, values: Mapping[str, Tensor]) -> None:
        held = dict(self.module.named_parameters())
        super().adopt_weights({name: value for name, value in values.items() if name in held})
        self.pipeline.weights_written()
        self.pipeline.keep_copies()

    def close(self) -> None:
        self.pipeline.close()
        super().close()
