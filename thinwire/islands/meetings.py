"""Nodes of a graph that meet their neighbours in pairs: when each pair exchanges, and which vectors."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.codecs import Identity, derive_seed
from thinwire.collectives import Communicator, Meter
from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S
from thinwire.collectives.gather import all_gather_exact
from thinwire.collectives.link import Link
from thinwire.collectives.reduce import all_reduce
from thinwire.collectives.rounds import Rounds
from thinwire.errors import ConfigError
from thinwire.islands.background import Background, FlatModel
from thinwire.methods.front import around
from thinwire.methods.own_pace.graph import Meeting
from thinwire.methods.own_pace.pairs import GradientLaw, PairsMethod, meeting_bytes
from thinwire.state.memory import Merge, Place, State
from thinwire.state.replicas import check_layout, fitting_parameters, same_options, same_start, shapes_digest
from thinwire.table import Row, announce as announce_table

# Ranks submit different jobs, so a job has the number of what it is for, the same on those who take part in it.
FIRST_MEETING = 1 << 10
# The key of what is kept: all parameters as one vector.
MODEL = "model"
AT_THE_START, AT_THE_END = FIRST_MEETING - 2, FIRST_MEETING - 1


class Node:
    """A node that meets its neighbours from a thread beside training, by a law; a context that all ranks enter.

    Time is counted in units of `step_s` seconds from the moment when all ranks have entered. All ranks draw the same
    meetings from (graph, seed), each with a number and a time. A node has its own meetings in order, one at a time: it
    advances its state to exactly the meeting's time, sends its message, and stays at that time until the neighbour's
    message has come. Therefore

    - a pair meets at one instant, though its clocks differ: what one node gains the other loses, bit for bit;
    - there is no deadlock: both sides of the earliest meeting left have had all their earlier ones;
    - if the network can't keep up, time stands still more often, also for `pace`: each local step has a time of its
      own, drawn once in a unit on average, and does not end before that time.

    A rank that leaves still meets others. Each message says which ranks have left, as far as its sender knows. An edge
    is done after a meeting at which both sides know that all have left; a rank is free when all its edges are done.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        method: PairsMethod,
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        seed: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        checked: bool = False,
        announce: bool = True,
        meter: Meter | None = None,
    ) -> None:
        trained = fitting_parameters(model, optimizer or plain_sgd(model))
        self.comm = Communicator(group, local_size=1, timeout_s=timeout_s, checked=checked, meter=meter)
        self.law, self.step_s, self.seed = method.law(self.comm.world_size), method.step_s, seed
        self.graph = self.law.graph
        law, graph = self.law, self.graph
        asked = f"{type(law).__name__} {graph} {law.rate} {self.step_s} {seed} {law.mixing.matrix.tolist()}"
        same_options(self.comm, asked)
        self._start_row = same_start(model, self.comm)
        self._mixing = law.mixing
        self._layout = {"rank": self.comm.rank, "edges": graph.edges, "parameters": shapes_digest(trained)}
        self._model = FlatModel(trained)
        self.memory = State(Place({MODEL: torch.Size([self._model.numel])}, self.comm.topology, self.comm.rank))
        self._vectors = self.memory.add(
            "vectors", Merge.OWN, shape_of=lambda name, shape: torch.Size([len(law.mixing.matrix), *shape])
        )
        self.entered = 0
        self.memory.add_attributes(self, "entered")
        self.begin()
        self.meetings = self.steps = 0
        self._is_inside = False
        if announce and self.comm.rank == 0:
            announce_table(self.describe())

    def begin(self) -> None:
        """Start with the model's weights, which are the same on all ranks."""
        self._vectors[MODEL] = self.law.start(self._model.read())

    @property
    def state(self) -> Tensor:
        """The node's vectors, fp32 [V, n], x first."""
        return self._vectors[MODEL]

    def __enter__(self) -> Self:
        """Start the clock as soon as all ranks have entered."""
        self._model.write(self.state[0])
        self._background = Background("thinwire-gossip", self._meet_until_all_leave)
        self._gates = random.Random(derive_seed(self.seed, self.entered, self.comm.rank)).random
        self._gate = self._at = self._next = 0.0
        self._left = torch.zeros(self.graph.num_nodes, dtype=torch.uint8)
        self.entered += 1
        self._is_inside = True
        self.comm.wait(self.comm.submit(self._start))
        self._begin_s = time.monotonic()
        self._background.start()
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Keep meeting until all ranks leave, then advance all nodes to one time and set the model to the mean.

        Not after an error.
        """
        with self._background.changed:
            self._left[self.comm.rank] = 1
        if error is not None:
            return
        self._background.join()
        last, total = self.comm.wait(self.comm.submit(self._end))
        self.bring_to_(last)
        self._model.write(total / self.comm.world_size)
        self._is_inside = False

    def now(self) -> float:
        """This node's time, in units: the clock's, or that of the meeting it is waiting for."""
        return min((time.monotonic() - self._begin_s) / self.step_s, self._next)

    def pace(self) -> None:
        """Wait until this step's time has come; counted as exposed_s. Raises the error that ended the gossip."""
        self._background.check()
        self._gate -= math.log(1.0 - self._gates())
        with self._background.changed, self.comm.meter.timed("exposed_s"):
            while self.now() < self._gate:
                is_frozen = self._next <= self._gate and self.now() >= self._next
                self._background.changed.wait(None if is_frozen else (self._gate - self.now()) * self.step_s)
                self._background.check()

    def bring_to_(self, when: float) -> None:
        """Apply the effect of time alone up to `when`, in units."""
        if when > self._at:
            self._mixing.apply_(self.state, when - self._at)
            self._at = when

    def _meet_until_all_leave(self) -> None:
        edges = {edge for edge in self.graph.edges if self.comm.rank in edge}
        for meeting in self.graph.meetings(self.law.rate, derive_seed(self.seed, self.entered)):
            if meeting.edge in edges and self._meet(meeting):
                edges.discard(meeting.edge)
            if not edges:
                return

    def _meet(self, meeting: Meeting) -> bool:
        """Have one meeting. Return whether both sides know now that all have left."""
        with self._background.changed:
            self._next = meeting.time
            self._background.changed.notify_all()
        if not self._left.all():
            time.sleep(max(0.0, self._begin_s + meeting.time * self.step_s - time.monotonic()))
        with self._background.changed:
            self.bring_to_(meeting.time)
            message, left = self.law.message(self.state), self._left.clone()
        peer = sum(meeting.edge) - self.comm.rank
        packet = torch.cat([message.view(torch.uint8), left])
        number = FIRST_MEETING + meeting.number
        theirs = self.comm.submit(lambda link: swap(link, packet, peer, number)).result()
        with self._background.changed:
            self.law.meet_(self.state, message - theirs[: -left.numel()].view(torch.float32))
            left |= theirs[-left.numel() :]
            self._left |= left
            self.meetings += 1
        return bool(left.all())

    def _start(self, link: Link) -> Rounds[Tensor]:
        return (yield from all_gather_exact(replace(link, number=AT_THE_START), torch.zeros(1, dtype=torch.uint8)))

    def _end(self, link: Link) -> Rounds[tuple[float, Tensor]]:
        """The latest time of all nodes, and the sum of all x at that time."""
        link = replace(link, number=AT_THE_END)
        times = yield from all_gather_exact(link, torch.tensor([self._at], dtype=torch.float64))
        last = float(times.max())
        self.bring_to_(last)
        exact = Identity()
        return last, (yield from all_reduce(link, self.state[0], exact, exact, exact, operation="mean"))

    @property
    def meter(self) -> Meter:
        """Payload bytes, and the seconds that this rank waited (exposed_s)."""
        return self.comm.meter

    @property
    def bytes_per_meeting(self) -> int:
        """Payload bytes that each side sends: a vector in fp32, and a byte for each rank."""
        return meeting_bytes(self._model.numel, self.graph.num_nodes)

    @property
    def bytes_per_step(self) -> float:
        """Payload bytes that this rank sends in a unit of time, averaged over ranks."""
        return 2 * self.law.rate / self.graph.num_nodes * self.bytes_per_meeting

    def describe(self) -> list[Row]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        graph, per_step = self.graph, 2 * self.law.rate / self.graph.num_nodes
        seen = f"chi1 {graph.chi1:.4g}, chi2 {graph.chi2:.4g}"
        return [
            ("graph", f"{graph.num_nodes} ranks, {len(graph.edges)} edges", seen),
            ("a unit of time", f"{self.step_s:g} s", "one local step; longer where the network can't keep up"),
            ("exchanges with neighbours", f"{per_step:.3g} a rank and unit", f"{self.law.rate:.4g} in all"),
            ("kept per rank", f"{self._vectors.planned_bytes / 1e6:.3f} MB", f"{self.state.shape[0]} vectors of fp32"),
            self._start_row,
            ("sent per rank and unit", f"{self.bytes_per_step / 1e6:.3f} MB", "fp32, on average"),
        ]

    def close(self) -> None:
        """Give the process group back."""
        self.comm.close()

    def state_dict(self) -> dict[str, Any]:
        """Copies of this node's vectors, and how often it was entered.

        Raises ConfigError inside the context, where nodes are at different times.
        """
        self._check_outside("save")
        return {"state": self.memory.state_dict(), "layout": self._layout}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state_dict. Raises ConfigError for another rank, graph or model, and inside the context."""
        self._check_outside("load")
        check_layout(self._layout, state_dict["layout"])
        self.memory.load_state_dict(state_dict["state"])

    def _check_outside(self, what: str) -> None:
        if self._is_inside:
            raise ConfigError(f"{what} the state outside of the context, where all nodes stand at one time")


class OptimizerNode(Node):
    """A node whose model an optimizer steps: each step's change of the model is added to the node's state."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, method: PairsMethod, **options: Any) -> None:
        super().__init__(model, optimizer, method, **options)
        self._optimizer = optimizer

    def __enter__(self) -> Self:
        super().__enter__()
        self._given = self._model.read()
        self._hook = self._optimizer.register_step_post_hook(self._after_step)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._hook.remove()
        super().__exit__(*raised)

    def _after_step(self, *_: Any) -> None:
        self.pace()
        update = self._model.read().sub_(self._given)
        with self._background.changed:
            self.bring_to_(self.now())
            self.state.add_(update)
            self._given = self.state[0].clone()
        self._model.write(self._given)
        self.steps += 1


