"""All ranks of a run in one process: what `thinwire train` computes, to the bit, without processes and sockets.

    python benchmarks/one_process.py RUN_DIR

Each rank is a thread with its own model, optimizer and buckets, of the same classes as in training. One thread runs at a
time: a rank goes on until it waits for a collective, and when all ranks have asked for one, the last to ask takes the
jobs of all of them through their rounds. Only messages are replaced, by copies from one rank's memory to another's.

The command trains the finished run in RUN_DIR again, and compares the loss of every step and the held-out loss.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.collectives import Communicator
from thinwire.collectives.exchange import Members
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.data import BatchLoader, heldout_batches
from thinwire.device import Device
from thinwire.errors import Problems
from thinwire.hosts.ranks import Ranks
from thinwire.hosts.sharded.optimizer import ShardedOptimizer
from thinwire.methods.sharded import ShardedMethod
from thinwire.models import build_model
from thinwire.training.config import TrainConfig, derive
from thinwire.training.engine import Corpus, build_optimizer
from thinwire.training.run import Run
from thinwire.training.schedule import lr_at
from thinwire.training.settings import read_toml

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
            awaited = []
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


class LocalCommunicator(Communicator):
    """One rank's communicator in a World."""

    def __init__(self, world: World, rank: int, local_size: int) -> None:
        members = Members(LocalGroup(world.messages, rank), list(range(world.world_size)), rank)
        super().__init__(members, local_size=local_size)
        self.world = world

    def submit(self, job: Callable[[Link], Rounds[T]]) -> Future[T]:
        self._num_jobs += 1
        link = Link(self._wire, self.topology, self._num_jobs, self._memory[0])
        return self.world.submit(self._num_jobs, job(link))

    def wait(self, future: Future[T]) -> T:
        return self.world.wait(future)


@dataclass(frozen=True)
class Trained:
    """losses: the mean over ranks of every step's; sent_bytes: by a rank in a step, once compression has begun."""

    losses: list[float]
    heldout_loss: float
    sent_bytes: int


def train(config: TrainConfig) -> Trained:
    """Run what `thinwire train` would, on the CPU, for a strategy of the sharded host.

    config: with the dtype stated, and all ranks on the data axis.
    """
    run = Run.of(config)
    assert isinstance(run.strategy, ShardedMethod) and config.dtype != "auto" and config.nodes == 1
    corpus, world = Corpus.of(config), World(config.workers)
    return world.run(lambda rank: _train(run, corpus, world, rank))[0]


def _train(run: Run, corpus: Corpus, world: World, rank: int) -> Trained:
    config, strategy, num_ranks = run.config, run.strategy, world.world_size
    assert isinstance(strategy, ShardedMethod)
    model = build_model(config.model, corpus.tokenizer.vocab_size, config.seq_len, config.seed)
    inner = build_optimizer(config, model)
    comm = LocalCommunicator(world, rank, config.local_size or num_ranks)
    units = strategy.units(
        model, dict(model.named_parameters()), [strategy.levels(comm.topology)], lambda _: 0, None
    )  # fmt: skip
    optimizer = ShardedOptimizer(
        model, inner, strategy, units, Ranks(comm, comm), [comm], overlap=False, seed=config.seed, notes=[]
    )
    batch = derive(config, num_ranks)
    loader = BatchLoader(
        corpus.train, seq_len=config.seq_len, micro_batch=batch.micro_batch, accumulation=batch.accumulation,
        rank=rank, world_size=num_ranks, seed=config.seed,
    )  # fmt: skip
    autocast = Device().autocast(config.dtype)
    losses = []
    for step in range(1, config.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(
                step, peak=config.lr, num_warmup_steps=config.num_warmup_steps, num_steps=config.steps
            )
        total = 0.0
        for number in range(batch.accumulation):
            with autocast:
                loss = model(*loader.next_batch())
            if number < batch.accumulation - 1:
                with optimizer.no_sync():
                    (loss / batch.accumulation).backward()
            else:
                (loss / batch.accumulation).backward()
            total += float((loss / batch.accumulation).detach().float())
        optimizer.note_loss(total)
        optimizer.clip_grad_norm_(config.grad_clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(optimizer.mean_loss)
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
    mean = optimizer.all_mean(heldout) / optimizer.all_mean(num_sequences)
    return Trained(losses, mean, optimizer.bytes_per_step)


def main() -> int:
    run_dir = Path(sys.argv[1])
    problems = Problems()
    config = read_toml(run_dir / "config.toml", problems)
    problems.raise_any()
    summary = json.loads((run_dir / "summary.json").read_text())
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    theirs = [line["loss"] for line in lines if "loss" in line]
    torch.set_num_threads(1)
    trained = train(replace(config, dtype=summary.get("dtype", config.dtype)))
    same = sum(own == other for own, other in zip(trained.losses, theirs, strict=True))
    print(f"{same} of {len(theirs)} losses of steps have the same bits")
    print(f"held-out loss: {trained.heldout_loss} here, {summary['heldout_loss']} in {run_dir}")
    return int(same < len(theirs) or trained.heldout_loss != summary["heldout_loss"])


if __name__ == "__main__":
    sys.exit(main())
