"""All ranks of a run in one process: what `thinwire train` computes, to the bit, without processes and sockets.

    python benchmarks/one_process.py RUN_DIR

Each rank is a thread with its own model, optimizer and buckets, of the same classes as in training. One thread runs
at a time: a rank goes on until it waits for a collective, and when all ranks have asked for one, the last to ask
takes the jobs of all of them through their rounds. Only messages are replaced, by copies from one rank's memory to
another's.

The command trains the finished run in RUN_DIR again, and compares the loss of every step and the held-out loss.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import singledispatch
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from thinwire.collectives import Communicator
from thinwire.collectives.elastic import Membership
from thinwire.collectives.exchange import Members
from thinwire.collectives.link import Link
from thinwire.collectives.meter import Meter, TimedBlock
from thinwire.collectives.peers import WorldPeers
from thinwire.collectives.rounds import Rounds
from thinwire.data import BatchLoader, heldout_batches
from thinwire.device import Device
from thinwire.errors import ConfigError, Problems
from thinwire.hosts.ddp.optimizer import DDPOptimizer
from thinwire.hosts.ranks import Ranks
from thinwire.hosts.sharded.optimizer import ShardedOptimizer
from thinwire.islands import exchanges
from thinwire.islands.loop import OuterLoop
from thinwire.islands.optimizer import IslandsOptimizer
from thinwire.methods.ddp import DDPMethod
from thinwire.methods.outer.base import IslandsMethod
from thinwire.methods.sharded import ShardedMethod
from thinwire.models import build_model
from thinwire.optim.schedule import lr_at
from thinwire.report.run import mean_losses, read_run
from thinwire.run.config import TrainConfig, derive
from thinwire.run.run import Run
from thinwire.run.settings import read_toml
from thinwire.state.memory import Place
from thinwire.training.engine import Corpus, build_optimizer

# Whoever waits for an exchange gives its turn away at once: nothing moves while it sleeps.
exchanges.LOOK_EVERY_S = 0.0

T = TypeVar("T")
Messages = dict[tuple[int, int, int], list[Tensor]]


@dataclass(frozen=True)
class Copy:
    """A message as its receiver waits for it; None: as its sender does, who has nothing to wait for."""

    buffer: Tensor | None
    sent: list[Tensor]

    def wait(self, timeout: timedelta) -> None:
        if self.buffer is not None:
            message = self.sent.pop(0)
            self.buffer[: message.numel()].copy_(message)


@dataclass(frozen=True)
class LocalGroup:
    """A rank's side of a process group whose ranks are in one process. messages: of all ranks, by (from, to, tag)."""

    messages: Messages
    rank: int

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Copy:
        self.messages[self.rank, peer, tag] += tensors
        return Copy(None, [])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Copy:
        return Copy(tensors[0], self.messages[peer, self.rank, tag])


@dataclass
class World:
    """Ranks that take turns. turn: held by the one that runs."""

    world_size: int
    turn: threading.Condition = field(default_factory=threading.Condition)
    messages: Messages = field(default_factory=lambda: defaultdict(list))
    jobs: dict[int, list[tuple[Rounds[Any], Future[Any]]]] = field(default_factory=lambda: defaultdict(list))
    failed: BaseException | None = None

    def submit(self, number: int, job: Rounds[T]) -> Future[T]:
        """One rank's part of collective `number`; when all ranks have theirs, it runs."""
        future: Future[T] = Future()
        asked = self.jobs[number]
        asked.append((job, future))
        if len(asked) == self.world_size:
            self._drive(self.jobs.pop(number))
            self.messages.clear()
            self.turn.notify_all()
        return future

    def wait(self, future: Future[T]) -> T:
        """The result, after other ranks had their turn."""
        self.turn.wait_for(lambda: future.done() or self.failed)
        if self.failed:
            raise RuntimeError("another rank failed") from self.failed
        return future.result()

    def _drive(self, jobs: list[tuple[Rounds[Any], Future[Any]]]) -> None:
        while jobs:
            awaited: list[Any] = []
            for job, future in list(jobs):
                try:
                    awaited += next(job)
                except StopIteration as end:
                    future.set_result(end.value)
                    jobs.remove((job, future))
            for message in awaited:
                message.wait()

    def run(self, work: Callable[[int], T]) -> list[T]:
        """What `work(rank)` returns, by rank."""
        results: list[Any] = [None] * self.world_size

        def rank(number: int) -> None:
            with self.turn:
                try:
                    results[number] = work(number)
                except BaseException as error:
                    self.failed = self.failed or error
                    self.turn.notify_all()

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed
        return results


class ProcessorBlock(TimedBlock):
    """Counts a thread's processor time: whoever runs alone never waits, but other programs may take its processor."""

    __slots__ = ()

    def __enter__(self) -> None:
        self.start_s = time.thread_time()

    def __exit__(self, *error: object) -> None:
        self.meter.add(self.kind, self.job, self.start_s, time.thread_time())


