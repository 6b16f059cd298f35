"""Asynchronous rounds at fixed times: islands of unequal speed that do not wait for the slowest."""

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

from thinwire.codecs import Codec, Identity, Integer, derive_seed
from thinwire.collectives import Communicator, Meter
from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S
from thinwire.collectives.gather import all_gather_exact, broadcast_
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.errors import ConfigError, nearest
from thinwire.layout.segments import Segments
from thinwire.methods.islands.weights import estimated_weights, fedavg_weights, normalised, tick_weights
from thinwire.state.background import Background, FlatModel
from thinwire.state.replicas import (
    check_layout,
    fitting_parameters,
    same_options,
    same_start,
    shapes_digest,
)
from thinwire.table import Row
from thinwire.table import announce as announce_table

log = logging.getLogger("thinwire")
WEIGHTS = ("ticks", "estimated", "importance")
CLOCK = 0
CLOCK_BYTES, WORD_BYTES = 1, 2


@dataclass(frozen=True)
class Tick:
    """One aggregation: its number from 0 on, the ranks that had finished a job, and their weights d_i."""

    number: int
    finished: tuple[int, ...]
    weights: tuple[float, ...]


class FedFix:
    """Train islands of unequal speed on one model; a context around one's own loop, entered by all ranks.

    Every rank is an island. It starts from the server's model, takes `local_steps` steps of `optimizer` (a job), hands
    in Delta_i = (its model) - (the model it was sent), and is sent the next one. Every `interval_s` seconds, at a tick,
    all ranks add up what has been handed in since the last:

        theta_{n+1} = theta_n + outer_lr sum_i d_i Delta_i        over those who have finished

    weights: "ticks", d_i = (ticks that the job took) p_i, unbiased; "estimated", d_i = p_i n / max(N_i, 1) from counts;
    "importance", d_i = p_i, biased towards fast islands. importance: p_i, one number for each rank, scaled to a sum of
    1; equal by default. max_ticks: no d_i is larger than max_ticks p_i. codec: how a Delta travels, each tensor by
    itself; Integer() by default. overlap: train on while a Delta travels, and add those steps to the model that comes;
    else the island waits for it. on_tick: called on another thread after each tick.

    The server's model is fp32 on the CPU of every rank, the same bits on all. Rank 0's clock decides when a tick is. On
    leaving the context a rank hands in what it has begun, waits until all ranks leave, and ends with the server's
    model. Raises ConfigError for options that can't work or differ between ranks; PeerLostError, in `optimizer.step()`,
    where a rank is lost.

    Source: Fraboni, Vidal, Kameni and Lorenzi, "A General Theory for Federated Optimization with Asynchronous and
    Heterogeneous Clients Updates", JMLR 2023 (FedFix).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        interval_s: float,
        local_steps: int,
        weights: str = "ticks",
        importance: Sequence[float] | None = None,
        outer_lr: float = 1.0,
        max_ticks: int = 10,
        codec: Codec | None = None,
        overlap: bool = False,
        on_tick: Callable[[Tick], None] | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        seed: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        checked: bool = False,
        announce: bool = True,
    ) -> None:
        _check_options(interval_s, local_steps, weights, outer_lr, max_ticks, timeout_s)
        self._trained = fitting_parameters(model, optimizer)
        self.comm = Communicator(group, local_size=1, timeout_s=timeout_s, checked=checked)
        self.importance = _importance(importance, self.comm.world_size)
        self.interval_s, self.local_steps, self.weights = interval_s, local_steps, weights
        self.outer_lr, self.max_ticks, self.overlap, self.seed = outer_lr, max_ticks, overlap, seed
        self.codec = (codec or Integer()) if self.comm.world_size > 1 else Identity()
        asked = f"{interval_s} {local_steps} {weights} {self.importance} {outer_lr} {max_ticks} {self.codec} {seed}"
        same_options(self.comm, asked)
        self._start_row = same_start(model, self.comm)
        self._optimizer, self._on_tick = optimizer, on_tick
        self._model = FlatModel(self._trained)
        self._wire = Segments(self.codec, self._model.lengths, tuple(range(len(self._model.lengths))))
        # What all ranks hold alike; written at ticks only.
        self._server = self._model.read()
        self.ticks = 0
        self.participations = [0] * self.comm.world_size
        self._born = [0] * self.comm.world_size
        # The island's own: where its job began, where it was handed in, and what goes to and comes from the ticks.
        self._begun = self._server.clone()
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

    # ---------------------------------------------------------------- around the loop

    def __enter__(self) -> Self:
        """Start from the server's model, and let time run."""
        if self._hook is not None:
            raise ConfigError("this FedFix has been entered before: make a new one, and load the old one's state")
        self._begun = self._server.clone()
        self._model.write(self._begun)
        self._hook = self._optimizer.register_step_post_hook(self._after_step)
        self.comm.barrier()
        self._background.start()
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Hand in what was begun, wait until all ranks leave, take the last model; after an error leave at once."""
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
            self.comm.close()

    def _after_step(self, *_: Any) -> None:
        self._background.check()
        self._steps += 1
        is_due = self._steps >= self.local_steps
        if self._handed_in is not None and (is_due or self._sent is not None):
            self._take_model()
        if is_due:
            self._hand_in()
            if not self.overlap:
                self._take_model()

    def _hand_in(self) -> None:
        """The job is done: the next tick takes what it changed."""
        self._handed_in = self._model.read()
        with self._background.changed:
            self._delta = self._handed_in - self._begun
        self._steps = 0
        self.jobs += 1

    def _take_model(self) -> None:
        """Go on from the model that the server sent; steps taken since the job was handed in are added to it."""
        with self._background.changed, self.meter.timed("exposed_s"):
            self._background.wait_for(lambda: self._sent is not None)
            sent, self._sent = self._sent, None
        assert sent is not None and self._handed_in is not None
        self._model.write(sent + (self._model.read() - self._handed_in) if self._steps else sent)
        self._begun, self._handed_in = sent, None

    # ---------------------------------------------------------------- ticks

    def _tick_until_all_leave(self) -> None:
        due = time.monotonic()
        do_all_leave = False
        while not do_all_leave:
            if self.comm.rank == CLOCK:
                # The others wait for this rank's word, inside of the tick.
                due = max(due + self.interval_s, time.monotonic())
                time.sleep(max(0.0, due - time.monotonic()))
            tick, do_all_leave = self.comm.submit(self._tick).result()
            if self._on_tick is not None:
                self._on_tick(tick)

    def _tick(self, link: Link) -> Rounds[tuple[Tick, bool]]:
        """One aggregation: the clock's word, everybody's word, the packets of those who have finished, the sum."""
        yield from _hear_clock(link)
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
        p, n = [self.importance[rank] for rank in finished], self.ticks + 1
        if self.weights == "importance":
            return fedavg_weights(p)
        if self.weights == "estimated":
            return estimated_weights(p, n, [self.participations[rank] + 1 for rank in finished], self.max_ticks)
        ticks = [n - self._born[rank] for rank in finished]
        self._warn_of(finished, ticks)
        return tick_weights(p, [min(count, self.max_ticks) for count in ticks])

    def _warn_of(self, finished: Sequence[int], ticks: Sequence[int]) -> None:
        for rank, count in zip(finished, ticks, strict=True):
            if count > self.max_ticks and rank not in self._warned and self.comm.rank == CLOCK:
                self._warned.add(rank)
                log.warning(
                    "thinwire: a job of rank %d took %d ticks and counts as %d, as max_ticks says, so it counts too "
                    "little: raise max_ticks or interval_s",
                    self.comm.global_ranks[rank], count, self.max_ticks,
                )  # fmt: skip

    def _apply(self, tick: Tick, total: Tensor) -> None:
        """Take the step, and send the new model to those who have finished: every rank has it already."""
        with self._background.changed:
            if tick.finished:
                self._server.add_(total, alpha=self.outer_lr)
            self.ticks += 1
            for rank in tick.finished:
                self.participations[rank] += 1
                self._born[rank] = self.ticks
            if self.comm.rank in tick.finished:
                self._delta, self._sent = None, self._server.clone()
            self._background.changed.notify_all()

    # ---------------------------------------------------------------- what is known

    @property
    def meter(self) -> Meter:
        """Payload bytes, and the seconds for which this island waited (exposed_s)."""
        return self.comm.meter

    @property
    def bytes_of_packet(self) -> int:
        """One Delta on the wire."""
        return self._wire.packet_bytes(self._model.numel)

    @property
    def bytes_per_job(self) -> int:
        """Payload that this rank sends for each job it finishes: its packet to every other rank."""
        return (self.comm.world_size - 1) * self.bytes_of_packet

    @property
    def bytes_per_tick(self) -> int:
        """Payload that this rank sends at each tick besides: its word to every other rank, rank 0's clock too."""
        return (self.comm.world_size - 1) * (WORD_BYTES + (CLOCK_BYTES if self.comm.rank == CLOCK else 0))

    def describe(self) -> list[Row]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        rule = {
            "ticks": "p times the ticks that the job took: unbiased",
            "estimated": "p times aggregations over participations, counted so far",
            "importance": "p alone: fast islands count more",
        }[self.weights]
        waits = "goes on, and adds those steps to the model that comes" if self.overlap else "waits for the next tick"
        plain = 4 * (self.comm.world_size - 1) * self._model.numel
        return [
            ("islands", str(self.comm.world_size), "every rank is one"),
            ("a tick", f"every {self.interval_s:g} s", f"by rank {self.comm.global_ranks[CLOCK]}'s clock"),
            ("a job", f"{self.local_steps} steps", f"an island that has finished {waits}"),
            (f"weights {self.weights}", rule, f"at most {self.max_ticks} p"),
            ("Deltas", str(self.codec), f"{self.codec.bits_per_element:.4g} bits an element"),
            self._start_row,
            ("sent per rank and job", f"{self.bytes_per_job / 1e6:.3f} MB", f"{plain / 1e6:.3f} MB in fp32"),
        ]

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The server's model after the last tick, and what was counted; ranks may be some ticks apart."""
        with self._background.changed:
            return {
                "server": self._server.clone(),
                "counts": torch.tensor([self.ticks, *self.participations]),
                "layout": self._layout(),
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the newest of the ranks' states, with new jobs; a collective, before the context is entered.

        Raises ConfigError where the state belongs to another world or model, or time runs already.
        """
        if self._hook is not None:
            raise ConfigError("load the state before you enter the context: time runs already")
        check_layout(self._layout(), state_dict["layout"])
        counts = self.comm.wait(self.comm.all_gather_exact(state_dict["counts"]))
        newest = int(counts[:, 0].argmax())
        server = state_dict["server"].clone()
        self._server = self.comm.wait(self.comm.submit(lambda link: broadcast_(link, server, newest)))
        self.ticks, *self.participations = counts[newest].tolist()
        self._born = [self.ticks] * self.comm.world_size

    def _layout(self) -> dict[str, Any]:
        return {"world_size": self.comm.world_size, "parameters": shapes_digest(self._trained)}


def _hear_clock(link: Link) -> Rounds[None]:
    """Rank 0 says that it is time: nobody decides that for itself."""
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


def _importance(given: Sequence[float] | None, world_size: int) -> list[float]:
    if given is None:
        return [1 / world_size] * world_size
    if len(given) != world_size or min(given) <= 0:
        raise ConfigError(f"importance {list(given)}: one number above 0 for each of the {world_size} ranks")
    return normalised(given)


def _check_options(
    interval_s: float, local_steps: int, weights: str, outer_lr: float, max_ticks: int, timeout_s: float
) -> None:
    if not 0 < interval_s < timeout_s:
        raise ConfigError(
            f"interval_s {interval_s:g}: above 0 and below timeout_s, {timeout_s:g}: ranks wait that long for a tick"
        )
    for name, value in {"local_steps": local_steps, "max_ticks": max_ticks}.items():
        if value < 1:
            raise ConfigError(f"{name} {value}: at least 1")
    if outer_lr <= 0:
        raise ConfigError(f"outer_lr {outer_lr:g}: above 0; 1 is the paper's")
    if weights not in WEIGHTS:
        raise ConfigError(f"weights {weights!r}{nearest(weights, WEIGHTS)}")
