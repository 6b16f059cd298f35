"""What a rival of `thinwire compare` shares with thinwire: the same model, batches, learning rates and result files.

A rival is a program of its own, `cmd:` among the contestants, one process a rank with the variables of torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from thinwire.data import BatchLoader, heldout_batches, load_tokenizer, prepare as prepare_tokens
from thinwire.errors import Problems
from thinwire.models import build_model
from thinwire.optim.schedule import lr_at
from thinwire.run.config import TrainConfig, derive
from thinwire.run.run import Run
from thinwire.run.settings import read_toml


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the flags that `thinwire compare` fills in."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    return parser


@dataclass(frozen=True)
class Rival:
    """One rank of a rival's run."""

    config: TrainConfig
    run_dir: Path
    rank: int
    world_size: int

    @classmethod
    def of(cls, arguments: argparse.Namespace, strategy: str = "") -> Rival:
        """The run that the flags ask for. strategy: whose default optimizer it has, in place of the configuration's."""
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        config = replace(read_toml(arguments.config, Problems()), steps=arguments.steps)
        if strategy:
            config = replace(config, strategy=strategy, optimizer=None, tables={})
        return cls(Run.of(config).config, arguments.run_dir, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

    def model(self) -> nn.Module:
        """The model with its first weights, the same on all ranks."""
        vocab_size = load_tokenizer(self.config.tokenizer).vocab_size
        return build_model(self.config.model, vocab_size, self.config.seq_len, self.config.seed, None)

    def train(self, model: nn.Module, update: Callable[[float], Mapping[str, float]]) -> None:
        """Take all steps, then measure the held-out loss on rank 0, which writes metrics.jsonl and summary.json.

        update: takes the step along the gradients in `.grad` with a learning rate, clears them, and returns what else
        the step's line shall have.
        """
        config, batch = self.config, derive(self.config, self.world_size)
        cache_dir = Path(config.cache_dir) if config.cache_dir else None
        tokens = prepare_tokens(
            config.data, load_tokenizer(config.tokenizer), text_field=config.text_field, cache_dir=cache_dir
        )
        train_tokens, heldout = tokens.split(config.seq_len)
        loader = BatchLoader(
            train_tokens, seq_len=config.seq_len, micro_batch=batch.micro_batch, accumulation=batch.accumulation,
            rank=self.rank, world_size=self.world_size, seed=config.seed,
        )  # fmt: skip
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=config.dtype == "bf16")
        self.run_dir.mkdir(parents=True, exist_ok=True)
        cpu_s: list[float] = []
        with (self.run_dir / "metrics.jsonl" if self.rank == 0 else Path(os.devnull)).open("w") as metrics:
            for step in range(1, config.steps + 1):
                start, start_cpu, total = time.perf_counter(), time.thread_time(), 0.0
                lr = lr_at(step, peak=config.lr, num_warmup_steps=config.num_warmup_steps, num_steps=config.steps)
                for _ in range(batch.accumulation):
                    with autocast:
                        loss = model(*loader.next_batch()) / batch.accumulation
                    loss.backward()
                    total += float(loss.detach())
                more = update(lr)
                cpu_s.append(time.thread_time() - start_cpu)
                line = {"step": step, "loss": total, "tokens": step * batch.tokens_per_step, **more}
                metrics.write(json.dumps(line | {"step_s": time.perf_counter() - start, "cpu_s": cpu_s[-1]}) + "\n")
                metrics.flush()
        if self.rank == 0:
            self._write_summary(model, heldout, autocast, statistics.fmean(cpu_s))

    def _write_summary(self, model: nn.Module, heldout: np.ndarray, autocast: torch.autocast, cpu_s: float) -> None:
        config, loss_sum, count = self.config, 0.0, 0
        model.eval()
        with torch.no_grad(), autocast:
            for inputs, targets in heldout_batches(
                heldout, seq_len=config.seq_len, micro_batch=derive(config, self.world_size).micro_batch, rank=0,
                world_size=1, max_sequences=config.eval_sequences,
            ):  # fmt: skip
                loss_sum, count = loss_sum + float(model(inputs, targets)) * len(inputs), count + len(inputs)
        summary = {"heldout_loss": loss_sum / count if count else None, "cpu_s": cpu_s}
        (self.run_dir / "summary.json").write_text(json.dumps(summary))
