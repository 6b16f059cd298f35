"""The user's optimizer over gradients that are estimated from losses. Each sample travels as one byte."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.checkpoint import Source
from thinwire.codecs import backends
from thinwire.collectives import Communicator
from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S
from thinwire.device import random_state, set_random_state
from thinwire.errors import ConfigError, PeerLostError
from thinwire.hosts.agreeing import AgreeingOptimizer
from thinwire.hosts.interface import ParallelOptimizer, RankOptions, apply
from thinwire.hosts.ranks import Ranks
from thinwire.methods import slope_code as byte
from thinwire.methods.directions import Directions
from thinwire.methods.forward import STATUS_BYTES, ForwardMethod
from thinwire.methods.slope_log import Entry, SlopeLog
from thinwire.state.replicas import check_layout, fitting_parameters, in_order, same_options, same_start, shapes_digest
from thinwire.table import SENT, Row, announce as announce_table

logger = logging.getLogger("thinwire")

UNMEASURED = (
    "no rank has a slope, and rank {} measured nothing in this step: `loss = optimizer.measure(loss_function)` and "
    "`loss.backward()` belong before `optimizer.step()`"
)
FLAT = "on all ranks the loss is not finite, or the same on both sides of the weights"


def forward_only(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: ForwardMethod,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    log: SlopeLog | None = None,
    local_size: int | None = None,
    seed: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    checked: bool = False,
    announce: bool = True,
) -> ForwardOptimizer:
    """Fine-tune `model` by `method`, such as OneByte(). A collective over the group, by default all ranks.

    The model is not changed. The optimizer's `measure` measures the losses.

    Args:
        model: fp32, on the CPU.
        optimizer: steps with the estimated gradient; plain SGD is the published choice.
        method: its options.
        group: the ranks, a process group or one dimension of a DeviceMesh; None for all.
        log: continue after its last step, with its seed and the weights of that step.
        local_size: ranks per node; None: detected.
        seed: of the directions.
        timeout_s, checked: see Communicator.
        announce: rank 0 prints the table of what is in effect.

    Raises ConfigError for parameters that are not fp32 on the CPU, for an optimizer that does not fit them, for the log
    of another model or cap, and for ranks that do not agree.
    """
    trained = in_order(fitting_parameters(model, optimizer))
    comm = Communicator(group, local_size=local_size, timeout_s=timeout_s, checked=checked)
    own = SlopeLog(seed if log is None else log.seed, method.cap, shapes_digest(trained))
    if log is not None:
        check_layout(own.layout, log.layout)
    log = log or own
    same_options(comm, f"{method}, seed {log.seed}, {log.end} steps done")
    wrapped = ForwardOptimizer(model, optimizer, comm, trained, method, log, [same_start(model, comm)])
    if announce and comm.rank == 0:
        announce_table(wrapped.describe())
    return wrapped


class ForwardOptimizer(AgreeingOptimizer):
    """Steps the user's optimizer with gradients that `measure` estimates; made by `forward_only`.

    In every step each rank sends its n samples, one byte each, and STATUS_BYTES more. `log` holds all applied bytes.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        comm: Communicator,
        trained: dict[str, nn.Parameter],
        method: ForwardMethod,
        log: SlopeLog,
        rows: list[Row],
    ) -> None:
        self.method = method
        self.log = log
        self.directions = Directions(trained, log.seed)
        super().__init__(model, inner, Ranks(comm, comm), dict(trained), self.directions.num_elements, rows)
        self.steps = log.end
        self._slopes = torch.zeros(method.samples, dtype=torch.float64)
        self._received: Tensor | None = None
        self._factor = 0.0
        self._has_measured = False
        self._has_warned = False

    @torch.no_grad()
    def measure(self, loss: Callable[[], Tensor]) -> Tensor:
        """Call `loss` on both sides of the weights along each of the n directions. Return the mean loss, fp32.

        The backward of the result costs nothing: it records the slopes, times the gradient that reaches it. Losses of
        several micro-batches therefore add up as gradients do, each along the same directions. Both sides use the same
        random numbers of torch, also for dropout. `loss` must return one number.
        """
        self._warn_of_rounding()
        losses = torch.zeros(self.method.samples, 2, dtype=torch.float64)
        for k in range(self.method.samples):
            random = random_state()
            for side, distance in enumerate((self.method.eps, -self.method.eps)):
                set_random_state(random)
                with self.directions.moved(self.steps, (self.comm.rank, k), distance):
                    losses[k, side] = _number(loss())
        slopes = (losses[:, 0] - losses[:, 1]) / (2 * self.method.eps)
        result = losses.mean().float().requires_grad_()

        def record(gradient: Tensor) -> None:
            self._slopes += slopes * float(gradient)
            self._has_measured = True

        result.register_hook(record)
        return result

    def zero_grad(self) -> None:
        """Forget the recorded slopes."""
        self._slopes.zero_()

    def step(self) -> None:
        """Exchange the bytes and update the weights with all of them. A collective over all ranks.

        A rank that measured nothing, or whose loss is not finite, sends the byte that leaves its sample out. If all
        samples are left out, the step is skipped. Every `check_every`-th step raises ReplicaError if weights differ
        between ranks.
        """
        super().step()
        if self.method.check_every and self.steps % self.method.check_every == 0:
            self.check_replicas()

    def check_replicas(self) -> None:
        """Compare the weights of all ranks bit for bit, then save the log. A collective.

        Raises ReplicaError that names the ranks.
        """
        super().check_replicas()
        self.log.seal(self.trained.values())
        self._keep_log()

    def reduce(self) -> Tensor:
        """An estimate of the gradient's norm, once a step: E[p^2] = |grad|^2. NaN where all samples are left out."""
        if self._grad_norm is None:
            words = [torch.tensor([self._loss], dtype=torch.float32), torch.tensor([self._stop], dtype=torch.uint8)]
            message = torch.cat([byte.encode(self._slopes), *(word.view(torch.uint8) for word in words)])
            try:
                self._received = self.comm.wait(self.comm.all_gather_exact(message))
            except PeerLostError:
                # A restarted run can repeat all steps so far from the log.
                self._keep_log()
                raise
            losses = (
                self._received[:, -STATUS_BYTES:-1].clone(memory_format=torch.contiguous_format).view(torch.float32)
            )
            self.mean_loss = float(losses.double().mean())
            self.stop_requested = self.stop_requested or bool(self._received[:, -1].any())
            self._slopes.zero_()
            self.skip_reason = FLAT if self._has_measured else UNMEASURED.format(self.comm.rank)
            self._has_measured = False
            slopes = self.log.slopes(self._codes)
            applied = slopes[slopes != 0]
            self._factor = self.method.factor(applied.numel()) if applied.numel() else 0.0
            self._grad_norm = applied.square().mean().sqrt()
        return self._grad_norm

    @property
    def _codes(self) -> Tensor:
        assert self._received is not None
        return self._received[:, :-STATUS_BYTES]

    def _scale(self, factor: float) -> None:
        self._factor *= factor

    def _update(self) -> None:
        lrs = tuple(float(group["lr"]) for group in self.inner.param_groups)
        self.log.entries.append(Entry(self._codes.clone(), self._factor, lrs))
        self.log.take(self.steps, self.directions, self.inner)

    def _skip(self) -> None:
        super()._skip()
        self._update()

    def _warn_of_rounding(self) -> None:
        if torch.is_autocast_enabled("cpu") and not self._has_warned and self.comm.rank == 0:
            logger.warning(
                "thinwire: %s takes differences of losses, which bf16 rounds: try --dtype fp32", self.method.name
            )
        self._has_warned = True

    def catch_up(self) -> int:
        """Before the first step, repeat the steps in the first rank's file `method.log`. Return their number.

        All ranks get the log from the first rank and nothing else. Without such a file nothing is repeated. A
        collective. Raises ConfigError for a file that can't be read or written and for the log of another run,
        ReplicaError if the weights are not those from which the log began.
        """
        if not self.method.log or self.steps:
            return self.steps
        own = self._read_log() if self.comm.rank == 0 else b""
        length = int(self.comm.wait(self.comm.all_gather_exact(torch.tensor([len(own)])))[0])
        effect = "new: rank 0 writes it after each comparison of the replicas"
        if length:
            message = torch.tensor(list(own or bytes(length)), dtype=torch.uint8)
            self.comm.wait(self.comm.broadcast_(message))
            log = SlopeLog.load(io.BytesIO(bytes(message.tolist())))
            check_layout(self.log.layout, log.layout)
            log.repeat(self.directions, self.inner, log.first_step)
            self.log, self.steps = log, log.end
            self.skipped_steps = sum(entry.factor == 0.0 for entry in log.entries)
            effect = f"goes on after step {log.end}, repeated from {length} bytes; rank 0 writes what follows"
        self._rows.append((f"log {self.method.log}", effect, "delete the file to start again"))
        return self.steps

    def _read_log(self) -> bytes:
        """The file's content, if it is a valid log; empty if there is no file yet."""
        path = Path(self.method.log)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"log {path} of {self.method.name}: its folder can't be made: {error.strerror}") from None
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise ConfigError(
                f"log {path} of {self.method.name}: its folder is not writable by this user; choose another"
            )
        if not path.exists():
            return b""
        SlopeLog.load(path)
        return path.read_bytes()

    def _keep_log(self) -> None:
        if self.method.log and self.comm.rank == 0:
            self.log.save(self.method.log)

    @property
    def bytes_per_step(self) -> int:
        """Payload bytes that this rank sends in one step: its samples, loss and stop request to each other rank."""
        return (self.method.samples + STATUS_BYTES) * (self.comm.world_size - 1)

    def describe(self) -> list[Row]:
        method, world_size = self.method, self.comm.world_size
        normals = (2 + world_size) * method.samples * self.num_parameters
        checks = f"16 bytes to each rank every {method.check_every} steps" if method.check_every else "checkpoints only"
        return [
            ("topology", str(self.comm.topology), self.comm.topology_reason),
            (
                f"strategy {method.name}",
                f"{method.samples} sample(s) of one byte per rank and step, two forward passes each, no backward",
                "for fine-tuning: start from a trained model, since from random weights it is far too slow",
            ),
            *self._rows,
            ("optimizer", type(self.inner).__name__, "plain SGD is the published choice"),
            (
                "normal numbers per step",
                f"{normals:.3g} drawn by every rank, {backends.numba_or_torch(torch.device('cpu'))}",
                "(2 + ranks) x samples x parameters",
            ),
            ("replicas compared", checks, ""),
            (
                SENT,
                f"{self.bytes_per_step} bytes",
                f"{self.uncompressed_bytes_per_step / 1e6:.3f} MB in fp32",
            ),
        ]

    def _own(self) -> dict[str, Any]:
        return {"log": self.log.state_dict()}

    def _load_own(self, own: Mapping[str, Any]) -> None:
        self.log = SlopeLog.from_state_dict(own["log"])

    def _adapt(self, source: Source) -> None:
        super()._adapt(source)
        self.log = SlopeLog(self.log.seed, self.log.cap, self.log.parameters, first_step=self.steps)

    @property
    def _lossy_weights(self) -> bool:
        # Losses are measured around the weights, along directions that differ by rank.
        return True

    def _layout(self) -> dict[str, Any]:
        return {"kind": type(self).__name__} | self.log.layout


class MeasuredModel(nn.Module):
    """A model that returns its loss. Each call is measured by the optimizer."""

    def __init__(self, model: nn.Module, optimizer: ForwardOptimizer) -> None:
        super().__init__()
        self.model = model
        self.optimizer = optimizer

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The mean loss around the weights. Its backward costs nothing."""
        return self.optimizer.measure(lambda: self.model(*args, **kwargs))


def _number(loss: Tensor) -> float:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"{given} is not the loss itself, one number: give `measure` your loss function")
    return float(loss)


@apply.register
def _apply_forward(
    method: ForwardMethod, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Unpack[RankOptions]
) -> tuple[nn.Module, ParallelOptimizer]:
    own: Any = {key: value for key, value in options.items() if key != "overlap"}
    wrapped = forward_only(model, optimizer, method, announce=False, **own)
    return MeasuredModel(model, wrapped), wrapped
