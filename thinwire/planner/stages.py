"""A step of a pipeline before it runs: what each stage holds and sends, and how long the step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import nn

from thinwire.cost import Cores, Network
from thinwire.losses import loss_in_effect
from thinwire.methods.interface import MethodPlan
from thinwire.methods.pipeline import Costs, PipelineTimeline, in_flight, simulate
from thinwire.methods.pipeline.across import STAGES as ACROSS_STAGES, ranks_across
from thinwire.methods.pipeline.balance import balanced
from thinwire.methods.pipeline.cut import SPREAD, stated_sizes
from thinwire.methods.pipeline.options import Pipeline, check_stages
from thinwire.methods.pipeline.plan import SCORE, TRAIN
from thinwire.methods.pipeline.recompute import AUTO, MORE_BYTES, mode_of
from thinwire.methods.pipeline.simulate import SpreadCosts
from thinwire.methods.pipeline.vocabulary import NUM_SCORES, Own
from thinwire.models import Llama
from thinwire.planner.forward import layer_and_ends

# Micro-batches of a simulated step at most: from there on each one more costs the same.
LONGEST = 64


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

    def cores(self, stages: int) -> Cores | None:
        """The cores shared by the ranks of one pipeline; None: each rank has its own."""
        return None

    def costs(self, found: Costs, options: Pipeline, stages: int) -> Costs:
        """The costs of chunks on these machines. found: costs on equal ranks on which packing takes no time."""
        return found


@dataclass(frozen=True)
class Stages:
    """A model over the stages of a pipeline, and one simulated step.

    Attributes:
        parts: of the model, by stage.
        sizes: number of layers of each chunk.
        timeline: of forwards, backwards and borders.
        held: for each stage, the most micro-batches of a chunk whose activations it keeps at once.
        tied_bytes: of a weight that the first and the last stage share.
        tensor: ranks over which matrices are cut.
    """

    options: Pipeline
    parts: tuple[nn.ModuleDict, ...]
    sizes: tuple[int, ...]
    timeline: PipelineTimeline
    held: tuple[int, ...]
    num_micro_batches: int
    more_s: float
    tied_bytes: int
    tensor: int = 1

    @property
    def step_s(self) -> float:
        """Seconds of forwards, backwards and borders."""
        return self.timeline.makespan_s + self.more_s

    @property
    def bubble(self) -> float:
        """The share of the step in which the stage that computes most is idle."""
        return min(self.timeline.idle_s) / self.timeline.makespan_s

    @property
    def link_bytes(self) -> dict[tuple[int, int], float]:
        """Bytes of a step, by (from stage, to stage)."""
        scale = self.num_micro_batches / min(self.num_micro_batches, LONGEST)
        found = {pair: num_bytes * scale for pair, num_bytes in self.timeline.link_bytes.items()}
        last = len(self.parts) - 1
        for pair in ((0, last), (last, 0)) if self.tied_bytes else ():
            found[pair] = found.get(pair, 0.0) + self.tied_bytes
        return found

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

    def memory_bytes(self, stage: int, plan: MethodPlan) -> float:
        """Bytes that one rank of a stage holds: by its method's plan, plus activations."""
        return sum(plan.memory.values()) + self.timeline.peak_bytes[stage]

    @property
    def heaviest(self) -> set[int]:
        """The stages that may need most memory: that with most parameters, and that with most activations."""
        numels = [sum(param.numel() for param in part.parameters()) for part in self.parts]
        return {numels.index(max(numels)), self.timeline.peak_bytes.index(max(self.timeline.peak_bytes))}


