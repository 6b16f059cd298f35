"""The same training shared out in each way over stages, replicas and tensor ranks, over a slow link: which is slowest.

    thinwire lab --nodes 2 --local-size 4 --rate 100mbit -- python benchmarks/factors.py [--steps 3]

A small Llama of 8 layers on 8 ranks, two nodes of four: all products of stages, replicas and tensor ranks that make 8.
A step has 16 sequences of 64 tokens in micro-batches of 2; borders and gradients travel in fp32, and sums over tensor
ranks are torch's. Prints the median seconds of a step of the slowest rank, fastest first. Tensor ranks are neighbours,
so that only 8 of them span both nodes, and then each layer's sums cross the link.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

import thinwire
from thinwire.models import build_model

RANKS, LOCAL_SIZE, SEQUENCES, TOKENS, MICRO_BATCH = 8, 4, 16, 64, 2
SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8,
    "num_hidden_layers": 8,
}  # fmt: skip
# (stages, replicas, tensor ranks).
FACTORS = [(p, RANKS // p // t, t) for p in (1, 2, 4, 8) for t in (1, 2, 4, 8) if p * t <= RANKS]


def step_s(stages: int, replicas: int, tensor: int, steps: int) -> float:
    """The median over steps of the slowest rank's seconds; the first step is not counted."""
    model = build_model("tiny", 64, TOKENS, overrides=SIZES)
    options = thinwire.Pipeline(plan="1f1b", forward="fp32", backward="fp32")
    stage = thinwire.pipeline(
        model, torch.optim.AdamW(model.parameters()), thinwire.Zero(), stages=stages, tensor=tensor, options=options,
        local_size=LOCAL_SIZE, announce=False,
    )  # fmt: skip
    tokens = torch.randint(0, 64, (SEQUENCES // replicas, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    given = [(part[:, :-1], part[:, 1:]) for part in tokens.split(MICRO_BATCH)]
    found = []
    for _ in range(steps + 1):
        dist.barrier()
        start = time.perf_counter()
        stage.forward_backward(given)
        stage.step()
        took = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        found.append(took.item())
    stage.close()
    return statistics.median(found[1:])


def main() -> None:
    """Print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    if dist.get_world_size() != RANKS:
        parser.error(f"{dist.get_world_size()} ranks: these are the ways to share {RANKS}")
    found = {sizes: step_s(*sizes, args.steps) for sizes in FACTORS}
    if dist.get_rank() == 0:
        for (stages, replicas, tensor), seconds in sorted(found.items(), key=lambda each: each[1]):
            print(f"stages {stages}, replicas {replicas}, tensor ranks {tensor}: {seconds:.3f} s")
        print(f"slowest: {max(found, key=lambda sizes: found[sizes])}, stages, replicas and tensor ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
