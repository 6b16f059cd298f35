"""Ways to begin a lost stage, in one process: the loss before and after each loss of a stage, and at the end.

    python benchmarks/recovery.py [--steps 300] [--every 60] [--seeds 3] [--lost 0,3] [--recover average,zero]

`tiny` with 8 layers, 4 stages of 2; stages 1 and 2, or those of --lost, are lost in turn, with their moments. The
layers of a lost stage begin as `recover` of a pipeline says, and its learning rate grows by 1.1. Embedding and head are
not lost. With `swap` half of each batch passes the first two stages, and the last two, in the other order. Two ways are
of this trial alone. `zero`: the layers before, with the last matrices of their MLPs zero. `regression`: random layers,
and then 8 steps towards what the lost stage made of the last batch. Text: the sources of this Python.

Prints held-out losses, means over seeds: right before losses, right after, and at the end; the mean number of steps
until the held-out loss is as low as before, where one that does not come back counts as all steps until the next loss,
with their number; and the end of each seed.
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
# Ways that only this trial has, and the steps of the second.
ZERO, REGRESSION, REGRESSION_STEPS = "zero", "regression", 8


def layers_of(model: nn.Module, stage: int) -> list[nn.Module]:
    first = stage * LAYERS_EACH
    return [model.get_submodule(f"model.layers.{index}") for index in range(first, first + LAYERS_EACH)]


def norm_of(model: nn.Module, stage: int) -> float:
    grads = [p.grad for layer in layers_of(model, stage) for p in layer.parameters() if p.grad is not None]
    return float(nn.utils.get_total_norm(grads))


@torch.no_grad()
def begin(model: nn.Module, fresh: nn.Module, how: str, stage: int, norms: list[float]) -> None:
    """Give the layers of a lost stage new weights."""
    found = sources({ZERO: "copy", REGRESSION: "random"}.get(how, how), stage, STAGES)
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
            param.copy_(torch.zeros_like(value) if how == ZERO and name == "mlp.down_proj.weight" else value)


def regress(layers: list[nn.Module], given: tuple[Tensor, ...], wanted: Tensor) -> None:
    """Train layers towards what a stage made of its last input. given: what its first layer was called with."""
    hidden, *rest = given
    optimizer = torch.optim.AdamW([p for layer in layers for p in layer.parameters()], lr=LR)
    for _ in range(REGRESSION_STEPS):
        output = hidden
        for layer in layers:
            output = layer(output, *rest)
        optimizer.zero_grad()
        nn.functional.mse_loss(output, wanted).backward()
        optimizer.step()


@torch.no_grad()
def through(model: nn.Module, stage: int, tokens: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """What the first layer of a stage is called with, and what its last layer returns."""
    first, *_, last = layers_of(model, stage)
    given: list[tuple[Tensor, ...]] = []
    made: list[Tensor] = []
    hooks = [
        first.register_forward_pre_hook(lambda layer, args: given.append(args)),
        last.register_forward_hook(lambda layer, args, output: made.append(output)),
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return given[0], made[0]


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


def run(
    how: str, seed: int, steps: int, every: int, in_turn: list[int]
) -> tuple[list[float], list[float], list[int | None], float]:  # fmt: skip
    """Losses right before and after each loss of a stage, steps until a loss is as low again, and the last loss.

    None: it never was before the next loss of a stage.
    """
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
    back: list[int | None] = []
    recoveries, lost_at = [0] * (STAGES + 1), 0
    for step in range(1, steps + 1):
        for group, num in zip(optimizer.param_groups, recoveries, strict=True):
            group["lr"] = LR * min(1.0, step / 20) * lr_factor(num)
        optimizer.zero_grad()
        batch = loader.next_batch()
        loss_of(model, how, *batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms = [norm_of(model, stage) for stage in range(STAGES)]
        optimizer.step()
        if back and back[-1] is None and heldout_loss() <= before[-1]:
            back[-1] = step - lost_at
        if how != NONE and step % every == 0 and step < steps:
            lost = in_turn[len(before) % len(in_turn)]
            before.append(heldout_loss())
            last = through(model, lost, batch[0])
            begin(model, fresh, how, lost, norms)
            if how == REGRESSION:
                regress(layers_of(model, lost), *last)
            back.append(None)
            lost_at = step
            for param in stages[lost]:
                optimizer.state.pop(param, None)
            recoveries[lost] += 1
            after.append(heldout_loss())
    return before, after, back, heldout_loss()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lost", default="1,2")
    parser.add_argument("--recover", default=",".join((*RECOVERIES, ZERO, REGRESSION)))
    args = parser.parse_args()
    in_turn = list(map(int, args.lost.split(",")))
    heads = ("recover", "before", "after", "back in", "end")
    print("  ".join(f"{head:>10}" for head in heads) + "  each seed's end")
    for how in args.recover.split(","):
        found = [run(how, seed, args.steps, args.every, in_turn) for seed in range(args.seeds)]
        befores, afters, backs, ends = zip(*found, strict=True)
        told = [f"{fmean(chain(*losses)):.4f}" if losses[0] else "" for losses in (befores, afters)]
        told.append(back_in(list(chain(*backs)), args.every))
        each = " ".join(f"{end:.4f}" for end in ends)
        print("  ".join(f"{text:>10}" for text in (how, *told, f"{fmean(ends):.4f}")) + f"  {each}", flush=True)


def back_in(steps: list[int | None], every: int) -> str:
    """The mean, and how many counted as `every`."""
    if not steps:
        return ""
    never = sum(each is None for each in steps)
    mean = fmean(every if each is None else each for each in steps)
    return f"{mean:.1f}" + (f" ({never}/{len(steps)})" if never else "")


if __name__ == "__main__":
    main()
