"""A model that trains under the methods of a mesh."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.checkpoint import Snapshot, Source
from thinwire.errors import ConfigError
from thinwire.hosts.experts import ExpertRanks
from thinwire.hosts.interface import ParallelOptimizer
from thinwire.hosts.pipeline.stage import PipelineStage
from thinwire.hosts.pipeline.vocabulary import SpreadRows
from thinwire.hosts.sequence import SequenceRanks
from thinwire.hosts.tensor import CopiedGradients, TensorAxis
from thinwire.table import SENT, Row


class Stage:
    """A model in training on a mesh; made by `parallelize`.

    A step is `forward_backward`, `reduce`, `update`, or `forward_backward` and `step`.

    Attributes:
        module: the module to call in training.
        optimizer: the ParallelOptimizer that steps it.
        pipeline: see PipelinedModel.
        sequence: the ranks that share this rank's sequences, see SequenceRanks. All of them call the model with the
            same whole sequences.
        experts: the ranks that share the experts of a mixture, see ExpertRanks. All of them call the model equally
            often.
        borders: where and how hidden states are rounded on their way between ranks, so that a loss depends on more than
            the weights; empty: nowhere.
    """

    pipeline: PipelineStage | None = None
    borders = ""
    # The optimizer's step whose gradients `forward_backward` has made; None: there are none.
    _made_for: int | None = None
    _broke_off = False

    def __init__(
        self,
        module: nn.Module,
        optimizer: ParallelOptimizer,
        rows: Sequence[Row] = (),
        tensor: TensorAxis | None = None,
        sequence: SequenceRanks | None = None,
        experts: ExpertRanks | None = None,
    ) -> None:
        self.module, self.optimizer, self.sequence, self.experts = module, optimizer, sequence, experts
        # What cuts parameters: a mixture has no tensor axis.
        self._cut: TensorAxis | ExpertRanks | SpreadRows | None = tensor or experts
        self._copies = CopiedGradients(module, tensor) if tensor is not None else None
        self._rows = list(rows)
        if sequence is not None:
            self.borders = sequence.rounds
            self._rows += sequence.describe()
        if experts is not None:
            self.borders = "; ".join(filter(None, [self.borders, experts.rounds]))
            self._rows += experts.describe()

    def forward_backward(
        self, batches: Sequence[Any], loss: Callable[[nn.Module, Any], Tensor] = lambda module, batch: module(*batch)
    ) -> float:
        """Run forward and backward on this rank's micro-batches of one step. Return their mean loss.

        Only the last micro-batch's backward communicates. With `optimizer.climb`, every micro-batch is passed twice: at
        the weights, and at the point uphill. The loss is that at the weights.

        Args:
            batches: the micro-batches of one step.
            loss: (module, micro-batch) -> its loss; by default the result of `module(*batch)`.

        Raises ConfigError for what is no list of micro-batches, and for a loss that is not one number; RuntimeError for
        a second call in one step, and after a call that failed in a backward.
        """
        with self._gradients_of_a_step(batches, loss):
            climb = self.optimizer.climb
            if climb is None:
                total = self._passes(batches, loss)
            else:
                parameters = list(self.module.parameters())
                gpus = {param.device for param in parameters if param.is_cuda}
                # What the first pass draws, such as dropout, the second one draws again.
                with self.optimizer.no_sync(), torch.random.fork_rng(gpus):
                    total = self._passes(batches, loss)
                with climb.uphill(parameters):
                    self._passes(batches, loss, climb.alpha)
            self.optimizer.note_loss(total)
        return total

    @contextmanager
    def _gradients_of_a_step(self, batches: Sequence[Any], loss: Callable[[Any, Any], Tensor]) -> Iterator[None]:
        """Refuse what can't give the gradients of a step, and note whether the block has given them."""
        check_passes(batches, loss)
        self._refuse_after_failure()
        if self._made_for == self.optimizer.steps:
            raise RuntimeError(
                "a second forward_backward in one step: give all micro-batches of a step to one call, as a list, and "
                "call stage.step() after it"
            )
        yield
        self._made_for, self._broke_off = self.optimizer.steps, False

    def _refuse_after_failure(self) -> None:
        if self._broke_off:
            raise RuntimeError(
                "an earlier forward_backward failed in a backward, and other ranks may wait for its gradients: end the "
                "program on all ranks, and go on from a checkpoint"
            )

    def _passes(self, batches: Sequence[Any], loss: Callable[[nn.Module, Any], Tensor], share: float = 1.0) -> float:
        """Add `share` times the gradient of the mean loss to the gradients. Return `share` times the mean loss."""
        total: Tensor | float = 0.0
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            with nullcontext() if is_last else self.optimizer.no_sync():
                value = checked_loss(loss(self.module, batch)) / (len(batches) / share)
                self._broke_off = True
                value.backward()
            # On its own device: to read it there would have the CPU wait for every micro-batch.
            total = total + value.detach().float()
        return float(total)

    @torch.no_grad()
    def next_loss(
        self, batches: Sequence[Any], loss: Callable[[Any, Any], Tensor] = lambda module, batch: module(*batch)
    ) -> float:
        """Mean over ranks of the loss that `forward_backward` would return for these micro-batches. A collective."""
        check_passes(batches, loss)
        total = torch.zeros(())
        for batch in batches:
            total += checked_loss(loss(self.module, batch)).cpu() / len(batches)
        return self.optimizer.all_mean(float(total))

    @property
    def uncompressed_bytes_per_step(self) -> float:
        """Bytes that one rank would send in a step of `zero` in fp32 over all ranks of the mesh."""
        if self.experts is None:
            return self.optimizer.uncompressed_bytes_per_step
        sizes = {name: param.numel() for name, param in self.module.named_parameters() if param.requires_grad}
        sizes |= {name: shape.numel() for name, shape in self.experts.shapes.items() if name in sizes}
        return 8 * sum(sizes.values()) * (1 - 1 / self.optimizer.comm.world_size)

    @property
    def lr_factor(self) -> float:
        """The factor of this rank's learning rate: above 1 if its stage was recovered."""
        return 1.0

    def reduce(self) -> Tensor:
        """Wait for the mean gradient, and agree with all ranks of the mesh on its norm, the loss and stopping.

        Returns the 2-norm of the whole gradient, fp64 scalar. Each element of the model counts once. Raises
        RuntimeError after a `forward_backward` that failed in a backward; ConfigError in the first step if ranks of a
        tensor axis have different gradients of a parameter that all of them hold whole.
        """
        self._refuse_after_failure()
        if self._copies is not None:
            self._copies.compare()
        return self.optimizer.reduce()

    def update(self, max_norm: float = math.inf) -> Tensor:
        """Clip the gradient to a norm of at most `max_norm`, update the weights, and clear the gradient.

        All ranks skip a step whose gradient is not finite. Returns the norm before clipping.
        """
        self._refuse_after_failure()
        norm = self.optimizer.clip_grad_norm_(max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._made_for = None
        return norm

    def step(self, max_norm: float = math.inf) -> Tensor:
        """`reduce` and `update`."""
        self.reduce()
        return self.update(max_norm)

    def describe(self) -> list[Row]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        rows = self.optimizer.describe()
        if self.sequence is not None:
            own = f"gradients and weights: {SENT}"
            rows = [(own if asked == SENT else asked, effect, why) for asked, effect, why in rows]
        return [*self._rows, *rows]

    def snapshot(self) -> Snapshot:
        """This rank's state between two steps, as pieces of whole parameters, which any mesh can load."""
        snapshot = self.optimizer.snapshot()
        if self._cut is not None:
            place = self.optimizer.comm.rank, self.optimizer.comm.world_size
            cut = {name: self._cut.piece_of_whole(name, piece, *place) for name, piece in snapshot.pieces.items()}
            # What was padding alone is nothing now.
            snapshot.pieces = {name: piece for name, piece in cut.items() if piece.values.numel()}
            shares = map(self._cut.share_of_whole, snapshot.shares)
            snapshot.shares = [share for share in shares if share is not None]
        snapshot.common |= {"borders": self.borders}
        if self.sequence is not None:
            snapshot.common |= {"sequence_draws": self.sequence.wire.num_drawn}
        if self.experts is not None:
            snapshot.common |= {"expert_draws": self.experts.wire.num_drawn}
        return snapshot

    def restore(self, source: Source) -> None:
        """Continue from a checkpoint of any mesh, and note what became of each of its parts. A collective."""
        self._made_for = None
        if self._cut is not None:
            source.place_piece = self._cut.piece_of_whole
            source.part_of = self._cut.part_of_flat
        self.optimizer.restore(source)
        if source.common.get("borders", "") != self.borders:
            source.is_same = source.is_exact = False
        if self.sequence is not None:
            self.sequence.wire.num_drawn = source.common.get("sequence_draws", 0)
        if self.experts is not None:
            self.experts.wire.num_drawn = source.common.get("expert_draws", 0)

    def adopt_weights(self, values: Mapping[str, Tensor]) -> None:
        """Take parameters of the whole model, by name, the same bits on all ranks, as ParallelOptimizer does."""
        self.optimizer.adopt_weights(values if self._cut is None else self._cut.part(values))

    def finish(self) -> None:
        """Write the result into the model: with islands, the mean of their weights. Training can't go on from there."""
        self.optimizer.finish()

    def close(self) -> None:
        """Wait for all communication and give the process groups back."""
        for axis in (self.sequence, self.experts):
            if axis is not None:
                axis.close()
        self.optimizer.close()


def check_passes(batches: object, loss: Callable[[Any, Any], Tensor]) -> None:
    """Raise ConfigError for what is no list of micro-batches, or a loss that can't be called for one of them."""
    if not isinstance(batches, Sequence) or isinstance(batches, str) or not batches:
        shape = f" of shape {list(batches.shape)}" if isinstance(batches, Tensor) else ""
        given = "an empty list" if isinstance(batches, Sequence) else f"a {type(batches).__name__}{shape}"
        raise ConfigError(f"micro-batches of a step: got {given}, must be a list of at least one; nearest: [batch]")
    try:
        called = inspect.signature(loss)
    except ValueError:
        # A built-in function states no parameters.
        return
    try:
        called.bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"the loss takes {called}, and is called as loss(module, micro-batch): {error}; nearest: "
            "lambda module, batch: module(batch).mean()"
        ) from None


def checked_loss(value: object) -> Tensor:
    """The loss of a micro-batch. Raises ConfigError if it is not one number in a tensor."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value
    given = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ConfigError(f"the loss gives {given}, must be a tensor of one number; nearest: its mean()")
