"""Steps of a pipeline on twenty nodes far apart, simulated: whole, with stages skipped at random, with planned paths.

    python benchmarks/skip.py [--seeds 10] [--trials 8000]

Delays of 1 to 150 ms and rates of 0.01 to 0.5 GiB/s between any two nodes, drawn evenly on a logarithmic scale; six
stages of 5, 3, 3, 3, 3 and 3 nodes; 30 micro-batches of 1.76 s forward, and backward 1.5 times that, with messages of
16 MiB. A path visits 4 of the stages. Prints seconds of a step, with nodes in the order in which they were drawn, and
where a genetic search of so many trials has placed them, for replicas that exchange 64 MiB in a step.
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import replace
from itertools import combinations

from thinwire.cost import Network
from thinwire.methods.pipeline import Costs
from thinwire.methods.pipeline.ground import Ground
from thinwire.methods.pipeline.placement import place_nodes
from thinwire.methods.pipeline.skip import full_paths, planned_paths, random_paths, waves

SIZES, LENGTH, NUM_PATHS, NUM_MICRO_BATCHES = (5, 3, 3, 3, 3, 3), 4, 15, 30
FORWARD_S, MESSAGE_BYTES, REPLICA_BYTES = 1.76, 2.0**24, 2.0**26


def world(seed: int) -> Ground:
    """Nodes and links of one draw."""
    draws, num, starts = random.Random(seed), sum(SIZES), SIZES[0]
    delays, rates = ([[0.0] * num for _ in range(num)] for _ in range(2))
    for a, b in combinations(range(num), 2):
        delays[a][b] = delays[b][a] = math.exp(draws.uniform(math.log(0.001), math.log(0.15)))
        rates[a][b] = rates[b][a] = 2**30 * math.exp(draws.uniform(math.log(0.01), math.log(0.5)))
    half = (0.75 * FORWARD_S,) * num + (0.0,) * starts
    forward = (FORWARD_S,) * num + (FORWARD_S / 4,) * starts
    even = Costs.even(num + starts, forward_bytes=MESSAGE_BYTES)
    stages = tuple(stage for stage, size in enumerate(SIZES) for _ in range(size))
    links = Network(tuple(range(num)), tuple(map(tuple, rates)), tuple(map(tuple, delays)))
    return Ground(stages, replace(even, forward_s=forward, input_s=half, weight_s=half), links, memory=3)


def steps_of(ground: Ground, seed: int) -> str:
    """Seconds of a step of each kind."""
    full = waves(full_paths(ground, NUM_PATHS), NUM_MICRO_BATCHES)
    drawn = waves(random_paths(ground, NUM_PATHS, LENGTH, seed), NUM_MICRO_BATCHES)
    planned = planned_paths(ground, NUM_PATHS, LENGTH, NUM_MICRO_BATCHES)
    steps = [ground.makespan_s(paths) for paths in (full, drawn, planned)]
    shown = ", ".join(f"{name} {step:.1f} s" for name, step in zip(("whole", "random", "planned"), steps, strict=True))
    return f"{shown}; planned takes {steps[2] / steps[1]:.0%} of random"


def main() -> None:
    """Two lines a draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trials", type=int, default=8000)
    args = parser.parse_args()
    for seed in range(args.seeds):
        ground = world(seed)
        print(f"draw {seed}: {steps_of(ground, seed)}", flush=True)
        found = place_nodes(ground.network, SIZES, MESSAGE_BYTES, REPLICA_BYTES, NUM_MICRO_BATCHES, trials=args.trials)
        told = f"links {found.links_s:.2f} s a micro-batch, replicas {found.replicas_s:.3f} s"
        print(f"  placed, {told}: {steps_of(replace(ground, stages=found.stages), seed)}", flush=True)


if __name__ == "__main__":
    main()
