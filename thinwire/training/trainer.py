"""The training loop: a thin example of the library, which does the rest of what a run needs around it."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.codecs import derive_seed
from thinwire.collectives import ElasticPeers, Peers, faults
from thinwire.data import BatchLoader, heldout_batches, load_tokenizer
from thinwire.data import prepare as prepare_tokens
from thinwire.data_parallel import TrainingStrategy
from thinwire.data_parallel.interface import ComingAndGoing, Finishing
from thinwire.data_parallel.islands import AmongIslands, OnIslands
from thinwire.data_parallel.watchdog import Watchdog
from thinwire.errors import ConfigError
from thinwire.models import build_model, generate
from thinwire.optim import make_optimizer
from thinwire.training import checkpoint
from thinwire.training.advice import advise
from thinwire.training.agreement import agree
from thinwire.training.config import PER_MACHINE, TrainConfig, derive
from thinwire.training.effects import Row
from thinwire.training.hardware import max_over_ranks, peak_rss_bytes
from thinwire.training.metrics import MembershipEvent, StepMetrics
from thinwire.training.prepare import Island
from thinwire.training.reporter import Reporter
from thinwire.training.run_dir import RunDir
from thinwire.training.schedule import lr_at
from thinwire.training.settings import build_strategy, used_tables
from thinwire.training.signals import StopFlag


@dataclass(frozen=True)
class Place:
    """This process among the others of its process group: all, or those of its island."""

    rank: int
    local_rank: int
    world_size: int
    island: Island = field(default_factory=Island)

    @property
    def num_ranks(self) -> int:
        """Of all islands."""
        return self.world_size * self.island.num_islands

    @property
    def number(self) -> int:
        """This one's, among the ranks of all islands."""
        return self.island.number * self.world_size + self.rank


