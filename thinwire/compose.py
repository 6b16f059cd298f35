"""`parallelize`: gives each method the host that runs it, each on its axis of one mesh."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# A host registers itself for its kind of method.
import thinwire.hosts.ddp.optimizer
import thinwire.hosts.forward.optimizer
import thinwire.hosts.fsdp.optimizer
import thinwire.hosts.sharded.wrap
import thinwire.islands.library
import thinwire.islands.optimizer
import thinwire.islands.own_pace  # noqa: F401
from thinwire import _compat
from thinwire.checkpoint import Snapshot, Source
from thinwire.collectives import Communicator, Meter, Peers, Topology, WorldPeers
from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S
from thinwire.collectives.groups import reserve
from thinwire.errors import ConfigError, Problems, nearest_divisor
from thinwire.hosts.arguments import check_arguments, check_instance
from thinwire.hosts.experts import ExpertRanks, expert_parallel
from thinwire.hosts.experts.parallel import check_experts, check_optimizer
from thinwire.hosts.interface import ParallelOptimizer, apply
from thinwire.hosts.offload.hollow import is_hollow
from thinwire.hosts.pipeline.stage import PipelineStage, StagePart, models_own, take_part
from thinwire.hosts.pipeline.vocabulary import SpreadRows
from thinwire.hosts.ranks import Axis, along
from thinwire.hosts.sequence import SequenceRanks, sequence_parallel
from thinwire.hosts.sequence.seams import heads_of
from thinwire.hosts.sharded.optimizer import ShardedOptimizer
from thinwire.hosts.stages import StageAxis, skeleton_of
from thinwire.hosts.tensor import CopiedGradients, TensorAxis, check_same_copies, cut_parameters, misfits
from thinwire.islands.optimizer import INSIDE
from thinwire.layout.mesh import AXES, check_axis, check_beside
from thinwire.methods.experts import ExpertParallel, check_data_method
from thinwire.methods.interface import Method
from thinwire.methods.memory import Residency, resident_method, same_everywhere
from thinwire.methods.outer.base import Connected, IslandsMethod
from thinwire.methods.pipeline.across import check_across, ranks_across
from thinwire.methods.pipeline.cut import layers_of
from thinwire.methods.pipeline.inside import check_inside, check_recovers, check_spread
from thinwire.methods.pipeline.options import Pipeline, check_stages
from thinwire.methods.sequence import SequenceParallel, Shape, check_strategy, choose_layout
from thinwire.models.moe import MoELlama, check_axes
from thinwire.models.tensor import cut_over
from thinwire.models.vocabulary import lose_by_rows
from thinwire.optim import SummingOptimizer
from thinwire.registry import check_on_mesh
from thinwire.state.given import optimizer_options, same_on_all_ranks
from thinwire.table import SENT, Row, announce as announce_table

__all__ = ["PipelinedModel", "Stage", "apply", "parallelize", "pipeline"]


# Process groups that a stage of an island opens along the pipeline; its host too, where the stages are all of it.
NUM_GROUPS = 6


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
        outer = [*self._rows, *self.pipeline.on_recompute, *(row for row in rows if row not in own)]
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
        snapshot.common |= {"pipeline_plan": self.pipeline.plan_kept()}
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
        if told := self.pipeline.take_plan(source.common.get("pipeline_plan", {})):
            source.note("paths of micro-batches", told, "they were planned for measured links")

    def adopt_weights(self, values: Mapping[str, Tensor]) -> None:
        held = dict(self.module.named_parameters())
        super().adopt_weights({name: value for name, value in values.items() if name in held})
        self.pipeline.weights_written()
        self.pipeline.keep_copies()

    def close(self) -> None:
        self.pipeline.close()
        super().close()


def pipeline(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: Method,
    *,
    stages: int,
    tensor: int = 1,
    options: Pipeline | None = None,
    local_size: int | None = None,
    overlap: bool = False,
    seed: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    checked: bool = False,
    initial: Callable[[str], Tensor] | None = None,
    announce: bool = True,
) -> PipelinedModel:
    """Cut a causal language model into `stages` and train it; `method` averages over the replicas of a stage.

    Args:
        model: called as model(tokens, targets=None); returns logits, or the mean loss if there are targets. All ranks
            start with the same weights. Afterwards the model holds the weights of this rank's stage only.
        optimizer: over the model's parameters. If `tensor` is above 1, it must not have taken a step yet.
        method: for the data axis, such as `thinwire.SDP4Bit()`; works if there are more ranks than stages x tensor.
        stages: `stages` x `tensor` must divide the number of ranks. The first ranks get the first stage, and so on,
            unless `options` say that replicas cross nodes.
        tensor: number of neighbouring ranks that cut the matrices of a stage's layers between them, by columns and by
            rows. Works for thinwire's models, and for models of transformers that state a plan. For others, use
            `parallelize_module` and `parallelize`.
        options: of the pipeline.
        local_size, overlap, seed, timeout_s, checked, initial, announce: as for `parallelize`.

    Raises ConfigError that lists everything that does not fit, before anything is sent.
    """
    check_arguments("pipeline", model, optimizer, stages=stages, tensor=tensor, local_size=local_size, overlap=overlap,
        seed=seed, timeout_s=timeout_s, checked=checked, announce=announce,
    )  # fmt: skip
    world_size = dist.get_world_size()
    for what, ranks, left in (("stages", stages, world_size), ("tensor ranks", tensor, world_size // max(1, stages))):
        if ranks < 1 or left % ranks:
            near = nearest_divisor(ranks, left)
            raise ConfigError(f"{ranks} {what} on {left} ranks: must divide them; nearest: {near}")
    device = next(iter(model.parameters())).device
    sizes = {"pipeline": stages, "data": world_size // stages // tensor} | ({"tensor": tensor} if tensor > 1 else {})
    options = options or Pipeline()
    laid_out = ranks_across(options.across, world_size, stages, tensor).view(*sizes.values())
    mesh = DeviceMesh(device.type, laid_out, mesh_dim_names=tuple(sizes))
    if tensor > 1:
        cut_with_optimizer(model, optimizer, mesh["tensor"])
    made = parallelize(
        model, optimizer, mesh, [options, method], local_size=local_size, overlap=overlap, seed=seed,
        timeout_s=timeout_s, checked=checked, initial=initial, announce=announce,
    )  # fmt: skip
    assert isinstance(made, PipelinedModel)
    return made


def cut_with_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
    """Cut the model by `cut_over`, and replace its parameters in the optimizer by their parts. Raises ConfigError."""
    if optimizer.state:
        raise ConfigError("the optimizer has taken steps with whole matrices: cut the model before the first")
    names = {id(param): name for name, param in model.named_parameters()}
    cut_over(model, mesh)
    parts = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [parts[names[id(param)]] if id(param) in names else param for param in group["params"]]


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    methods: Iterable[Method | Connected | Pipeline | SequenceParallel | ExpertParallel | Residency],
    *,
    local_size: int | None = None,
    overlap: bool = False,
    seed: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    checked: bool = False,
    initial: Callable[[str], Tensor] | None = None,
    announce: bool = True,
) -> Stage:
    """Train `model` on a mesh, with at most one method on each axis. A collective over the mesh.

    - The data axis: replicas; its method averages gradients. Most methods also work beside a tensor axis.
    - The tensor axis is torch's. Call `parallelize_module(model, mesh["tensor"], plan)` first, then make the optimizer.
    - The island axis: a method such as DiLoCo exchanges whole parameters in some of the updates. The islands of the
      mesh stay the same from start to end.
    - The pipeline axis: each rank holds some of the layers; see PipelinedModel.
    - The sequence axis: each rank holds some of a sequence's tokens. The data axis's method then averages over the
      ranks of both axes.
    - The expert axis: each rank holds some of a mixture's experts, and has a batch of its own. For the data axis's
      method, all ranks are replicas of the other weights.

    The gradient norm is that of the whole model. Ranks that hold the same elements stay equal bit for bit.

    Args:
        model: on every rank of the mesh; its parameters are plain tensors, or DTensors on the tensor axis.
        optimizer: over the model's parameters. If a method shards it: an elementwise one, or thinwire.Muon.
        mesh: its dimensions are named by AXES, such as ("data", "tensor").
        methods: at most one for each axis, such as [thinwire.DiLoCo(), thinwire.SDP4Bit()]. Without a method for the
            data axis, the `inner` of an islands method works there. The options of the pipeline, sequence and expert
            axes belong here too: `thinwire.Pipeline()`, `thinwire.SequenceParallel()`, `thinwire.ExpertParallel()`;
            the mesh sets their `parallel`. A `thinwire.Residency()` says what part of a sharded method's state lies on
            a disk.
        local_size: ranks per node; None: found from the launcher or host names.
        overlap: weights may arrive during the next forward.
        seed: of all randomness.
        timeout_s: how long one message may take, in seconds.
        checked: put a header and a checksum in front of every message.
        initial: with a Residency or a pipeline axis, for a model made by `thinwire.hollow`; see `thinwire.zero`. Beside
            a pipeline it is asked for the parameters of this rank's stage alone, in order of registration.
        announce: rank 0 prints what was asked for, what is in effect, and why they differ.

    Raises ConfigError with all reasons at once, before anything is sent: for a mesh without names, an axis without a
    method, two methods for one axis, everything that a method refuses, and parameters that do not fit the tensor axis.
    Then ranks compare their arguments; raises ConfigError that names the first difference.
    """
    check_arguments("parallelize", model, optimizer, local_size=local_size, overlap=overlap, seed=seed,
        timeout_s=timeout_s, checked=checked, announce=announce,
    )  # fmt: skip
    if not isinstance(methods, Sequence) or isinstance(methods, str):
        raise ConfigError(f"methods must be a list, such as [{methods!r}]")
    check_mesh(mesh)
    with same_on_all_ranks(mesh.mesh.flatten().tolist(), timeout_s) as alike:
        given = AxisMethods.of(methods, model, mesh, has_initial=initial is not None)
        check_joint(optimizer, sizes_of(mesh))
        alike |= {"methods": given.alike, "local_size": local_size, "overlap": overlap, "seed": seed}
        alike |= {"checked": checked} | optimizer_options(optimizer, model) | same_everywhere(given.residency)
    names, method, part, stages, tensor, experts = names_of(mesh), given.method, None, None, None, None
    of_ranks: dict[str, Any] = {"seed": seed, "timeout_s": timeout_s, "checked": checked}
    of_island = " of this island" if isinstance(method, Connected) else ""
    rows: list[Row] = [(f"mesh{of_island}", shape_of(mesh), "axes from the outside in")]
    if "pipeline" in names:
        part, stages = cut_layers(model, optimizer, mesh, given, initial)
    if "tensor" in names:
        tensor, part = cut_matrices(model, optimizer, mesh, part)
        rows.append(tensor_row(model, tensor, timeout_s))
    axis = axis_of(mesh, tensor, part, stages)
    if axis is not None:
        local_size = node_inside(mesh, axis.whole, local_size)
    if axis is not None and "expert" in names:
        check_optimizer(model, optimizer, given.experts)
        meter = Meter()
        experts = expert_parallel(
            model, given.experts, axis.whole, stride=stride_of(mesh, "expert"), local_size=local_size, meter=meter,
            **of_ranks,
        )  # fmt: skip
        axis = replace(axis, group_for=experts.group_for, meter=meter)
    if stages is not None:
        # The first rank of an island opens a group with other islands' first ones, and no group opens behind that.
        reserve(mesh["pipeline"], NUM_GROUPS, timeout_s)
        if tensor is not None:
            reserve(mesh["tensor"], 1, timeout_s)
    if "island" in names and isinstance(method, IslandsMethod):
        method = method.connected_to(lambda: other_islands(mesh, timeout_s, checked))
    options = of_ranks | {"local_size": local_size} | ({} if axis is None else {"axis": axis})
    if given.residency is not None:
        options |= {"residency": given.residency, "initial": initial}
    module, parallel = apply(method, model, optimizer, overlap=overlap, **options)
    if experts is not None and isinstance(experts.options.release, int) and isinstance(parallel, ShardedOptimizer):
        experts.hold(parallel, experts.options.release)
    if isinstance(model, MoELlama) and parallel.comm.world_size > 1:
        model.gather = partial(gathered, parallel.comm)
    if overlap and not parallel.overlaps:
        rows.append(("overlap", "no effect", "weights are whole when a step ends"))
    if part is not None:
        own = PipelineStage(part, mesh["pipeline"], parallel, tensor=tensor, **of_ranks)
        if stages is not None:
            stages.after_write = own.weights_written
        holders = holders_of(mesh, "pipeline")
        stage: Stage = PipelinedModel(model, parallel, rows, own, tensor, holders, announces=announce)
    else:
        sequence = None
        if "sequence" in names:
            sequence = sequence_parallel(
                model, given.sequence, None if axis is None else axis.whole, stride=stride_of(mesh, "sequence"),
                local_size=local_size, meter=parallel.meter, **of_ranks,
            )  # fmt: skip
            model.forward = sequence.forward_of(model)
        stage = Stage(module, parallel, rows, tensor, sequence, experts)
    if announce and mesh.get_rank() == 0:
        announce_table(stage.describe())
    return stage


@dataclass(frozen=True)
class AxisMethods:
    """What `parallelize` was given: the method of the data axis, in that of islands, and the options of other axes.

    alike: what all ranks must have been given; the peers of an island, and a residency, are a rank's own.
    """

    method: Method | Connected
    pipeline: Pipeline
    sequence: SequenceParallel
    experts: ExpertParallel
    residency: Residency | None
    alike: list[Any]

    @classmethod
    def of(cls, methods: Iterable[Any], model: nn.Module, mesh: DeviceMesh, *, has_initial: bool) -> AxisMethods:
        """The methods by their axes, with the ranks of the mesh. Raises ConfigError with all that does not fit."""
        pipelines = [method for method in methods if isinstance(method, Pipeline)]
        sequences = [method for method in methods if isinstance(method, SequenceParallel)]
        experts = [method for method in methods if isinstance(method, ExpertParallel)]
        residencies = [method for method in methods if isinstance(method, Residency)]
        layouts = Pipeline | SequenceParallel | ExpertParallel | Residency
        others = [method for method in methods if not isinstance(method, layouts)]
        method = checked_method(
            model, mesh, others, pipelines, sequences, experts,
            is_filled=has_initial and bool(residencies or "pipeline" in names_of(mesh)),
        )  # fmt: skip
        if len(residencies) > 1:
            raise ConfigError("a process has one residency: give one thinwire.Residency")
        if residencies:
            resident_method(method, names_of(mesh))
        sizes, alike = sizes_of(mesh), [one for one in methods if not isinstance(one, Connected | Residency)]
        return cls(
            method, (*pipelines, Pipeline())[0],
            replace((*sequences, SequenceParallel())[0], parallel=sizes.get("sequence", 1)),
            replace((*experts, ExpertParallel())[0], parallel=sizes.get("expert", 1)),
            (*residencies, None)[0], alike,
        )  # fmt: skip


def cut_layers(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, given: AxisMethods,
    initial: Callable[[str], Tensor] | None,
) -> tuple[StagePart, StageAxis | None]:  # fmt: skip
    """Leave this rank's layers in the model: its part of a pipeline, and beside islands how their stages lie."""
    # Before the others' stages leave the model.
    skeleton = skeleton_of(model) if isinstance(given.method, IslandsMethod | Connected) else None
    part = take_part(model, optimizer, given.pipeline, mesh["pipeline"], initial)
    if skeleton is None:
        return part, None
    trained = tuple(map(part.holdings.trained_by, range(mesh["pipeline"].size())))
    return part, StageAxis(mesh["pipeline"], skeleton, trained)


