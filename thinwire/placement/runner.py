"""Runs a placed model: each rank runs its units in the plan's order, and tensors between them travel as messages."""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.node import map_arg

from thinwire import _compat
from thinwire.codecs.random import named_seed
from thinwire.collectives import Communicator, Expected, Label, Mailbox, Meter
from thinwire.collectives.groups import ranks_of
from thinwire.device import random_state, set_random_state
from thinwire.errors import ConfigError
from thinwire.hosts.ranks import Axis
from thinwire.placement.plan import BACKWARD, FORWARD, CrossingTensor, DevicePlan, DeviceRoutes
from thinwire.placement.profile import mapped
from thinwire.placement.trace import Traced, target_name
from thinwire.table import Row, announce as announce_table

# Of a rank that has no other: it stays zero.
IDLE = "idle"


class Placed:
    """A model of which each rank of a group holds a part; made by `Placement.apply`.

    Call it on all ranks of the group at once, with the same inputs. All ranks get the output of the whole model.
    `backward` on a loss of it leaves each rank the gradients of its weights, equal to those of one process up to
    rounding, and None where one process has None.

    If the model draws random numbers, as dropout does, a forward draws one number of torch's generator. This number and
    the name of a node seed what the node draws. So the draws are the same on any number of ranks, if all ranks were
    seeded alike.

    Attributes:
        model: the given object; it holds the weights of this rank's part, under their original names.
        rank: in the group.
        routes: the tensors that travel.
        meter: counts messages as placement_forward and placement_backward.
        spans: the units that this rank ran in the last forward and backward, as (direction, unit, begin, end) in
            seconds.
    """

    def __init__(
        self, own: DeviceRoutes, describe: Callable[[], Sequence[Row]], optimizer: torch.optim.Optimizer | None,
        group: dist.ProcessGroup | DeviceMesh | Sequence[int] | None, *, timeout_s: float, checked: bool,
        announce: bool,
    ) -> None:  # fmt: skip
        """own: the routes that this rank has planned. describe: returns the placement's rows of the start-up table."""
        traced, num, self._is_closed = own.traced, own.num_ranks, False
        ranks = ranks_of(group) if dist.is_initialized() else [0]
        if len(ranks) != num:
            near = "the ranks of one copy, such as mesh['stage']" if len(ranks) > num else f"a machine of {len(ranks)}"
            raise ConfigError(f"a group of {len(ranks)} ranks for a placement on {num}; nearest: {near}")
        comm = Communicator(group, timeout_s=timeout_s, checked=checked)
        self.model, self.rank, self.num_ranks = traced.model, comm.rank, num
        plan, *alike = self._common_plan(comm, own)
        self.routes = DeviceRoutes(traced, own.profile, plan, num, own.training)
        self.meter: Meter = comm.meter
        comm.close()
        self.mailbox = Mailbox(
            group, comm.topology, timeout_s=timeout_s, checked=checked, meter=self.meter, operation="placement"
        )
        self.spans: list[tuple[str, int, float, float]] = []
        self.num_names = 1 + sum(param.requires_grad for param in self.model.parameters())
        self._device = next((param.device for param in self.model.parameters()), torch.device("cpu"))
        self.weights = self._take_part(optimizer)
        self.model.forward = self._forward
        if announce and self.rank == 0:
            announce_table([*copy_rows(ranks), *describe(), *self._notes(*alike)])

    def axis(self, mesh: DeviceMesh, data: str = "data") -> Axis:
        """The axis for `thinwire.zero(model, optimizer, method, axis=...)`: copies average along `data`.

        The gradient norm is then that of the whole model, and all ranks skip a step that is not finite. mesh: of all
        ranks of all copies. Raises ConfigError for a mesh without the dimension `data`.
        """
        names = tuple(mesh.mesh_dim_names or ())
        if data not in names or mesh.ndim != 2:
            raise ConfigError(f"a mesh of {names or mesh.ndim} dimensions: give one of two, of which one is {data!r}")
        return Axis(mesh[data], _compat.flattened(mesh), num_names=self.num_names)

    def close(self) -> None:
        """Give the process group back. Call it between steps. The model can't be called any more."""
        self.mailbox.close()
        self._is_closed = True

    def _common_plan(self, comm: Communicator, own: DeviceRoutes) -> tuple[DevicePlan, bool, bool]:
        """The first rank's plan, whether all ranks have it, and whether torch's generators are in one state on them.

        Raises ConfigError for a rank with another model or other inputs.
        """
        names = [name for name in own.traced.named if name not in own.profile.constants]
        texts = identity(own, names).encode(), torch.get_rng_state().numpy().tobytes()
        told = comm.wait(comm.all_gather_exact(torch.tensor([zlib.crc32(text) for text in texts])))
        marks, states = told.view(comm.world_size, 2).T.tolist()
        if odd := next((rank for rank, each in enumerate(marks) if each != marks[0]), None):
            raise ConfigError(
                f"rank {comm.global_ranks[odd]} has placed another model, or for inputs of other shapes, than rank "
                f"{comm.global_ranks[0]}: give all ranks of a group the same"
            )
        plans = comm.wait(comm.all_gather_exact(own.plan.encoded(names))).view(comm.world_size, 2, -1)
        return DevicePlan.decoded(plans[0], names), bool((plans == plans[0]).all()), len(set(states)) == 1

    def _take_part(self, optimizer: torch.optim.Optimizer | None) -> list[nn.Parameter]:
        """Drop the parts that other ranks have. Return this rank's trained weights."""
        routes, homes, before = self.routes, dict[int, int](), list(self.model.parameters())
        for unit, home in zip(routes.plan.units, routes.plan.homes, strict=True):
            for name in unit:
                homes |= {id(tensor): home for tensor in routes.traced.weights(routes.traced.named[name])}
        for module in self.model.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    # What nobody reads stays with the first.
                    if tensor is not None and homes.get(id(tensor), 0) != self.rank:
                        held[name] = None
        weights = [param for param in self.model.parameters() if param.requires_grad]
        if optimizer is not None and not weights:
            self.model.register_parameter(IDLE, nn.Parameter(torch.zeros(1, device=self._device)))
            weights = [self.model.get_parameter(IDLE)]
            optimizer.param_groups[0]["params"].append(weights[0])
        if optimizer is not None:
            kept = {id(param) for param in self.model.parameters()}
            drop(optimizer, [param for param in before if id(param) not in kept])
        return weights

    def _notes(self, is_one_plan: bool, is_seeded_alike: bool) -> list[Row]:
        rows = [] if is_one_plan else [("plan", "that of the first rank", "ranks measured other seconds")]
        if self.routes.profile.draws and is_seeded_alike:
            why = "a number of torch's generator and its name seed each node: other draws than without placing"
            rows.append(("random numbers, as of dropout", "the same on any number of ranks", why))
        elif self.routes.profile.draws:
            why = "torch's generators differ: call torch.manual_seed with one number on all ranks"
            rows.append(("random numbers, as of dropout", "each rank's own", why))
        return rows

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_closed:
            raise ConfigError("the placed model is closed, and its ranks send nothing; nearest: call it before `close`")
        traced = self.routes.traced.now()
        inputs = traced.bind(args, kwargs)
        known = {id(weight) for weight in self.weights} if self.routes.training else set()
        for name, param in self.model.named_parameters() if known else ():
            if param.requires_grad and id(param) not in known:
                raise ConfigError(
                    f"{name!r} requires a gradient, and did not when the model was placed: let it require one before "
                    "`place`, and freeze it after `apply`"
                )
        step = PlacedStep(self, traced, inputs)
        if torch.is_grad_enabled() and self.routes.training:
            outputs = _Whole.apply(step, *self.weights)
        else:
            outputs = step.forward(keeps_graph=False)
        found = dict(zip(self.routes.output_nodes, outputs, strict=True))

        def value(node: fx.Node) -> Any:
            if node in inputs:
                return inputs[node]
            return found[node.name] if node.name in found else self.routes.profile.constants[node.name]

        return mapped(traced.output, value, fx.Node)


