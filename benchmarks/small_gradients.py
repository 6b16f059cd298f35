"""What becomes of gradients that are much smaller than others in their group: where Adam ends, codec by codec.

    python benchmarks/small_gradients.py [--seeds 3] [--json FILE]

Four ranks, each a node, minimise sum_i c_i |w_i - w*_i|^2 from |w - w*| = 1, c_i = 1, 0.1, 0.01 or 0.001, with noise on
every gradient. Adam takes steps of one length whatever c_i is, so without a codec every weight comes equally far.
Prints what is left of the distance, by c_i: `mixed`, where neighbours differ, and `rows`, where rows of 48 elements do,
which groups of 64 straddle.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from thinwire.codecs import Codec, Identity, derive_seed, paired_seed

CURVATURES = (1.0, 0.1, 0.01, 0.001)
NUM_RANKS, NUMEL, STEPS, LR, NOISE = 4, 3072, 80, 0.01, 0.5
# A codec, and the weight beta of the old error in LoCo's feedback; 0 is plain error feedback, None: no feedback.
CASES: tuple[tuple[str, float | None], ...] = (
    ("fp32", None),
    ("int4/64:bf16+hadamard32", None),
    ("int4/64:bf16", None),
    ("int4/48:bf16+hadamard16", None),
    ("int4/16:bf16", None),
    ("int4/64:bf16+hadamard32", 0.0),
    ("int4/64:bf16:nearest+hadamard32", 0.0),
    ("int4/64:bf16:nearest+hadamard32", 0.8),
    ("e3m0/64:bf16", None),
    ("e3m0/64:bf16:nearest", 0.0),
    ("int6/64:bf16+hadamard32", None),
    ("e5m0/64:bf16", None),
    ("int8/64:bf16+hadamard32", None),
)


def curvatures(row: int) -> Tensor:
    """c of every element: the same for `row` elements, then the next."""
    return torch.tensor(CURVATURES).repeat_interleave(row).repeat(NUMEL // (row * len(CURVATURES)))


def distances(codec: Codec, beta: float | None = None, *, row: int = 1, seed: int = 0) -> list[float]:
    """The mean of |w - w*| after the last step, for each of CURVATURES."""
    c, drawn = curvatures(row), torch.Generator().manual_seed(seed)
    target = 1.0 - 2.0 * torch.randint(0, 2, (NUMEL,), generator=drawn)
    weights = torch.zeros(NUMEL, requires_grad=True)
    adam = torch.optim.Adam([weights], lr=LR, betas=(0.9, 0.95), eps=1e-12)
    errors = torch.zeros(NUM_RANKS, NUMEL)
    for step in range(STEPS):
        total = torch.zeros(NUMEL)
        for rank in range(NUM_RANKS):
            gradient = c * (weights.detach() - target + NOISE * torch.randn(NUMEL, generator=drawn))
            sent = gradient if beta is None else gradient + errors[rank]
            packet = codec.encode(sent, seed=paired_seed(derive_seed(seed, step), rank))
            decoded = codec.decode(packet, NUMEL)
            if beta is not None:
                errors[rank].mul_(beta).add_(sent - decoded, alpha=1 - beta)
            total += decoded
        weights.grad = total / NUM_RANKS
        adam.step()
    left = (weights.detach() - target).abs()
    return [float(left[c == one].mean()) for one in CURVATURES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    heads = [f"{place} {one:g}" for place in ("mixed", "rows") for one in CURVATURES]
    print("| codec | feedback | bits | " + " | ".join(heads) + " |")
    print("|---|---|---|" + "---|" * len(heads))
    found = []
    for text, beta in CASES:
        codec = Codec.parse(text)
        runs = [
            [*distances(codec, beta, seed=seed), *distances(codec, beta, row=48, seed=seed)]
            for seed in range(options.seeds)
        ]
        means = torch.tensor(runs).mean(dim=0).tolist()
        bits = 32 if codec == Identity() else codec.bits_per_element
        feedback = "" if beta is None else f"beta {beta:g}"
        print(f"| `{text}` | {feedback} | {bits:g} | " + " | ".join(f"{mean:.2f}" for mean in means) + " |", flush=True)
        found.append({"codec": text, "beta": beta, "left": dict(zip(heads, means, strict=True))})
    if options.json:
        options.json.write_text(json.dumps({"seeds": options.seeds, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
