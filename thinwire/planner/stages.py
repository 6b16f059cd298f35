"""A step of a pipeline before it runs: what each stage holds and sends, and how long the step takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from thinwire.cost import Cores, Machine, Network, Timeline, simulate
from thinwire.cost.graph import CARRY
from thinwire.cost.simulator import TRAINING
from thinwire.losses import loss_in_effect
from thinwire.methods.interface import MethodPlan
from thinwire.methods.pipeline import Costs, Plan, in_flight
from thinwire.methods.pipeline.across import STAGES as ACROSS_STAGES, ranks_across
from thinwire.methods.pipeline.costs import SpreadCosts, peak_bytes
from thinwire.methods.pipeline.cut import SPREAD
from thinwire.methods.pipeline.drawn import DrawnPlan, Joined, draw_step
from thinwire.methods.pipeline.options import Pipeline, check_stages
from thinwire.methods.pipeline.plan import SCORE, TRAIN
from thinwire.methods.pipeline.recompute import AUTO, MORE_BYTES
from thinwire.methods.pipeline.vocabulary import NUM_SCORES, Own, kept_elements
from thinwire.models import Llama
from thinwire.planner.forward import layer_and_ends
from thinwire.planner.parts import cut_parts
from thinwire.planner.steps import Steps, copies_of, tied_bytes


@dataclass(frozen=True)
class Grid:
    """Machines of local_size ranks each, and their rates.

    flops: floating-point operations per second of one rank. rate: bytes per second on one node's link, which its ranks
    share. local_rate: on one rank's link inside its node. None: the link takes no time. local_delay_s: of a
    message inside a node.
    """

    nodes: int
    local_size: int
    flops: float
    rate: float | None = None
    local_rate: float | None = None
    local_delay_s: float = 0.0

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.local_size

    def links(self, stages: int, across: str = ACROSS_STAGES, tensor: int = 1) -> Network:
        """The network between the ranks of one pipeline, while all pipelines send. across: see Pipeline."""
        ranks = ranks_across(across, self.num_ranks, stages, tensor)
        nodes = tuple(rank // self.local_size for rank in ranks[:, 0, 0].tolist())
        # Pipelines that lie on one node share its link.
        share = (self.rate or float("inf")) / self.pipelines_on_node(stages, across, tensor)
        local = self.local_rate or float("inf")
        rates = tuple(tuple(local if a == b else share for b in nodes) for a in nodes)
        return Network(nodes, rates, ((0.0,) * stages,) * stages)

    def pipelines_on_node(self, stages: int, across: str, tensor: int) -> int:
        """How many ranks of the first stage lie on one node."""
        first = ranks_across(across, self.num_ranks, stages, tensor)[0].flatten() // self.local_size
        return int((first == 0).sum())

    def sum_s(self, num_bytes: float, tensor: int) -> float:
        """Seconds of a sum over the ranks of a tensor axis, which are neighbours on one node, along a ring."""
        return 2 * (tensor - 1) * (num_bytes / tensor / (self.local_rate or float("inf")) + self.local_delay_s)

    def machine_of(self, stages: int, across: str, tensor: int) -> Machine:
        """The ranks that are simulated, stage by stage: here those of one pipeline, which share no cores."""
        links, ranks = self.links(stages, across, tensor), range(stages)
        return Machine(("",) * stages, links, Cores(tuple(ranks), (math.inf,) * stages), {CARRY: math.inf})

    def codecs(self, options: Pipeline) -> dict[str, str]:
        """The codecs of borders whose packing takes time, by "forward" and "backward"."""
        return {}

    def launched(self, found: Costs) -> Costs:
        """The costs of chunks with what a pass takes besides operations."""
        return found

    def costs(self, found: Costs, options: Pipeline, stages: int) -> Costs:
        """The costs by which an order is chosen: each rank's own, with packing. found: costs on usual ranks."""
        return found


