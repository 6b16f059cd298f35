"""A head on all stages against one on the last, simulated: whose links pay for it, and what a relay would gain.

    python benchmarks/vocabulary.py [--ranks 4] [--ranks 8] [--micro-batches 32]

A stage's layers take 50 ms forward and 100 ms backward, and so does the whole head; a hidden state has 0.52 MB in fp32.
Fitted plans with 1 barrier; links with a delay of 0.5 ms. Prints the seconds of a step, in fp32 and with borders of 8
bits forward and 4 back: with the head on the last stage; on all stages, as it runs, where the last stage's rank sends
each other rank its copy of the hidden state, and gets each one's part of its gradient; and the same with a relay. There
each of the other ranks gets one slice of the hidden state and passes it on at once; on the way back it adds up one
slice of all parts. So the last rank sends and gets one hidden state where it had p - 1, and the others send up to one
more each way.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from thinwire.cost import Network
from thinwire.methods.pipeline import Action, Costs, Pipeline, Plan, fitted, simulate
from thinwire.methods.pipeline.border import Crossing
from thinwire.methods.pipeline.plan import PlanMessage, Shared, straight
from thinwire.methods.pipeline.simulate import Beside, PipelineClock, PipelineTimeline, SpreadCosts
from thinwire.methods.pipeline.vocabulary import NUM_SCORES

FORWARD_S, TOKENS, FEATURES = 0.05, 508, 256
# Bytes per second of the links; 0: none.
RATES = {"20 Mbit/s": 2.5e6, "100 Mbit/s": 12.5e6, "1 Gbit/s": 125e6, "none": 0.0}
BORDERS = {"fp32": Crossing(), "8 and 4 bits": Crossing("int8/64:nearest", "int4/64")}


class Slice(NamedTuple):
    """Of a message that all ranks share, the part that one rank passes on. kind: "copy", "part" or "sum"."""

    kind: str
    owner: int
    source: int
    target: int
    micro_batch: int


@dataclass
class RelayClock(PipelineClock):
    """A step in which ranks pass slices of hidden states on, and add up slices of their gradient's parts."""

    arrived: Counter[tuple[str, int, int, int]] = field(default_factory=Counter)

    @property
    def last(self) -> int:
        """The rank of the last layer."""
        return self.home[-1]

    @property
    def others(self) -> list[int]:
        """All other ranks: each passes on one slice."""
        return [rank for rank in range(self.num_ranks) if rank != self.last]

    def _give(self, rank: int, action: Action, given: PlanMessage) -> None:
        is_shared = isinstance(given, Shared) and given.kind in ("hidden", "part") and given.target != given.source
        if not is_shared or not isinstance(given, Shared):
            super()._give(rank, action, given)
        elif given.kind == "hidden":
            self._send_slice(Slice("copy", given.target, rank, given.target, given.micro_batch))
        else:
            for owner in self.others:
                piece = Slice("part", owner, rank, owner, given.micro_batch)
                if owner == rank:
                    self._take(piece)
                else:
                    self._send_slice(piece)

    def _send_slice(self, piece: Slice) -> None:
        of_kind = self.costs.spread.sizes["hidden" if piece.kind == "copy" else "part"]
        self._send(piece.source, piece.target, of_kind / len(self.others), piece)  # type: ignore[arg-type]

    def _arrive(self, arrived: Sequence[PlanMessage | Beside]) -> None:
        super()._arrive(arrived)
        for what in arrived:
            if isinstance(what, Slice):
                self._take(what)

    def _take(self, piece: Slice) -> None:
        """Pass a slice on where it is this rank's, and note what is whole."""
        number, target, num = piece.micro_batch, piece.target, len(self.others)
        if piece.kind == "copy" and piece.owner == target:
            for other in self.others:
                if other != target:
                    self._send_slice(piece._replace(source=target, target=other))
        # A copy is whole where all slices are; a slice of parts is summed up where all ranks' are.
        group = piece.owner if piece.kind == "part" else 0
        self.arrived[piece.kind, number, target, group] += 1
        if self.arrived[piece.kind, number, target, group] < num:
            return
        if piece.kind == "copy":
            self.done.add(Shared("hidden", self.last, target, number))
        elif piece.kind == "part":
            self._send_slice(Slice("sum", piece.owner, target, self.last, number))
        else:
            self.done.update(Shared("part", rank, self.last, number) for rank in self.others)


def relayed(plan: Plan, costs: Costs, links: Network) -> PipelineTimeline:
    """The timeline of a plan with the relay."""
    places = [0] * plan.num_ranks

    def next_of_order(rank: int, clock: PipelineClock) -> Action | None:
        order, place = plan.orders[rank], places[rank]
        if place == len(order) or not clock.can_start(order[place]):
            return None
        places[rank] += 1
        return order[place]

    clock = RelayClock(plan.home, plan.paths, plan.num_ranks, costs, links, barriers=plan.barriers)
    return clock.run(next_of_order)


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


def on_all(num_ranks: int, num: int, crossing: Crossing, links: Network) -> tuple[float, float]:
    """Seconds of a step with a spread head, as it runs, and with the relay: the faster of two plans."""
    forward, backward = bytes_of(crossing)
    sizes = {"hidden": forward, "part": backward, "scores": 4.0 * NUM_SCORES * TOKENS}
    sizes |= {"rows": forward / num_ranks, "gradient": backward / num_ranks}
    passes = {"S": 2 * FORWARD_S / num_ranks, "T": FORWARD_S / num_ranks}

    def costs(share: float) -> Costs:
        found = sizes | {"hidden": share * forward, "part": share * backward}
        even = Costs.even(num_ranks, FORWARD_S, forward_bytes=forward, backward_bytes=backward)
        return replace(even, spread=SpreadCosts(passes, found))

    options, own = Pipeline(head="spread"), costs(1.0)
    made = [options.plan_of(num_ranks, num, costs(share), links) for share in (1.0, 1.0 / (num_ranks - 1))]
    return simulate(made[0], own, links).makespan_s, min(relayed(plan, own, links).makespan_s for plan in made)


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
                spread, relayed = on_all(num_ranks, args.micro_batches, crossing, links)
                shown.append(f"{borders}: last {last:.1f} s, spread {spread:.1f} s, with a relay {relayed:.1f} s")
            print(f"  {name}: {'; '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
