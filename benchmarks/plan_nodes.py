"""How long `thinwire plan` takes for many nodes.

    python benchmarks/plan_nodes.py [--nodes 8 16 32] [--seed 0]

Plans the demo model, 8 sequences a rank, on stated machines of one rank a node: with links of 100 Mbit/s that are all
alike, and with links between half of that and all of it, drawn at random, which need an order of nodes, and on which
messages end at different times. Prints the processor's seconds, which a busy machine makes little longer, and the ratio
of both kinds. All of it takes two minutes.
"""

from __future__ import annotations

import argparse
import random
import time

from thinwire.calibration.machine import CODECS
from thinwire.cost import Cores, Machine, Network
from thinwire.planner.plan import plan

RATE, DELAY_S, BURST_S, SEQUENCES, SEQ_LEN = 12.5e6, 1e-3, 0.02, 8, 256
RATES = {"layer 512 fp32": 2e10, "launch 512 fp32": 1e3, "copy": 5e9, "carry": 5e8, "round": 2e3}
RATES |= {f"{way} {codec}": 5e8 for way in ("encode", "decode") for codec in CODECS}


def machine(num_nodes: int, slowest: float, seed: int) -> Machine:
    """Nodes with a rank each. slowest: of the links, the rate of the slowest as a part of that of the fastest."""
    rng, ranks = random.Random(seed), range(num_nodes)
    rates = tuple(tuple(RATE * rng.uniform(slowest, 1.0) for _ in ranks) for _ in ranks)
    network = Network(tuple(ranks), rates, ((DELAY_S,) * num_nodes,) * num_nodes, BURST_S)
    return Machine(tuple(map(str, ranks)), network, Cores(tuple(ranks), (2.0,) * num_nodes), RATES)


def planned_s(made: Machine) -> float:
    """The processor's seconds of one plan."""
    start = time.process_time()
    plan("demo", made, tokens_per_step=made.num_ranks * SEQUENCES * SEQ_LEN, seq_len=SEQ_LEN, micro_batch=SEQUENCES)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", type=int, default=[8, 16, 32])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # What is loaded at the first plan belongs to none.
    planned_s(machine(2, 1.0, args.seed))
    for num in args.nodes:
        alike_s, uneven_s = (planned_s(machine(num, slowest, args.seed)) for slowest in (1.0, 0.5))
        print(f"{num} nodes: {alike_s:.1f} s with equal links, {uneven_s:.1f} s with uneven ones", flush=True)


if __name__ == "__main__":
    main()
