"""1-bit Adam: exact Adam until its variance has settled, then momenta at one bit an element."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from thinwire.codecs import Codec, Sign
from thinwire.collectives.all_to_all import all_to_all_nodes
from thinwire.collectives.gather import all_gather_packets, gather_bytes
from thinwire.collectives.link import Link
from thinwire.collectives.reduce import added
from thinwire.collectives.rounds import Rounds
from thinwire.errors import ConfigError
from thinwire.methods.options import check_types
from thinwire.methods.reduction import OPERATION, Step
from thinwire.methods.whole_step import Compressed, OnWholeStep, WholeStep, check_clip, is_compressed
from thinwire.optim import OneBitAdamW
from thinwire.state.memory import Kept, KeptSpan, Place, Residual
from thinwire.table import Row

log = logging.getLogger("thinwire")
# Share of the run that exact Adam takes, if the run's length is known and no step is stated.
DEFAULT_SHARE = 0.2
SETTLED = 0.96
# The beta2 of OneBitAdamW in a training run.
BETA2 = 0.999


@dataclass(frozen=True)
class OneBitAdam(OnWholeStep):
    """Adam that freezes its variance and then exchanges momenta as signs, with error feedback at both ends.

        first:  g averaged in fp32; plain Adam
        then:   y = b1 m + (1 - b1) g + e    e <- y - C(y)             on every node; C(y) to each slice's server
                z = mean of C(y) + E         E <- z - C(z)             on the server; C(z) to all, where it becomes m
                x <- x - lr m / (sqrt(v) + eps)                        v as it was when the first part ended

    C(y) = sign(y) |y| / sqrt(d) for each tensor and server. The automatic rule freezes once the learning rate does not
    rise and |v| has kept 0.96 of its value 1 / (1 - b2) steps earlier (1-norms, bias corrected). Tensors with fewer
    than two dimensions stay with exact Adam, in fp32. Takes thinwire.OneBitAdamW, which has b1, b2.

    Raises ConfigError for values out of range. Source: Tang et al., "1-bit Adam" (ICML 2021), algorithm 1.
    """

    optimizers: ClassVar[tuple[str, ...]] = ("onebit-adam",)
    optimizers_reason: ClassVar[str] = "exchanges the momentum that its own optimizer keeps"
    not_on_zero: ClassVar[str] = "needs the whole momentum on every rank, of which zero keeps a slice"

    freeze: float | None = None
    """Exact steps before the variance is frozen: a number from 2, or a share of the run below 1; 0: an automatic
    rule. By default a fifth of a training run, 0 in your own loop."""
    clip: float = 1.0
    """Largest 2-norm of a rank's gradient, in units of the square root of the number of ranks; 0: no clipping."""

    def __post_init__(self) -> None:
        check_types(self)
        freeze = self.freeze
        if freeze is not None and not (0 <= freeze < 1 or (2 <= freeze < float("inf") and freeze == int(freeze))):
            raise ConfigError(
                f"freeze {freeze} of onebit-adam: must be a number of steps from 2, a share below 1, or 0 for the "
                f"automatic rule; nearest: {2 if not freeze >= 2 else round(min(freeze, 1e9))}"
            )
        check_clip(self.name, self.clip)

    @property
    def name(self) -> str:
        return "onebit-adam"

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return (self.codec,)

    @property
    def codec(self) -> Codec:
        """Codec C: one scale for all elements of a call."""
        return Sign(group=1 << 30, norm="l2")

    @property
    def settled_after(self) -> int:
        """Number of exact steps; the smallest possible number if the automatic rule decides."""
        # There is no variance before the first step, and the last exact step ends with the ranks' vote.
        return int(self.freeze) if self.freeze else _window(BETA2) + 2

    def for_run(self, num_steps: int, num_warmup_steps: int) -> OneBitAdam:
        """The same method with `freeze` as a number of steps; see PlannedByRun."""
        if self.freeze == 0:
            if num_steps <= self.settled_after:
                raise ConfigError(
                    f"freeze 0 of onebit-adam: the automatic rule takes {self.settled_after} exact steps or more, and "
                    f"the run has {num_steps}, so that no step would be compressed; nearest: {DEFAULT_SHARE}, a share "
                    "of the run"
                )
            return self
        if self.freeze is None:
            return replace(self, freeze=max(2, num_warmup_steps + 1, math.ceil(DEFAULT_SHARE * num_steps)))
        steps = int(self.freeze) if self.freeze >= 1 else max(2, math.ceil(self.freeze * num_steps))
        if steps <= num_warmup_steps:
            raise ConfigError(
                f"freeze {self.freeze:g} of onebit-adam: the variance would be frozen after step {steps}, inside the "
                f"learning rate's warm-up of {num_warmup_steps} steps, before it has settled; nearest: "
                f"{num_warmup_steps + 1} steps"
            )
        return replace(self, freeze=steps)

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        if not isinstance(optimizer, OneBitAdamW):
            kind = "no optimizer" if optimizer is None else type(optimizer).__name__
            raise ConfigError(
                f"onebit-adam was given {kind}, and exchanges the momentum of an optimizer of its own: take "
                "thinwire.OneBitAdamW"
            )
        if self.freeze is not None and 0 < self.freeze < 1:
            raise ConfigError(
                f"freeze {self.freeze:g} of onebit-adam is a share of a run whose length is not known here: give the "
                "number of steps, or 0 for the automatic rule"
            )

    def reduction(self, place: Place, seed: int) -> OneBitMean:
        return OneBitMean(self, place)


