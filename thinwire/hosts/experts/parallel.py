"""Cuts the experts of a mixture over neighbouring ranks of a group, and sends the tokens' rows to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.checkpoint import Piece, Share
from thinwire.codecs.random import GAMMA, MASK32
from thinwire.collectives import Communicator, Meter
from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S
from thinwire.errors import ConfigError
from thinwire.hosts.experts.checks import check_experts
from thinwire.hosts.experts.once import Once, work_on
from thinwire.hosts.experts.stopwatch import Stopwatch
from thinwire.hosts.experts.trip import ExpertWire
from thinwire.hosts.experts.weights import Gather, Gathered, KeptBits
from thinwire.hosts.experts.wires import entering, wire_of
from thinwire.hosts.ranks import SHARED, along, meter_of, neighbours
from thinwire.hosts.sharded.optimizer import ShardedOptimizer
from thinwire.methods.experts import ExpertParallel, ExpertPlacement
from thinwire.methods.experts.options import CODED
from thinwire.methods.experts.traffic import chunks_text
from thinwire.models.experts import Experts, between_ranks, mixed
from thinwire.models.fused import FusedExperts
from thinwire.models.kept import KeptValues
from thinwire.models.moe import MoE
from thinwire.models.order import Order
from thinwire.models.row_hooks import row_hooks
from thinwire.models.seam import experts_of, module_of
from thinwire.optim.dion import FACTOR
from thinwire.state.portable import OPTIMIZER
from thinwire.state.replicas import SPREAD, equal_bits
from thinwire.table import Row

RELEASED = "bytes of gradients in each layer's backward, while experts compute; the rest at its end"


class ExpertRanks:
    """A rank's place among those that share the experts; made by `expert_parallel`.

    Attributes:
        options: with the way in use.
        placement: which experts each rank has.
        wire: the codecs that round rows.
        once: see Once.
        watch: seconds of the layers of experts.
        comm: the ranks that share the experts.
        everyone: all ranks that train the model.
        replicas: global ranks that hold the same experts as this one.
        kept_bits: of pruned experts, see KeptBits.
        modules: the experts of each layer.
        tokens: (n) -> which tokens of the global batch are the n tokens of a forward on this rank, int64 [n]. What rows
            draw follows from these numbers. None: each rank has as many tokens, in the order of ranks.
        shapes: of the whole tensors of experts, by name, see `tensors_of`.
    """

    def __init__(
        self, options: ExpertParallel, placement: ExpertPlacement, comm: Communicator, everyone: Communicator,
        shapes: Mapping[str, torch.Size], stride: int = 1, seed: int = 0, asked: ExpertParallel | None = None,
    ) -> None:  # fmt: skip
        self._asked, self._stride, self._seed = asked or options, stride, seed
        self.placement, self.comm, self.everyone, self.shapes = placement, comm, everyone, shapes
        place, ranks = comm.rank, placement.ranks
        self.replicas = [each for rank, each in enumerate(everyone.global_ranks) if rank // stride % ranks == place]
        self.watch = Stopwatch()
        self._wires: dict[tuple[str, str, int, int], tuple[ExpertWire, Once | None]] = {}
        self.options = options
        self.wire, self.once = self._wires_of(options)
        self._held: tuple[ShardedOptimizer, float | None] | None = None
        self._followed: ShardedOptimizer | None = None
        self._kept: dict[tuple[nn.Module, str], Gathered] = {}
        self.kept_bits: dict[nn.Module, KeptBits] = {}
        self.modules: list[nn.Module] = []
        self.tokens: Callable[[int], Tensor] | None = None

    @property
    def members(self) -> list[int]:
        """The ranks that share the experts, numbered among all."""
        return neighbours(self.everyone.rank, self.placement.ranks, self._stride)

    def take(self, options: ExpertParallel) -> None:
        """Let rows travel in another way from now on: another `move`, `route`, `chunks` or `once_a_step`.

        All ranks call it alike, between any two steps: outputs and gradients stay the same. Raises ConfigError for a
        way that does not fit the nodes.
        """
        drawn = self.wire.num_drawn
        self.wire, self.once = self._wires_of(options)
        self.options, self.wire.num_drawn = options, drawn
        # What was gathered in another way is of no use.
        self._kept.clear()
        self._set_pace()

    def hold(self, optimizer: ShardedOptimizer, room_bytes: float | None) -> None:
        """Let gradients leave while experts compute: so many bytes in each layer's backward, and the rest at the end.

        room_bytes: of a rank to other nodes; None: gradients leave as they are ready. To be called between two steps.
        """
        self._held = optimizer, room_bytes
        self._set_pace()

    def _set_pace(self) -> None:
        """Hold gradients back only where rows travel, between which they can leave."""
        if self._held is not None:
            optimizer, room_bytes = self._held
            pace = optimizer.hold_gradients(None if self.options.move == "experts" else room_bytes)
            for wire, _ in self._wires.values():
                wire.between = None if pace is None else pace.release

    def _wires_of(self, options: ExpertParallel) -> tuple[ExpertWire, Once | None]:
        """The wires of a way; the same ones each time, since buffers have grown to the rows that come."""
        key = options.move, options.route, options.num_chunks, options.num_back
        if key not in self._wires:
            wire = wire_of(options, self.placement, self.comm, self.members, self._stride, self._seed)
            grid = self.comm.topology
            is_once = options.route == "once" and min(grid.num_nodes, grid.local_size) > 1
            once = entering(wire) if is_once else None
            self._wires[key] = (wire if once is None else once.outer), once
        return self._wires[key]

    @staticmethod
    def _numbered(tokens: Callable[[int], Tensor], num_tokens: int) -> Tensor:
        """What `tokens` says. Raises ConfigError unless it is a number for each token."""
        found = tokens(num_tokens) if callable(tokens) else tokens
        if not (callable(tokens) and isinstance(found, Tensor) and found.shape == (num_tokens,)) or (
            found.is_floating_point() or found.is_complex()
        ):
            told = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(
                f"ep.tokens: gave {told} for {num_tokens} tokens: must be a function of how many that returns their "
                f"numbers in the global batch, int64 [{num_tokens}]; nearest: lambda n: torch.arange(n)"
            )
        return found

    def forward(self, experts: Experts | FusedExperts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum over each token's experts, see Experts; `watch` takes the time. A collective."""
        x = self.watch.begins(x)
        layer = self.modules.index(module_of(experts))
        own = self.wire.own_tokens(len(x)) if self.tokens is None else self._numbered(self.tokens, len(x))
        tokens = own + (layer * GAMMA & MASK32)
        if self.once is not None:
            return self.watch.ends(self.once.forward(experts, x, index, weights, tokens))

        def work(rows: Tensor, order: Order) -> Tensor:
            return self.work(experts, rows, order.counts, self.wire.row_numbers(order, tokens))

        between = between_ranks(row_hooks(module_of(experts)), work)
        return self.watch.ends(mixed(x, index, weights, experts.num_experts, experts.weigh_inputs, between))

    def group_for(self, name: str, tensor: Tensor) -> list[int] | None:
        """The `group_for` of `thinwire.zero`: the ranks that hold replicas of a parameter or buffer; None: all."""
        return self.replicas if name in self.shapes else None

    def work(
        self, experts: Experts | FusedExperts, rows: Tensor, counts: Tensor, numbers: Tensor | None = None
    ) -> Tensor:
        """The experts' outputs for this rank's rows, which are sorted by expert; see `Experts.work`. A collective.

        numbers: see Trip.
        """
        placement, comm, move = self.placement, self.comm, self.options.move
        weights: Sequence[Tensor] = experts.weights
        kept = self._kept_of(experts) if torch.is_grad_enabled() else None
        if move == "experts":
            every = range(comm.world_size)
            bits = self.kept_bits.get(module_of(experts))
            return experts.product(rows, counts, Gather.apply(self.wire, every, placement, kept, bits, *weights))
        if (gathered := self.options.gathered) > 1:
            first = comm.rank - comm.rank % gathered
            group = range(first, first + gathered)
            weights = Gather.apply(self.wire, group, placement.inside(gathered), kept, None, *weights)
        return work_on(self.wire, experts, rows, counts, tuple(weights), numbers)

    @contextmanager
    def whole(self, model: nn.Module | None = None) -> Iterator[None]:
        """A context in which all experts, or those of a part of the model, are whole on this rank: no rows travel.

        Ranks may then call the model unequally often, each for itself, as in `generate`. What is changed in the experts
        stays: each rank keeps its part. The memory of all of these experts is needed at a time. A collective at the
        start, over the ranks that share the experts; exact, whatever codecs rows have. Not for training.
        """
        held: list[tuple[Tensor, Tensor]] = []
        among = self.modules if model is None else model.modules()
        modules = [module for module in among if vars(module).get(SPREAD) is self]
        for module in modules:
            # One message at a time, in the same order on all ranks.
            for tensor in tensors_of(module).values():
                parts = self.comm.wait(self.comm.all_gather_exact(tensor.data.contiguous()))
                held.append((tensor, tensor.data))
                tensor.data = self.placement.joined(parts)
        forwards = [vars(module).pop("forward") for module in modules]
        try:
            yield
        finally:
            for module, forward in zip(modules, forwards, strict=True):
                vars(module)["forward"] = forward
            for tensor, part in held:
                part.copy_(self.placement.part(tensor.data, self.comm.rank))
                tensor.data = part

    def follow(self, optimizer: ShardedOptimizer) -> None:
        """Let options that depend on a step have their effect: `once_a_step`, and a number of bytes as `release`."""
        self._followed = optimizer
        if isinstance(self.options.release, int):
            self.hold(optimizer, self.options.release)

    def _kept_of(self, experts: Experts | FusedExperts) -> Gathered | None:
        """What a layer keeps through a step; None: each forward gathers anew."""
        if not self.options.once_a_step or self._followed is None:
            return None
        followed = self._followed
        made = Gathered(lambda: followed.steps, lambda: followed.accumulates)
        return self._kept.setdefault((module_of(experts), self.options.move), made)

    def gather(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors on all ranks, from every rank's part of the experts' tensors. A collective."""
        return {
            name: self.placement.joined(self.comm.wait(self.comm.all_gather_exact(value.contiguous())))
            if name in self.shapes
            else value
            for name, value in values.items()
        }

    def gather_bytes(self, names: Collection[str]) -> int:
        """Bytes that a rank sends to gather these parameters in fp32."""
        numel = sum(self.shapes[name].numel() for name in names if name in self.shapes)
        return 4 * (self.placement.ranks - 1) * (numel // self.placement.ranks)

    def part(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of whole tensors."""
        own = self.comm.rank
        return {
            name: self.placement.part(value, own).contiguous() if name in self.shapes else value
            for name, value in values.items()
        }

    def piece_of_whole(self, key: str, piece: Piece, number: int = 0, count: int = 1) -> Piece:
        """Turn a piece of this rank's part of a parameter into a piece of the whole.

        Args:
            key: KIND/.../NAME of a checkpoint.
            number, count: this rank's place among the ranks that hold the same part, if they share the saving.
        """
        name = next((name for name in self.shapes if key.endswith(f"/{name}")), None)
        # A rank's own state covers only its part.
        if name is None or key.startswith("own/"):
            return piece
        shape = self.shapes[name]
        if key.startswith(f"{OPTIMIZER}/{FACTOR}/"):
            shape = torch.Size([shape[0], shape[-1], piece.numel // (self.placement.each * shape[-1])])
        found, offset = self._lies(shape)
        shared = piece.share(number, count)
        return replace(shared, is_copy=False, offset=shared.offset + offset, **found)

    def share_of_whole(self, share: Share) -> Share | None:
        """A share of this rank's part of a parameter as a share of the whole."""
        if share.name not in self.shapes:
            return share
        found, offset = self._lies(self.shapes[share.name])
        return replace(share, offset=share.offset + offset, **found)

    def part_of_flat(self, name: str, values: Tensor) -> Tensor:
        """This rank's part of a whole parameter's values, both flat."""
        if name not in self.shapes:
            return values
        return self.placement.part(values.view(self.shapes[name]), self.comm.rank).flatten()

    def _lies(self, whole: torch.Size) -> tuple[dict[str, Any], int]:
        """Place of this rank's part in a tensor of all experts, see Piece, and the offset in the tensor."""
        run, row, first, offset = self.placement.range(whole, self.comm.rank)
        cut = {"run": run, "row": row, "first": first} if run < row else {}
        return {"numel": whole.numel(), **cut}, offset

    @property
    def rounds(self) -> str:
        """Where and how rows are rounded, so that a loss depends on more than the weights; empty: nowhere."""
        asked = self.options
        wire = self.wire
        if wire.dispatch is None and wire.combine is None and wire.weights is None:
            return ""
        moved = "" if wire.weights is None else f", weights {asked.weights}"
        return (
            f"experts: dispatch {asked.dispatch}, combine {asked.combine}, {wire.placement.slices} parts added{moved}"
        )

    def describe(self) -> list[Row]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        asked, num = self.options, len(self.replicas)
        codecs = f"dispatch {asked.dispatch}, combine {asked.combine}, gradients {asked.gradients}"
        codecs += chunks_text(asked, "; in ")
        copies = f"{num} replicas of each average its gradients" if num > 1 else "no replicas: nothing is averaged"
        is_straight = not self.wire.hops and self.once is None
        route = "linear" if is_straight else asked.route
        kind, _, repeats = asked.move.partition("=")
        often = "gathered once a step" if asked.once_a_step else "gathered in each micro-batch"
        to = f"{repeats} ranks of each expert" if repeats else "experts"
        moved = {
            "tokens": (f"tokens to experts, route {route}", codecs),
            "slices": (
                f"slices to each other, tokens to {to}, route {route}",
                f"{often}; weights {asked.weights}, {codecs}",
            ),
            "experts": (
                "experts to tokens",
                f"{often}; no rows travel; weights {asked.weights}, gradients {asked.gradients}",
            ),
        }
        straight = [(f"experts route {asked.route}", "linear", "one node, or one rank a node")]
        found = [(name, getattr(self._asked, name), getattr(asked, name)) for name in CODED]
        fitted = [
            (f"experts {name} {text}", used, "groups end where a row ends")
            for name, text, used in found
            if text != used
        ]
        return [
            *fitted,
            *(straight if asked.route != "linear" and is_straight else []),
            *([] if asked.release == "now" else [(f"experts release {asked.release}", "between rows", RELEASED)]),
            (f"experts over {asked.parallel} ranks", str(self.placement), copies),
            (f"experts move {asked.move}", moved[kind][0], f"{self.comm.topology}; {moved[kind][1]}"),
        ]

    def close(self) -> None:
        """Wait for all communication and give the process groups back."""
        for comm in dict.fromkeys([self.comm, self.everyone]):
            comm.close()


def expert_parallel(
    model: nn.Module,
    options: ExpertParallel,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    stride: int = 1,
    local_size: int | None = None,
    seed: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    checked: bool = False,
    meter: Meter | None = None,
) -> ExpertRanks:
    """Keep this rank's part of a mixture's experts on it; rows of all ranks then travel to their experts. A collective.

    With x_i the row of a token for its expert e, the ranks that hold e return y_i = sum over slices of their part of
    e(x_i). Tokens and all other weights stay where they are: each rank has a batch of its own. The gradients of a
    rank's experts are sums over the rows of all ranks. Summed over replicas and divided by the number R of ranks, they
    are the gradient of the mean loss.

    Args:
        model: a mixture of thinwire, on every rank. If ranks differ, rank 0's experts are used.
        options: such as ExpertParallel(4). Neighbouring ranks share the experts.
        group: all ranks that train the model; None: the world.
        stride: distance between these neighbours, if the ranks between them share a sequence.
        local_size: ranks per node; None: found from the launcher or host names.
        seed: of the codecs' randomness.
        timeout_s, checked, meter: see Communicator.

    Call it before you make the optimizer, and before `thinwire.zero`, which finds the replicas. Raises ConfigError that
    lists everything that does not fit, for a number of ranks that does not divide the group's, and for a model without
    such experts.
    Source: Lepikhin et al., "GShard" (2020); slices: Hwang et al., "Tutel" (MLSys 2023), section 3.1.
    """
    options.check_stated()
    make = partial(Communicator, timeout_s=timeout_s, checked=checked)
    everyone = make(group, local_size=local_size, meter=meter or meter_of(model))
    placement = check_experts(model, options, everyone.world_size)
    found = experts_of(model)
    modules = {name: module_of(each) for name, each in found.items()}
    asked, options = options, options.fitted(next(iter(found.values())).width)
    tensors = {f"{at}.{name}": tensor for at, each in modules.items() for name, tensor in tensors_of(each).items()}
    equal_bits(everyone, [tensor.data for tensor in tensors.values()])
    ranks, members = placement.ranks, neighbours(everyone.rank, placement.ranks, stride)
    comm = everyone
    if ranks < everyone.world_size:
        own = [everyone.global_ranks[rank] for rank in members]
        comm = make(own, local_size=along(everyone.topology, members), meter=everyone.meter)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    made = ExpertRanks(options, placement, comm, everyone, shapes, stride, seed, asked)
    pruned = [each for each in found.values() if any(isinstance(m, KeptValues) for m in module_of(each).modules())]
    made.modules = list(modules.values())
    made.kept_bits = {module_of(each): KeptBits(each) for each in pruned}
    for tensor in tensors.values():
        tensor.data = placement.part(tensor.data, comm.rank).clone(memory_format=torch.contiguous_format)
    if options.capacity is not None:
        for layer in (module for module in model.modules() if isinstance(module, MoE)):
            layer.capacity_factor = options.capacity
    for name, experts in found.items():
        # Compiled layers leave their code for it.
        modules[name].forward = torch.compiler.disable(partial(made.forward, experts))
        vars(modules[name])[SPREAD] = made
    SHARED.setdefault(model, []).append(made)
    return made


def tensors_of(experts: nn.Module) -> dict[str, Tensor]:
    """What ranks have their part of: parameters, and the places of the kept values of pruned experts in their rows."""
    kept = {f"{at}.places": each.places for at, each in experts.named_modules() if isinstance(each, KeptValues)}
    return {**dict(experts.named_parameters()), **kept}