def cut_matrices(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, part: StagePart | None
) -> tuple[TensorAxis, StagePart | None]:
    """The tensor axis of a model, or of what a stage has of it, and that part with local tensors."""
    tensor = cut_parameters(model, optimizer, mesh["tensor"], () if part is None else part.chunks.values())
    if part is None:
        lose_by_rows(model)
    return tensor, None if part is None else part.local(tensor)


def axis_of(
    mesh: DeviceMesh, tensor: TensorAxis | None, part: StagePart | None, stages: StageAxis | None
) -> Axis | None:
    """The ranks of the data axis' method; None: all there are.

    Ranks of a sequence have the same weights: to that method they are like all others. So are those that hold different
    experts, for all other weights.
    """
    names = names_of(mesh)
    is_flat = set(names) <= {"data", "sequence", "expert"}
    if is_flat and mesh.size() == dist.get_world_size() and "expert" not in names:
        return None
    inside = mesh[tuple(name for name in names if name != "island")]
    whole = _compat.flattened(inside) if inside.ndim > 1 else inside
    group = whole if is_flat or inside.ndim == 1 else mesh["data"]
    return Axis(group, whole, tensor, part.num_names if part is not None else 0, stages=stages)


def gathered(comm: Communicator, sums: Tensor) -> Tensor:
    """The `sums` of all ranks, stacked in rank order."""
    return comm.wait(comm.all_gather_exact(sums.cpu())).to(sums.device)


