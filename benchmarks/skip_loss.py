"""What skipping layers costs in loss, in one process.

    python benchmarks/skip_loss.py [--steps 250] [--seeds 3]

`tiny` with 8 layers, 4 micro-batches of 4 sequences of 64 tokens a step. Each micro-batch leaves out two of the last
seven layers, drawn at random. Text: the sources of this Python. Prints the held-out loss of all layers after as many
steps with and without skipping.
"""

from __future__ import annotations

import argparse
import random

import torch
from torch import nn

from thinwire.data import ByteTokenizer, prepare
from thinwire.data.loader import BatchLoader
from thinwire.models import build_model

LAYERS, LEFT_OUT, SEQ_LEN, MICRO_BATCHES, SIZE, LR = 8, 2, 64, 4, 4, 3e-3


def run(seed: int, steps: int, *, skips: bool) -> float:
    """The held-out loss at the end."""
    train, heldout = prepare("stdlib", ByteTokenizer()).split(SEQ_LEN)
    model = build_model("tiny", 256, SEQ_LEN, seed, {"num_hidden_layers": LAYERS})
    layers = list(model.get_submodule("model.layers").children())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95))
    loader, draws = BatchLoader(train, seq_len=SEQ_LEN, micro_batch=SIZE, seed=seed), random.Random(seed)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = LR * min(1.0, step / 20)
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            out = draws.sample(range(1, LAYERS), LEFT_OUT) if skips else []
            kept = nn.ModuleList(layer for number, layer in enumerate(layers) if number not in out)
            model.set_submodule("model.layers", kept)
            (model(*loader.next_batch()) / MICRO_BATCHES).backward()
        model.set_submodule("model.layers", nn.ModuleList(layers))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        return float(model(*BatchLoader(heldout, seq_len=SEQ_LEN, micro_batch=64).next_batch()))


def main() -> None:
    """One line a seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    for seed in range(args.seeds):
        whole, skipping = (run(seed, args.steps, skips=skips) for skips in (False, True))
        print(f"seed {seed}: whole {whole:.4f}, skipping {skipping:.4f}, {skipping / whole - 1:+.1%}", flush=True)


if __name__ == "__main__":
    main()
