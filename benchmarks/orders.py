"""How much faster a pipeline is in the planned order of ranks than in others, on two racks of two nodes.

    python benchmarks/orders.py [--inside 100mbit] [--across 10mbit] [--steps 10] [--model demo]

Nodes 0 and 2 are one rack, 1 and 3 the other; between racks each pair of nodes has the rate --across, by rates of pairs
in the lab. The ranks are calibrated, a pipeline of four stages is planned, and then trained in all six orders with rank
0 first. Prints each order's median step, the planned order's over the median of all, and the predictions beside.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from statistics import median

from planner import NODES, SEQ_LEN, SEQUENCES, in_lab

from thinwire.cost import Machine
from thinwire.lab import LabSpec
from thinwire.planner.plan import plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inside", default="100mbit")
    parser.add_argument("--across", default="10mbit")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    pairs = [(a, b) for a, b in itertools.combinations(range(NODES), 2) if a % 2 != b % 2]
    spec = LabSpec(nodes=NODES, rate=args.inside, link=dict.fromkeys(pairs, args.across))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        in_lab(spec, ["calibrate", "--models", args.model, "--out", str(folder / "machine.json")])
        found = plan(
            args.model, Machine.read(folder / "machine.json"), tokens_per_step=NODES * SEQUENCES * SEQ_LEN,
            seq_len=SEQ_LEN, micro_batch=SEQUENCES, stages=NODES,
        )  # fmt: skip
        way, took = found.best.candidate, dict[tuple[int, ...], float]()
        print(f"planned: {way.flags} --order {' '.join(map(str, found.best.order))}", flush=True)
        for rest in itertools.permutations(range(1, NODES)):
            order = (0, *rest)
            run_dir = folder / "-".join(map(str, order))
            in_lab(spec, [
                "train", *way.flags.split(), "--pipeline.across", "stages", "--model", args.model, "--steps",
                str(args.steps), "--tokens-per-step", str(NODES * SEQUENCES * SEQ_LEN), "--dtype", "fp32",
                "--eval-sequences", "0", "--sample-tokens", "0", "--checkpoint-every", "0", "--run-dir", str(run_dir),
                "--order", *map(str, order),
            ])  # fmt: skip
            took[order] = json.loads((run_dir / "summary.json").read_text())["step_s"]
            predicted_s = found.pricing.staged(way, order).stages.step_s
            mark = "  planned" if order == found.best.order else ""
            print(f"{' '.join(map(str, order))}: {took[order]:.3f} s, predicted {predicted_s:.3f} s{mark}", flush=True)
    share = took[found.best.order] / median(took.values())
    print(f"the planned order takes {share:.3f} of the median order")


if __name__ == "__main__":
    main()