def checked_method(
    model: nn.Module,
    mesh: DeviceMesh,
    methods: Sequence[Method | Connected],
    pipelines: Sequence[Pipeline] = (),
    sequences: Sequence[SequenceParallel] = (),
    experts: Sequence[ExpertParallel] = (),
    *,
    is_filled: bool,
) -> Method | Connected:
    """The method of the data axis; if there is an island axis, that method wrapped by the islands'.

    is_filled: parameters without memory get their first values. Raises ConfigError that lists everything that does not
    fit. Changes nothing and sends nothing.
    """
    problems, names = Problems(), names_of(mesh)
    if len(names) != mesh.ndim:
        raise ConfigError(f"the mesh has no names: give init_device_mesh mesh_dim_names, of {', '.join(AXES)}")
    for name in names:
        with problems.collect():
            check_axis(name)
    if "data" not in names:
        problems.messages.append(f"the mesh {shape_of(mesh)} has no data axis: add one, of 1 rank if need be")
    method: Method | Connected | None = None
    with problems.collect():
        method = composed(methods, mesh)
    if method is not None and ("tensor" in names or mesh.size() < dist.get_world_size()):
        with problems.collect():
            check_on_mesh(method.method if isinstance(method, Connected) else method)
    problems.messages += pipeline_problems(model, mesh, method, pipelines)
    if method is not None and "pipeline" in names:
        problems.note(check_recovers, (*pipelines, Pipeline())[0], method, sizes_of(mesh))
        problems.note(check_spread, (*pipelines, Pipeline())[0], method, sizes_of(mesh))
    problems.note(check_axes, model, sizes_of(mesh))
    problems.messages += sequence_problems(model, mesh, method, sequences)
    problems.messages += expert_problems(model, mesh, method, experts)
    if "tensor" in names:
        problems.messages += misfits(model, mesh["tensor"])
    elif foreign := next((name for name, param in model.named_parameters() if isinstance(param, DTensor)), None):
        problems.messages.append(
            f"{foreign!r} is a DTensor, and the mesh {shape_of(mesh)} has no tensor axis: a model of fully_shard is "
            "compressed by thinwire.compress_fsdp; one of parallelize_module needs the axis 'tensor'"
        )
    if meta := next((name for name, param in model.named_parameters() if param.is_meta), None):
        problems.messages.append(
            f"{meta!r} is on the meta device: call model.to_empty(device=...) and fill it first, or call "
            "thinwire.hollow(model) and give `initial`, with a pipeline axis or a Residency"
        )
    if not is_filled and (empty := next((name for name, param in model.named_parameters() if is_hollow(param)), None)):
        problems.messages.append(
            f"{empty!r} has no memory: give `initial`, its first values, with a pipeline axis or a Residency; nearest: "
            "thinwire.zero(..., initial=...)"
        )
    problems.raise_any()
    assert method is not None
    return method