def stages_of(
    model: Llama, options: Pipeline, stages: int, num_micro_batches: int, batch: int, seq_len: int, grid: Grid,
    loss: str = "auto", tensor: int = 1, sequence: int = 1, attention_s: float = 0.0,
    memory_bytes: float | None = None,
) -> Stages:  # fmt: skip
    """Cut the model, and simulate a step of `num_micro_batches` with `batch` sequences each.

    loss: as for `thinwire train`. tensor: ranks over which the model's matrices are already cut, and which sum their
    results twice in each layer's forward and twice in its backward. sequence: ranks that share each sequence, and send
    for attention_s seconds in each layer's forward and backward together. memory_bytes: of a rank, by which recompute
    "auto" is decided; the result's options state what was chosen. Raises ConfigError for stages, layers and
    micro-batches that do not fit each other.
    """
    check_stages(options, stages, len(model.model.layers))
    parts, sizes = cut_parts(model, options, stages)
    even = costs_of(model, options, sizes, options.home(stages), batch, seq_len, grid.flops, loss, tensor, sequence)
    sum_s = grid.sum_s(4.0 * batch * seq_len * model.config.hidden_size / sequence, tensor)
    # Half of attention's messages go forward, and each pass stands for two sums.
    costs = grid.costs(with_sums(even, sizes, sum_s + attention_s / 4), options, stages)
    links, cores = grid.links(stages, options.across, tensor), grid.cores(stages)
    num = min(num_micro_batches, LONGEST)
    room = None if memory_bytes is None else [memory_bytes - held_bytes(part) for part in parts]
    plan = options.plan_of(stages, num, costs, links, room)
    if options.recompute == AUTO:
        options = replace(options, recompute=mode_of(plan))
    timeline = simulate(plan, costs, links, cores)
    more_s = 0.0
    if num < num_micro_batches:
        half = options.plan_of(stages, num // 2, costs, links)
        slope = (timeline.makespan_s - simulate(half, costs, links, cores).makespan_s) / (num - num // 2)
        more_s = slope * (num_micro_batches - num)
    head, embedding, home = model.lm_head.weight, model.model.embed_tokens.weight, options.home(stages)
    is_sent = head is embedding and home[-1] != home[0] and options.head != SPREAD
    # Of the tensor ranks each sends its rows, or its share of a whole weight.
    whole_bytes = model.config.vocab_size * head.shape[1] * head.element_size()
    tied_bytes = -(-whole_bytes // tensor) if is_sent else 0
    held = in_flight(plan)
    return Stages(options, tuple(parts), sizes, timeline, held, num_micro_batches, more_s, tied_bytes, tensor)


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


def cut_parts(model: Llama, options: Pipeline, stages: int) -> tuple[list[nn.ModuleDict], tuple[int, ...]]:
    """Each stage's part of the model, and each chunk's number of layers."""
    chunks, home, layers = options.num_chunks(stages), options.home(stages), list(model.model.layers)
    numels = [sum(param.numel() for param in layer.parameters()) for layer in layers]
    embedding, head = model.model.embed_tokens, model.lm_head
    operations = list(map(float, numels))
    if options.head != SPREAD:
        operations[0 if options.head == "first" else -1] += head.weight.numel()
    sizes = (
        stated_sizes(options.layers, chunks, len(layers))
        if options.layers
        else balanced(operations, list(map(float, numels)), chunks)
    )
    sizes = options.sizes(sizes)
    parts = [nn.ModuleDict() for _ in range(stages)]
    for chunk, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        parts[home[chunk]][f"layers{chunk}"] = nn.ModuleList(layers[end - size : end])
    if options.head == SPREAD:
        for rank, part in enumerate(parts):
            own = Own.of(rank, stages, len(head.weight))
            part["embedding"], part["head"] = (rows_of(own, each.weight) for each in (embedding, head))
            if head.weight is embedding.weight:
                part["head"] = part["embedding"]
        parts[home[-1]]["norm"] = model.model.norm
        return parts, sizes
    parts[home[0]]["embedding"] = embedding
    if home[-1] == home[0] or head.weight is not embedding.weight:
        parts[home[-1]]["head"] = head
    parts[home[-1]]["norm"] = model.model.norm
    return parts, sizes


def rows_of(own: Own, weight: torch.Tensor) -> nn.Module:
    """A module with a rank's rows of a weight."""
    return nn.Embedding(own.size, weight.shape[1], _weight=weight.new_empty(own.size, weight.shape[1]))


def costs_of(
    model: Llama, options: Pipeline, sizes: Sequence[int], home: Sequence[int], batch: int, seq_len: int, flops: float,
    loss: str = "auto", tensor: int = 1, sequence: int = 1,
) -> Costs:  # fmt: skip
    """The costs of one micro-batch. A backward has twice the operations of the forward."""
    loss, _ = loss_in_effect(loss, batch * seq_len, model.config.vocab_size)
    # A spread head has logits.
    loss = "plain" if options.head == SPREAD else loss
    layer, ends = layer_and_ends(model.config, seq_len, is_cut=loss == "cut", tensor=tensor)
    work = [num * layer.operations / sequence for num in sizes]
    kept = [num * layer.kept_bytes / sequence for num in sizes]
    if options.head != SPREAD:
        work[-1] += ends.operations / sequence
        kept[-1] += ends.kept_bytes / sequence
    num_elements = batch * seq_len * model.config.hidden_size // sequence
    seconds = tuple(batch * each / flops for each in work)
    crossing = options.crossing(0)
    forward, backward = (
        (float(-(-crossing.packet_bytes(way, num_elements, torch.float32) // tensor)),) * len(home)
        for way in ("forward", "backward")
    )
    held, inputs = tuple(batch * each for each in kept), (4.0 * num_elements,) * len(home)
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
    return replace(costs, spread=SpreadCosts(times, sizes_of, 4.0 * (num_tokens * rows + num_elements)))
