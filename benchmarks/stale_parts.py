"""What old values of a graph's other parts cost in accuracy, in one process.

    python benchmarks/stale_parts.py [--epochs 200] [--seeds 5]

The network and the planted graphs of examples/graph.py, trained whole, in 8 parts in another order each epoch, and in 8
parts in one order. Prints the share of the edges that lie between parts, and of the vertices that the network classes
right in a forward of the whole graph.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from graph import LAYERS, PARTS, GraphStage

WHOLE, SHUFFLED, FIXED = "whole", "another order each epoch", "one order"


def run(seed: int, epochs: int, kind: str) -> float:
    """The share of vertices that are classed right."""
    model = GraphStage(range(LAYERS), seed, 1 if kind == WHOLE else PARTS)
    optimizer, orders = torch.optim.Adam(model.parameters(), lr=3e-3), torch.Generator().manual_seed(seed)
    num = len(model.parts)
    for _ in range(epochs):
        order = torch.randperm(num, generator=orders).tolist() if kind == SHUFFLED else list(range(num))
        model.carried.begin(order)
        for loss in reversed([model(None, part) / num for part in order]):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return right(model)


@torch.no_grad()
def right(model: GraphStage) -> float:
    """Of a forward of all vertices at once."""
    hidden = model.features
    for at in range(LAYERS):
        hidden = hidden + torch.relu(model.edges @ hidden @ model.weights[str(at)])
    return float((hidden[:, :3].argmax(1) == model.classes).float().mean())


def main() -> None:
    """One line a kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    between = []
    for seed in range(args.seeds):
        model = GraphStage([0], seed)
        edges = (model.edges > 0).float().fill_diagonal_(0)
        inside = sum(float(edges[own][:, own].sum()) for own in model.parts)
        between.append(1 - inside / float(edges.sum()))
    print(f"edges between parts: {fmean(between):.1%}", flush=True)
    for kind in (WHOLE, SHUFFLED, FIXED):
        found = [run(seed, args.epochs, kind) for seed in range(args.seeds)]
        print(f"{kind}: {fmean(found):.1%} ({', '.join(f'{each:.1%}' for each in found)})", flush=True)


if __name__ == "__main__":
    main()