class ProcessorMeter(Meter):
    """Counts seconds by ProcessorBlock."""

    def timed(self, kind: str, job: str = "") -> TimedBlock:
        return ProcessorBlock(self, kind, job)


class LocalCommunicator(Communicator):
    """One rank's communicator in a World."""

    def __init__(self, world: World, rank: int, local_size: int) -> None:
        members = Members(LocalGroup(world.messages, rank), list(range(world.world_size)), rank)
        super().__init__(members, local_size=local_size, meter=ProcessorMeter())
        self.world = world

    def submit(self, job: Callable[[Link], Rounds[T]], *, urgent: bool = False) -> Future[T]:
        self._num_jobs += 1
        link = Link(self._wire, self.topology, self._num_jobs, self._memory[0])
        return self.world.submit(self._num_jobs, job(link))

    def wait(self, future: Future[T]) -> T:
        return self.world.wait(future)


@dataclass(frozen=True)
class Trained:
    """losses: the mean over ranks of every step's; sent_bytes: by a rank in a step, once compression has begun.

    sent: bytes that rank 0 had sent at the end of every step, by its meter. compute_s: a rank's processor time of a
    step, codecs included, the mean over ranks and steps; codec_s: that of packing and unpacking alone.
    """

    losses: list[float]
    heldout_loss: float
    sent_bytes: int
    sent: list[int]
    compute_s: float
    codec_s: float


class LocalDDP:
    """What DistributedDataParallel is to its optimizer, with one bucket, which is complete when `launch` is called."""

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        self._params = list(trained.values())[::-1]

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        self._state, self._hook = state, hook

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def launch(self) -> None:
        """Give the gradients to the hook, and let them be views of the bucket."""
        self._flat = torch.cat([param.grad.flatten() for param in self._params if param.grad is not None])
        parts = self._flat.split([param.numel() for param in self._params])
        for param, part in zip(self._params, parts, strict=True):
            param.grad = part.view_as(param)
        self._hook(self._state, self)

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> Tensor:
        return self._flat

    def parameters(self) -> list[nn.Parameter]:
        return self._params

    def gradients(self) -> list[Tensor]:
        return [param.grad for param in self._params if param.grad is not None]


class LocalPeers(WorldPeers):
    """Islands of one rank each, in a World."""

    def __init__(self, world: World, rank: int) -> None:
        self.comm = LocalCommunicator(world, rank, 1)
        self.island, self.members, self.has_state = rank, tuple(range(world.world_size)), True
        self.membership = Membership(0, self.members, (), (), 0.0)
        self.world = world

    def lost(self) -> bool:
        """Never; whoever asks stands still for an exchange, and the others have their turn."""
        self.world.turn.wait(0.0)
        return False


@dataclass(frozen=True)
class Hosted:
    """An optimizer of a host, and what must be called after the last backward of a step."""

    optimizer: Any
    launch: Callable[[], None] = lambda: None


@singledispatch
def host(method: object, model: nn.Module, inner: torch.optim.Optimizer, world: World, rank: int, run: Run) -> Hosted:
    """The method's host, the same as in training, over the ranks of a World."""
    raise ConfigError(f"{type(method).__name__} can't train in one process: its host needs one for each rank")


@host.register
def _sharded(
    method: ShardedMethod, model: nn.Module, inner: torch.optim.Optimizer, world: World, rank: int, run: Run
) -> Hosted:
    comm = LocalCommunicator(world, rank, run.config.local_size or world.world_size)
    levels = [method.levels(comm.topology)]
    units = method.units(model, dict(model.named_parameters()), levels, lambda _: 0, None)
    return Hosted(
        ShardedOptimizer(
            model, inner, method, units, Ranks(comm, comm), [comm], overlap=False, seed=run.config.seed, notes=[]
        )
    )


@host.register
def _ddp(
    method: DDPMethod, model: nn.Module, inner: torch.optim.Optimizer, world: World, rank: int, run: Run
) -> Hosted:
    comm = LocalCommunicator(world, rank, run.config.local_size or world.world_size)
    trained = dict(model.named_parameters())
    place = Place({name: param.shape for name, param in trained.items()}, comm.topology, rank)
    reduction = method.reduction(place, run.config.seed)
    if world.world_size > 1 and not reduction.is_metered:
        raise ConfigError(f"{method.name} can't train in one process: torch's own collectives carry it")
    method.bind(reduction, trained, inner)
    ddp: Any = LocalDDP(trained)
    optimizer = DDPOptimizer(
        model, inner, Ranks(comm, comm), trained, ddp, reduction, [], whole_step=method.whole_step
    )  # fmt: skip
    return Hosted(optimizer, ddp.launch)


