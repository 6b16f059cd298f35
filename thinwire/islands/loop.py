"""The outer loop of one island: which fragments it sends after which step, and with which weights it continues."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.collectives import Peers
from thinwire.collectives.faults import say
from thinwire.collectives.peers import alone
from thinwire.errors import CorruptMessageError, PeerLostError
from thinwire.islands import levelling, recovery
from thinwire.islands.correction import Correction
from thinwire.islands.exchanges import Exchanges, Flight, shapes_of
from thinwire.islands.island import Decision, Host, Island
from thinwire.layout.fragments import cut
from thinwire.methods.outer.method import OuterMethod
from thinwire.methods.outer.parameters import merged, residuals_in
from thinwire.optim.rewarming import Rewarming
from thinwire.state.replicas import check_layout, check_state, short_digest
from thinwire.state.whole import local_tensor, write_whole
from thinwire.table import Row


class Whole(NamedTuple):
    """The parameters that islands exchange: those of `model`, which may have no memory.

    Their whole shapes, if it has parts.
    """

    model: nn.Module
    shapes: Mapping[str, torch.Size]


class OuterLoop:
    """Counts inner steps, exchanges fragments with other islands when they are due, and continues with the result.

    All ranks of an island make the same calls. Only its first rank has peers, and the outer state, fp32 on the CPU.
    Every island must take the same steps.

    Args:
        torch_optimizer: the optimizer to whose gradients a correction is added, and whose learning rate is warmed up
            again on an island that joins others.
        options: further options that must be equal on all islands.
        whole: the parameters that the host returns; None: the model's parameters, as this rank has them.

    Raises ConfigError if islands train different models or use different options.
    """

    def __init__(
        self,
        host: Host,
        model: nn.Module,
        method: OuterMethod,
        peers: Peers | None,
        *,
        torch_optimizer: torch.optim.Optimizer,
        options: str = "",
        whole: Whole | None = None,
        seed: int = 0,
    ) -> None:
        self.host, self.model, self.method, self.torch_optimizer = host, model, method, torch_optimizer
        self.island = Island(host.comm)
        self.island.first_does(lambda: None)
        self.whole = whole or Whole(model, {})
        fragments = cut(self.whole.model, method.num_fragments, method.pattern, method.codec.block, self.whole.shapes)
        connected = (peers or alone()) if self.island.is_first else None
        self.exchanges = Exchanges(method, fragments, connected, options=options, seed=seed)
        self.steps = 0
        self.changes: list[recovery.Change] = []
        self.wishes_stop = False
        self.correction = Correction(method.correction, torch_optimizer) if method.correction else None
        self.begin()
        self.start_row = self._same_start()

    def begin(self) -> None:
        """Start with the present weights. A collective over the island."""
        start = [fragment.flat(self.host.masters(fragment.names)) for fragment in self.exchanges.fragments]
        if self.island.is_first:
            self.exchanges.begin(start)

    def owe(self, saved: Mapping[str, Any]) -> bool:
        """Take the error feedback of a state_dict of another layout, by parameter. Return whether there was any."""
        shapes = {name: shape for fragment in self.exchanges.fragments for name, shape in fragment.shapes.items()}
        lost, found = self.exchanges.state.lost, residuals_in(saved, shapes)
        if lost is None or not found:
            return False
        for number, fragment in enumerate(self.exchanges.fragments):
            lost[str(number)] = fragment.pack(map(found.get, fragment.names), fragment.zeros())
        return True

    def after_step(self) -> None:
        """After an inner step: receive and send what is due. On all ranks of the island."""
        self.steps += 1
        if self._receive_due():
            return
        for number in self.exchanges.schedule.due(self.steps):
            self._send(number)
        self.exchanges.sent_through = self.steps
        if self.exchanges.connected is not None:
            self.exchanges.connected.reached(self.steps)
        self._receive_due()

    def drain(self) -> None:
        """Wait for all exchanges under way, and apply them as if they were due."""
        while self.exchanges.flights:
            self._receive()

    def finish(self) -> None:
        """Replace the islands' weights by their mean wherever they differ, and leave it in the model: the result.

        They differ after steps that no exchange has covered, and by `mix` after an exchange. A run that is shorter than
        a round has its only exchange here. An island that is still catching up gets the whole state, and ends with the
        others.
        """
        self.drain()
        self._end_together()
        just_sent = [] if self.method.mix else self.exchanges.schedule.due(self.steps)
        for number in range(self.exchanges.ending - 1, len(self.exchanges.fragments)):
            self.exchanges.ending = number + 2
            if self.steps and number not in just_sent:
                self._send(number, is_last=True)
                self.drain()
        self._adopt_outer()

    def _end_together(self) -> None:
        """Begin to end. Meet again if an island still listens, since nothing else would tell it that the run ends."""

        def meet() -> int:
            self.exchanges.ending = self.exchanges.ending or 1
            if not self.exchanges.catching_up:
                return 0
            self.changes.append(recovery.renew(self.exchanges, time.monotonic()))
            return self.changes[-1].jump

        jump = self.island.first_does(meet) or 0
        ending, decision = self.island.share(torch.tensor([float(self.exchanges.ending)]), Decision(jump=jump))
        self.exchanges.ending = int(ending)
        if decision.jump:
            self._jump(decision.jump)

    def go_on_from(self, step: int) -> None:
        """Set the number of steps taken."""
        self.steps = self.exchanges.sent_through = step

    def sum_over_islands(self, numbers: Sequence[float]) -> list[float]:
        """Sums over islands of their first ranks' numbers, fp64. A collective over all ranks of all islands."""
        total = self.island.first_does(lambda: levelling.sum_of(self.exchanges, numbers))
        own = torch.tensor(numbers, dtype=torch.float64)
        return self.island.share(own if total is None else total)[0].tolist()

    def level(self, *, has_own: bool) -> int:
        """If the islands' weights differ, continue with the mean over those that have weights of their own.

        Likewise with error feedback. Returns the number of those; 0 if no weights differ. A collective over all ranks
        of all islands, after `begin`.
        """
        self.island.first_does(lambda: levelling.share_residuals(self.exchanges, has_own=has_own))
        count = self.island.first_does(lambda: levelling.take_mean(self.exchanges, has_own=has_own)) or 0
        count = int(self.island.share_number(count))
        if count:
            self._adopt_outer()
        return count

    def _same_start(self) -> Row:
        """Give all islands the first one's weights; if the others have begun before, give this island their state."""
        joined: list[recovery.Change] = []
        differ = bool(self.island.first_does(partial(self._meet_others, joined)))
        jump = joined[0].jump if joined else 0
        shared, decision = self.island.share(torch.tensor([float(differ)]), Decision(jump=jump))
        self.changes += joined
        if decision.jump:
            self._jump(decision.jump)
            Rewarming(self.torch_optimizer, self.method.rejoin_steps)
            how = joined[0].how if joined else "from the first rank"
            return "equal islands at start", f"joined after step {self.steps}", how
        if bool(shared[0]):
            self._adopt_outer()
        return (
            "equal islands at start",
            "sent by the first" if differ else "nothing sent",
            ("they differed" if differ else "they were equal already"),
        )

    def _meet_others(self, joined: list[recovery.Change]) -> bool:
        """Begin with the other islands, or join them if they have begun.

        Return whether weights differed at the start.
        """
        if self.exchanges.peers.has_state:
            untrained = [param.data for param in self.model.parameters() if not param.requires_grad]
            fixed = [local_tensor(tensor) for tensor in [*untrained, *self.model.buffers()]]
            return levelling.same_start(self.exchanges, fixed)
        joined.append(recovery.join(self.exchanges))
        return False

    def _send(self, number: int, *, is_last: bool = False) -> None:
        weights = self.host.masters(self.exchanges.fragments[number].names)
        self.exchanges.send(number, self.steps, weights, wishes_stop=self.wishes_stop, is_last=is_last)

    def _receive_due(self) -> bool:
        """Apply the exchanges that are due.

        Return whether this island jumped to the step of islands that it had lost.
        """
        while self.exchanges.flights and self.exchanges.flights[0].due <= self.steps:
            if self._receive():
                return True
        return False

    def _receive(self) -> bool:
        """Apply the first exchange under way, and continue with its result; see _receive_due."""
        flight = self.exchanges.flights[0]
        jump = self.island.first_does(lambda: self._await(flight)) or 0
        return self._merge(flight, jump)

    def _await(self, flight: Flight) -> int:
        """Wait until the outer step is taken. Return the step to jump to if the others went on without this island.

        On the first rank.
        """
        sync, exchanges = flight.sync, self.exchanges
        assert sync is not None
        while not flight.is_applied:
            start = time.monotonic()
            try:
                exchanges.wait_for(sync)
            except (PeerLostError, CorruptMessageError) as error:
                say(f"thinwire: island {exchanges.peers.island}: {error}")
            else:
                exchanges.apply(flight)
                if not any(header.wishes_renewal for header in sync.headers()):
                    return 0
                start = time.monotonic()
            change = recovery.renew(exchanges, start)
            self.changes.append(change)
            if change.jump:
                return change.jump
        return 0

    def _merge(self, flight: Flight, jump: int) -> bool:
        """Send mix * w + (1 - mix) * x from the first rank to all of the island; see _receive_due."""
        fragment, mix = self.exchanges.fragments[flight.fragment], self.method.mix
        weights = self.host.masters(fragment.names) if mix else {}
        flat = fragment.zeros()
        if self.island.is_first:
            outer = self.exchanges.outer[flight.fragment].parameters
            flat = merged(fragment.flat(weights) if mix else outer, outer, mix)
        flat, decision = self.island.share(flat, Decision(self.exchanges.stop_agreed, jump))
        self.exchanges.stop_agreed = decision.stop
        if decision.jump:
            self._jump(decision.jump)
            return True
        self.exchanges.flights.popleft()
        if self.correction is not None:
            self.correction.note_exchange()
        self.host.adopt_weights(fragment.views(flat))
        if self.correction is not None:
            self.correction.note_start()
        return False

    def _jump(self, step: int) -> None:
        """Take the outer parameters and the step of islands that went on without this one."""
        self.exchanges.flights.clear()
        self.go_on_from(step)
        self._adopt_outer()

    def _adopt_outer(self) -> None:
        """Continue with the outer parameters. A collective over the island."""
        for number, fragment in enumerate(self.exchanges.fragments):
            self.host.adopt_weights(fragment.views(self._outer_of(number)))
        if self.correction is not None:
            self.correction.note_start()

    def _outer_of(self, number: int) -> Tensor:
        """The outer parameters of a fragment, on all ranks of the island."""
        is_first, exchanges = self.island.is_first, self.exchanges
        own = exchanges.outer[number].parameters if is_first else exchanges.fragments[number].zeros()
        flat, decision = self.island.share(own, Decision(exchanges.stop_agreed))
        exchanges.stop_agreed = decision.stop
        return flat

    @contextmanager
    @torch.no_grad()
    def outer_parameters(self) -> Iterator[None]:
        """Context in which the model has the outer parameters, for evaluation. A collective over the island.

        Call `synchronize` before, so that weights are whole. They are restored bit for bit.
        """
        named = dict(self.model.named_parameters())
        held: dict[str, Tensor] = {}
        for number, fragment in enumerate(self.exchanges.fragments):
            for name, value in fragment.views(self._outer_of(number)).items():
                held[name] = named[name].data.clone()
                # Not a write that whoever keeps references would take for an edit.
                write_whole(named[name].data, value)
        try:
            yield
        finally:
            for name, value in held.items():
                named[name].data.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """The state from which the loop continues bit for bit.

        Waits for exchanges under way, and keeps them as messages.
        """
        self.island.first_does(self.exchanges.wait_for_all)
        return {
            "steps": self.steps,
            **self.exchanges.state_dict(),
            "correction": self.correction.state.state_dict() if self.correction is not None else {},
            "layout": self._layout(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state_dict, which holds no weights. Raises ConfigError if it does not fit."""
        check_state(state, "layout", "steps")
        check_layout(self._layout(), state["layout"])
        self.go_on_from(state["steps"])
        self.exchanges.load_state_dict(state)
        if self.correction is not None:
            self.correction.load_state_dict(state["correction"])

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether `state` is a state_dict of this rank of this island, with this method."""
        return state["layout"] == self._layout()

    def _layout(self) -> dict[str, Any]:
        connected = self.exchanges.connected
        return {
            "method": repr(self.method),
            "fragments": short_digest(shapes_of(self.exchanges.fragments)),
            "island": connected.island if connected is not None else None,
            "is_first": self.island.is_first,
        }
