"""One rank's stage of a pipeline: its part of the model, and the steps and forwards that it runs with others."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.collectives import Mailbox
from thinwire.cost import Network
from thinwire.errors import ConfigError
from thinwire.hosts.interface import ParallelOptimizer
from thinwire.hosts.offload.hollow import any_values, is_hollow
from thinwire.hosts.pipeline.links import measured_links
from thinwire.hosts.pipeline.measured import measured, spans_of_all
from thinwire.hosts.pipeline.memory import Activations, kept_by
from thinwire.hosts.pipeline.recovery import EndCopies, Holdings, first_copies, keeper_of, packed, recovered
from thinwire.hosts.pipeline.runner import Runner, counts_forwards
from thinwire.hosts.pipeline.shared import SharedMailbox
from thinwire.hosts.pipeline.tied import TiedWeights
from thinwire.hosts.pipeline.vocabulary import SpreadRows, SpreadVocabulary, spread_rows, whole_logits
from thinwire.hosts.ranks import communicator_along
from thinwire.hosts.tensor import TensorAxis
from thinwire.losses import cut_loss
from thinwire.methods.pipeline import Action, Chunk, Costs, Cut, Plan, cut, in_flight, simulate, token_shares
from thinwire.methods.pipeline.border import LastMessages, sequence_keys
from thinwire.methods.pipeline.costs import peak_bytes
from thinwire.methods.pipeline.drift import drifted, plan_from, plan_text
from thinwire.methods.pipeline.options import Pipeline
from thinwire.methods.pipeline.plan import AGREE, BACKWARD, EMBED, FORWARD, SCATTER, SCORE, TRAIN, ordered, straight
from thinwire.methods.pipeline.recompute import AUTO, MODES, MORE_BYTES, fastest_within, keeping, mode_of
from thinwire.methods.pipeline.recover import NONE, RECOVERIES, SWAP, lr_factor
from thinwire.methods.pipeline.simulate import PipelineTimeline, trace
from thinwire.methods.pipeline.vocabulary import Own
from thinwire.models.vocabulary import lose_by_rows
from thinwire.table import Row

# The first step warms up; this one is measured.
MEASURED_STEP = 2
# Links are measured again each time that so many steps have gone by.
MEASURED_EVERY = 50
MicroBatch = tuple[Tensor, Tensor]
Loss = Callable[[Any, Any], Tensor]
Initial = Callable[[str], Tensor] | None


def models_own(module: Any, batch: Any) -> Tensor:
    """The loss that the model itself returns."""
    return module(*batch)


def keys_of(micro_batch: MicroBatch) -> list[bytes]:
    """The keys of a micro-batch's sequences."""
    return sequence_keys(micro_batch[0])


class StageChunk(nn.Module):
    """A chunk that is called through the training loop's loss function, which may measure time or cast."""

    def __init__(self, chunk: Chunk, dtype: torch.dtype) -> None:
        super().__init__()
        self.chunk, self.dtype = chunk, dtype
        self.loss: Loss = models_own

    def forward(self, hidden: Tensor | None, micro_batch: tuple[Tensor, Tensor | None]) -> Tensor:
        """See Chunk. The hidden state that it returns has the pipeline's dtype."""
        found: list[Tensor] = []

        def module(*batch: Any) -> Tensor:
            found.append(self.chunk(hidden, batch))
            return found[-1]

        output = self.loss(module, micro_batch)
        if len(found) != 1 or output is not found[0]:
            raise ConfigError(
                "a pipeline computes the model's own loss: `loss` must return the result of `module(*batch)`"
            )
        return output if self.chunk.gives_loss else output.to(self.dtype)