def identity(routes: DeviceRoutes, names: Sequence[str]) -> str:
    """A text in which placements of one model, for inputs of the same shapes, agree in all processes.

    names: of the nodes that are computed.
    """
    told: list[Any] = [routes.training, sorted(routes.profile.draws), routes.traced.ambient]
    for name in names:
        node = routes.traced.named[name]
        constants = map_arg((node.args, node.kwargs), lambda each: each.name)
        module = routes.traced.model.get_submodule(str(node.target)) if node.op == "call_module" else None
        told.append((name, node.op, target_name(node), routes.profile.sizes[name].shape, constants, module,
                     routes.traced.contexts.get(name)))  # fmt: skip
    # The address of a function is another one in each process.
    return re.sub(" at 0x[0-9a-f]+", "", repr(told))


class _Whole(torch.autograd.Function):
    """The whole model as one autograd function of this rank's weights: its outputs, and the weights' gradients."""

    @staticmethod
    def forward(ctx: Any, step: PlacedStep, *weights: nn.Parameter) -> tuple[Tensor, ...]:
        ctx.step = step
        # Weights behind an output that no loss uses have no gradient, rather than one of zeros.
        ctx.set_materialize_grads(False)
        outputs = step.forward(keeps_graph=True)
        discrete = (tensor for tensor in outputs if not (tensor.is_floating_point() or tensor.is_complex()))
        sizes = (step.routes.profile.sizes[name] for name in step.routes.output_nodes)
        frozen = (tensor for tensor, size in zip(outputs, sizes, strict=True) if not size.needs_grad)
        ctx.mark_non_differentiable(*discrete, *frozen)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.step is None:
            raise RuntimeError("a second backward through one forward of a placed model: call the model again")
        if torch.is_grad_enabled():
            raise ConfigError(
                "create_graph=True: gradients of a placed model have no graph, and no loss can depend on them; "
                "nearest: create_graph=False, or the model without placing"
            )
        found = ctx.step.backward(gradients)
        weights = ctx.step.placed.weights
        _compat.skip_hooks_of_none(weight for weight, own in zip(weights, found, strict=True) if own is None)
        ctx.step = None
        return None, *found


