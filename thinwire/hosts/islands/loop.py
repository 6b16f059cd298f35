"""The outer loop of one island: what it sends when, and what becomes of what it receives."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from thinwire import _compat
from thinwire.codecs import derive_seed
from thinwire.collectives import Peers
from thinwire.collectives.elastic import PATIENCE_S
from thinwire.collectives.faults import say
from thinwire.collectives.peers import alone
from thinwire.errors import ConfigError, CorruptMessageError, PeerLostError
from thinwire.hosts.islands import recovery
from thinwire.hosts.islands.flights import Flight, Host
from thinwire.layout.fragments import Fragment, cut
from thinwire.methods.islands.exchange import (
    LAST,
    RENEW,
    STOP,
    Header,
    Sync,
    sent_bytes,
)
from thinwire.methods.islands.fedspeed import Correction
from thinwire.methods.islands.method import OuterMethod
from thinwire.methods.islands.outer import NUM_WORDS, OuterFragment, merged
from thinwire.optim.rewarming import Rewarming
from thinwire.state.replicas import check_layout, digest, odd_ranks
from thinwire.table import Row

LOOK_EVERY_S = 0.1
# What an island's first rank tells the others.
DONE, FAILED = "done", "failed"

T = TypeVar("T")

log = logging.getLogger("thinwire")


class OuterLoop:
    """Counts inner steps, exchanges fragments with other islands when they are due, and takes outer steps.

    All ranks of an island have one and call it alike; its first rank alone has peers, and the outer state, fp32 on the
    CPU. weight: of this island in the means. torch_optimizer: the one whose gradients a correction is added to, and
    whose learning rate rises anew on an island that joins others.
    terms: what else all islands must have in common.

    Every island must take the same steps. Raises ConfigError where islands train different models or by other options.
    """

    def __init__(
        self,
        host: Host,
        model: nn.Module,
        method: OuterMethod,
        peers: Peers | None,
        *,
        torch_optimizer: torch.optim.Optimizer,
        terms: str = "",
        seed: int = 0,
    ) -> None:
        self.host, self.model, self.method, self.terms, self.seed = host, model, method, terms, seed
        self.torch_optimizer = torch_optimizer
        self._num_waits = 0
        self._first_does(lambda: None)
        self.fragments = cut(model, method.num_fragments, method.pattern, method.codec.block)
        self.schedule = method.schedule(len(self.fragments))
        self._fixed = [param.data for param in model.parameters() if not param.requires_grad] + list(model.buffers())
        self.is_first = host.comm is None or host.comm.rank == 0
        self.peers = (peers or alone()) if self.is_first else None
        self.steps = 0
        # After which step the last exchanges were started.
        self.sent_through = 0
        # Where this island goes on that has caught up with the others; 0: it needn't.
        self.jump = 0
        self.changes: list[recovery.Change] = []
        self.weight = 1.0
        self.wishes_stop = self.stop_agreed = False
        self.flights: deque[Flight] = deque()
        self.outer: list[OuterFragment] = []
        self.correction = Correction(method.correction, torch_optimizer) if method.correction else None
        self.begin()
        self.start_row = self._same_start()

    def begin(self) -> None:
        """Start from the weights as they are; a collective over the island."""
        start = [fragment.flat(self.host.masters(fragment.names)) for fragment in self.fragments]
        if self.is_first:
            corrected = self.method.correction is not None
            self.outer = [
                OuterFragment.starting(fragment, flat, corrected=corrected)
                for fragment, flat in zip(self.fragments, start, strict=True)
            ]

    # ---------------------------------------------------------------- a step

    def after_step(self) -> None:
        """An inner step was taken: receive what is due, send what is due; on all ranks of the island."""
        self.steps += 1
        if self._receive_due():
            return
        for number in self.schedule.due(self.steps):
            self._send(number)
        self.sent_through = self.steps
        if self.peers is not None:
            self.peers.reached(self.steps)
        self._receive_due()

    def drain(self) -> None:
        """Wait for everything under way, and take it as if it were due."""
        while self.flights:
            self._receive()

    def finish(self) -> None:
        """Take the mean of the islands' weights wherever they differ, and leave it in the model: the result.

        They differ after steps that no exchange has had yet, and by `mix` after one. A run that is shorter than a round
        has its only exchange here.
        """
        self.drain()
        just_sent = [] if self.method.mix else self.schedule.due(self.steps)
        for number in range(len(self.fragments)):
            if self.steps and number not in just_sent:
                self._send(number, is_last=True)
                self.drain()
        for number, fragment in enumerate(self.fragments):
            flat = self._share(self.outer[number].parameters if self.is_first else fragment.zeros())
            self.host.adopt_weights(fragment.views(flat))
        if self.correction is not None:
            self.correction.note_start()

    def _receive_due(self) -> bool:
        """Take what is due; whether this island went on elsewhere instead, with those that it had lost."""
        while self.flights and self.flights[0].due <= self.steps:
            if self._receive():
                return True
        return False

    def _send(self, number: int, *, is_last: bool = False) -> None:
        """Outer gradient of a fragment: x - w, and on its way. is_last: of all, so that x becomes the mean of w."""
        fragment = self.fragments[number]
        weights = self.host.masters(fragment.names)
        flight = Flight(number, self.steps + self.method.overlap_steps, None)
        if self.is_first:
            assert self.peers is not None
            outer = self.outer[number]
            count = outer.number + 1
            delta = outer.parameters - fragment.flat(weights)
            weight = self.weight
            wishes = STOP * self.wishes_stop + RENEW * self.peers.changed() + LAST * is_last
            if not bool(torch.isfinite(delta.sum())):
                log.warning("thinwire: island %d is left out of an exchange: not finite", self.peers.island)
                weight = 0.0
            header = Header(outer.fingerprint, count, number, weight, wishes)
            flight.sync = Sync(
                header, self.method.codec, fragment.numel, self.steps,
                derive_seed(self.seed, count, number, self.peers.island),
                delta=delta,
            )  # fmt: skip
            flight.submit(self.peers)
        self.flights.append(flight)

    def _receive(self) -> bool:
        """The outer step of the first fragment under way, and what the island goes on with; see _receive_due."""
        flight = self.flights[0]
        self._first_does(lambda: self._await(flight))
        return self._merge(flight)

    def _await(self, flight: Flight) -> None:
        """Return when the outer step is taken, or this island has caught up with others that went on without it."""
        sync, peers = flight.sync, self.peers
        assert sync is not None and peers is not None
        while not (flight.is_applied or self.jump):
            start = time.monotonic()
            try:
                self.wait_for(sync)
            except (PeerLostError, CorruptMessageError) as error:
                say(f"thinwire: island {peers.island}: {error}")
                recovery.renew(self, start)
                continue
            self.apply(flight)
            if any(header.wishes_renewal for header in sync.headers()):
                recovery.renew(self, time.monotonic())

    def wait_for(self, sync: Sync) -> None:
        """Return when all members hold all messages; raises PeerLostError, at once where a member is known to be lost.

        CorruptMessageError where nobody knows whether they do.
        """
        assert self.peers is not None
        if sync.future is not None:
            with self.peers.awaiting(sync.due):
                self.result_of(sync.future)

    def result_of(self, future: Future) -> Any:
        """What the islands do together; raises PeerLostError at once where a member is known to be lost."""
        assert self.peers is not None
        if not future.done():
            with self.peers.comm.meter.timed("exposed_s"):
                while wait([future], timeout=LOOK_EVERY_S).not_done:
                    if self.peers.lost():
                        raise PeerLostError("an island that takes part in the exchange under way is gone")
        return future.result()

    def apply(self, flight: Flight) -> None:
        """One outer step with what was received; every island takes the same, bit for bit."""
        assert flight.sync is not None
        self.apply_sync(flight.fragment, flight.sync, flight.members)
        flight.is_applied = True

    def apply_sync(self, number: int, sync: Sync, members: tuple[int, ...]) -> None:
        """See apply; members: those among whom it was exchanged."""
        sync.check(members)
        total, weights = sync.total()
        if any(header.is_last for header in sync.headers()):
            self.outer[number].take_mean(total, weights)
        else:
            self.outer[number].apply(self.method.rule, total, weights, len(members))
        self.stop_agreed = self.stop_agreed or any(header.wishes_stop for header in sync.headers())

    def _merge(self, flight: Flight) -> bool:
        """mix * w + (1 - mix) * x, from the first rank to all of the island; see _receive_due."""
        number = flight.fragment
        fragment, mix = self.fragments[number], self.method.mix
        weights = self.host.masters(fragment.names) if mix else {}
        flat = fragment.zeros()
        if self.is_first:
            outer = self.outer[number].parameters
            flat = merged(fragment.flat(weights) if mix else outer, outer, mix)
        flat = self._share(flat)
        if self.jump:
            self._go_on_elsewhere()
            return True
        self.flights.popleft()
        if self.correction is not None:
            self.correction.note_exchange()
        self.host.adopt_weights(fragment.views(flat))
        if self.correction is not None:
            self.correction.note_start()
        return False

    def _share(self, flat: Tensor) -> Tensor:
        """The first rank's values on all ranks of the island, with whether islands have agreed to stop, and `jump`."""
        comm = self.host.comm
        if comm is None or comm.world_size == 1:
            return flat
        message = torch.cat([flat, torch.tensor([float(self.stop_agreed), float(self.jump)])])
        comm.wait(comm.broadcast_(message))
        self.stop_agreed, self.jump = bool(message[-2]), int(message[-1])
        return message[:-2]

    def _first_does(self, work: Callable[[], T]) -> T | None:
        """What the first rank does alone, for longer than a message may take: the others wait, and fail with it."""
        comm, self._num_waits = self.host.comm, self._num_waits + 1
        if comm is None or comm.world_size == 1:
            return work()
        store, key = _compat.default_store(), f"thinwire/island/{comm.global_ranks[0]}/{self._num_waits}"
        if comm.rank:
            store.wait([key], timedelta(seconds=PATIENCE_S))
            if store.get(key) != DONE.encode():
                raise PeerLostError("the first rank of this island has failed")
            return None
        try:
            done = work()
        except BaseException:
            with suppress(RuntimeError):
                store.set(key, FAILED)
            raise
        store.set(key, DONE)
        return done

    # ---------------------------------------------------------------- islands that come and go

    def _go_on_elsewhere(self) -> None:
        """Take the outer parameters of islands that went on without this one, and their step."""
        self.flights.clear()
        self.steps = self.sent_through = self.jump
        self.jump = 0
        for number in range(len(self.fragments)):
            self._merge_start(number)

    def pending(self, number: int) -> Flight:
        """The exchange of a fragment that is under way and not applied."""
        return next(flight for flight in self.flights if flight.fragment == number and not flight.is_applied)

    def state_to_hand_over(self) -> Tensor:
        """The outer state in one, fp32, flat: what an island needs to take part, besides counts."""
        held = [t for outer in self.outer for t in (outer.parameters, outer.momentum, outer.correction)]
        return torch.cat([tensor for tensor in held if tensor is not None])

    def take_over(self, state: Tensor, counts: list[int]) -> None:
        """Take what another island's state_to_hand_over gave; counts: exchanges applied to it, by fragment."""
        rest = state
        for outer, count in zip(self.outer, counts, strict=True):
            for tensor in (outer.parameters, outer.momentum, outer.correction):
                if tensor is not None:
                    tensor.copy_(rest[: tensor.numel()])
                    rest = rest[tensor.numel() :]
            outer.set_parameters(outer.parameters.clone())
            outer.number = count

    # ---------------------------------------------------------------- weights as they are elsewhere

    @contextmanager
    @torch.no_grad()
    def outer_parameters(self) -> Iterator[None]:
        """The model has the outer parameters inside, for evaluation; a collective of the island.

        The weights must be whole (`synchronize`); they come back bit for bit.
        """
        named = dict(self.model.named_parameters())
        held: dict[str, Tensor] = {}
        for number, fragment in enumerate(self.fragments):
            flat = self._share(self.outer[number].parameters if self.is_first else fragment.zeros())
            for name, value in fragment.views(flat).items():
                held[name] = named[name].data.clone()
                # Not a write that whoever keeps references would take for an edit.
                named[name].data.copy_(value)
        try:
            yield
        finally:
            for name, value in held.items():
                named[name].data.copy_(value)

    def _same_start(self) -> Row:
        """Give all islands the first one's weights, sending them only where they differ; a collective.

        An island that comes later gets the others' state.
        """
        differ = bool(self._first_does(self._meet_others))
        shared = self._share(torch.tensor([float(differ)]))
        if self.jump:
            self._go_on_elsewhere()
            Rewarming(self.torch_optimizer, self.method.rejoin_steps)
            how = self.changes[-1].how if self.changes else "from the first rank"
            return "equal islands at start", f"joined after step {self.steps}", how
        if bool(shared[0]):
            for number in range(len(self.fragments)):
                self._merge_start(number)
        return (
            "equal islands at start",
            "sent by the first" if differ else "nothing sent",
            ("they differed" if differ else "they were equal already"),
        )

    def _meet_others(self) -> bool:
        """Catch up with islands that have begun before, or begin with them; whether they differed then."""
        assert self.peers is not None
        if self.peers.has_state:
            return self._level_islands()
        recovery.join(self)
        return False

    def sum_over_islands(self, numbers: Sequence[float]) -> list[float]:
        """What the islands' first ranks give, in all, in fp64; a collective over all ranks of all islands."""
        given = torch.tensor(numbers, dtype=torch.float64)
        total = self._first_does(lambda: self._sum(given))
        return self._share(given if total is None else total).tolist()

    def _sum(self, given: Tensor) -> Tensor:
        assert self.peers is not None
        total: Tensor = self.result_of(self.peers.comm.all_gather_exact(given)).sum(0)
        return total

    def level(self, *, has_own: bool) -> int:
        """Where the islands' weights differ, go on from the mean of those that have weights of their own.

        Returns how many these are; 0 where nothing differs. A collective over all ranks of all islands, after `begin`.
        """
        count = self._first_does(lambda: self._take_mean(has_own)) or 0
        count = int(self._share(torch.tensor([float(count)]))[0])
        if count:
            for number in range(len(self.fragments)):
                self._merge_start(number)
        return count

    def _take_mean(self, has_own: bool) -> int:
        """The outer parameters become the mean of those of islands that have their own; how many."""
        assert self.peers is not None
        comm = self.peers.comm
        if not odd_ranks(comm, digest(outer.parameters for outer in self.outer)):
            return 0
        owners = self.result_of(comm.all_gather_exact(torch.tensor([float(has_own)])))
        for outer in self.outer:
            held = self.result_of(comm.all_gather_exact(outer.parameters))
            total = torch.zeros(len(outer.parameters), dtype=torch.float64)
            for is_owner, weights in zip(owners, held, strict=True):
                total += weights * is_owner
            outer.set_parameters((total / owners.sum()).float())
        return int(owners.sum())

    def _level_islands(self) -> bool:
        """Compare with the other islands; whether they differed, in which case `outer` is now the first one's."""
        assert self.peers is not None
        comm = self.peers.comm
        if odd := odd_ranks(comm, digest([self.asked().encode(), *self._fixed])):
            raise ConfigError(
                f"island {odd[0]} trains another model, on other data or by other options than island "
                f"{self.peers.members[0]}, or its frozen weights and buffers differ: start all with the same"
            )
        if not odd_ranks(comm, digest(outer.parameters for outer in self.outer)):
            return False
        for outer in self.outer:
            flat = outer.parameters.clone()
            comm.wait(comm.broadcast_(flat))
            outer.set_parameters(flat)
        return True

    def _merge_start(self, number: int) -> None:
        fragment = self.fragments[number]
        flat = self._share(self.outer[number].parameters if self.is_first else fragment.zeros())
        self.host.adopt_weights(fragment.views(flat))
        if self.correction is not None:
            self.correction.note_start()

    # ---------------------------------------------------------------- what is known

    @property
    def num_islands(self) -> int:
        """Those present; 0 where only the island's first rank knows."""
        return len(self.peers.members) if self.peers is not None else 0

    def exchange_bytes(self, number: int) -> int:
        """Payload this rank sends to other islands for one exchange of a fragment."""
        if self.peers is None:
            return 0
        return sent_bytes(self.method.codec, self.fragments[number].numel, self.num_islands)

    @property
    def bytes_per_round(self) -> int:
        """Payload this rank sends in sync_every steps besides the inner strategy's: each fragment once."""
        return sum(self.exchange_bytes(n) + self._inside_bytes(f) for n, f in enumerate(self.fragments))

    def _inside_bytes(self, fragment: Fragment) -> int:
        """Handing a fragment from the shards to the first rank, and the merged one back to all."""
        comm = self.host.comm
        if comm is None or comm.world_size == 1:
            return 0
        reads, writes = self.host.handover_bytes(fragment.names)
        grid, node, local_rank = comm.topology, comm.topology.node(comm.rank), comm.topology.local_rank(comm.rank)
        copies = (grid.local_size - 1 if local_rank == 0 else 0) + (grid.num_nodes - 1 if comm.rank == 0 else 0)
        copies = copies if node == 0 or local_rank == 0 else 0
        return (1 + bool(self.method.mix)) * reads + writes + 4 * (fragment.numel + NUM_WORDS) * copies

    def rows(self) -> list[Row]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        method, codec = self.method, self.method.codec
        largest = max(range(len(self.fragments)), key=self.exchange_bytes)
        held = sum(outer.parameters.nbytes + outer.momentum.nbytes for outer in self.outer) / 1e6
        schedule = f"every {method.sync_every} steps"
        if method.start_after:
            schedule += f", every step until step {method.start_after}"
        overlap = f"{method.overlap_steps} steps" if method.overlap_steps else "off: all wait for each exchange"
        going_on = f"{method.mix:g} of the island's own weights" if method.mix else "the outer parameters"
        rows: list[Row] = [
            ("islands", f"{self.num_islands}, this is {self.peers.island if self.peers else '?'}", ""),
            self.start_row,
            ("exchange of each fragment", schedule, f"{len(self.fragments)} fragment(s), {method.pattern}"),
            ("outer gradients", str(codec), f"{codec.bits_per_element:.4g} bits an element"),
            ("outer optimizer", f"Nesterov, rate {method.outer_lr:g}, momentum {method.outer_momentum:g}",
             f"{held:.3f} MB on the CPU of each island's first rank"),
            ("overlap of an exchange", overlap, ""),
            ("after an exchange go on with", going_on, ""),
            ("largest exchange", f"{self.exchange_bytes(largest) / 1e6:.3f} MB", "sent by each island"),
        ]  # fmt: skip
        if method.correction:
            rows.append(("correction", f"FedSpeed, lam {method.correction.lam:g}", "behind clipping"))
        return rows

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on bit for bit; what is under way is waited for, and kept as messages."""
        self._first_does(self._wait_for_all)
        flights = []
        for flight in self.flights:
            sync = flight.sync
            told = None if sync is None else (tuple(sync.header), sync.step, sync.seed, sync.received, sync.message)
            flights.append((flight.fragment, flight.due, flight.members, told, flight.is_applied))
        return {
            "steps": self.steps,
            "flights": flights,
            "outer": [(o.parameters, o.momentum, o.number, o.correction) for o in self.outer],
            "names": [fragment.names for fragment in self.fragments],
            "block": self.method.codec.block,
            "correction": self.correction.state_dict() if self.correction is not None else {},
            "layout": self._layout(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what state_dict gave, besides the weights; raises ConfigError where it does not fit."""
        check_layout(self._layout(), state["layout"])
        self.drain_silently()
        self.steps = self.sent_through = state["steps"]
        for outer, (parameters, momentum, number, correction) in zip(self.outer, state["outer"], strict=True):
            outer.set_parameters(parameters)
            outer.momentum.copy_(momentum)
            outer.number = number
            if outer.correction is not None:
                outer.correction.copy_(correction)
        for fragment, due, members, told, is_applied in state["flights"]:
            flight = Flight(fragment, due, None, tuple(members), is_applied)
            if told is not None:
                header, step, seed, received, message = told
                flight.sync = Sync(Header(*header), self.method.codec, self.fragments[fragment].numel, step, seed)
                flight.sync.message, flight.sync.received = message, received
                flight.sync.is_committed = received is not None
                if self.peers is not None and received is None:
                    flight.submit(self.peers)
            self.flights.append(flight)
        if self.correction is not None:
            self.correction.load_state_dict(state["correction"])

    @staticmethod
    def parameters_in(state: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """The outer parameters by name in what state_dict gave on an island's first rank; shapes: of the model's.

        Raises ConfigError for a state of an older version, which does not say where they begin.
        """
        if missing := sorted({"outer", "names", "block"} - state.keys()):
            raise ConfigError(
                f"the outer parameters of its islands were saved by an older version of thinwire, without {missing}: "
                "take some more steps with `thinwire train --resume auto`, which saves them anew, or use that version"
            )
        found: dict[str, Tensor] = {}
        for names, (parameters, *_) in zip(state["names"], state["outer"], strict=True):
            fragment = Fragment({name: torch.Size(shapes[name]) for name in names}, state["block"])
            found |= fragment.views(parameters)
        return found

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether this is what state_dict gave on this rank of this island, under this method."""
        return state["layout"] == self._layout()

    def drain_silently(self) -> None:
        """Wait for what is under way, and drop it."""
        self._wait_for_all()
        self.flights.clear()

    def _wait_for_all(self) -> None:
        """What a loss has stopped is sent again, here when it is due, and where the state is loaded."""
        for flight in self.flights:
            if flight.sync is not None:
                with suppress(PeerLostError, CorruptMessageError):
                    self.wait_for(flight.sync)

    def _layout(self) -> dict[str, Any]:
        return {
            "method": repr(self.method),
            "fragments": hashlib.sha256(repr(self._shapes()).encode()).hexdigest()[:16],
            "island": self.peers.island if self.peers is not None else None,
            "is_first": self.is_first,
        }

    def asked(self) -> str:
        """What all islands must have in common; a run that goes on may have other terms than before."""
        return repr((self._shapes(), self.method, self.terms))

    def _shapes(self) -> list[list[tuple[str, tuple[int, ...]]]]:
        return [[(name, tuple(shape)) for name, shape in fragment.shapes.items()] for fragment in self.fragments]

    def abandon(self) -> None:
        """Leave the other islands at once, after a failure."""
        if self.peers is not None:
            self.peers.abandon()

    def close(self) -> None:
        """Wait for what is under way, and leave the other islands."""
        self.drain_silently()
        if self.peers is not None:
            # Whoever leaves breaks connections that a slower one may still wait on; if one is gone, that is over.
            with suppress(PeerLostError):
                self.peers.comm.barrier()
            self.peers.close()