def axis_problems(axis: str, options: Sequence[object], mesh: DeviceMesh, with_axis: str) -> Iterator[str]:
    """Yield why the options of an axis that cuts the model don't fit a mesh. with_axis: a mesh that would fit."""
    names = names_of(mesh)
    if axis not in names:
        if options:
            yield (
                f"{type(options[0]).__name__} works on the {axis} axis, and the mesh {shape_of(mesh)} has none; "
                f"nearest: {with_axis}"
            )
        return
    if len(options) > 1:
        yield f"the {axis} axis takes one {type(options[0]).__name__}"
    problems = Problems()
    problems.note(check_beside, axis, names)
    yield from problems.messages


def pipeline_problems(
    model: nn.Module, mesh: DeviceMesh, method: Method | Connected | None, pipelines: Sequence[Pipeline]
) -> list[str]:
    """Reasons why a pipeline axis does not fit model, mesh and method, one message each; empty if it fits."""
    sizes = sizes_of(mesh)
    problems = Problems(axis_problems("pipeline", pipelines, mesh, f"pipeline=1,{shape_of(mesh)}"))
    if "pipeline" not in sizes:
        return problems.messages
    options = (*pipelines, Pipeline())[0]
    with problems.collect():
        check_stages(options, sizes["pipeline"], len(layers_of(model)[1]))
    problems.note(check_across, options.across, places_of(mesh))
    if method is not None:
        problems.note(check_inside, method, sizes.get("data", 1))
    return problems.messages