class Trainer:
    """Builds what a run needs, takes the steps, measures at the end; `stop` is asked before every update.

    Every rank makes one. Raises ConfigError where ranks disagree about the run.
    """

    def __init__(
        self, config: TrainConfig, place: Place, stop: StopFlag, dtype: str | None, rows: Sequence[Row]
    ) -> None:
        self.config, self.place, self.stop = config, place, stop
        self.batch = derive(config, place.num_ranks)
        self.run_dir = RunDir(config.run_dir)
        self.tokenizer = load_tokenizer(config.tokenizer)
        cache_dir = Path(config.cache_dir) if config.cache_dir else None
        tokens = prepare_tokens(config.data, self.tokenizer, text_field=config.text_field, cache_dir=cache_dir)
        train_tokens, self.heldout_tokens = tokens.split(config.seq_len)
        self.digest = tokens.info.digest
        saved = checkpoint.latest(self.run_dir.checkpoints)
        self.dtype = agree(config, tokens=self.digest, step=checkpoint.step_of(saved), dtype=dtype)
        fields = config.tables.get("llama") if "llama" in used_tables(config) else None
        self.model = build_model(config.model, self.tokenizer.vocab_size, config.seq_len, config.seed, fields)
        optimizer = build_optimizer(config, self.model)
        self.num_parameters = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        # In training the wrapped module is called, which may communicate; everywhere else the model itself.
        strategy: TrainingStrategy | AmongIslands = build_strategy(config)
        if isinstance(strategy, OnIslands):
            strategy = strategy.among(partial(meet_others, config, place), terms=common_terms(config, self.digest))
        self.wrapped, self.optimizer = strategy.apply(
            self.model, optimizer, local_size=config.local_size, seed=config.seed, timeout_s=config.timeout,
            checked=config.checked, overlap=True,
        )  # fmt: skip
        advice = advise(
            self.optimizer, config.strategy, self.num_parameters, self.batch.tokens_per_step // place.num_ranks,
            torch.bfloat16 if self.dtype == "bf16" else torch.float32,
        )  # fmt: skip
        # On every rank: they measure together.
        link_rows = list(advice)
        self.loader = BatchLoader(
            train_tokens, seq_len=config.seq_len, micro_batch=self.batch.micro_batch,
            accumulation=self.batch.accumulation, rank=place.number, world_size=place.num_ranks, seed=config.seed,
        )  # fmt: skip
        torch.manual_seed(derive_seed(config.seed, place.number) >> 1)
        self.step = 0
        self._follow()
        # Who has joined others has their state, and no use for its own of long ago.
        if saved and not self.step:
            self.step = self._load(saved)
        self._watchdog = Watchdog(config.dead_steps)
        self._traffic = self.optimizer.meter.snapshot()
        self.reporter: Reporter | None = None
        if place.rank == 0:
            data_row = (f"data {config.data}", f"{tokens.info.num_tokens:,} tokens", f"tokenizer {config.tokenizer}")
            self.reporter = Reporter(
                config, first_step=self.step, world_size=place.num_ranks,
                uncompressed_bytes=self.optimizer.uncompressed_bytes_per_step,
                rows=[data_row, *rows, *self.optimizer.describe(), *link_rows],
            )  # fmt: skip
        self._report_changes()
        self._arm_faults()

    def run(self) -> None:
        """Take the remaining steps, then measure, save and report; ends early where any rank was asked to stop."""
        stopped, last = "", min(self.config.steps, self.config.stop_at or self.config.steps)
        while self.step < last and not stopped:
            self._take_step()
            if self.optimizer.stop_requested:
                stopped = self.stop.reason or "a signal to another rank"
            elif self.config.checkpoint_every and self.step % self.config.checkpoint_every == 0:
                self._save()
        if self.step < self.config.steps and not stopped:
            stopped = f"--stop-at {self.config.stop_at}"
        self._save()
        heldout_loss = None
        if isinstance(self.optimizer, Finishing):
            self.optimizer.finish()
        if not stopped:
            self.optimizer.synchronize()
            heldout_loss = self._evaluate() if self.config.eval_sequences else None
        for fault in faults.disarm():
            print(f"thinwire: rank {self.place.rank}: --inject {str(fault)!r} never happened", file=sys.stderr)
        peak_rss = max_over_ranks(peak_rss_bytes())
        self.optimizer.close()
        if self.reporter is not None:
            self.reporter.finish(
                step=self.step, skipped_steps=self.optimizer.skipped_steps, heldout_loss=heldout_loss,
                stopped=stopped or "finished", sample="" if stopped else self._sample(),
                parameters=self.num_parameters, peak_rss_bytes=peak_rss,
            )  # fmt: skip

    def _arm_faults(self) -> None:
        """Let the faults happen that are this process's; one that was started again has had its own."""
        if not int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
            announce = faults.say if self.reporter is None else self.reporter.progress.warn
            island = self.place.island.number if isinstance(self.optimizer, ComingAndGoing) else None
            told = map(faults.parse, self.config.inject)
            faults.arm(told, rank=self.place.rank, island=island, announce=announce)

    def _follow(self) -> None:
        """Go where the others are: an island that was away, or comes late, leaves out the steps that it has missed."""
        if isinstance(self.optimizer, ComingAndGoing):
            self.loader.skip_steps(self.optimizer.position - self.step)
            self.step = self.optimizer.position

    def _report_changes(self) -> None:
        if not isinstance(self.optimizer, ComingAndGoing):
            return
        for change in self.optimizer.take_changes():
            if self.reporter is not None:
                now = change.membership
                self.reporter.membership(
                    MembershipEvent(
                        self.step, now.generation, list(now.members), list(now.lost), list(now.joined),
                        round(change.cost_s, 3), change.how,
                    )
                )  # fmt: skip

    def _take_step(self) -> None:
        faults.at_step(self.step + 1)
        start = time.perf_counter()
        optimizer, before = self.optimizer, self.optimizer.meter.snapshot()
        lr = lr_at(
            self.step + 1, peak=self.config.lr, num_warmup_steps=self.config.num_warmup_steps,
            num_steps=self.config.steps,
        )  # fmt: skip
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.note_loss(self._forward_backward())
        if self.stop.reason:
            optimizer.request_stop()
        # From here on all ranks know of the loss, of the gradient's norm and of a wish to stop.
        grad_norm = float(optimizer.clip_grad_norm_(self.config.grad_clip or math.inf))
        # The weights of this step travel during the next one's forward, with which they are counted.
        traffic = optimizer.meter.snapshot()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(optimizer, Finishing):
            # What travels between islands leaves at the end of a step, and is waited for there.
            traffic = optimizer.meter.snapshot()
        self.step += 1
        spent = optimizer.meter.snapshot() - before
        sent, self._traffic = traffic - self._traffic, traffic
        step_s = time.perf_counter() - start
        if self.reporter is not None:
            self.reporter.step(
                StepMetrics(
                    step=self.step, loss=optimizer.mean_loss, tokens=self.step * self.batch.tokens_per_step,
                    step_s=step_s, compute_s=step_s - spent.exposed_s, exposed_comm_s=spent.exposed_s,
                    sent_bytes=sent.sent_bytes, received_bytes=sent.received_bytes, lr=lr, grad_norm=grad_norm,
                    codec_s=spent.encode_s + spent.decode_s, forward_s=self._forward_s,
                    sent_weight_bytes=sent.sent_by("weights"),
                )
            )  # fmt: skip
        self._watch_gradient(grad_norm)
        self._follow()
        self._report_changes()

    def _forward_backward(self) -> float:
        """The mean loss over this rank's micro-batches; only the last one's backward communicates."""
        total = torch.zeros(())
        self._forward_s = 0.0
        for micro_step in range(self.batch.accumulation):
            tokens, targets = self.loader.next_batch()
            is_last = micro_step == self.batch.accumulation - 1
            with nullcontext() if is_last else self.optimizer.no_sync():
                start = time.perf_counter()
                with self._autocast():
                    loss = self.wrapped(tokens, targets) / self.batch.accumulation
                self._forward_s += time.perf_counter() - start
                loss.backward()
            total += loss.detach()
        return float(total)

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bf16")

    def _watch_gradient(self, norm: float) -> None:
        """Say every skipped step aloud; end a run that takes none any more, or has nothing to learn from."""
        if self.reporter is not None and not math.isfinite(norm):
            self.reporter.progress.warn(f"step {self.step} skipped on all ranks: a gradient is not finite")
        self._watchdog.note(norm, self.step)

    @torch.no_grad()
    def _evaluate(self) -> float:
        """The mean loss on held-out sequences, over all ranks, of each island by itself; nats per token."""
        if self.reporter is not None:
            self.reporter.progress.say("measuring the held-out loss ...")
        self.model.eval()
        total, num_sequences = 0.0, 0
        for tokens, targets in heldout_batches(
            self.heldout_tokens, seq_len=self.config.seq_len, micro_batch=self.batch.micro_batch,
            rank=self.place.rank, world_size=self.place.world_size, max_sequences=self.config.eval_sequences,
        ):  # fmt: skip
            with self._autocast():
                total += float(self.model(tokens, targets)) * len(tokens)
            num_sequences += len(tokens)
        self.model.train()
        # A rank may have fewer sequences than others, or none.
        return self.optimizer.all_mean(total) / self.optimizer.all_mean(num_sequences)

    def _sample(self) -> str:
        """Text that the model writes after the prompt."""
        if not self.config.sample_tokens:
            return ""
        prompt = [int(token) for token in self.tokenizer.encode(self.config.prompt)]
        prompt = prompt or [self.tokenizer.end_of_document or 0]
        generator = torch.Generator().manual_seed(self.config.seed)
        with self._autocast():
            tokens = generate(self.model, torch.tensor([prompt]), self.config.sample_tokens, 0.8, generator)
        return self.tokenizer.decode(tokens[0].tolist())

    def _save(self) -> None:
        """Write a checkpoint, of replicas that are still the same bits on all ranks."""
        self.optimizer.check_replicas()
        state = {
            "step": self.step,
            "world_size": self.place.world_size,
            "tokens": self.digest,
            "optimizer": self.optimizer.state_dict(),
            "untrained": untrained_state(self.model),
            "loader": self.loader.state_dict(),
            "rng": torch.get_rng_state(),
        }
        checkpoint.save(
            self.run_dir.checkpoints, self.step, self.place.rank, state,
            is_leader=self.place.local_rank == 0, barrier=lambda: self.optimizer.all_mean(0.0),
        )  # fmt: skip

    def _load(self, saved: Path) -> int:
        """Continue from a checkpoint; returns its step."""
        state = checkpoint.load(saved, self.place.rank)
        if state["world_size"] != self.place.world_size:
            raise ConfigError(
                f"{saved} was written by {state['world_size']} ranks and there are {self.place.world_size} now; "
                "go on with as many"
            )
        if state["tokens"] != self.digest:
            raise ConfigError(f"data {self.config.data} is not the data that {saved} was trained on: bring it back")
        self.optimizer.load_state_dict(state["optimizer"])
        self.model.load_state_dict(state["untrained"], strict=False)
        self.loader.load_state_dict(state["loader"])
        torch.set_rng_state(state["rng"])
        return state["step"]


def meet_others(config: TrainConfig, place: Place) -> Peers | None:
    """The other islands, for the first rank of one that has any."""
    number, num_islands, meet = place.island
    if place.rank or num_islands == 1:
        return None
    return ElasticPeers(meet, number, timeout_s=config.timeout, max_islands=num_islands, min_islands=num_islands)


def common_terms(config: TrainConfig, tokens: str) -> str:
    """What all islands must have in common, besides the model and the method."""
    shared = {name: value for name, value in asdict(config).items() if name not in PER_MACHINE}
    return repr((shared, tokens))


def build_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over all trainable parameters; those with fewer than two dimensions do not decay."""
    params = [param for param in model.parameters() if param.requires_grad]
    matrices = {"params": [p for p in params if p.dim() >= 2], "weight_decay": config.weight_decay}
    vectors = {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}
    groups = [group for group in (matrices, vectors) if group["params"]]
    assert config.optimizer is not None, "resolved by with_optimizer"
    return make_optimizer(config.optimizer, groups, config.lr)


def untrained_state(model: nn.Module) -> dict[str, Any]:
    """Buffers and frozen parameters, which the optimizer does not know."""
    trained = {name for name, param in model.named_parameters(remove_duplicate=False) if param.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in trained}