class OneBitMean(WholeStep):
    """The mean gradient. Once the variance is frozen, the mean momentum, compressed in both directions.

    State: `worker`, e, of this local rank's slices, once a node; `server`, E, of the chunks that it serves. Once
        frozen,
    if no element is masked: sum of the output momenta + mean over ranks of both errors, in units of a rank's momentum =
    sum of the means of b1 m + (1 - b1) g.
    """

    optimizer: OneBitAdamW

    def __init__(self, method: OneBitAdam, place: Place) -> None:
        super().__init__(method.clip, place)
        self.method, self.codec = method, method.codec
        # Clipping comes before compression.
        residual = Residual("error feedback of momenta", after_clip=None)
        self.worker = self.state.add("worker", residual, self._worker_shape, self.slice_spans, row="error feedback")
        self.server = self.state.add("server", residual, self._server_shape, self._server_spans, row="error feedback")
        self._params: dict[str, nn.Parameter] = {}
        self._betas: dict[str, tuple[float, float]] = {}
        self._lr: float | None = None
        self._variances: list[float] = []
        self.state.add_attributes(self, "_lr", "_variances")
        self._is_told = False

    def _worker_shape(self, name: str, shape: torch.Size) -> torch.Size | None:
        return torch.Size([self.grid.num_nodes, self._chunk_length(name)]) if is_compressed(shape) else None

    def _server_shape(self, name: str, shape: torch.Size) -> torch.Size | None:
        return torch.Size([self._chunk_length(name)]) if is_compressed(shape) else None

    def _server_spans(self, name: str, shape: torch.Size) -> Iterator[KeptSpan]:
        """One server keeps what is missing in all."""
        length = self._chunk_length(name)
        first = (self.grid.local_rank(self.rank) * self.grid.num_nodes + self.grid.node(self.rank)) * length
        yield KeptSpan(0, first, min(length, shape.numel() - first), 1, 1)

    def bind(self, trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None) -> None:
        assert isinstance(optimizer, OneBitAdamW)
        betas = {id(param): group["betas"] for group in optimizer.param_groups for param in group["params"]}
        self.optimizer = optimizer
        self._params = {name: param for name, param in trained.items() if is_compressed(param.shape)}
        self._betas = {name: betas[id(param)] for name, param in self._params.items()}

    def unit(self) -> int:
        """Elements by which slices are padded: a chunk per node, and whole bytes of signs per chunk."""
        return 8 * self.grid.num_nodes

    @property
    def is_frozen(self) -> bool:
        """Whether momenta are sent."""
        return any(self.optimizer.is_frozen(param) for param in self._params.values())

    def reduce(self, link: Link, grads: dict[str, Tensor], step: Step) -> Rounds[None]:
        scale = self.local_scale(grads)
        if self.is_frozen:
            self._tell(step)
            means, outs, _ = yield from self.exchange(link, grads, scale, step)
            outs |= means
        else:
            outs, votes = yield from self.dense_mean(link, grads, scale, vote=float(self._is_ready(step)))
            # All ranks freeze together, because their processors may have rounded differently.
            if votes == link.topology.world_size:
                self.optimizer.freeze_after_step(self._params.values())
        for name, out in outs.items():
            grads[name].copy_(out)

    def _tell(self, step: Step) -> None:
        """Report once, on the first rank, that momenta are sent from this step on."""
        if self._is_told or self.rank:
            return
        self._is_told = True
        never = sum(int((self._state(name)["exp_avg_sq"] == 0).sum()) for name in self._params)
        log.warning("thinwire: onebit-adam: 1-bit momenta from step %d on", step.number + 1)
        if never:
            log.warning("thinwire: onebit-adam: %d elements have had no gradient so far and stay as they are", never)

    def _is_ready(self, step: Step) -> bool:
        """Whether this step may be the last exact one."""
        if not self._params:
            return False
        lr, before = max(step.lrs.values()), self._lr
        self._lr = lr
        if before is None:
            # In the first step, also after a resume from another method, a rise of the learning rate can't be seen.
            return False
        is_rising = lr > before
        if self.method.freeze:
            # After a resume the step may be high while the optimizer is new.
            num_seen = max((int(state["step"]) for state in map(self._state, self._params) if state), default=0)
            is_due = min(step.number, num_seen) + 1 >= self.method.freeze
            if is_due and is_rising:
                raise ConfigError(
                    f"onebit-adam: the variance is to be frozen after step {step.number + 1} (freeze "
                    f"{self.method.freeze:g}), and the learning rate still rises there, to {lr:g}: freeze after its "
                    "warm-up, or set freeze to 0 for the automatic rule"
                )
            return is_due
        return self._has_settled() and not is_rising

    def _has_settled(self) -> bool:
        """Whether |v|_1 has kept 0.96 of its value 1 / (1 - b2) steps earlier."""
        states = [(self._state(name), self._betas[name][1]) for name in self._params]
        if not all(state for state, _ in states):
            return False
        sums = [float(s["exp_avg_sq"].sum(dtype=torch.float64)) / (1 - beta2 ** s["step"]) for s, beta2 in states]
        window = _window(max(beta2 for _, beta2 in states))
        self._variances = [*self._variances[-window:], math.fsum(sums)]
        return len(self._variances) > window and self._variances[-1] >= SETTLED * self._variances[0]

    def compress(self, link: Link, grads: dict[str, Tensor], scale: float, step: Step) -> Rounds[Compressed]:
        """The momenta that all ranks adopt."""
        num_nodes = link.topology.num_nodes
        fresh = yield from self.node_mean(link, grads, scale)
        seen = {name: (self.slice_of(self._state(name)["exp_avg_sq"]) > 0).view(num_nodes, -1) for name in grads}
        given: dict[str, Tensor] = {}
        pushed = link.scratch("pushed", num_nodes, self._answer_bytes())
        with link.timed("encode_s", OPERATION):
            for name, packets in self._parts(pushed).items():
                given[name] = self._local_momentum(name, fresh[name]).mul_(seen[name])
                for chunk, packet in zip(given[name], packets, strict=True):
                    self.codec.encode(chunk, out=packet)
        received = yield from all_to_all_nodes(link, pushed, operation=OPERATION)
        served: dict[str, Tensor] = {}
        answer = link.scratch("answer", pushed.shape[1])
        with link.timed("decode_s", OPERATION):
            for name, packets in self._parts(received).items():
                served[name] = self._served(name, packets).mul_(seen[name][link.node])
        with link.timed("encode_s", OPERATION):
            for name, packet in self._parts(answer).items():
                self.codec.encode(served[name], out=packet)
        gathered = yield from all_gather_packets(link, answer, OPERATION)
        with link.timed("decode_s", OPERATION):
            outs = {name: self._whole_momentum(name, packets) for name, packets in self._parts(gathered).items()}

        def remember() -> None:
            for name in grads:
                self._keep(self.worker, name, given[name], self._parts(pushed)[name], seen[name])
                self._keep(self.server, name, served[name], self._parts(answer)[name], seen[name][link.node])

        return outs, remember

    def _state(self, name: str) -> dict[str, Tensor]:
        return self.optimizer.state[self._params[name]]

    def _local_momentum(self, name: str, g: Tensor) -> Tensor:
        """b1 m + (1 - b1) g + e, of this local rank's slice: fp32 [num_nodes, n], a row for each server."""
        momentum = self.slice_of(self._state(name)["exp_avg"])
        mixed = torch.lerp(momentum, g, 1 - self._betas[name][0]).view(self.grid.num_nodes, -1)
        return mixed.add_(self.worker[name])

    def _served(self, name: str, packets: Tensor) -> Tensor:
        """The mean of the nodes' packets, in their order, plus the error of the last answer."""
        total = self.codec.decode_sum([*packets], torch.zeros(self._chunk_length(name)), add=True)
        return total.div_(len(packets)).add_(self.server[name])

    def _keep(self, kept: Kept, name: str, given: Tensor, packets: Tensor, seen: Tensor) -> None:
        """Store the error, what was given minus what was sent, wherever there is a variance to divide by."""
        sent = self._decoded(name, packets).view(given.shape)
        kept[name] = given.sub_(sent).mul_(seen)

    def _decoded(self, name: str, packets: Tensor) -> Tensor:
        """Decode packets, uint8 [..., bytes], to flat fp32."""
        rows = packets.reshape(-1, packets.shape[-1])
        return torch.cat([self.codec.decode(row, self._chunk_length(name)) for row in rows])

    def _whole_momentum(self, name: str, packets: Tensor) -> Tensor:
        """The momentum in the parameter's shape, 0 where there never was a gradient, since a sign can't express 0."""
        shape = self.shapes[name]
        momentum = self._decoded(name, packets)[: shape.numel()].view(shape)
        return momentum * (self._state(name)["exp_avg_sq"] > 0)

    def _chunk_length(self, name: str) -> int:
        """Elements of a slice that one node serves."""
        return self.slice_length(self.shapes[name]) // self.grid.num_nodes

    def _answer_bytes(self) -> int:
        """Bytes of one encoded chunk of every compressed parameter."""
        return sum(self.codec.packet_bytes(shape.numel()) for shape in self.server.shapes().values())

    def _parts(self, packets: Tensor) -> dict[str, Tensor]:
        """Each parameter's part of the last dimension, by name."""
        sizes = [self.codec.packet_bytes(self._chunk_length(name)) for name in self._params]
        return dict(zip(self._params, packets.split(sizes, dim=-1), strict=True))

    def sent_bytes(self) -> dict[str, int]:
        answer = self._answer_bytes()
        there = {"intra": 0, "inter": (self.grid.num_nodes - 1) * answer}
        return added(self.exact_bytes(), there, gather_bytes(self.grid, answer))

    def rows(self) -> list[Row]:
        num_large = sum(map(is_compressed, self.shapes.values()))
        effect = f"{num_large} of {len(self.shapes)} as 1-bit momenta both ways, the others as fp32 gradients"
        if self.method.freeze:
            first = ("exact Adam", f"the first {self.method.freeze:g} steps, in fp32", "freeze")
        else:
            reason = "with the learning rate not rising, |v| has kept 0.96 of its value 1 / (1 - beta2) steps earlier"
            first = ("exact Adam", "until the variance has settled, in fp32", reason)
        return [("momenta", effect, "one scale for each tensor and server"), first, *self.common_rows()]


def _window(beta2: float) -> int:
    """Steps over which the variance must keep its size: 1 / (1 - b2)."""
    return math.ceil(1 / (1 - beta2) - 1e-6)
