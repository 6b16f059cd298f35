"""One rank's stage of a pipeline, and the steps that it runs with the others."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.collectives import Mailbox
from thinwire.hosts.interface import ParallelOptimizer
from thinwire.hosts.pipeline.forward import StageForward
from thinwire.hosts.pipeline.measured import spans_of_all
from thinwire.hosts.pipeline.part import Loss, MicroBatch, StagePart, models_own
from thinwire.hosts.pipeline.plans import StagePlans
from thinwire.hosts.pipeline.recovery import EndCopies, packed, recovered
from thinwire.hosts.pipeline.runner import Runner
from thinwire.hosts.pipeline.shared import SharedMailbox
from thinwire.hosts.pipeline.tied import TiedWeights
from thinwire.hosts.ranks import communicator_along
from thinwire.hosts.tensor import TensorAxis
from thinwire.losses import cut_loss
from thinwire.methods.pipeline import Plan, token_shares
from thinwire.methods.pipeline.border import LastMessages, sequence_keys
from thinwire.methods.pipeline.recover import NONE, RECOVERIES, lr_factor
from thinwire.methods.pipeline.simulate import trace
from thinwire.models.modes import follow
from thinwire.models.vocabulary import lose_by_rows
from thinwire.table import Row


def keys_of(micro_batch: MicroBatch) -> list[bytes]:
    """The keys of a micro-batch's sequences."""
    return sequence_keys(micro_batch[0])