def places_of(mesh: DeviceMesh) -> Tensor:
    """The ranks of a mesh, or of its first island, by the axes pipeline, data and tensor."""
    names = names_of(mesh)
    ranks = mesh.mesh.permute([names.index(name) for name in AXES if name in names])
    return ranks[0] if "island" in names else ranks


def sequence_problems(
    model: nn.Module, mesh: DeviceMesh, method: Method | Connected | None, options: Sequence[SequenceParallel]
) -> list[str]:
    """Reasons why a sequence axis does not fit model, mesh and method, one message each; empty if it fits."""
    sizes, ranks = sizes_of(mesh), (*options, SequenceParallel())[0].parallel
    problems = Problems(axis_problems("sequence", options, mesh, f"{shape_of(mesh)},sequence={ranks}"))
    if "sequence" not in sizes:
        return problems.messages
    with problems.collect():
        asked = replace((*options, SequenceParallel())[0], parallel=sizes["sequence"])
        heads, kv_heads, width, _ = heads_of(model)
        # How the ranks lie on nodes is found later; only stated methods depend on it.
        choose_layout(asked, Shape(heads, kv_heads, width, 1), 1)
    if method is not None:
        problems.note(check_strategy, method)
    return problems.messages


def stride_of(mesh: DeviceMesh, axis: str) -> int:
    """Distance in a flat mesh between neighbours on an axis: the number of ranks of the axes inside it."""
    names = names_of(mesh)
    return math.prod(mesh.mesh.shape[names.index(axis) + 1 :])


