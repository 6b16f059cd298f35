"""How long the list schedulers take on large graphs, and how long their schedules are on random ones.

    python benchmarks/placement.py [--graphs 60] [--ops 2000] [--out FILE]

First, --graphs random layered graphs of 50 operations on four devices, where a message takes 0.4 of an operation on
average: the mean schedule of each scheduler over that of operations placed at random. Then one graph of --ops
operations on four devices, whose messages take 0.1 of an operation: seconds of each scheduler, and its schedule over
the work itself, a quarter of which each device has. On it m-ETF is to take less than 10 s and m-SCT less than 60 s;
else the exit code is 1. All of it is written to FILE, by default to benchmarks/results/placement.json, with the
machine's load. Takes about ten seconds. Needs the extra `plan` for m-SCT's linear programme.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from statistics import fmean

from thinwire.cost import Network
from thinwire.placement.board import replay
from thinwire.placement.etf import m_etf
from thinwire.placement.graph import Devices, Op, OpGraph
from thinwire.placement.sct import m_sct
from thinwire.placement.topo import m_topo

RESULTS = Path(__file__).parent / "results/placement.json"
METHODS = {"m-topo": m_topo, "m-etf": m_etf, "m-sct": m_sct}
NUM_DEVICES = 4
# Operations of a layer, at most: of the small graphs, and of the large one, in which as many may be ready at once.
WIDTH, WIDEST = 8, 400
# Seconds in which a scheduler is to place the large graph.
LIMITS = {"m-etf": 10.0, "m-sct": 60.0}


def layered(seed: int, num_ops: int, width: int) -> OpGraph:
    """Layers of random operations of 0.5 to 2 s, each with 1 to 3 inputs from the layer before, of 1 to 4 bytes."""
    rng = random.Random(seed)
    ops: list[Op] = []
    edges: list[tuple[int, int]] = []
    before: list[int] = []
    while len(ops) < num_ops:
        layer = list(range(len(ops), min(num_ops, len(ops) + rng.randint(1, width))))
        for number in layer:
            ops.append(Op(f"op{number}", rng.uniform(0.5, 2.0), 1.0))
            edges += [(each, number) for each in rng.sample(before, min(len(before), rng.randint(1, 3)))]
        before = layer
    return OpGraph.of(ops, edges, {number: rng.randint(1, 4) for number in range(num_ops)})


def devices(message_share: float) -> Devices:
    """Devices between which a message takes this share of an operation, on average: 2.5 bytes, and 1.25 s."""
    return Devices(Network.even(NUM_DEVICES, 2.5 / (message_share * 1.25)), float("inf"))


def quality(num_graphs: int) -> dict[str, float]:
    """The mean schedule of each scheduler over that of operations placed at random."""
    found: dict[str, list[float]] = {name: [] for name in ("random", *METHODS)}
    for seed in range(num_graphs):
        graph, own = layered(seed, 50, WIDTH), devices(0.4)
        homes = [random.Random(seed).randrange(NUM_DEVICES) for _ in graph.ops]
        found["random"].append(replay(graph, own, homes).makespan_s)
        for name, method in METHODS.items():
            found[name].append(method(graph, own).makespan_s)
    at_random = fmean(found.pop("random"))
    return {name: fmean(each) / at_random for name, each in found.items()}


def speed(num_ops: int) -> dict[str, tuple[float, float]]:
    """By scheduler, its seconds, and its schedule over a device's part of the work."""
    graph, own, found = layered(0, num_ops, WIDEST), devices(0.1), {}
    work_s = sum(op.seconds for op in graph.ops) / NUM_DEVICES
    for name, method in METHODS.items():
        start = time.perf_counter()
        made = method(graph, own)
        found[name] = time.perf_counter() - start, made.makespan_s / work_s
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=60)
    parser.add_argument("--ops", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    shares = quality(args.graphs)
    print(f"{args.graphs} graphs of 50 operations: the mean schedule over random placement's")
    for name, share in shares.items():
        print(f"  {name:<8} {share:.2f}")
    took = speed(args.ops)
    print(f"{args.ops} operations: seconds to place them, and the schedule over the work")
    for name, (seconds, share) in took.items():
        limit = f", asked for: less than {LIMITS[name]:g} s" if name in LIMITS else ""
        print(f"  {name:<8} {seconds:.1f} s{limit}; {share:.3f}")
    load = os.getloadavg()[0]
    told = {"graphs": args.graphs, "over_random": shares, "ops": args.ops, "placed": took, "load": load}
    args.out.write_text(json.dumps(told, indent=1) + "\n")
    print(f"load of the machine at the end: {load:.1f}; written: {args.out}")
    return int(any(took[name][0] >= limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
