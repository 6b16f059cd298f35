"""A head on all stages against one on the last, simulated: whose links pay for it.

    python benchmarks/vocabulary.py [--ranks 4] [--ranks 8] [--micro-batches 32]

A stage's layers take 50 ms forward and 100 ms backward, and so does the whole head; a hidden state has 0.52 MB in fp32.
Fitted plans with 1 barrier; links with a delay of 0.5 ms. Prints the seconds of a step, in fp32 and with borders of 8
bits forward and 4 back, with the head on the last stage, and on all.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from thinwire.cost import Network
from thinwire.methods.pipeline import Costs, Pipeline, fitted, simulate
from thinwire.methods.pipeline.border import Crossing
from thinwire.methods.pipeline.costs import SpreadCosts
from thinwire.methods.pipeline.plan import straight
from thinwire.methods.pipeline.vocabulary import NUM_SCORES

FORWARD_S, TOKENS, FEATURES = 0.05, 508, 256
# Bytes per second of the links; 0: none.
RATES = {"20 Mbit/s": 2.5e6, "100 Mbit/s": 12.5e6, "1 Gbit/s": 125e6, "none": 0.0}
BORDERS = {"fp32": Crossing(), "8 and 4 bits": Crossing("int8/64:nearest", "int4/64")}


def bytes_of(crossing: Crossing) -> tuple[float, ...]:
    """Of a hidden state, and of its gradient."""
    num = TOKENS * FEATURES
    return tuple(float(crossing.packet_bytes(way, num, torch.float32)) for way in ("forward", "backward"))


def on_last(num_ranks: int, num: int, crossing: Crossing, links: Network) -> float:
    """Seconds of a step with the whole head on the last stage."""
    seconds = (*[FORWARD_S] * (num_ranks - 1), 2 * FORWARD_S)
    forward, backward = bytes_of(crossing)
    costs = Costs.even(num_ranks, forward_bytes=forward, backward_bytes=backward)
    costs = replace(costs, forward_s=seconds, input_s=seconds, weight_s=seconds)
    made = fitted(range(num_ranks), straight(num_ranks, num), costs, links)
    return simulate(made, costs, links).makespan_s


def on_all(num_ranks: int, num: int, crossing: Crossing, links: Network) -> float:
    """Seconds of a step with a spread head."""
    forward, backward = bytes_of(crossing)
    sizes = {"hidden": forward, "part": backward, "scores": 4.0 * NUM_SCORES * TOKENS}
    sizes |= {"rows": forward / num_ranks, "gradient": backward / num_ranks}
    passes = {"S": 2 * FORWARD_S / num_ranks, "T": FORWARD_S / num_ranks}
    even = Costs.even(num_ranks, FORWARD_S, forward_bytes=forward, backward_bytes=backward)
    costs = replace(even, spread=SpreadCosts(passes, sizes))
    made = Pipeline(head="spread").plan_of(num_ranks, num, costs, links)
    return simulate(made, costs, links).makespan_s


def main() -> None:
    """A table for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, action="append", help="stages; by default 4 and 8")
    parser.add_argument("--micro-batches", type=int, default=32)
    args = parser.parse_args()
    for num_ranks in args.ranks or (4, 8):
        print(f"{num_ranks} ranks")
        for name, rate in RATES.items():
            links = Network.even(num_ranks, rate=rate, delay_s=0.0005) if rate else Network.even(num_ranks)
            shown = []
            for borders, crossing in BORDERS.items():
                last = on_last(num_ranks, args.micro_batches, crossing, links)
                spread = on_all(num_ranks, args.micro_batches, crossing, links)
                shown.append(f"{borders}: last {last:.1f} s, spread {spread:.1f} s")
            print(f"  {name}: {'; '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
