"""Cut the batch, the model, or both: what a node's link carries in a step, over the tokens of the step.

    python benchmarks/crossing.py [--model 350m] [--out docs/crossing.svg]

Four nodes of one rank each. Batch: four replicas, `sdp4bit`. Model: four stages, borders of 8 and 4 bits. Both: two
stages of two replicas, `sdp4bit`. Bytes are those of `thinwire explain`, of the busiest node. Prints at which number of
tokens two ways carry the same, and draws the plot of docs/tasks/cut-the-model.md.
"""

from __future__ import annotations

import argparse
from importlib.resources import files
from itertools import combinations
from pathlib import Path

from thinwire.errors import Problems
from thinwire.planner.explain import explain
from thinwire.planner.options import read_explain
from thinwire.report.svg import Chart

ROOT = Path(__file__).parents[1]
SEQ_LEN, NODES, RATE = 256, 4, 1e6
# Sequences of a step from which on a tied weight, which crosses once, is no part of the busiest link.
ENOUGH = 32
# Tokens of a step that are drawn, from the first power of two to the last.
POWERS = range(10, 19)
# Name: number of stages, and the strategy of their replicas.
WAYS = {"batch": (1, "sdp4bit"), "model": (4, "zero"), "both": (2, "sdp4bit")}


def link_bytes(model: str, name: str, num_sequences: int) -> float:
    """Bytes on the busiest node's link in a step."""
    stages, strategy = WAYS[name]
    passes = str(num_sequences // (NODES // stages))
    flags = ["--model", model, "--seq-len", str(SEQ_LEN), "--micro-batch", "1", "--nodes", str(NODES), "--gflops", "40"]
    flags += ["--rate", f"{RATE:.0f}bit", "--strategy", strategy, "--micro-batches", passes]
    flags += ["--stages", str(stages), "--pipeline.plan", "1f1b"] if stages > 1 else []
    found = explain(read_explain(flags, Problems()), Problems())
    seconds = found.link_s(found.plans[strategy])
    assert seconds is not None
    return seconds * RATE / 8


def line_of(model: str, name: str) -> tuple[float, float]:
    """(bytes of a step, bytes of each token): what travels is a constant part and one that grows with the tokens."""
    few, many = (link_bytes(model, name, num) for num in (ENOUGH, 2 * ENOUGH))
    by_token = (many - few) / (ENOUGH * SEQ_LEN)
    return few - by_token * ENOUGH * SEQ_LEN, by_token


def main() -> None:
    """Print the crossings, and write the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="350m")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "crossing.svg")
    args = parser.parse_args()
    lines = {name: line_of(args.model, name) for name in WAYS}
    for name, (still, by_token) in lines.items():
        print(f"{name}: {still / 1e6:.1f} MB a step, and {by_token:.0f} bytes a token")
    for one, other in combinations(lines, 2):
        (still, by_token), (other_still, other_by_token) = lines[one], lines[other]
        same = (other_still - still) / (by_token - other_by_token)
        print(f"{one} and {other} carry the same at {same:,.0f} tokens")
    tokens = [2.0**power for power in POWERS]
    highest = 2.0 * lines["batch"][0]
    chart = Chart(
        "bytes on a link over tokens", (tokens[0], tokens[-1]), (0.0, highest / 1e6), "tokens of a step",
        f"MB on a node's link in a step, {args.model}", names=list(lines), log_x=True,
    )  # fmt: skip
    ends = []
    for number, (name, (still, by_token)) in enumerate(lines.items()):
        steps = [2.0 ** (power / 8) for power in range(8 * POWERS[0], 8 * POWERS[-1] + 1)]
        points = [(at, (still + by_token * at) / 1e6) for at in steps if still + by_token * at <= highest]
        chart.line(points, f"c{number}")
        ends.append((name, f"c{number}", points[-1]))
    chart.end_labels(ends)
    style = files("thinwire.report").joinpath("style.css").read_text(encoding="utf-8")
    head, rest = chart.svg().split(">", 1)
    args.out.write_text(f'{head} xmlns="http://www.w3.org/2000/svg"><style>{style}</style>{rest}\n')
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
