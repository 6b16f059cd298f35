"""Ways to begin a lost stage, in one process: the loss before and after each loss of a stage, and at the end.

    python benchmarks/recovery.py [--steps 300] [--every 60] [--seeds 3] [--lost 0,3] [--recover average,swap]

`tiny` with 8 layers, 4 stages of 2; stages 1 and 2, or those of --lost, are lost in turn, with their moments. The
layers of a lost stage begin as `recover` of a pipeline says, and its learning rate grows by 1.1. Embedding and head are
not lost. With `swap` half of each batch passes the first two stages, and the last two, in the other order. Text: the
sources of this Python. Prints held-out losses, means over seeds: right before losses, right after, and at the end; and
the end of each seed.
"""

from __future__ import annotations

import argparse
from itertools import chain
from statistics import fmean

import torch
from torch import Tensor, nn

from thinwire.data import ByteTokenizer, prepare
from thinwire.data.loader import BatchLoader
from thinwire.methods.pipeline.recover import NONE, RECOVERIES, SWAP, between, lr_factor, sources
from thinwire.models import build_model

STAGES, LAYERS_EACH, SEQ_LEN, LR = 4, 2, 64, 3e-3


def layers_of(model: nn.Module, stage: int) -> list[nn.Module]:
    first = stage * LAYERS_EACH
    return [model.get_submodule(f"model.layers.{index}") for index in range(first, first + LAYERS_EACH)]


def norm_of(model: nn.Module, stage: int) -> float:
    grads = [p.grad for layer in layers_of(model, stage) for p in layer.parameters() if p.grad is not None]
    return float(nn.utils.get_total_norm(grads))


@torch.no_grad()
def begin(model: nn.Module, fresh: nn.Module, how: str, stage: int, norms: list[float]) -> None:
    """Give the layers of a lost stage new weights."""
    found = sources(how, stage, STAGES)
    for number, layer in enumerate(layers_of(model, stage)):
        beside = [dict(layers_of(model, other)[number].named_parameters()) for other in found]
        new = dict(layers_of(fresh, stage)[number].named_parameters())
        for name, param in layer.named_parameters():
            value: Tensor = new[name]
            if len(found) == 2:
                weights = (norms[found[0]], norms[found[1]]) if how in ("average", SWAP) else (0.0, 0.0)
                value = between(beside[0][name], beside[1][name], *weights)
            elif found:
                value = beside[0][name]
            param.copy_(value)


def loss_of(model: nn.Module, how: str, tokens: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of a batch."""
    if how != SWAP:
        return model(tokens, targets)
    half, layers = len(tokens) // 2, model.get_submodule("model.layers")
    loss = model(tokens[:half], targets[:half])
    turned = nn.ModuleList(layer for stage in (1, 0, 3, 2) for layer in layers_of(model, stage))
    model.set_submodule("model.layers", turned)
    loss = (loss + model(tokens[half:], targets[half:])) / 2
    model.set_submodule("model.layers", layers)
    return loss


def run(how: str, seed: int, steps: int, every: int, in_turn: list[int]) -> tuple[list[float], list[float], float]:
    """Losses right before and after each loss of a stage, and at the end."""
    tokens = prepare("stdlib", ByteTokenizer())
    train, heldout = tokens.split(SEQ_LEN)
    overrides = {"num_hidden_layers": STAGES * LAYERS_EACH}
    model, fresh = (build_model("tiny", 256, SEQ_LEN, one, overrides) for one in (seed, seed + 1000))
    stages = [[p for layer in layers_of(model, stage) for p in layer.parameters()] for stage in range(STAGES)]
    inside = {id(param) for params in stages for param in params}
    ends = [param for param in model.parameters() if id(param) not in inside]
    optimizer = torch.optim.AdamW([{"params": params} for params in [*stages, ends]], lr=LR, betas=(0.9, 0.95))
    loader = BatchLoader(train, seq_len=SEQ_LEN, micro_batch=16, seed=seed)
    check = BatchLoader(heldout, seq_len=SEQ_LEN, micro_batch=64).next_batch()

    def heldout_loss() -> float:
        with torch.no_grad():
            return float(model(*check))

    before: list[float] = []
    after: list[float] = []
    recoveries = [0] * (STAGES + 1)
    for step in range(1, steps + 1):
        for group, num in zip(optimizer.param_groups, recoveries, strict=True):
            group["lr"] = LR * min(1.0, step / 20) * lr_factor(num)
        optimizer.zero_grad()
        loss_of(model, how, *loader.next_batch()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms = [norm_of(model, stage) for stage in range(STAGES)]
        optimizer.step()
        if how != NONE and step % every == 0 and step < steps:
            lost = in_turn[len(before) % len(in_turn)]
            before.append(heldout_loss())
            begin(model, fresh, how, lost, norms)
            for param in stages[lost]:
                optimizer.state.pop(param, None)
            recoveries[lost] += 1
            after.append(heldout_loss())
    return before, after, heldout_loss()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lost", default="1,2")
    parser.add_argument("--recover", default=",".join(RECOVERIES))
    args = parser.parse_args()
    in_turn = list(map(int, args.lost.split(",")))
    print(f"{'recover':>8}  {'before':>7}  {'after':>7}  {'end':>7}  each seed's end")
    for how in args.recover.split(","):
        found = [run(how, seed, args.steps, args.every, in_turn) for seed in range(args.seeds)]
        befores, afters, ends = zip(*found, strict=True)
        told = [f"{fmean(chain(*losses)):.4f}" if losses[0] else "" for losses in (befores, afters)]
        each = " ".join(f"{end:.4f}" for end in ends)
        print(f"{how:>8}  {told[0]:>7}  {told[1]:>7}  {fmean(ends):7.4f}  {each}", flush=True)


if __name__ == "__main__":
    main()
