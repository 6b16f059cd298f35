"""The plans by which a rank runs steps: for equal stages and links at first, then for measured ones."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from thinwire.collectives import Communicator, Mailbox
from thinwire.cost import Network
from thinwire.hosts.pipeline.links import measured_links
from thinwire.hosts.pipeline.measured import measured
from thinwire.hosts.pipeline.memory import Activations, kept_by
from thinwire.hosts.pipeline.part import MicroBatch, StagePart
from thinwire.hosts.pipeline.recovery import EndCopies, keeper_of
from thinwire.hosts.pipeline.runner import Runner, counts_forwards
from thinwire.methods.pipeline import Action, Costs, Plan, in_flight, simulate
from thinwire.methods.pipeline.costs import peak_bytes
from thinwire.methods.pipeline.drift import drifted, plan_from, plan_text
from thinwire.methods.pipeline.recompute import AUTO, MODES, MORE_BYTES, mode_of
from thinwire.methods.pipeline.simulate import PipelineTimeline
from thinwire.table import Row

# The first step warms up; this one is measured.
MEASURED_STEP = 2
# Links are measured again each time that so many steps have gone by.
MEASURED_EVERY = 50


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a step's forwards and backwards, simulated from measurements.

    Attributes:
        bubbles: for each rank, the share of the step in which it computes nothing.
        in_flight: for each rank, the most micro-batches whose activations it keeps at once.
        timeline: of that step.
        mode: in which it recomputes, where that is "auto".
    """

    bubbles: tuple[float, ...]
    in_flight: tuple[int, ...]
    timeline: PipelineTimeline
    mode: str = ""

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.timeline.makespan_s

    @property
    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each rank, in order."""
        return self.timeline.orders

    def __str__(self) -> str:
        shown = ", ".join(f"{part:.0%}" for part in self.bubbles)
        links = ", ".join(f"{a} to {b} {num / 1e6:.3f} MB" for (a, b), num in sorted(self.timeline.link_bytes.items()))
        held = ", ".join(map(str, self.in_flight))
        return (
            f"{self.step_s:.3g} s a step; stages, first to last, are idle for {shown} of it, and hold at most {held} "
            f"micro-batches at once; they send {links}" + (f"; recompute {AUTO}: {self.mode}" if self.mode else "")
        )


class StagePlans:
    """A runner for each number of micro-batches that a step has had, with its plan.

    Args:
        part: this rank's part of the model.
        comm: over the pipeline.
        everyone: over all ranks.
        alike: over the ranks that have the same micro-batches as this one and run actions together, if any.
        mailbox: of the steps.
        probe: another one, for messages that measure links.
        running: makes the runner of a plan.
        ends: copies that travel between steps, if lost stages are recovered.

    Attributes:
        activations: where recompute is "auto": what they take and may take, known with the first micro-batches.
        on_recompute: rows on it.
        prediction: of the steps under the plan in effect; None: nothing was measured yet.
        network: the links that plans are made for.
        why_planned: the link whose drift had them made anew, in words; empty: none has drifted.
    """

    def __init__(
        self, part: StagePart, comm: Communicator, everyone: Communicator, alike: Communicator | None,
        mailbox: Mailbox, probe: Mailbox, running: Callable[[Plan], Runner], ends: EndCopies | None,
    ) -> None:  # fmt: skip
        self.part, self.comm, self.everyone, self.alike, self.ends = part, comm, everyone, alike, ends
        self._mailbox, self._probe, self._running = mailbox, probe, running
        self._runners: dict[int, Runner] = {}
        # For which numbers of micro-batches they were made for measurements.
        self._fitted: set[int] = set()
        self.activations: Activations | None = None
        self.on_recompute: list[Row] = []
        if part.options.recompute == AUTO:
            how = "by free memory and simulated seconds"
            self.on_recompute = [(f"recompute {AUTO}", "decided with the first micro-batches", how)]
        self.prediction: Prediction | None = None
        self.network: Network | None = None
        self.why_planned = ""

    def runner(self, num: int) -> Runner:
        """The runner of steps of `num` micro-batches. Raises ConfigError for a number that the plan does not take."""
        if num not in self._runners:
            self._runners[num] = self._running(self.plan_of(num))
        return self._runners[num]

    def plan_of(self, num: int, costs: Costs | None = None, network: Network | None = None) -> Plan:
        """A plan for steps of `num` micro-batches; without measurements for equal stages and links."""
        memory = None
        if (known := self.activations) is not None:
            costs, memory = known.costs(costs or Costs.even(self.part.made.num_chunks)), known.free
        return self.part.options.plan_of(self.comm.world_size, num, costs, network, memory)

    def forget(self) -> None:
        """Begin anew, with plans for equal stages and links."""
        self._runners.clear()
        self._fitted.clear()

    def settle(self, batches: Sequence[MicroBatch]) -> list[Row]:
        """See PipelineStage.settle."""
        if self.part.options.recompute != AUTO or self.activations is not None:
            return []
        made, comm = self.part.made, self.comm
        largest = max(batches, key=lambda batch: batch[0].numel())
        own = {}
        for number, chunk in self.part.chunks.items():
            starts = number == 0 and made.vocabulary is None
            arrives = None if starts else made.shape(0, largest)
            # Ranks of a tensor axis add up what they compute.
            own[number] = kept_by(chunk, arrives, made.dtype, largest, is_alone=self.alike is None)
        num_trained = sum(param.numel() for param in made.model.parameters() if param.requires_grad)
        last_messages = self.part.options.last_messages_bytes(comm.world_size)[comm.rank]
        found = Activations.of_all(
            own, made.num_chunks, comm.rank, comm.world_size, MORE_BYTES * num_trained + last_messages,
            self.part.device, self.everyone, not counts_forwards(self.part.chunks.values()),
        )  # fmt: skip
        if self.part.vocabulary is not None:
            found = replace(found, spread=self.part.vocabulary.kept_bytes(largest, self.part.options.barriers))
        self.activations = found
        self.on_recompute = [self._row_on_mode(self.runner(len(batches)).plan, found)]
        return self.on_recompute

    def _row_on_mode(self, plan: Plan, found: Activations) -> Row:
        """A row on the mode in which a plan recomputes, where that is "auto"."""
        peaks = peak_bytes(plan.orders, found.costs(Costs.even(len(plan.home))))
        shown = ", ".join(f"{peak / 1e6:.1f} of {free / 1e6:.0f}" for peak, free in zip(peaks, found.free, strict=True))
        mode, why = mode_of(plan), f"activations of the stages, in MB of what is free for them: {shown}"
        if any(peak > free for peak, free in zip(peaks, found.free, strict=True)):
            why += "; no choice fits: a smaller micro-batch, in_flight or chunk does"
        elif found.free[0] == torch.inf:
            why = "a layer keeps statistics of each forward, and must not run twice"
        return f"recompute {AUTO}", f"{mode}: {MODES[mode]}", why

    def is_measured(self, num_steps: int) -> bool:
        """Whether the last of so many steps is measured."""
        since = num_steps - MEASURED_STEP
        return not since or (self.part.options.is_measured and since > 0 and since % MEASURED_EVERY == 0)

    def fit(self, runner: Runner, batches: Sequence[MicroBatch]) -> None:
        """Measure, and plan the steps that follow, unless links are as they were when the plan was made.

        All ranks compute the same plan from the same numbers.
        """
        costs = self._with_ends(self._of_first(measured(runner, self.comm, batches)))
        if self.ends is not None:
            # Copies that are still on their way would slow the probes.
            self.ends.take()
        skips = bool(self.part.options.skip)
        network: Network = self._of_first(measured_links(self.comm, self._probe, all_pairs=skips))
        num, plan = len(batches), runner.plan
        if self.network is not None:
            self.why_planned = drifted(self.network, network, simulate(plan, costs, self.network))
        if self.network is None or self.why_planned:
            self.network, self._fitted = network, set()
        if num not in self._fitted:
            plan = self.plan_of(num, costs, self.network)
            self._runners[num] = self._running(plan)
            self._fitted.add(num)
        elif self.prediction is not None:
            return
        found, mode = simulate(plan, costs, self.network), ""
        if self.activations is not None:
            # The times of a step may make another mode the fastest.
            self.on_recompute, mode = [self._row_on_mode(plan, self.activations)], mode_of(plan)
        bubbles = tuple(idle / max(found.makespan_s, 1e-12) for idle in found.idle_s)
        self.prediction = Prediction(bubbles, in_flight(plan), found, mode)

    def _with_ends(self, costs: Costs) -> Costs:
        """The costs with the messages that belong to no micro-batch: tied weights, and copies for a recovery."""
        holdings, share, num_ranks = self.part.holdings, self._mailbox.share_bytes, self.comm.world_size
        ends = [holdings.num_bytes(names) for names in holdings.ends] if self.ends is not None else []
        copies = tuple((rank, keeper_of(rank, num_ranks), share(num)) for rank, num in enumerate(ends) if num)
        return replace(costs, tied_bytes=share(holdings.num_bytes(holdings.tied)), copies=copies)

    @property
    def _asked(self) -> dict[str, Any]:
        """The options by which a plan with paths of its own is made."""
        options = self.part.options
        return {"skip": options.skip, "in_flight": options.in_flight, "recompute": options.recompute}

    def kept(self) -> dict[str, Any]:
        """The plans on which bits depend, since they were made for measured links, as JSON can hold them."""
        if not self.part.options.skip or self.network is None:
            return {}
        plans = {num: self._runners[num].plan for num in sorted(self._fitted)}
        return {str(num): plan_text(plan, self.network) | {"asked": self._asked} for num, plan in plans.items()}

    def take(self, kept: Mapping[str, Any]) -> str:
        """Go on with the plans of `kept`; what became of them, in words; empty: there were none."""
        if not kept:
            return ""
        if not self.part.options.skip:
            return "dropped: no stage is skipped now"
        plans = {int(num): plan_from(text) for num, text in kept.items()}
        if any(plan.home != self.part.made.home for plan, _ in plans.values()):
            return "dropped: they are of other stages"
        # A checkpoint of an older version does not say what was asked for.
        before, now = next(iter(kept.values())).get("asked", self._asked), self._asked
        if changed := [name for name in now if before[name] != now[name]]:
            was, has = (", ".join(f"{name} {asked[name]}" for name in changed) for asked in (before, now))
            return f"dropped: they were made for {was}, and this run has {has}"
        for num, (plan, network) in plans.items():
            self._runners[num], self.network = self._running(plan), network
        self._fitted = set(plans)
        return f"taken over for steps of {' or '.join(map(str, plans))} micro-batches, until links drift"

    def _of_first(self, value: Any) -> Any:
        """The first rank's result, for all on its tensor axis, which must run actions in one order.

        If stages are skipped, for all replicas too, so that a checkpoint has one plan.
        """
        alike = self.everyone if self.part.options.skip else self.alike
        if alike is None:
            return value
        packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        (size, *_) = alike.wait(alike.all_gather_exact(torch.tensor([packed.numel()]))).flatten().tolist()
        whole = packed if alike.rank == 0 else packed.new_empty(size)
        alike.wait(alike.broadcast_(whole))
        return pickle.loads(whole.numpy().tobytes())