class GradientNode(Node):
    """A node whose law uses gradients itself: `step` replaces the optimizer in your own loop."""

    law: GradientLaw

    def __init__(self, model: nn.Module, method: PairsMethod, **options: Any) -> None:
        super().__init__(model, None, method, **options)

    def step(self) -> None:
        """Apply the gradient, and write the new x into the model."""
        gradient = self._model.gradient()
        self.pace()
        with self._background.changed:
            self.bring_to_(self.now())
            self.law.gradient_(self.state, gradient)
            x = self.state[0].clone()
        self._model.write(x)
        self.steps += 1

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for tensor in self._model.tensors:
            tensor.grad = None


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An SGD optimizer that names the trained parameters if the user gives no optimizer."""
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=1.0)


@around.register
def _pairs(
    method: PairsMethod, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> Node:
    if method.brings_step:
        return GradientNode(model, method, **options)
    if optimizer is None:
        name = type(method).__name__
        raise ConfigError(f"{name} steps by an optimizer, and none is given: {name}(model, optimizer)")
    return OptimizerNode(model, optimizer, method, **options)


def swap(link: Link, packet: Tensor, peer: int, number: int) -> Rounds[Tensor]:
    """Send a uint8 packet to one rank and receive one of the same length from it; the result is not scratch.

    number: of the job. Both sides must give the same, because ranks submit different jobs.
    """
    link = replace(link, number=number)
    received = torch.empty_like(packet)
    round_ = link.exchange("gossip", "inter", {peer: received})
    round_.send(peer, packet)
    yield from round_.finish()
    return received