def holders_of(mesh: DeviceMesh, axis: str) -> list[int]:
    """The ranks of a mesh that have this rank's coordinate on one of its axes."""
    place = mesh.get_coordinate()
    assert place is not None
    dim = names_of(mesh).index(axis)
    return mesh.mesh.select(dim, place[dim]).flatten().tolist()


def with_ranks(options: ExpertParallel, mesh: DeviceMesh) -> ExpertParallel:
    """The options, with `parallel` set to the length of the mesh's expert axis."""
    return replace(options, parallel=mesh["expert"].size())


def expert_problems(
    model: nn.Module, mesh: DeviceMesh, method: Method | Connected | None, options: Sequence[ExpertParallel]
) -> list[str]:
    """Reasons why an expert axis does not fit model, mesh and method, one message each; empty if it fits."""
    sizes, ranks = sizes_of(mesh), (*options, ExpertParallel())[0].parallel
    problems = Problems(axis_problems("expert", options, mesh, f"{shape_of(mesh)},expert={ranks}"))
    if "expert" not in sizes:
        return problems.messages
    with problems.collect():
        check_experts(model, with_ranks((*options, ExpertParallel())[0], mesh), sizes["expert"])
    if method is not None:
        problems.note(check_data_method, method)
    return problems.messages


def composed(methods: Sequence[Method | Connected], mesh: DeviceMesh) -> Method | Connected:
    """One method made of all: that of the data axis becomes the `inner` of an islands method. Raises ConfigError."""
    for method in methods:
        check_instance(method)
    outer = [method for method in methods if isinstance(method, IslandsMethod | Connected)]
    inner = [method for method in methods if not isinstance(method, IslandsMethod | Connected)]
    given, has_islands = ", ".join(type(method).__name__ for method in methods) or "none", "island" in names_of(mesh)
    kept = f"thinwire.{type(inner[0]).__name__ if inner else 'Zero'}()"
    if has_islands and (len(outer) != 1 or isinstance(outer[0], Connected)):
        raise ConfigError(
            f"the island axis takes one method of islands, not {given}; nearest: [thinwire.DiLoCo(), {kept}], "
            "or a mesh without that axis"
        )
    if not has_islands and (of_islands := next((one for one in outer if isinstance(one, IslandsMethod)), None)):
        raise ConfigError(
            f"{type(of_islands).__name__} works on the island axis, and the mesh {shape_of(mesh)} has none; nearest: "
            f"island=1,{shape_of(mesh)}" + (f", or [{kept}] alone" if inner else "")
        )
    if len(inner) > 1 or len(methods) > 1 + has_islands or not methods:
        raise ConfigError(f"the data axis takes one method, not {given}; nearest: [{kept}]")
    if not outer:
        return inner[0]
    (islands,) = outer
    if not inner or isinstance(islands, Connected):
        return islands
    if islands.inner not in (type(islands)().inner, inner[0]):
        raise ConfigError(
            f"two methods for the data axis, {type(islands.inner).__name__} as inner= and {type(inner[0]).__name__}; "
            "nearest: leave inner= out"
        )
    return replace(islands, inner=inner[0])


