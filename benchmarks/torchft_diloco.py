"""torchft's DiLoCo as a contestant of `thinwire compare`: the same model, data and inner steps, its own outer ones.

    thinwire compare --strategies 'diloco,cmd:torchft=python3 benchmarks/torchft_diloco.py --config {config}
        --run-dir {run_dir} --steps {steps}' --lab nodes=4,rate=100mbit -- --model demo --steps 300

With --num-fragments, --overlap-steps and --mix it is torchft's Streaming DiLoCo, on `streaming-diloco`'s fragments.

One process an island, with the variables of torchrun. Needs torchft (0.2.0 was tried), which thinwire never installs.
Every island is a replica group of one rank; the lighthouse runs beside rank 0. Bytes are left to the kernel's counters.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from thinwire.data import BatchLoader, heldout_batches, load_tokenizer, prepare as prepare_tokens
from thinwire.errors import Problems
from thinwire.layout.fragments import cut
from thinwire.models import build_model
from thinwire.optim.schedule import lr_at
from thinwire.run.config import TrainConfig, derive
from thinwire.run.run import Run
from thinwire.run.settings import read_toml
from thinwire.training.engine import build_optimizer

WAIT = timedelta(seconds=120)


def own_address(others: str) -> str:
    """Of this process, as those see it that share a link with `others`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((others, 1))
        return str(probe.getsockname()[0])


def manager_of(model: nn.Module, optimizer: torch.optim.Optimizer, store: TCPStore, rank: int, count: int) -> Manager:
    """torchft's manager of this island, in step with all others."""

    def load(state: dict[str, dict]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    own = own_address(os.environ["MASTER_ADDR"])
    return Manager(
        pg=ProcessGroupGloo(timeout=WAIT), min_replica_size=count, use_async_quorum=False, rank=0, world_size=1,
        load_state_dict=load, state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"island-{rank}", store_addr=own, store_port=store.port, hostname=own, init_sync=False,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        timeout=WAIT, quorum_timeout=WAIT, connect_timeout=WAIT,
    )  # fmt: skip


def fragments_of(model: nn.Module, num_fragments: int) -> list[nn.Module]:
    """The model's parameters, as modules that torchft exchanges in turn."""
    named = dict(model.named_parameters())
    modules = []
    for fragment in cut(model, num_fragments, "strided", 1):
        modules.append(nn.Module())
        for name in fragment.names:
            modules[-1].register_parameter(name.replace(".", "_"), named[name])
    return modules


def train(config: TrainConfig, run_dir: Path, rank: int, world_size: int, arguments: argparse.Namespace) -> None:
    batch = derive(config, world_size)
    tokenizer = load_tokenizer(config.tokenizer)
    cache_dir = Path(config.cache_dir) if config.cache_dir else None
    tokens = prepare_tokens(config.data, tokenizer, text_field=config.text_field, cache_dir=cache_dir)
    train_tokens, heldout = tokens.split(config.seq_len)
    model = build_model(config.model, tokenizer.vocab_size, config.seq_len, config.seed, None)
    inner = build_optimizer(config, model)
    fragments = fragments_of(model, arguments.num_fragments)
    outer = [
        torch.optim.SGD(fragment.parameters(), lr=arguments.outer_lr, momentum=0.9, nesterov=True)
        for fragment in fragments
    ]
    loader = BatchLoader(
        train_tokens, seq_len=config.seq_len, micro_batch=batch.micro_batch, accumulation=batch.accumulation,
        rank=rank, world_size=world_size, seed=config.seed,
    )  # fmt: skip
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=config.dtype == "bf16")
    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    manager = manager_of(model, inner, store, rank, world_size)
    run_dir.mkdir(parents=True, exist_ok=True)
    diloco = DiLoCo(
        manager, fragments, inner, outer, sync_every=arguments.sync_every, pin_memory=False,
        fragment_sync_delay=arguments.overlap_steps, fragment_update_alpha=arguments.mix,
    )  # fmt: skip
    with diloco, (run_dir / "metrics.jsonl" if rank == 0 else Path(os.devnull)).open("w") as metrics:
        for step in range(1, config.steps + 1):
            start, total = time.perf_counter(), 0.0
            lr = lr_at(step, peak=config.lr, num_warmup_steps=config.num_warmup_steps, num_steps=config.steps)
            for group in inner.param_groups:
                group["lr"] = lr
            for _ in range(batch.accumulation):
                inputs, targets = loader.next_batch()
                with autocast:
                    loss = model(inputs, targets) / batch.accumulation
                loss.backward()
                total += float(loss.detach())
            nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
            inner.step()
            inner.zero_grad()
            step_s = time.perf_counter() - start
            line = {"step": step, "loss": total, "tokens": step * batch.tokens_per_step, "step_s": step_s}
            metrics.write(json.dumps(line) + "\n")
            metrics.flush()
    if rank == 0:
        loss_sum, count = 0.0, 0
        with torch.no_grad(), autocast:
            for inputs, targets in heldout_batches(
                heldout, seq_len=config.seq_len, micro_batch=batch.micro_batch, rank=0, world_size=1,
                max_sequences=config.eval_sequences,
            ):  # fmt: skip
                loss_sum, count = loss_sum + float(model(inputs, targets)) * len(inputs), count + len(inputs)
        summary = {"heldout_loss": loss_sum / count if count else None}
        (run_dir / "summary.json").write_text(json.dumps(summary))
    manager.shutdown(wait=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--sync-every", type=int, default=100)
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--num-fragments", type=int, default=1)
    parser.add_argument("--overlap-steps", type=int, default=0)
    parser.add_argument("--mix", type=float, default=0.0)
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = Run.of(replace(read_toml(arguments.config, Problems()), steps=arguments.steps)).config
    lighthouse = None
    if rank == 0:
        # It waits a while for those who have not come yet, and for nobody once all have.
        bind = f"0.0.0.0:{os.environ['MASTER_PORT']}"
        lighthouse = LighthouseServer(bind=bind, min_replicas=world_size, join_timeout_ms=60_000)
    train(config, arguments.run_dir, rank, world_size, arguments)
    if lighthouse is not None:
        # The others still leave.
        time.sleep(2)
        lighthouse.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
