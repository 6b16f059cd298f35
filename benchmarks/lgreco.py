"""What a setting for each tensor saves: bytes of L-GreCo's plans against one setting for all, at equal error.

    python benchmarks/lgreco.py [--steps 40] [--plans 2] [--json FILE]

Two workers train the demo model on the standard library's sources and plan every --steps / --plans steps, on real
gradients with what error feedback added. Prints for each plan the bytes of the uniform setting over the plan's, the
plan's error over the uniform setting's on the gradients it was made from, and that of the plan before it on the
same gradients, which it has not seen.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.data import BatchLoader, ByteTokenizer, prepare
from thinwire.data_parallel.ddp.lgreco import LGreCoMean, Plan, Plannable
from thinwire.models import build_model

SEQ_LEN, MICRO_BATCH = 256, 2
# A uniform setting, and how far from it a plan may go.
METHODS: tuple[tuple[Plannable, float], ...] = (
    (thinwire.PowerSGD(rank=4, start_step=0), 4),
    (thinwire.PowerSGD(rank=32, start_step=0), 32),
    (thinwire.EFTopK(density=0.01), 4),
    (thinwire.EFTopK(density=0.01), 32),
    (thinwire.EFInteger(bits=4), 4),
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
    handle = thinwire.compress_ddp(ddp, method, optimizer, local_size=1, announce=False)
    reduction = handle.reduction
    assert isinstance(reduction, LGreCoMean)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    plans: list[tuple[Plan, float]] = []
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


def saved(base: Plannable, plan: Plan, shapes: dict[str, torch.Size]) -> float:
    """Bytes of the uniform setting over the plan's, of all that is planned."""
    uniform = sum(base.size(shapes[name], base.uniform) for name in plan.settings)
    return uniform / sum(base.size(shapes[name], setting) for name, setting in plan.settings.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--plans", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for base, span in METHODS:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, (2, base, span, arguments.steps, arguments.steps // arguments.plans, folder), nprocs=2)
            plans: list[tuple[Plan, float]] = torch.load(f"{folder}/plans", weights_only=False)
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
    if arguments.json:
        machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
        result = {"command": "python benchmarks/lgreco.py", "machine": machine, "readme": rows}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