def other_islands(mesh: DeviceMesh, timeout_s: float, checked: bool) -> Peers | None:
    """The islands of a mesh, on the first rank of each island; they stay the same from start to end."""
    axis = names_of(mesh).index("island")
    place = mesh.get_coordinate()
    assert place is not None
    if any(at for dim, at in enumerate(place) if dim != axis):
        return None
    return WorldPeers(mesh["island"], timeout_s=timeout_s, checked=checked)


def node_inside(mesh: DeviceMesh, inside: DeviceMesh, local_size: int | None) -> int | None:
    """Ranks per node inside an island, computed from `local_size`, which counts ranks of the whole mesh."""
    if local_size is None or inside.size() == mesh.size():
        return local_size
    ranks = mesh.mesh.flatten().tolist()
    members = [ranks.index(rank) for rank in inside.mesh.flatten().tolist()]
    return along(Topology.stated(len(ranks), local_size), members)


def check_joint(optimizer: torch.optim.Optimizer, sizes: Mapping[str, int]) -> None:
    """Raise ConfigError for an optimizer that looks across all parameters, where ranks of an axis have others."""
    parts = [axis for axis in ("pipeline", "expert") if sizes.get(axis, 1) > 1]
    if isinstance(optimizer, SummingOptimizer) and optimizer.is_joint and parts:
        raise ConfigError(
            f"{type(optimizer).__name__} looks across all parameters, of which ranks of the {parts[0]} axis have "
            "others; nearest: AdamW, or thinwire.Muon"
        )


def check_mesh(mesh: object) -> None:
    """Raise ConfigError for what is no DeviceMesh."""
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"parallelize got {mesh!r} as its mesh: must be a DeviceMesh; nearest: torch.distributed.init_device_mesh("
            "'cpu', (2,), mesh_dim_names=('data',))"
        )


def names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of a mesh's dimensions; empty if it has none."""
    return tuple(mesh.mesh_dim_names or ())


def sizes_of(mesh: DeviceMesh) -> dict[str, int]:
    """The number of ranks along each named axis of a mesh."""
    return dict(zip(names_of(mesh), mesh.mesh.shape, strict=False))


def shape_of(mesh: DeviceMesh) -> str:
    """The mesh as text, such as data=2,tensor=2."""
    return ",".join(f"{name}={size}" for name, size in zip(names_of(mesh), mesh.mesh.shape, strict=True))


def tensor_row(model: nn.Module, axis: TensorAxis, timeout_s: float) -> Row:
    """The start-up row about the tensor axis. A collective over it."""
    comm = Communicator(axis.mesh, local_size=1, timeout_s=timeout_s)
    differed = check_same_copies(model, axis, comm)
    comm.close()
    effect = f"{len(axis.local_names())} parameters cut over {axis.mesh.size()} ranks"
    if why := vars(model).get("whole_vocabulary"):
        effect += f"; embedding and head are whole on each: {why}"
    sent = f"{len(differed)} copies differed and were sent by its first rank" if differed else "copies are equal"
    return "tensor axis", effect, sent
