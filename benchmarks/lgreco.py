"""What a setting for each tensor saves: bytes of L-GreCo's plans against one setting for all, at equal error.

    python benchmarks/lgreco.py [--steps 40] [--plans 2] [--loss-steps 200] [--json FILE]

Two workers train the demo model on the standard library's sources and plan every --steps / --plans steps, on real
gradients with what error feedback added. Prints for each plan the bytes of the uniform setting over the plan's, the
plan's error over the uniform setting's on the gradients it was made from, and that of the plan before it on the
same gradients, which it has not seen. Then --loss-steps of the tiny model by `thinwire train`, with one setting for
all and with plans: the held-out loss and the bytes of a step. --steps 0 leaves out the first part, --loss-steps 0 the
second.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.data import BatchLoader, ByteTokenizer, prepare
from thinwire.methods.data.lgreco import ChosenSettings, LGreCoMean
from thinwire.methods.plannable import Plannable
from thinwire.models import build_model

SEQ_LEN, MICRO_BATCH = 256, 2
# A uniform setting, and how far from it a plan may go.
METHODS: tuple[tuple[Plannable, float], ...] = (
    (thinwire.PowerSGD(rank=4, start_step=0), 4),
    (thinwire.PowerSGD(rank=32, start_step=0), 32),
    (thinwire.EFTopK(), 4),
    (thinwire.EFTopK(), 32),
    (thinwire.EFInteger(), 4),
)
# Strategies with one setting for all, each with the learning rate and options for it and for its planned form.
TRAINED = (
    ("powersgd", "3e-3", ["--powersgd.rank", "4"]),
    ("ef-topk", "3e-3", ["--eftopk.codec", "topk1%"]),
    ("ef-topk", "3e-3", ["--eftopk.codec", "threshold1%/4096"]),
    ("ef-integer", "3e-3", ["--efinteger.codec", "int4/64:bf16:nearest"]),
    ("dgc", "0.3", ["--dgc.density", "0.01"]),
)


def worker(rank: int, world_size: int, base: Plannable, span: float, steps: int, every: int, folder: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    tokenizer = ByteTokenizer()
    tokens, _ = prepare("stdlib", tokenizer).split(SEQ_LEN)
    loader = BatchLoader(tokens, seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, rank=rank, world_size=world_size)
    model = build_model("demo", tokenizer.vocab_size, SEQ_LEN)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    method = thinwire.LGreCo(base, span=span, start=every, every=every, samples=min(10, every))
    handle = thinwire.compress_ddp(ddp, method, optimizer=optimizer, local_size=1, announce=False)
    reduction = handle.reduction
    assert isinstance(reduction, LGreCoMean)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    plans: list[tuple[ChosenSettings, float]] = []
    for _ in range(steps):
        inputs, targets = loader.next_batch()
        ddp(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if reduction.plan is not None and (not plans or plans[-1][0] is not reduction.plan):
            plans.append((reduction.plan, saved(base, reduction.plan, shapes)))
    if rank == 0:
        torch.save(plans, f"{folder}/plans")
    handle.close()
    dist.destroy_process_group()


def saved(base: Plannable, plan: ChosenSettings, shapes: dict[str, torch.Size]) -> float:
    """Bytes of the uniform setting over the plan's, of all that is planned."""
    uniform = sum(base.size(shapes[name], base.uniform) for name in plan.settings)
    return uniform / sum(base.size(shapes[name], setting) for name, setting in plan.settings.items())


def plan_rows(steps: int, num_plans: int) -> list[list[str]]:
    """Bytes and errors of plans, printed; the rows of the README's table."""
    rows = []
    for base, span in METHODS:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, (2, base, span, steps, steps // num_plans, folder), nprocs=2)
            plans: list[tuple[ChosenSettings, float]] = torch.load(f"{folder}/plans", weights_only=False)
        for plan, ratio in plans:
            share, stale = plan.error / plan.uniform_error, plan.previous_error / plan.uniform_error
            print(
                f"{base.name} {base.uniform:g}, span {span:g}: plan after step {plan.step}: "
                f"{ratio:.2f} times fewer bytes at {share:.3f} of the uniform error; "
                f"the settings before it now make {stale:.3f}",
                flush=True,
            )
        settings = sorted(plans[-1][0].settings.values())
        print(f"  settings from {settings[0]:g} to {settings[-1]:g}, median {settings[len(settings) // 2]:g}")
        what = (
            f"lgreco on {base.name} {base.uniform:g}: uniform bytes over the plan's at equal error, {len(plans)} plans"
        )
        rows.append([what, ", ".join(f"{ratio:.2f}" for _, ratio in plans)])
    return rows


def loss_rows(steps: int) -> list[list[str]]:
    """Loss and bytes of a step with one setting for all and with plans, printed; the rows of the README's table."""
    rows = []
    for strategy, lr, options in TRAINED:
        found = []
        for name, plans in ((strategy, []), (f"lgreco-{strategy}", ["--lgreco.every", "50"])):
            with tempfile.TemporaryDirectory() as folder:
                command = [
                    sys.executable, "-m", "thinwire", "train", "--model", "tiny", "--strategy", name, *options, *plans,
                    "--workers", "2", "--local-size", "1", "--seq-len", "64", "--micro-batch", "8", "--lr", lr,
                    "--weight-decay", "0", "--steps", str(steps), "--dtype", "fp32", "--sample-tokens", "0",
                    "--eval-sequences", "256", "--run-dir", f"{folder}/run",
                ]  # fmt: skip
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                summary = json.loads(Path(f"{folder}/run/summary.json").read_text())
            found.append(f"{summary['heldout_loss']:.3f} at {summary['sent_bytes_per_step'] / 1e3:.1f} kB a step")
            print(f"{name} {' '.join(options)}: held-out loss {found[-1]}", flush=True)
        rows.append([f"{strategy} {' '.join(options)}, {steps} steps: one setting, then planned", "; ".join(found)])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--plans", type=int, default=2)
    parser.add_argument("--loss-steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = plan_rows(arguments.steps, arguments.plans) if arguments.steps else []
    rows += loss_rows(arguments.loss_steps) if arguments.loss_steps else []
    if arguments.json:
        machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
        result = {"command": "python benchmarks/lgreco.py", "machine": machine, "readme": rows}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