@dataclass(frozen=True)
class Stages:
    """A model over the stages of a pipeline, and one simulated step.

    Attributes:
        parts: of the model, by stage.
        sizes: number of layers of each chunk.
        timeline: of the ranks of `Grid.machine_of`; of a long step its first part, see Steps.
        held: for each stage, the most micro-batches of a chunk whose activations it keeps at once.
        peak_bytes: for each stage, the most bytes of activations that it keeps at once.
        link_bytes: of a step, by (from stage, to stage).
        first_s: until the first rank's forwards and backwards are over.
        more_s: seconds of the micro-batches beyond those of the timeline.
        tied_bytes: of a weight that the first and the last stage share.
        tensor: ranks over which matrices are cut.
    """

    options: Pipeline
    parts: tuple[nn.ModuleDict, ...]
    sizes: tuple[int, ...]
    timeline: Timeline
    held: tuple[int, ...]
    peak_bytes: tuple[float, ...]
    link_bytes: dict[tuple[int, int], float]
    first_s: float
    more_s: float
    tied_bytes: int
    tensor: int = 1

    @property
    def step_s(self) -> float:
        """Seconds of a step of the ranks that are simulated, with everything that they send."""
        return self.timeline.makespan_s + self.more_s

    def idle_s(self, stage: int) -> float:
        """Seconds in which the first rank of a stage computes nothing."""
        first = stage * (self.timeline.graph.num_ranks // len(self.parts))
        return self.timeline.makespan_s - self.timeline.busy_s(first, TRAINING)

    @property
    def bubble(self) -> float:
        """The share of the step in which the stage that computes most is idle."""
        return min(map(self.idle_s, range(len(self.parts)))) / self.timeline.makespan_s

    def sent_bytes(self, stage: int) -> float:
        """Bytes that a rank of a stage sends to other stages in a step."""
        return sum(num_bytes for (source, _), num_bytes in self.link_bytes.items() if source == stage)

    def crossing_bytes(self, grid: Grid) -> float:
        """The most bytes that one node's ranks together send to stages on other nodes in a step."""
        stages, across = len(self.parts), self.options.across
        nodes = grid.links(stages, across, self.tensor).nodes
        sent = dict.fromkeys(nodes, 0.0)
        for (source, target), num_bytes in self.link_bytes.items():
            if nodes[source] != nodes[target]:
                sent[nodes[source]] += num_bytes
        return grid.pipelines_on_node(stages, across, self.tensor) * max(sent.values())

    def last_messages_bytes(self, stage: int) -> float:
        """The most bytes that a rank keeps of sequences' last messages, to which `delta` sends differences."""
        return self.options.last_messages_bytes(len(self.parts))[stage]

    def memory_bytes(self, stage: int, plan: MethodPlan) -> float:
        """Bytes that one rank of a stage holds: by its method's plan, plus activations and last messages."""
        return sum(plan.memory.values()) + self.peak_bytes[stage] + self.last_messages_bytes(stage)

    @property
    def heaviest(self) -> set[int]:
        """The stages that may need most memory: with most parameters, and with most of what they keep."""
        numels = [sum(param.numel() for param in part.parameters()) for part in self.parts]
        last = self.options.last_messages_bytes(len(self.parts))
        kept = [peak + more for peak, more in zip(self.peak_bytes, last, strict=True)]
        return {numels.index(max(numels)), kept.index(max(kept))}


def stages_of(
    model: Llama, options: Pipeline, stages: int, num_micro_batches: int, batch: int, seq_len: int, grid: Grid,
    loss: str = "auto", tensor: int = 1, sequence: int = 1, attention_s: float = 0.0,
    memory_bytes: float | None = None, join: Callable[[Sequence[nn.ModuleDict]], Joined] | None = None,
    dtype: str = "fp32",
) -> Stages:  # fmt: skip
    """Cut the model, and simulate a step of `num_micro_batches` with `batch` sequences each.

    loss: as for `thinwire train`. tensor: ranks over which the model's matrices are already cut, and which sum their
    results twice in each layer's forward and twice in its backward. sequence: ranks that share each sequence, and send
    for attention_s seconds in each layer's forward and backward together. memory_bytes: of a rank, by which recompute
    "auto" is decided; the result's options state what was chosen. join: what the replicas of each part send each other;
    None: nothing. dtype: the compute type. Raises ConfigError for stages, layers and micro-batches that do not fit each
    other.
    """
    check_stages(options, stages, len(model.model.layers), features=model.config.hidden_size)
    parts, sizes = cut_parts(model, options, stages, seq_len, tensor)
    home = options.home(stages)
    even = costs_of(model, options, sizes, home, batch, seq_len, grid.flops, loss, tensor, sequence, dtype)
    sum_s = grid.sum_s(4.0 * batch * seq_len * model.config.hidden_size / sequence, tensor)
    # Half of attention's messages go forward, and each pass stands for two sums.
    costs = grid.launched(with_sums(even, sizes, sum_s + attention_s / 4))
    costs = replace(costs, tied_bytes=tied_bytes(model, options, stages, tensor), copies=copies_of(parts, options))
    step = Steps(options, stages, grid.costs(costs, options, stages), grid.links(stages, options.across, tensor))
    if options.recompute == AUTO:
        held = map(sum, zip(map(held_bytes, parts), options.last_messages_bytes(stages), strict=True))
        room = None if memory_bytes is None else [memory_bytes - each for each in held]
        options = replace(options, recompute=step.mode(num_micro_batches, room))
        step = Steps(options, stages, step.costs, step.links)
    machine, joined = grid.machine_of(stages, options.across, tensor), None if join is None else join(parts)

    def simulated(plan: Plan) -> tuple[Timeline, DrawnPlan]:
        made = draw_step(plan, costs, machine.network.nodes, grid.codecs(options), joined)
        return simulate(made.graph, machine), made.pipeline

    # What a stage keeps follows from the order of all micro-batches.
    whole, short, half = step.whole(num_micro_batches), *step.shorter(num_micro_batches)
    (timeline, drawn), more_s = simulated(short), 0.0
    if half is not None:
        slope = timeline.makespan_s - simulated(half)[0].makespan_s
        more = num_micro_batches - short.num_micro_batches
        more_s = slope / (short.num_micro_batches - half.num_micro_batches) * more
    first_s = max(timeline.spans[task][1] for task in drawn.ends[0])
    link_bytes = drawn.link_bytes(num_micro_batches / short.num_micro_batches)
    return Stages(
        options, tuple(parts), sizes, timeline, in_flight(whole), peak_bytes(whole.orders, costs), link_bytes,
        first_s + more_s, more_s, int(costs.tied_bytes), tensor,
    )  # fmt: skip


def held_bytes(part: nn.Module) -> float:
    """Bytes of a stage's weights in fp32, and of what training adds to them on one replica."""
    return sum((param.element_size() + MORE_BYTES) * param.numel() for param in part.parameters())


def with_sums(costs: Costs, sizes: Sequence[int], sum_s: float) -> Costs:
    """The costs where each layer waits for so many seconds twice in its forward, and twice for its input's gradient."""
    forward_s, input_s = (
        tuple(own + 2 * num * sum_s for own, num in zip(seconds, sizes, strict=True))
        for seconds in (costs.forward_s, costs.input_s)
    )
    return replace(costs, forward_s=forward_s, input_s=input_s)


def costs_of(
    model: Llama, options: Pipeline, sizes: Sequence[int], home: Sequence[int], batch: int, seq_len: int, flops: float,
    loss: str = "auto", tensor: int = 1, sequence: int = 1, dtype: str = "fp32",
) -> Costs:  # fmt: skip
    """The costs of one micro-batch. A backward has twice the operations of the forward."""
    loss, _ = loss_in_effect(loss, batch * seq_len, model.config.vocab_size)
    # A spread head has logits.
    loss = "plain" if options.head == SPREAD else loss
    layer, ends = layer_and_ends(model.config, seq_len, is_cut=loss == "cut", tensor=tensor, dtype=dtype)
    work = [num * layer.operations / sequence for num in sizes]
    kept = [num * layer.kept(batch / sequence) for num in sizes]
    if options.head != SPREAD:
        work[-1] += ends.operations / sequence
        kept[-1] += ends.kept(batch / sequence)
    num_elements = batch * seq_len * model.config.hidden_size // sequence
    seconds = tuple(batch * each / flops for each in work)
    crossing = options.crossing(0)
    forward, backward = (
        (float(-(-crossing.packet_bytes(way, num_elements, torch.float32) // tensor)),) * len(home)
        for way in ("forward", "backward")
    )
    held, inputs = tuple(kept), (4.0 * num_elements,) * len(home)
    costs = Costs(seconds, seconds, seconds, forward, backward, held, inputs)
    if options.head != SPREAD:
        return costs
    num_ranks, num_tokens = max(home) + 1, batch * seq_len
    # The logits, and one more product in S or T, by which they differ.
    product_s, rows = batch * ends.operations / num_ranks / flops, Own.of(0, num_ranks, model.config.vocab_size).size
    sizes_of = {"hidden": forward[0], "part": backward[0], "scores": 4.0 * NUM_SCORES * num_tokens}
    sizes_of |= {"rows": forward[0] / num_ranks, "gradient": backward[0] / num_ranks}
    products = {SCORE: 2, TRAIN: 1} if options.barriers == 1 else {SCORE: 1, TRAIN: 2}
    times = {kind: num * product_s for kind, num in products.items()}
    kept_by_head = 4.0 * kept_elements(num_tokens, rows, model.config.hidden_size, options.barriers)
    return replace(costs, spread=SpreadCosts(times, sizes_of, kept_by_head))