@host.register
def _islands(
    method: IslandsMethod, model: nn.Module, inner: torch.optim.Optimizer, world: World, rank: int, run: Run
) -> Hosted:
    inside = host(method.inner, model, inner, World(1, world.turn), 0, run)
    loop = OuterLoop(
        inside.optimizer, model, method.outer(), LocalPeers(world, rank), torch_optimizer=inner, seed=run.config.seed
    )
    return Hosted(IslandsOptimizer(inside.optimizer, loop, method), inside.launch)


def train(config: TrainConfig) -> Trained:
    """Run what `thinwire train` would, on the CPU. Of methods on DDP the bits differ: there is one bucket here.

    config: with the dtype stated, and all ranks on the data axis; or each an island. Raises ConfigError for a method
    whose host needs processes.
    """
    run = Run.of(config)
    assert config.dtype != "auto" and config.nodes == 1
    corpus, world = Corpus.of(config), World(config.workers)
    ranks = world.run(lambda rank: _train(run, corpus, world, rank))
    heldout = sum(trained.heldout_loss for trained, _ in ranks) / sum(num_sequences for _, num_sequences in ranks)
    # Each island knows its own loss only; of the others all ranks know the mean.
    losses = [fmean(step) for step in zip(*(one.losses for one, _ in ranks), strict=True)]
    compute_s, codec_s = (sum(getattr(one, name) for one, _ in ranks) / len(ranks) for name in ("compute_s", "codec_s"))
    return replace(ranks[0][0], losses=losses, heldout_loss=heldout, compute_s=compute_s, codec_s=codec_s)


def _train(run: Run, corpus: Corpus, world: World, rank: int) -> tuple[Trained, int]:
    """One rank's part; its held-out loss is the sum over its sequences, of which the second value is the number."""
    config, num_ranks = run.config, world.world_size
    model = build_model(config.model, corpus.tokenizer.vocab_size, config.seq_len, config.seed)
    hosted = host(run.strategy, model, build_optimizer(config, model), world, rank, run)
    optimizer = hosted.optimizer
    batch = derive(config, num_ranks)
    loader = BatchLoader(
        corpus.train, seq_len=config.seq_len, micro_batch=batch.micro_batch, accumulation=batch.accumulation,
        rank=rank, world_size=num_ranks, seed=config.seed,
    )  # fmt: skip
    autocast = Device().autocast(config.dtype)
    losses, sent, first_s = [], [], time.thread_time()
    before = optimizer.meter.snapshot().sent_bytes
    for step in range(1, config.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, peak=config.lr, num_warmup_steps=config.num_warmup_steps, num_steps=config.steps)
        total = 0.0
        for number in range(batch.accumulation):
            with autocast:
                loss = model(*loader.next_batch())
            if number < batch.accumulation - 1:
                with optimizer.no_sync():
                    (loss / batch.accumulation).backward()
            else:
                (loss / batch.accumulation).backward()
                hosted.launch()
            total += float((loss / batch.accumulation).detach().float())
        optimizer.note_loss(total)
        optimizer.clip_grad_norm_(config.grad_clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(optimizer.mean_loss)
        sent.append(optimizer.meter.snapshot().sent_bytes - before)
    optimizer.finish()
    compute_s = (time.thread_time() - first_s) / config.steps
    counted = optimizer.meter.snapshot()
    codec_s = (counted.encode_s + counted.decode_s) / config.steps
    sent[-1] = counted.sent_bytes - before
    optimizer.check_replicas()
    model.eval()
    heldout, num_sequences = 0.0, 0
    with torch.no_grad(), autocast:
        for tokens, targets in heldout_batches(
            corpus.heldout, seq_len=config.seq_len, micro_batch=batch.micro_batch, rank=rank, world_size=num_ranks,
            max_sequences=config.eval_sequences,
        ):  # fmt: skip
            heldout += float(model(tokens, targets)) * len(tokens)
            num_sequences += len(tokens)
    return Trained(losses, heldout, optimizer.bytes_per_step, sent, compute_s, codec_s), num_sequences


def main() -> int:
    run_dir = Path(sys.argv[1])
    problems = Problems()
    config = read_toml(run_dir / "config.toml", problems)
    problems.raise_any()
    summary = json.loads((run_dir / "summary.json").read_text())
    theirs = [*mean_losses(read_run(run_dir)).values()]
    torch.set_num_threads(1)
    trained = train(replace(config, dtype=summary.get("dtype", config.dtype)))
    same = sum(own == other for own, other in zip(trained.losses, theirs, strict=True))
    print(f"{same} of {len(theirs)} losses of steps have the same bits")
    print(f"held-out loss: {trained.heldout_loss} here, {summary['heldout_loss']} in {run_dir}")
    return int(same < len(theirs) or trained.heldout_loss != summary["heldout_loss"])


if __name__ == "__main__":
    sys.exit(main())