class PipelineStage:
    """Runs steps with the other stages. All ranks see the same micro-batches, (tokens, targets), in the same order.

    Args:
        part: this rank's.
        mesh: the pipeline axis.
        optimizer: over the part's weights; its meter counts the messages.
        tensor: the axis that cuts the weights of a stage, if any.

    plans: by which it runs steps.
    """

    def __init__(
        self, part: StagePart, mesh: DeviceMesh, optimizer: ParallelOptimizer, *, seed: int, timeout_s: float,
        checked: bool, tensor: TensorAxis | None = None,
    ) -> None:  # fmt: skip
        self.part, self.optimizer, self.device = part, optimizer, part.device
        everyone = optimizer.everyone
        self.comm = communicator_along(mesh, everyone, timeout_s=timeout_s)
        topology = self.comm.topology
        options: dict[str, Any] = {"timeout_s": timeout_s, "checked": checked, "meter": optimizer.comm.meter}
        # The ranks that have the same micro-batches, hidden states and gradients as this one.
        self.alike = None if tensor is None else communicator_along(tensor.mesh, everyone, **options)
        self.mailbox = (
            Mailbox(mesh, topology, **options)
            if self.alike is None
            else SharedMailbox(self.alike, mesh, topology, **options)
        )
        # What is measured is no part of a step, and counts as an operation of its own.
        self._probe = Mailbox(mesh, topology, timeout_s=timeout_s, meter=optimizer.comm.meter, operation="probe")
        self.crossing = part.options.crossing(seed)
        self.tied = TiedWeights(self.mailbox, part.tied, () if tensor is None else tensor.parts)
        # Of what no neighbour has the like of, where a lost stage is recovered.
        self.ends: EndCopies | None = None
        if part.options.recover != NONE:
            box = Mailbox(mesh, topology, timeout_s=timeout_s, checked=checked, meter=optimizer.comm.meter)
            self.ends = EndCopies(box, part.holdings, part.copies)
        self.plans = StagePlans(
            part, self.comm, everyone, self.alike, self.mailbox, self._probe, self.running, self.ends
        )
        self._forward = StageForward(part, self.comm, self.running)
        self.last: dict[int, LastMessages] = {}
        self._forget_messages()
        # The norm of the last finite gradient of this stage's layers, its own before replicas average and before it is
        # clipped, which scales all stages alike; and how often each stage was recovered.
        self.norm = 0.0
        self.recoveries: dict[int, int] = {}
        self.num_before = 0
        self.num_steps = 0
        for chunk in part.chunks.values():
            if chunk.chunk.gives_loss:
                lose_by_rows(chunk.chunk.model)
        # Of the last step: from the first action to the last, and in actions.
        self.step_s = self.busy_s = 0.0
        # Of the first step under the prediction: what each rank did, and when, in Chrome's trace format.
        self.trace: list[dict[str, Any]] | None = None

    @property
    def number(self) -> int:
        """Number of this stage, from 0."""
        return self.comm.rank

    @property
    def num_stages(self) -> int:
        return self.comm.world_size

    @property
    def borders(self) -> str:
        """Where and how hidden states are rounded; empty if they travel exactly."""
        made, codec = self.part.made, self.crossing.forward + (", differences" if self.part.options.delta else "")
        ends = "" if self.part.vocabulary is None else ", and at both ends"
        return "" if self.crossing.codec("forward") is None else f"{codec} behind {made.sizes} on {made.home}{ends}"

    def cut_loss(self, head: nn.Module) -> None:
        """Let the model's head compute the loss, see thinwire.losses.cut_loss; no effect on stages without the head."""
        for chunk in self.part.chunks.values():
            if chunk.chunk.gives_loss:
                cut_loss(chunk.chunk.model, head)

    def forward_backward(self, batches: Sequence[MicroBatch], loss: Loss = models_own) -> float:
        """Compute the gradients of the mean loss over all tokens of the batches.

        Return the loss on the head's rank, else 0.

        Each rank sends its gradients as soon as its own last backward is done, or, in steps that measure links, right
        after that. Raises ConfigError for a number of batches that does not fit the plan.
        """
        self._call_by(loss)
        self.plans.settle(batches)
        runner = self.plans.runner(len(batches))
        runner.num_before = self.num_before
        start = time.perf_counter()
        with self.optimizer.no_sync():
            part = runner.run(batches, token_shares(batches))
        self.step_s = time.perf_counter() - start
        self.busy_s = sum(ended - begun for _, begun, ended in runner.spans)
        if self.ends is not None:
            norm = self._norm_of_layers()
            # The step of a gradient that is not finite is skipped, and its norm would make a mean of layers NaN.
            self.norm = norm if math.isfinite(norm) else self.norm
        self.num_before, self.num_steps = runner.num_before, self.num_steps + 1
        if is_measured := self.plans.is_measured(self.num_steps):
            # In front of the gradients of replicas, which would slow the probes of links.
            self.plans.fit(runner, batches)
        self.optimizer.send_accumulated()
        # The mean over all ranks is that over the replicas of the whole.
        self.optimizer.note_loss(float(part) * self.num_stages)
        known = None if is_measured or self.trace is not None else self.plans.prediction
        if known is not None and runner.plan.orders == known.orders:
            self.trace = trace(known.timeline.spans, "predicted")
            self.trace += trace(spans_of_all(runner, self.comm), "measured")
        return float(part)

    def settle(self, batches: Sequence[MicroBatch], loss: Loss = models_own) -> list[Row]:
        """Where recompute is "auto" and undecided, decide it for steps of such micro-batches, and return a row on it.

        Of tensors only shapes count, so they may be on meta. A collective over all ranks.
        """
        self._call_by(loss)
        return self.plans.settle(batches)

    def next_loss(self, batches: Sequence[MicroBatch], loss: Loss = models_own) -> float:
        """The loss that `forward_backward` would return, as the mean over all replicas. A collective over all ranks."""
        self._call_by(loss)
        self.plans.settle(batches)
        part = self.plans.runner(len(batches)).evaluate(batches, token_shares(batches), self.num_before)
        everyone = self.optimizer.everyone
        own = torch.tensor([float(part) * self.num_stages], dtype=torch.float64)
        return float(everyone.wait(everyone.all_gather_exact(own)).mean())

    def forward(self, tokens: Tensor, targets: Tensor | None = None, *, only: int | None = None) -> Tensor:
        """Logits of tokens [batch, seq], or the mean loss, on every rank of the pipeline. A collective over it.

        Without gradients. only: the place of the token whose logits alone are returned, [batch, 1, vocab].
        """
        self._call_by(models_own)
        return self._forward(tokens, targets, only=only)

    def weights_written(self) -> None:
        """Note that something other than `step` has written this stage's weights. Copies elsewhere are sent again."""
        self.tied.is_stale = True

    def restore(self, num_before: int) -> None:
        """Continue after `num_before` micro-batches. Copies of weights on other ranks are sent again."""
        self.num_before = num_before
        self.weights_written()
        self._forget_messages()
        self.keep_copies()

    def _forget_messages(self) -> None:
        """Reset the messages to which differences refer to zeros, as all ranks do."""
        home, options = self.part.made.home, self.part.options
        if options.delta:
            own = [n for n, ends in enumerate(pairwise(home)) if ends[0] != ends[1] and self.comm.rank in ends]
            self.last = {border: LastMessages(1e6 * options.delta_mb) for border in own}
            self.plans.forget()

    def keep_copies(self) -> None:
        """After an update, start to send the neighbours their copies of this stage.

        Waits only for the previous copies.
        """
        if self.ends is not None:
            self.optimizer.synchronize()
            self.ends.send(self.weights)

    @property
    def weights(self) -> dict[str, Tensor]:
        """This rank's weights by name; a tied one under its owner's name."""
        found: dict[str, Tensor] = dict(self.part.made.model.named_parameters())
        for params in self.part.tied.values():
            found.update(zip(self.part.holdings.tied, params, strict=True))
        return found

    @property
    def lr_factor(self) -> float:
        """The factor of this stage's learning rate."""
        return lr_factor(self.recoveries.get(self.comm.rank, 0))

    def rescue(self) -> dict[int, Tensor]:
        """After a loss: this rank's copies of others' weights, by rank, as far as they had arrived.

        A borrowed weight, for which no optimizer of this rank has state, is listed under this rank's own number.
        """
        assert self.ends is not None
        own = {self.number: packed(self.weights, self.part.holdings.tied).cpu()} if self.tied.borrowed else {}
        return self.ends.rescue() | own

    def copy_replica(self, source: int, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights of one replica of this stage, bit for bit. A collective over its replicas.

        source: number of that replica. weights: its own, by name; on the others only names and shapes count.
        """
        holdings = self.part.holdings
        names = [*holdings.within(self.number), *holdings.ends[self.number]]
        names += holdings.tied if self.number == 0 else ()
        packet = packed(weights, names).cpu()
        comm = self.optimizer.comm
        comm.wait(comm.broadcast_(packet, source))
        values = holdings.split(packet, names)
        self.optimizer.adopt_weights({name: value.to(self.device) for name, value in values.items()})

    def recover(
        self, lost: Collection[int], norms: Sequence[float], copies: Mapping[int, Tensor],
        recoveries: Mapping[int, int], healthy: int = 0,
    ) -> None:  # fmt: skip
        """Give lost stages new weights, in a new pipeline. Their moments start anew. A collective over all ranks.

        Afterwards every rank calls `restore`.

        Args:
            lost: stages whose state no process has; the others have restored theirs.
            norms: for each stage, its `norm` before the loss; any number for a lost one.
            copies: what `rescue` returned on this rank before the loss; empty for a lost one.
            recoveries: for each stage, how often it was recovered before; equal on all ranks.
            healthy: number of the replica of the pipeline whose weights the other replicas copy.
        """
        assert self.ends is not None
        for rank, copy in copies.items():
            if rank == self.number:
                for param, value in zip(self.tied.borrowed, self._split_tied(copy), strict=True):
                    param.data.copy_(value)
            else:
                self.ends.held[rank] = copy
        values = recovered(
            self.ends.mailbox, self.part.holdings, self.part.options.recover, lost, norms, self.weights, self.ends.held
        )
        if values:
            self.optimizer.adopt_weights(values)
        if self.number in lost and self.optimizer.comm.world_size > 1:
            self.copy_replica(healthy, self.weights)
        self.recoveries = {stage: recoveries.get(stage, 0) + (stage in lost) for stage in {*recoveries, *lost}}

    def break_off(self) -> None:
        """Close all connections after a loss, so that ranks that wait for this one get an error at once."""
        self.comm.break_off()
        if self.alike is not None:
            self.alike.break_off()
        boxes = [self.mailbox, self._probe] + ([self.ends.mailbox] if self.ends is not None else [])
        for box in boxes:
            box.break_off()

    def _split_tied(self, packet: Tensor) -> list[Tensor]:
        holdings = self.part.holdings
        return list(holdings.split(packet, holdings.tied).values())

    def _norm_of_layers(self) -> float:
        model = self.part.made.model
        names = self.part.holdings.within(self.comm.rank)
        grads = [grad for name in names if (grad := model.get_parameter(name).grad) is not None]
        return float(nn.utils.get_total_norm(grads)) if grads else 0.0

    def sent_bytes(self, batches: Sequence[MicroBatch]) -> list[int]:
        """Payload bytes of each rank in a step of these micro-batches, without messages between replicas, by formula.

        An upper bound if packets vary in length.
        """
        made, runner = self.part.made, self.plans.runner(len(batches))
        found = [sum(runner.messages_of(rank, batches)) for rank in range(self.num_stages)]
        holdings = self.part.holdings
        tied = holdings.num_bytes(holdings.tied)
        for rank in {made.home[0], made.home[-1]} if tied else ():
            found[rank] += tied
        if self.ends is not None:
            for rank in range(self.num_stages):
                found[rank] += holdings.num_bytes(holdings.ends[rank])
        return [self.mailbox.share_bytes(num) for num in found]

    def describe(self) -> list[Row]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        made, options = self.part.made, self.part.options
        rows = options.describe(made.sizes, made.features, made.dtype.itemsize)
        tied = sum(param.nbytes for params in self.part.tied.values() for param in params)
        num_replicas = self.optimizer.comm.world_size
        if options.skip and num_replicas > 1:
            why = "paths over all ranks of a stage: in a loop of your own, by skipping(..., nodes=...)"
            rows.append((f"skip with {num_replicas} replicas", "each keeps its micro-batches to its own ranks", why))
        if self.ends is not None:
            sent = f"{self.ends.sent_bytes / 1e6:.3f} MB of this stage's ends a step go to its neighbour"
            rows.append((f"recover {options.recover}", RECOVERIES[options.recover], sent))
        if tied:
            effect = f"{tied / 1e6:.3f} MB a step between the two ranks, each way"
            rows.append(("tied weights", effect, "the head's gradients go to the embedding, its weights come back"))
        return rows

    def close(self) -> None:
        """Give the process groups back."""
        if self.ends is not None:
            self.ends.take()
            self.ends.mailbox.close()
        for each in (self.comm, self.mailbox, self._probe, self.alike):
            if each is not None:
                each.close()

    def _call_by(self, loss: Loss) -> None:
        model = self.part.made.model
        if self.part.vocabulary is not None:
            self.part.vocabulary.loss = loss
        for chunk in self.part.chunks.values():
            chunk.loss = loss
            follow(chunk.chunk.model, model)

    def running(self, plan: Plan) -> Runner:
        """The runner of a plan."""
        made = self.part.made
        return Runner(
            plan, self.part.chunks, self.mailbox, made.shape, dtype=made.dtype, crossing=self.crossing,
            device=self.device, tied=self.tied, last=self.last, keys=keys_of, vocabulary=self.part.vocabulary,
        )  # fmt: skip