@dataclass(frozen=True)
class StagePart:
    """A rank's part of a model.

    Attributes:
        tied: for each rank, the weights that this rank and that one share.
        holdings, copies: if lost stages are recovered: the parameters of all ranks, and this rank's copies of others'.
        vocabulary: this rank's rows of embedding and head, if all ranks have some.
    """

    options: Pipeline
    made: Cut
    chunks: dict[int, StageChunk]
    tied: dict[int, list[nn.Parameter]]
    num_parameters: int
    num_names: int
    holdings: Holdings
    copies: dict[int, Tensor]
    vocabulary: SpreadVocabulary | None = None

    def local(self, tensor: TensorAxis) -> StagePart:
        """The same after `cut_parameters`, which puts local tensors in the place of DTensors."""
        return replace(self, tied={peer: tensor.local(params) for peer, params in self.tied.items()})

    @property
    def rows(self) -> SpreadRows | None:
        """Which rows of which parameters this rank has."""
        return None if self.vocabulary is None else self.vocabulary.rows


def take_part(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: Pipeline, mesh: DeviceMesh, initial: Initial = None
) -> StagePart:
    """Leave in model and optimizer only the parameters that this rank's stage trains.

    Names stay those of the whole model. initial: gives the first values of parameters without memory, by name; those of
    other stages never get any. Raises ConfigError, before anything is changed, for a model that can't be cut this way.
    """
    stages, rank = mesh.size(), mesh.get_local_rank()
    apart = options.recover == SWAP
    with any_values(model):
        made = cut(model, options.num_chunks(stages), options.layers, options.head, apart=apart)
    made = replace(made, home=options.home(stages))
    options.crossing(0).check(made.features)
    own = [chunk for chunk, home in enumerate(made.home) if home == rank]
    trained = [param for param in model.parameters() if param.requires_grad]
    num_parameters, num_names = sum(param.numel() for param in trained), len(trained)
    chunks = {number: StageChunk(made.chunk(number), made.dtype) for number in own}
    tied = made.tied(made.home, rank)
    holdings = Holdings.of(made)
    check_trained(made, holdings)
    if initial is not None:
        parts = [*(part.chunk for part in chunks.values()), *map(model.get_submodule, made.spread_names)]
        ends = holdings.kept_by(rank) if options.recover != NONE else []
        fill(model, parts, {name for other in ends for name in holdings.ends[other]}, initial)
    copies = first_copies(holdings, model, rank) if options.recover != NONE else {}
    vocabulary: SpreadVocabulary | None = None
    if made.vocabulary is not None:
        rows = spread_rows(made, optimizer, Own.of(rank, stages, made.vocabulary.size))
        vocabulary = SpreadVocabulary(
            *rows, rank=rank, num_ranks=stages, features=made.features, padding=made.vocabulary.padding
        )
    made.reduce_to(own, [param for peer, params in tied.items() if peer < rank for param in params])
    kept = {id(param) for param in model.parameters()}
    for group in optimizer.param_groups:
        dropped = [param for param in group["params"] if id(param) not in kept]
        group["params"] = [param for param in group["params"] if id(param) in kept]
        for param in dropped:
            optimizer.state.pop(param, None)
    return StagePart(options, made, chunks, tied, num_parameters, num_names, holdings, copies, vocabulary)


def fill(
    model: nn.Module, parts: Sequence[nn.Module], others: Collection[str], initial: Callable[[str], Tensor]
) -> None:
    """Give parameters without memory their first values: those of `parts` of a model, and the `others` by name."""
    own = {id(param) for part in parts for param in part.parameters()}
    for name, param in model.named_parameters():
        if (id(param) in own or name in others) and is_hollow(param):
            param.data = initial(name).to(param.device, param.dtype)


