"""How much faster a run is in the planned order of ranks than in others, on two racks of two nodes.

    python benchmarks/orders.py [--inside 100mbit] [--across 20mbit] [--stages 2] [--strategy zero-bf16] [--steps 8]
        [--out FILE]

Nodes 0 and 2 are one rack, 1 and 3 the other; between racks each pair of nodes has the rate --across, by rates of pairs
in the lab. The ranks are calibrated, two stages with two replicas each are planned for the demo model, 2 sequences of
256 tokens a rank, and then trained in all six orders with rank 0 first. Prints each order's median step, the planned
order's over the median of all, and the predictions beside; all of it is written to FILE, by default to
benchmarks/results/orders.json. Ends with exit code 1 if the planned order takes more than 0.7 of the median one. On two
idle cores that takes about 6 minutes: 45 s to calibrate, and 25 s to 60 s for an order.

With --stages 4 there are no replicas, and every order has a link between the racks that carries as much: by the
simulation the planned order then takes 0.84 of the median one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from planner import NODES, SEQ_LEN, SEQUENCES, in_lab

from thinwire.cost import Machine
from thinwire.lab import LabSpec
from thinwire.planner.plan import plan

# What the planned order may take of the median one.
MOST = 0.7
RESULTS = Path(__file__).parent / "results/orders.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inside", default="100mbit")
    parser.add_argument("--across", default="20mbit")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--strategy", default="zero-bf16")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    pairs = [(a, b) for a, b in itertools.combinations(range(NODES), 2) if a % 2 != b % 2]
    start = time.perf_counter()
    spec = LabSpec(nodes=NODES, rate=args.inside, link=dict.fromkeys(pairs, args.across))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        in_lab(spec, ["calibrate", "--models", "demo", "--out", str(folder / "machine.json")])
        found = plan(
            "demo", Machine.read(folder / "machine.json"), tokens_per_step=NODES * SEQUENCES * SEQ_LEN,
            seq_len=SEQ_LEN, micro_batch=SEQUENCES, stages=args.stages, strategies=[args.strategy], axes=(),
            has_groups=False,
        )  # fmt: skip
        way, took, orders = found.best.candidate, dict[tuple[int, ...], float](), list[dict[str, Any]]()
        print(f"planned: {way.flags} --order {' '.join(map(str, found.best.order))}", flush=True)
        for rest in itertools.permutations(range(1, NODES)):
            order = (0, *rest)
            run_dir = folder / "-".join(map(str, order))
            in_lab(spec, [
                "train", *way.flags.split(), "--pipeline.across", "stages", "--model", "demo", "--steps",
                str(args.steps), "--tokens-per-step", str(NODES * SEQUENCES * SEQ_LEN), "--dtype", "fp32",
                "--eval-sequences", "0", "--sample-tokens", "0", "--checkpoint-every", "0", "--run-dir", str(run_dir),
                "--order", *map(str, order),
            ])  # fmt: skip
            took[order] = json.loads((run_dir / "summary.json").read_text())["step_s"]
            predicted_s = found.pricing.staged(way, order).stages.step_s
            orders.append({"order": order, "measured_s": took[order], "predicted_s": predicted_s})
            mark = "  planned" if order == found.best.order else ""
            print(f"{' '.join(map(str, order))}: {took[order]:.3f} s, predicted {predicted_s:.3f} s{mark}", flush=True)
    share, load = took[found.best.order] / median(took.values()), os.getloadavg()[0]
    network = {"inside": args.inside, "across": args.across}
    told = {**network, "flags": way.flags, "planned": found.best.order, "orders": orders, "share": share, "load": load}
    args.out.write_text(json.dumps(told, indent=1) + "\n")
    print(f"the planned order takes {share:.3f} of the median order; asked for: at most {MOST}")
    print(f"took {time.perf_counter() - start:.0f} s; load of the machine at the end: {load:.1f}; written: {args.out}")
    return 1 if share > MOST else 0


if __name__ == "__main__":
    sys.exit(main())