class PlacedStep:
    """One forward of a placed model, and its backward.

    Each unit is differentiated by itself: its inputs are detached, whether they arrived or were made here. A value's
    gradients are summed in the order of the units that took it: first this rank's, then those of other ranks in order.
    """

    def __init__(self, placed: Placed, traced: Traced, inputs: dict[fx.Node, Any]) -> None:
        """traced: the graph for the modes in which modules are. inputs: by its placeholders."""
        self.placed, self.routes, self.mailbox = placed, placed.routes, placed.mailbox
        self.traced, self.inputs = traced, inputs
        self.own = [unit for unit, home in enumerate(self.routes.plan.homes) if home == placed.rank]
        # By the number of a crossing: its tensor here, without a graph; by unit: its cut inputs, and its outputs.
        self._held: dict[int, Tensor] = {}
        self._graphs: dict[int, tuple[dict[int, Tensor], dict[int, Tensor]]] = {}
        self._gradients: dict[int, Tensor] = {}
        self._of_weights: dict[int, Tensor] = {}
        # One number on all ranks, which seeds what nodes draw.
        self._drawn = int(torch.randint(2**62, (), device="cpu")) if self.routes.profile.draws else 0

    def forward(self, *, keeps_graph: bool) -> tuple[Tensor, ...]:
        """The model's outputs, detached. A collective over the group."""
        placed, arrivals = self.placed, self.routes.arrivals(self.placed.rank)
        self.mailbox.begin([Expected(_label(FORWARD, one), one.home, one.num_bytes) for one in arrivals])
        placed.spans.clear()
        for unit in self.own:
            for crossing in self.routes.inputs[unit]:
                self._take(crossing)
            begun_s = time.perf_counter()
            outputs = self._run(unit, keeps_graph)
            placed.spans.append((FORWARD, unit, begun_s, time.perf_counter()))
            for crossing, output in zip(self.routes.outputs[unit], outputs, strict=True):
                self._held[crossing.number] = output
                for target in crossing.targets:
                    self.mailbox.send(target, _label(FORWARD, crossing), _packet(output))
        shown = {one.node: one for one in self.routes.crossings if one.is_output}
        for crossing in shown.values():
            self._take(crossing)
        found = tuple(self._held[shown[name].number] for name in self.routes.output_nodes)
        self._held.clear()
        self.mailbox.finish()
        return found

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of this rank's weights. gradients: of the outputs. A collective over the group."""
        routes, rank = self.routes, self.placed.rank
        given = dict(zip(routes.output_nodes, gradients, strict=True))
        for crossing in (one for one in routes.crossings if one.is_output and one.home == rank):
            self._add(self._gradients, crossing.number, given[crossing.node])
        coming = routes.returns(rank)
        self.mailbox.begin(
            [Expected(_label(BACKWARD, one, sender), sender, one.gradient_bytes) for one, sender in coming]
        )
        for unit in reversed(self.own):
            for crossing in routes.outputs[unit]:
                for sender in crossing.senders if crossing.home == rank else ():
                    packet = self.mailbox.take(_label(BACKWARD, crossing, sender), _gradient_length)
                    gradient = self._tensor(crossing, packet[1:].clone()) if packet[0] else None
                    self._add(self._gradients, crossing.number, gradient)
            begun_s = time.perf_counter()
            self._differentiate(unit)
            self.placed.spans.append((BACKWARD, unit, begun_s, time.perf_counter()))
            for crossing in routes.gives_back(unit):
                packet = _gradient_packet(crossing, self._gradients.pop(crossing.number, None))
                self.mailbox.send(crossing.home, _label(BACKWARD, crossing, rank), packet, _gradient_length(packet))
        self.mailbox.finish()
        return [self._of_weights.get(id(weight)) for weight in self.placed.weights]

    def _take(self, crossing: CrossingTensor) -> None:
        if crossing.number not in self._held:
            self._held[crossing.number] = self._tensor(crossing, self.mailbox.take(_label(FORWARD, crossing)))

    def _tensor(self, crossing: CrossingTensor, packet: Tensor) -> Tensor:
        return packet.view(crossing.dtype).view(crossing.shape).to(self.placed._device)

    def _run(self, unit: int, keeps_graph: bool) -> list[Tensor]:
        """A unit's outputs, detached. Their graph is kept if a backward follows."""
        routes = self.routes
        leaves: dict[int, Tensor] = {}
        values: dict[fx.Node, Any] = dict(self.inputs)
        for crossing in routes.inputs[unit]:
            tensor = self._held[crossing.number].detach()
            if keeps_graph and crossing.needs_grad:
                leaves[crossing.number] = tensor.requires_grad_()
            values[self.traced.named[crossing.node]] = tensor

        def value_of(node: fx.Node) -> Any:
            return values[node] if node in values else routes.profile.constants[node.name]

        with torch.set_grad_enabled(keeps_graph):
            for name in routes.plan.units[unit]:
                values[self.traced.named[name]] = self._called(name, value_of)
        outputs = {one.number: values[self.traced.named[one.node]] for one in routes.outputs[unit]}
        for crossing in routes.outputs[unit]:
            _check(crossing, outputs[crossing.number])
        if keeps_graph:
            self._graphs[unit] = leaves, outputs
        return [output.detach() for output in outputs.values()]

    def _called(self, name: str, value_of: Callable[[fx.Node], Any]) -> Any:
        """A node's result. What it draws depends on the step and its name, and not on what its rank drew before."""
        node = self.traced.named[name]
        if name not in self.routes.profile.draws:
            return self.traced.call(node, value_of)
        common = random_state()
        torch.manual_seed(named_seed(self._drawn, name) >> 1)
        try:
            return self.traced.call(node, value_of)
        finally:
            set_random_state(common)

    def _differentiate(self, unit: int) -> None:
        """Add to the gradients of a unit's inputs and weights."""
        leaves, outputs = self._graphs.pop(unit)
        ends = {
            number: output for number, output in outputs.items() if output.requires_grad and number in self._gradients
        }
        gradients = [self._gradients.pop(number) for number in ends]
        weights = [weight for name in self.routes.plan.units[unit] for weight in self._weights(name)]
        weights = list({id(weight): weight for weight in weights}.values())
        if not ends or not (leaves or weights):
            return
        inner = [*leaves.values(), *weights]
        # A weight's hooks are for its whole gradient, with which autograd calls them after this model's backward.
        with _compat.without_hooks(weights):
            found = torch.autograd.grad(list(ends.values()), inner, gradients, allow_unused=True)
        for number, gradient in zip(leaves, found[: len(leaves)], strict=True):
            self._add(self._gradients, number, gradient)
        for weight, gradient in zip(weights, found[len(leaves) :], strict=True):
            self._add(self._of_weights, id(weight), gradient)

    def _weights(self, name: str) -> list[Tensor]:
        return [weight for weight in self.traced.weights(self.traced.named[name]) if weight.requires_grad]

    @staticmethod
    def _add(sums: dict[int, Tensor], key: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            sums[key] = gradient if key not in sums else sums[key] + gradient


def _label(direction: str, crossing: CrossingTensor, sender: int = 0) -> Label:
    """The label of a message. A gradient comes from several ranks, each of which has its own labels."""
    return Label(direction, crossing.number, sender)


def _packet(tensor: Tensor) -> Tensor:
    # The bytes of a conjugate, or of its imaginary part, are those of the original until it is resolved.
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def _gradient_packet(crossing: CrossingTensor, gradient: Tensor | None) -> Tensor:
    """The message of a gradient: a byte that says whether there is one, and its bytes."""
    packet = torch.empty(crossing.gradient_bytes, dtype=torch.uint8)
    packet[0] = gradient is not None
    if gradient is not None:
        packet[1:] = _packet(gradient)
    return packet


def _gradient_length(packet: Tensor) -> int:
    return packet.numel() if packet[0] else 1


def _check(crossing: CrossingTensor, output: Any) -> None:
    shape, dtype = (output.shape, output.dtype) if isinstance(output, Tensor) else (None, None)
    if (shape, dtype) != (crossing.shape, crossing.dtype):
        told = f"{list(shape)} of {dtype}" if shape is not None else type(output).__name__
        raise ConfigError(
            f"{crossing.node!r} gives {told}, and the placement was made for {list(crossing.shape)} of "
            f"{crossing.dtype}: place the model for inputs of these shapes"
        )


def drop(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> None:
    """Take parameters, and their state, out of an optimizer."""
    gone = {id(param) for param in params}
    for group in optimizer.param_groups:
        group["params"] = [param for param in group["params"] if id(param) not in gone]
    for param in params:
        optimizer.state.pop(param, None)


def copy_rows(ranks: Sequence[int]) -> list[Row]:
    """A row about which copy of the model these ranks hold, if there are several: each prints a table of its own."""
    if not dist.is_initialized() or dist.get_world_size() == len(ranks):
        return []
    return [("copy of the model", f"on ranks {', '.join(map(str, ranks))}", f"of {dist.get_world_size()} ranks in all")]