def check_trained(made: Cut, holdings: Holdings) -> None:
    """Raise ConfigError, on all ranks, if all parameters of a stage are frozen: it would have nothing to update."""
    # Rows of a vocabulary on all stages are always trained.
    frozen = [rank for rank in range(len(holdings.ends)) if not holdings.trained_by(rank)]
    if not frozen or made.vocabulary is not None:
        return
    layers = {number: f"{made.layers}.{number}" for number in range(sum(made.sizes))}
    trained = [number for number, name in layers.items() if holdings.of_layer(name)]
    stages = len(holdings.ends)
    near = f"{max(1, len(trained))} stages"
    if len(trained) >= stages:
        ends = [trained[len(trained) * (stage + 1) // stages - 1] + 1 for stage in range(stages - 1)]
        near = "layers '" + ",".join(str(b - a) for a, b in pairwise([0, *ends, len(layers)])) + "'"
    raise ConfigError(
        f"stage {frozen[0]} of {stages}: all of its parameters are frozen, and each stage must train some; nearest: "
        f"{near}"
    )


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a step's forwards and backwards, simulated from measurements.

    Attributes:
        bubbles: for each rank, the share of the step in which it computes nothing.
        in_flight: for each rank, the most micro-batches whose activations it keeps at once.
        timeline: of that step.
        mode: in which it recomputes, where that is "auto".
    """

    bubbles: tuple[float, ...]
    in_flight: tuple[int, ...]
    timeline: PipelineTimeline
    mode: str = ""

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.timeline.makespan_s

    @property
    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each rank, in order."""
        return self.timeline.orders

    def __str__(self) -> str:
        shown = ", ".join(f"{part:.0%}" for part in self.bubbles)
        links = ", ".join(f"{a} to {b} {num / 1e6:.3f} MB" for (a, b), num in sorted(self.timeline.link_bytes.items()))
        held = ", ".join(map(str, self.in_flight))
        return (
            f"{self.step_s:.3g} s a step; stages, first to last, are idle for {shown} of it, and hold at most {held} "
            f"micro-batches at once; they send {links}" + (f"; recompute {AUTO}: {self.mode}" if self.mode else "")
        )


class LastLogits(nn.Module):
    """A pipeline in the form in which a text generator calls a model: it returns the logits of the last token only."""

    def __init__(self, stage: PipelineStage, model: nn.Module) -> None:
        super().__init__()
        self.stage, self.model = stage, model
        self.max_seq_len: Any = model.max_seq_len

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, 1, vocab]. A collective over the pipeline."""
        return self.stage.forward(tokens, last_only=True)


class PipelineStage:
    """Runs steps with the other stages. All ranks see the same micro-batches, (tokens, targets), in the same order.

    Args:
        part: this rank's.
        mesh: the pipeline axis.
        optimizer: over the part's weights; its meter counts the messages.
        tensor: the axis that cuts the weights of a stage, if any.
    """

    def __init__(
        self, part: StagePart, mesh: DeviceMesh, optimizer: ParallelOptimizer, *, seed: int, timeout_s: float,
        checked: bool, tensor: TensorAxis | None = None,
    ) -> None:  # fmt: skip
        self.part, self.optimizer = part, optimizer
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
        self._runners: dict[int, Runner] = {}
        # For which numbers of micro-batches they were made for measurements.
        self._fitted: set[int] = set()
        # Where recompute is "auto": what activations take and may take, known with the first micro-batches.
        self.activations: Activations | None = None
        # Rows on it.
        self.on_recompute: list[Row] = []
        if part.options.recompute == AUTO:
            how = "by free memory and simulated seconds"
            self.on_recompute = [(f"recompute {AUTO}", "decided with the first micro-batches", how)]
        self.last: dict[int, LastMessages] = {}
        self._forget_messages()
        self.device = next(iter(part.made.model.parameters())).device
        # Of what no neighbour has the like of, where a lost stage is recovered.
        self.ends: EndCopies | None = None
        if part.options.recover != NONE:
            box = Mailbox(mesh, topology, timeout_s=timeout_s, checked=checked, meter=optimizer.comm.meter)
            self.ends = EndCopies(box, part.holdings, part.copies)
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
        self.prediction: Prediction | None = None
        # The links that the plan was made for; and the one whose drift had it made anew, in words.
        self.network: Network | None = None
        self.why_planned = ""
        # Of the first step under the prediction: what each rank did, and when, in Chrome's trace format.
        self.trace: list[dict[str, Any]] | None = None
        self._forwards: dict[int, Runner] = {}

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
        self.settle(batches, loss)
        runner = self._runner(len(batches))
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
        since = self.num_steps - MEASURED_STEP
        if is_measured := not since or (self.part.options.is_measured and since > 0 and since % MEASURED_EVERY == 0):
            # In front of the gradients of replicas, which would slow the probes of links.
            self._fit(runner, batches)
        self.optimizer.send_accumulated()
        # The mean over all ranks is that over the replicas of the whole.
        self.optimizer.note_loss(float(part) * self.num_stages)
        known = None if is_measured or self.trace is not None else self.prediction
        if known is not None and runner.plan.orders == known.orders:
            self.trace = trace(known.timeline.spans, "predicted")
            self.trace += trace(spans_of_all(runner, self.comm), "measured")
        return float(part)

    def settle(self, batches: Sequence[MicroBatch], loss: Loss = models_own) -> list[Row]:
        """Where recompute is "auto" and undecided, decide it for steps of such micro-batches, and return a row on it.

        Of tensors only shapes count, so they may be on meta. A collective over all ranks.
        """
        if self.part.options.recompute != AUTO or self.activations is not None:
            return []
        self._call_by(loss)
        made, everyone = self.part.made, self.optimizer.everyone
        largest = max(batches, key=lambda batch: batch[0].numel())
        own = {}
        for number, chunk in self.part.chunks.items():
            starts = number == 0 and made.vocabulary is None
            # Ranks of a tensor axis add up what they compute.
            is_alone = self.alike is None
            arrives = None if starts else made.shape(0, largest)
            own[number] = kept_by(chunk, arrives, made.dtype, largest, is_alone=is_alone)
        num_trained = sum(param.numel() for param in made.model.parameters() if param.requires_grad)
        last_messages = self.part.options.last_messages_bytes(self.num_stages)[self.number]
        counting = counts_forwards(self.part.chunks.values())
        found = Activations.of_all(
            own,
            made.num_chunks,
            self.number,
            self.num_stages,
            MORE_BYTES * num_trained + last_messages,
            self.device,
            everyone,
            not counting,
        )
        if self.part.vocabulary is not None:
            found = replace(found, spread=self.part.vocabulary.kept_bytes(largest, self.part.options.barriers))
        self.activations = found
        for num in self._fitted:
            self._runners[num] = self._running(self._in_fitting_mode(self._runners[num].plan, self.network))
        self.on_recompute = [self._row_on_mode(self._runner(len(batches)).plan, found)]
        return self.on_recompute

    def _row_on_mode(self, plan: Plan, found: Activations) -> Row:
        """A row on the mode in which a plan recomputes, where that is "auto"."""
        peaks = peak_bytes(plan.orders, found.costs(Costs.even(len(plan.home))))
        shown = ", ".join(f"{peak / 1e6:.1f} of {free / 1e6:.0f}" for peak, free in zip(peaks, found.free, strict=True))
        mode, why = mode_of(plan), f"activations of the stages, in MB of what is free for them: {shown}"
        if any(peak > free for peak, free in zip(peaks, found.free, strict=True)):
            why += "; no choice fits: a smaller micro-batch, in_flight or chunk does"
        elif found.free[0] == torch.inf:
            why = "a layer keeps statistics of each forward, and must not run twice"
        return f"recompute {AUTO}", f"{mode}: {MODES[mode]}", why

    def next_loss(self, batches: Sequence[MicroBatch], loss: Loss = models_own) -> float:
        """The loss that `forward_backward` would return, as the mean over all replicas. A collective over all ranks."""
        self._call_by(loss)
        self.settle(batches, loss)
        part = self._runner(len(batches)).evaluate(batches, token_shares(batches), self.num_before)
        everyone = self.optimizer.everyone
        own = torch.tensor([float(part) * self.num_stages], dtype=torch.float64)
        return float(everyone.wait(everyone.all_gather_exact(own)).mean())

    @torch.no_grad()
    def forward(self, tokens: Tensor, targets: Tensor | None = None, *, last_only: bool = False) -> Tensor:
        """Logits of tokens [batch, seq], or the mean loss, on every rank of the pipeline. A collective over it.

        Without gradients. last_only: only the logits of the last token.
        """
        self._call_by(models_own)
        output = self._forward_runner().evaluate([(tokens, targets)], [1.0])
        source = self.part.made.home[-1]
        shape: list[int] = []
        if targets is None and self.part.made.vocabulary is not None:
            own = output[:, -1:] if last_only else output
            logits = self.comm.wait(self.comm.all_gather_exact(own.to(self.part.made.dtype).contiguous()))
            return whole_logits(logits, self.part.made.vocabulary.size)
        if targets is None:
            output = output[:, -1:] if last_only and self.comm.rank == source else output
            sizes = torch.tensor([*output.shape] if output.ndim else [0, 0, 0])
            shape = self.comm.wait(self.comm.all_gather_exact(sizes)).view(-1, 3)[source].tolist()
        # Autocast may have left it in another dtype where the head is.
        dtype = self.part.made.dtype
        whole = output.to(dtype).contiguous() if self.comm.rank == source else output.new_empty(shape, dtype=dtype)
        self.comm.wait(self.comm.broadcast_(whole, source))
        return whole

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
            self._runners.clear()
            self._fitted.clear()

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
        made, runner = self.part.made, self._runner(len(batches))
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
        made = self.part.made
        rows = self.part.options.describe(made.sizes, made.features, made.dtype.itemsize)
        tied = sum(param.nbytes for params in self.part.tied.values() for param in params)
        if self.ends is not None:
            sent = f"; {self.ends.sent_bytes / 1e6:.3f} MB of this stage's ends a step go to its neighbour"
            rows.append((f"recover {self.part.options.recover}", RECOVERIES[self.part.options.recover], sent[2:]))
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
            if chunk.training != model.training:
                chunk.train(model.training)

    def _runner(self, num: int) -> Runner:
        if num not in self._runners:
            self._runners[num] = self._running(self._plan_of(num))
        return self._runners[num]

    def _plan_of(self, num: int, costs: Costs | None = None, network: Network | None = None) -> Plan:
        memory = None
        if (known := self.activations) is not None:
            costs, memory = known.costs(costs or Costs.even(self.part.made.num_chunks)), known.free
        return self.part.options.plan_of(self.num_stages, num, costs, network, memory)

    def _forward_runner(self) -> Runner:
        """A runner of a plan for the forwards of one micro-batch."""
        if not self._forwards:
            home = self.part.made.home
            barriers = self.part.options.barriers if self.part.vocabulary is not None else 0
            orders = []
            for rank in range(self.num_stages):
                own = [chunk for chunk in range(len(home)) if home[chunk] == rank]
                order = [(FORWARD, chunk, 0) for chunk in own]
                spread = [[(EMBED, rank, 0)], [(kind, rank, 0) for kind in (SCORE, AGREE, TRAIN)], [(SCATTER, rank, 0)]]
                first, head, last = spread if barriers else ([], [], [])
                orders.append(ordered(first + order + head + [(BACKWARD, *each[1:]) for each in order[::-1]] + last))
            self._forwards[1] = self._running(Plan(home, straight(len(home), 1), tuple(orders), barriers))
        return self._forwards[1]

    def _running(self, plan: Plan) -> Runner:
        made = self.part.made
        return Runner(
            plan, self.part.chunks, self.mailbox, made.shape, dtype=made.dtype, crossing=self.crossing,
            device=self.device, tied=self.tied, last=self.last, keys=keys_of, vocabulary=self.part.vocabulary,
        )  # fmt: skip

    def _fit(self, runner: Runner, batches: Sequence[MicroBatch]) -> None:
        """Measure, and plan the steps that follow, unless links are as they were when the plan was made.

        All ranks compute the same plan from the same numbers.
        """
        costs = self._with_ends(self._of_first(measured(runner, self.comm, batches)))
        if self.ends is not None:
            # Copies that are still on their way would slow the probes.
            self.ends.take()
        skips = bool(self.part.options.skip)
        network: Network = self._of_first(measured_links(self.comm, self._probe, all_pairs=skips))
        num, plan = len(batches), runner.plan
        if self.network is not None:
            self.why_planned = drifted(self.network, network, simulate(plan, costs, self.network))
        if self.network is None or self.why_planned:
            self.network, self._fitted = network, set()
        if num not in self._fitted:
            plan = self._plan_of(num, costs, self.network)
            self._runners[num] = self._running(plan)
            self._fitted.add(num)
        elif self.prediction is not None:
            return
        found, mode = simulate(plan, costs, self.network), ""
        if self.activations is not None:
            # The times of a step may make another mode the fastest.
            self.on_recompute, mode = [self._row_on_mode(plan, self.activations)], mode_of(plan)
        bubbles = tuple(idle / max(found.makespan_s, 1e-12) for idle in found.idle_s)
        self.prediction = Prediction(bubbles, in_flight(plan), found, mode)

    def _with_ends(self, costs: Costs) -> Costs:
        """The costs with the messages that belong to no micro-batch: tied weights, and copies for a recovery."""
        holdings, share = self.part.holdings, self.mailbox.share_bytes
        ends = [holdings.num_bytes(names) for names in holdings.ends] if self.ends is not None else []
        copies = tuple((rank, keeper_of(rank, self.num_stages), share(num)) for rank, num in enumerate(ends) if num)
        return replace(costs, tied_bytes=share(holdings.num_bytes(holdings.tied)), copies=copies)

    @property
    def _asked(self) -> dict[str, Any]:
        """The options by which a plan with paths of its own is made."""
        options = self.part.options
        return {"skip": options.skip, "in_flight": options.in_flight, "recompute": options.recompute}

    def plan_kept(self) -> dict[str, Any]:
        """The plans on which bits depend, since they were made for measured links, as JSON can hold them."""
        if not self.part.options.skip or self.network is None:
            return {}
        plans = {num: self._runners[num].plan for num in sorted(self._fitted)}
        return {str(num): plan_text(plan, self.network) | {"asked": self._asked} for num, plan in plans.items()}

    def take_plan(self, kept: Mapping[str, Any]) -> str:
        """Go on with the plans of `plan_kept`; what became of them, in words; empty: there were none."""
        if not kept:
            return ""
        if not self.part.options.skip:
            return "dropped: no stage is skipped now"
        plans = {int(num): plan_from(text) for num, text in kept.items()}
        if any(plan.home != self.part.made.home for plan, _ in plans.values()):
            return "dropped: they are of other stages"
        # A checkpoint of an older version does not say what was asked for.
        before, now = next(iter(kept.values())).get("asked", self._asked), self._asked
        if changed := [name for name in now if before[name] != now[name]]:
            was, has = (", ".join(f"{name} {asked[name]}" for name in changed) for asked in (before, now))
            return f"dropped: they were made for {was}, and this run has {has}"
        told = f"taken over for steps of {' or '.join(map(str, plans))} micro-batches, until links drift"
        for num, (plan, network) in plans.items():
            own = self._in_fitting_mode(plan, network)
            self._runners[num], self.network = self._running(own), network
            if self.activations is not None:
                self.on_recompute = [self._row_on_mode(own, self.activations)]
            if own != plan:
                told += f"; recompute {mode_of(own)} by the memory here, was {mode_of(plan)}"
        self._fitted = set(plans)
        return told

    def _in_fitting_mode(self, plan: Plan, network: Network | None) -> Plan:
        """A plan that was taken over, as the memory here asks for where recompute is "auto" and decided."""
        if self.part.options.recompute != AUTO or (known := self.activations) is None:
            return plan
        costs = known.costs(Costs.even(self.part.made.num_chunks))
        return fastest_within(keeping(plan), costs, network, known.free)

    def _of_first(self, value: Any) -> Any:
        """The first rank's result, for all on its tensor axis, which must run actions in one order.

        If stages are skipped, for all replicas too, so that a checkpoint has one plan.
        """
        alike = self.optimizer.everyone if self.part.options.skip else self.alike
        if alike is None:
            return value
        packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        (size, *_) = alike.wait(alike.all_gather_exact(torch.tensor([packed.numel()]))).flatten().tolist()
        whole = packed if alike.rank == 0 else packed.new_empty(size)
        alike.wait(alike.broadcast_(whole))
        return pickle.loads(whole.numpy().tobytes())
