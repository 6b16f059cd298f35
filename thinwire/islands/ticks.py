"""Asynchronous rounds at fixed times: islands of unequal speed do not wait for the slowest."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.codecs import Identity, derive_seed
from thinwire.collectives import Communicator, Meter
from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S
from thinwire.collectives.gather import all_gather_exact, broadcast_
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.errors import ConfigError
from thinwire.islands.background import Background, FlatModel
from thinwire.layout.sections import Sections
from thinwire.methods.front import around
from thinwire.methods.own_pace.rounds import RoundsMethod
from thinwire.state.memory import Merge, Place, State
from thinwire.state.replicas import check_layout, fitting_parameters, same_options, same_start, shapes_digest
from thinwire.table import Row, announce as announce_table

log = logging.getLogger("thinwire")
CLOCK = 0
# The key of what is kept: all parameters as one vector.
MODEL = "model"
CLOCK_BYTES, STATUS_BYTES = 1, 2


@dataclass(frozen=True)
class Tick:
    """One aggregation: its number from 0, the ranks that had finished a job, and their weights d_i."""

    number: int
    finished: tuple[int, ...]
    weights: tuple[float, ...]


class RoundsIsland:
    """One rank as an island; a context around its loop. `method` has the mathematics.

    The training thread counts jobs. Ticks run beside it, on all ranks together, when rank 0's clock says so.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        method: RoundsMethod,
        *,
        on_tick: Callable[[Tick], None] | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        seed: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        checked: bool = False,
        announce: bool = True,
        meter: Meter | None = None,
    ) -> None:
        if not method.interval_s < timeout_s:
            raise ConfigError(
                f"interval_s {method.interval_s:g}: below timeout_s, {timeout_s:g}: ranks wait that long for a tick"
            )
        self._trained = fitting_parameters(model, optimizer)
        self.comm = Communicator(group, local_size=1, timeout_s=timeout_s, checked=checked, meter=meter)
        self.method, self.seed = method, seed
        self.importance = method.importance_of(self.comm.world_size)
        self.codec = method.codecs[0] if self.comm.world_size > 1 else Identity()
        same_options(self.comm, f"{method} {seed}")
        self._start_row = same_start(model, self.comm)
        self._optimizer, self._on_tick = optimizer, on_tick
        self._model = FlatModel(self._trained)
        self._wire = Sections.alone(self.codec, self._model.lengths, range(len(self._model.lengths)))
        # What all ranks hold alike; written at ticks only.
        self.state = State(Place({MODEL: torch.Size([self._model.numel])}, self.comm.topology, self.comm.rank))
        self._kept = self.state.add("server", Merge.SAME)
        self.state.add_attributes(self, "ticks", "participations")
        self.ticks = 0
        self.participations = [0] * self.comm.world_size
        self._born = [0] * self.comm.world_size
        # The island's own: where its job began, where it was handed in, and what goes to and comes from the ticks.
        self.begin()
        self._handed_in: Tensor | None = None
        self._steps = 0
        self._delta: Tensor | None = None
        self._sent: Tensor | None = None
        self._is_leaving = False
        self._warned: set[int] = set()
        self.jobs = 0
        self._background = Background("thinwire-ticks", self._tick_until_all_leave)
        self._hook: Any = None
        if announce and self.comm.rank == CLOCK:
            announce_table(self.describe())

    def begin(self) -> None:
        """Start with the model's weights, which are the same on all ranks."""
        self._kept[MODEL] = self._model.read()
        self._begun = self._server.clone()

    @property
    def _server(self) -> Tensor:
        """The server's model, fp32 [n]."""
        return self._kept[MODEL]

    def __enter__(self) -> Self:
        """Start with the server's model, and start the clock."""
        if self._hook is not None:
            raise ConfigError("this context has been entered before: make a new one, and load the old one's state")
        self._begun = self._server.clone()
        self._model.write(self._begun)
        self._hook = self._optimizer.register_step_post_hook(self._after_step)
        self.comm.barrier()
        self._background.start()
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Finish the job, wait until all ranks leave, and take the last model; after an error, leave at once."""
        self._hook.remove()
        if error is None:
            if self._handed_in is not None:
                self._take_model()
            if self._steps:
                self._hand_in()
                self._take_model()
        with self._background.changed:
            self._is_leaving = True
        if error is None:
            self._background.join()
            self._model.write(self._server)
            self.close()

    def close(self) -> None:
        """Give the process group back."""
        self.comm.close()

    def _after_step(self, *_: Any) -> None:
        self._background.check()
        self._steps += 1
        is_due = self._steps >= self.method.local_steps
        if self._handed_in is not None and (is_due or self._sent is not None):
            self._take_model()
        if is_due:
            self._hand_in()
            if not self.method.overlap:
                self._take_model()

    def _hand_in(self) -> None:
        """The job is done: the next tick sends its change of the model."""
        self._handed_in = self._model.read()
        with self._background.changed:
            self._delta = self._handed_in - self._begun
        self._steps = 0
        self.jobs += 1

    def _take_model(self) -> None:
        """Continue with the model that the server sent, plus the steps taken since the job ended."""
        with self._background.changed, self.meter.timed("exposed_s"):
            self._background.wait_for(lambda: self._sent is not None)
            sent, self._sent = self._sent, None
        assert sent is not None and self._handed_in is not None
        self._model.write(sent + (self._model.read() - self._handed_in) if self._steps else sent)
        self._begun, self._handed_in = sent, None

    def _tick_until_all_leave(self) -> None:
        due = time.monotonic()
        do_all_leave = False
        while not do_all_leave:
            if self.comm.rank == CLOCK:
                # The others wait for this rank's word, inside of the tick.
                due = max(due + self.method.interval_s, time.monotonic())
                time.sleep(max(0.0, due - time.monotonic()))
            tick, do_all_leave = self.comm.submit(self._tick).result()
            if self._on_tick is not None:
                self._on_tick(tick)

    def _tick(self, link: Link) -> Rounds[tuple[Tick, bool]]:
        """One aggregation: the clock's signal, every rank's status, the packets of finished jobs, their sum."""
        yield from _await_clock(link)
        with self._background.changed:
            delta, is_leaving = self._delta, self._is_leaving
        own = torch.tensor([delta is not None, is_leaving], dtype=torch.uint8)
        words = yield from all_gather_exact(link, own)
        finished = words[:, 0].nonzero().flatten().tolist()
        packet = None if delta is None else self._encode(link, delta)
        packets = yield from _gather_from(link, finished, packet, self.bytes_of_packet)
        tick = Tick(self.ticks, tuple(finished), tuple(self._weights_of(finished)))
        with link.timed("decode_s", "hand_in"):
            total = torch.zeros(self._model.numel)
            for rank, weight in zip(tick.finished, tick.weights, strict=True):
                total.add_(self._wire.decode(packets[rank], self._model.numel), alpha=weight)
        self._apply(tick, total)
        return tick, bool(words[:, 1].all())

    def _encode(self, link: Link, delta: Tensor) -> Tensor:
        with link.timed("encode_s", "hand_in"):
            return self._wire.encode(delta, seed=derive_seed(self.seed, self.ticks, link.rank))

    def _weights_of(self, finished: Sequence[int]) -> list[float]:
        num_ticks = self.ticks + 1
        job_ticks = [num_ticks - self._born[rank] for rank in finished]
        if (limit := self.method.most_ticks) is not None:
            self._warn_of(finished, job_ticks, limit)
        num_jobs = [self.participations[rank] + 1 for rank in finished]
        return self.method.weights_of([self.importance[rank] for rank in finished], job_ticks, num_ticks, num_jobs)

    def _warn_of(self, finished: Sequence[int], ticks: Sequence[int], limit: int) -> None:
        for rank, count in zip(finished, ticks, strict=True):
            if count > limit and rank not in self._warned and self.comm.rank == CLOCK:
                self._warned.add(rank)
                log.warning(
                    "thinwire: a job of rank %d took %d ticks and counts as %d, as max_ticks says, so it counts too "
                    "little: raise max_ticks or interval_s",
                    self.comm.global_ranks[rank], count, limit,
                )  # fmt: skip

    def _apply(self, tick: Tick, total: Tensor) -> None:
        """Take the server's step, and give the new model to ranks that have finished; every rank computes it itself."""
        with self._background.changed:
            if tick.finished:
                self._server.add_(total, alpha=self.method.outer_lr)
            self.ticks += 1
            # A list of its own: one that was saved may not be written yet.
            self.participations = [num + (rank in tick.finished) for rank, num in enumerate(self.participations)]
            for rank in tick.finished:
                self._born[rank] = self.ticks
            if self.comm.rank in tick.finished:
                self._delta, self._sent = None, self._server.clone()
            self._background.changed.notify_all()

    @property
    def meter(self) -> Meter:
        """Payload bytes, and the seconds that this island waited (exposed_s)."""
        return self.comm.meter

    @property
    def bytes_of_packet(self) -> int:
        """Bytes of one Delta packet."""
        return self._wire.packet_bytes(self._model.numel)

    @property
    def bytes_per_job(self) -> int:
        """Payload bytes that this rank sends for each finished job: its packet to every other rank."""
        return (self.comm.world_size - 1) * self.bytes_of_packet

    @property
    def bytes_per_step(self) -> float:
        """Payload bytes of a job spread over its steps."""
        return self.bytes_per_job / self.method.local_steps

    def describe(self) -> list[Row]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        waits = (
            "goes on, and adds those steps to the model that comes"
            if self.method.overlap
            else "waits for the next tick"
        )
        plain = 4 * (self.comm.world_size - 1) * self._model.numel
        return [
            ("islands", str(self.comm.world_size), "every rank is one"),
            ("a tick", f"every {self.method.interval_s:g} s", f"by rank {self.comm.global_ranks[CLOCK]}'s clock"),
            ("a job", f"{self.method.local_steps} steps", f"an island that has finished {waits}"),
            self.method.weighting_row,
            ("Deltas", str(self.codec), f"{self.codec.bits_per_element:.4g} bits an element"),
            self._start_row,
            ("sent per rank and job", f"{self.bytes_per_job / 1e6:.3f} MB", f"{plain / 1e6:.3f} MB in fp32"),
        ]

    def state_dict(self) -> dict[str, Any]:
        """The server's model after the last tick, and the counters. Ranks may be some ticks apart."""
        with self._background.changed:
            return {"state": self.state.state_dict(), "layout": self._layout()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the newest of the ranks' states, with new jobs. A collective, before the context is entered.

        Raises ConfigError if the state belongs to another world or model, and inside the context.
        """
        if self._hook is not None:
            raise ConfigError("load the state before you enter the context: time runs already")
        check_layout(self._layout(), state_dict["layout"])
        self.state.load_state_dict(state_dict["state"])
        own, server = torch.tensor([self.ticks, *self.participations]), self._server
        counts = self.comm.wait(self.comm.all_gather_exact(own))
        newest = int(counts[:, 0].argmax())
        self._kept[MODEL] = self.comm.wait(self.comm.submit(lambda link: broadcast_(link, server, newest)))
        self.ticks, *self.participations = counts[newest].tolist()
        self._born = [self.ticks] * self.comm.world_size

    def _layout(self) -> dict[str, Any]:
        return {"world_size": self.comm.world_size, "parameters": shapes_digest(self._trained)}


def _await_clock(link: Link) -> Rounds[None]:
    """Wait until rank 0 says that it is time for a tick."""
    word = torch.zeros(CLOCK_BYTES, dtype=torch.uint8)
    is_clock = link.rank == CLOCK
    round_ = link.exchange("clock", "inter", {} if is_clock else {CLOCK: torch.empty_like(word)})
    for peer in link.node_peers() if is_clock else []:
        round_.send(peer, word)
    yield from round_.finish()


def _gather_from(
    link: Link, senders: Sequence[int], packet: Tensor | None, num_bytes: int
) -> Rounds[dict[int, Tensor]]:
    """The packets of `senders`, uint8 of num_bytes, by rank; scratch of the link. packet: this rank's, if it sends."""
    received = {rank: link.scratch(f"of rank {rank}", num_bytes) for rank in senders if rank != link.rank}
    round_ = link.exchange("hand_in", "inter", received)
    if packet is not None:
        for peer in link.node_peers():
            round_.send(peer, packet)
    yield from round_.finish()
    return received if packet is None else received | {link.rank: packet}


@around.register
def _rounds(method: RoundsMethod, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> RoundsIsland:
    return RoundsIsland(model, optimizer, method, **options)
