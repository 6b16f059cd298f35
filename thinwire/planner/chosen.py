"""What options that say auto take: the ranks measure themselves and their links, and rank 0 chooses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from thinwire.calibration.levels import EXPERTS as USUAL_EXPERTS, measure_links
from thinwire.calibration.work import pass_seconds
from thinwire.collectives import Communicator, Mailbox
from thinwire.collectives.store_gather import of_all_ranks, told_by_first
from thinwire.cost.links import ALL_TO_ALL, Links
from thinwire.data import load_tokenizer
from thinwire.device import Device
from thinwire.errors import ConfigError
from thinwire.hosts.pipeline.links import measured_links
from thinwire.hosts.ranks import along, neighbours
from thinwire.hosts.sequence.seams import attention_of
from thinwire.methods.pipeline.across import REPLICAS, STAGES
from thinwire.methods.sequence import choose_layout, network_of
from thinwire.models import Llama, build_model, build_skeleton
from thinwire.models.seam import mixture_of
from thinwire.options import EXPERTS, PIPELINE, model_table
from thinwire.planner.experts import choose_experts as experts_on
from thinwire.planner.forward import layer_and_ends
from thinwire.planner.options import AUTO, ExplainConfig
from thinwire.planner.stages import Grid
from thinwire.planner.stated_stages import step_of_stages
from thinwire.report.units import seconds_text
from thinwire.run.config import TrainConfig, derive
from thinwire.run.effects import unused_rows
from thinwire.run.run import Run
from thinwire.table import Row

# Of the model that is timed: its ends weigh about as much as in a stage.
TIMED_LAYERS = 2
# Of a mixture's.
TIMED_EXPERTS = 2


def choose_across(run: Run, device: Device, dtype: str | None) -> tuple[Run, list[Row]]:
    """The run whose stages cross nodes, or whose replicas do, by the fewer predicted seconds; and a row about it.

    dtype: the compute type, if this rank knows it. A collective over the default group. Unchanged where no node has
    several ranks, or all of them are on one.
    """
    config = run.config
    comm = Communicator(local_size=config.local_size, timeout_s=config.timeout)
    topology = comm.topology
    comm.close()
    if 1 in (topology.num_nodes, topology.local_size):
        return run, []
    if config.model.startswith("hf:"):
        why = "models of transformers have no predicted seconds; nearest: state --pipeline.across"
        return crossing(run, STAGES), [(f"across {AUTO}", STAGES, why)]
    grid = measured_for(f"--pipeline.across {AUTO}", config, device, dtype)
    found: dict[str, float] = {}
    if dist.get_rank() == 0:
        found = {across: predicted_s(crossing(run, across), grid) for across in (STAGES, REPLICAS)}
    found = told_by_first(found, "what crosses nodes")
    across = min(found, key=lambda each: found[each])
    shown = ", ".join(f"{seconds_text(seconds)} a step with {name}" for name, seconds in found.items())
    return crossing(run, across), [(f"across {AUTO}", f"{across} cross nodes", f"predicted: {shown}")]


def crossing(run: Run, across: str) -> Run:
    """The run with this option."""
    stated = run.config.tables.get(PIPELINE, {})
    return Run.of(replace(run.config, tables={**run.config.tables, PIPELINE: {**stated, "across": across}}))


def predicted_s(run: Run, grid: Grid) -> float:
    """Seconds of a step on machines like these, simulated, with what replicas send."""
    config, shape = run.config, run.config.mesh_shape
    batch = derive(config, config.num_shares)
    asked = ExplainConfig(
        strategy=config.strategy, nodes=grid.nodes, local_size=grid.local_size, model=config.model,
        tokenizer=config.tokenizer, mesh=str(shape), seq_len=config.seq_len, loss=config.loss,
        micro_batches=batch.accumulation, micro_batch=batch.micro_batch, tables=config.tables,
    )  # fmt: skip
    return step_of_stages(asked, run.strategy, grid)


def measured_for(asked: str, config: TrainConfig, device: Device, dtype: str | None) -> Grid:
    """What `measured` finds, after a line about it. A collective.

    asked: the option that needs it. dtype: the compute type, if this rank knows it.
    """
    if dist.get_rank() == 0:
        print(f"{asked}: measuring the ranks and their links ...", flush=True)
    model = skeleton_of(config)
    assert isinstance(model, Llama)
    return measured(config, model, device, told_by_first(dtype, "its dtype") or "fp32")


def skeleton_of(config: TrainConfig) -> nn.Module:
    """The run's model without memory."""
    table = config.tables.get(model_table(config.model) or "", {})
    return build_skeleton(config.model, load_tokenizer(config.tokenizer).vocab_size, config.seq_len, table)


def measured(config: TrainConfig, model: Llama, device: Device, dtype: str) -> Grid:
    """The rates of the slowest rank and the slowest links. A collective.

    All ranks compute at the same time, then all send at the same time, each to the next.
    """
    fields = {**config.tables.get(model_table(config.model) or "", {}), "num_hidden_layers": TIMED_LAYERS}
    timed = device.place(build_model(config.model, model.config.vocab_size, config.seq_len, overrides=fields))
    num_sequences = derive(config, config.num_shares).micro_batch
    comm = Communicator(local_size=config.local_size, timeout_s=config.timeout)
    comm.barrier()
    told = of_all_ranks(pass_seconds(timed, num_sequences, config.seq_len, dtype, device), "how fast it is")
    topology = comm.topology
    rate, local_rate, delay_s = slowest_links(comm, config.timeout)
    layer, ends = layer_and_ends(model.config, config.seq_len)
    # A backward computes twice what the forward does.
    operations = 3 * num_sequences * (TIMED_LAYERS * layer.operations + ends.operations)
    return Grid(topology.num_nodes, topology.local_size, operations / max(told), rate, local_rate, delay_s)


def slowest_links(comm: Communicator, timeout_s: float) -> tuple[float | None, float | None, float]:
    """Bytes per second of the slowest link between nodes and inside a node; None if there is none. Closes `comm`.

    Also the longest delay of a message inside a node, in seconds.
    """
    box = Mailbox(None, comm.topology, timeout_s=timeout_s)
    network, topology, size = measured_links(comm, box), comm.topology, comm.world_size
    box.close()
    comm.close()
    ring = [(rank, (rank + way) % size) for rank in range(size) for way in (1, -1) if size > 1]
    crossing = [network.rates[a][b] for a, b in ring if topology.node(a) != topology.node(b)]
    inside = [network.rates[a][b] for a, b in ring if topology.node(a) == topology.node(b)]
    delays = [network.delays_s[a][b] for a, b in ring if topology.node(a) == topology.node(b)]
    return min(crossing, default=None), min(inside, default=None), max(delays, default=0.0)


def choose_experts(run: Run, device: Device, dtype: str | None) -> tuple[Run, list[Row]]:
    """The run with what the options of experts that say auto take, the same on all ranks; and rows on it.

    dtype: the compute type, if this rank knows it. A collective over the default group. Raises ConfigError on all ranks
    if no number of ranks can train.
    """
    config = run.config
    if dist.get_rank() == 0:
        print(f"--experts.* {AUTO}: measuring the links ...", flush=True)
    comm = Communicator(local_size=config.local_size, timeout_s=config.timeout)
    model = skeleton_of(config)
    topology = comm.topology
    dtype = told_by_first(dtype, "its dtype") or "fp32"
    links = measure_links(comm, sizes_timed(model), device=device, dtype=dtype)
    comm.close()
    told: tuple[str, dict[str, Any], list[Row]] = "", {}, []
    if dist.get_rank() == 0:
        batch = derive(config, config.num_shares)
        asked = ExplainConfig(
            nodes=topology.num_nodes, local_size=topology.local_size, model=config.model, seq_len=config.seq_len,
            micro_batches=batch.accumulation, micro_batch=batch.micro_batch,
            dtype="bf16" if dtype == "bf16" else "fp32", tables=config.tables,
        )  # fmt: skip
        shape = None if config.finds_expert_ranks else config.mesh_shape
        try:
            told = "", *experts_on(run.strategy, model, asked, links, shape)
        except ConfigError as error:
            told = str(error), {}, []
    problem, values, rows = told_by_first(told, "the options of experts")
    if problem:
        raise ConfigError(f"--experts.* {AUTO}: {problem}")
    stated = config.tables[EXPERTS]
    taken = Run.of(replace(config, tables={**config.tables, EXPERTS: {**stated, **values}}))
    rows.append(measured_row(links))
    # Codecs and slices of one rank.
    rows += [row for row in unused_rows(taken) if row[0].startswith(f"--{EXPERTS}.")]
    # What is open stays so, for the steps and for a resume; the mesh does not.
    ranks = {"parallel": values["parallel"]} if "parallel" in values else {}
    kept = replace(config, tables={**config.tables, EXPERTS: {**stated, **ranks}})
    return replace(taken, config=replace(kept, optimizer=taken.config.optimizer), links=links), rows


def choose_attention(run: Run, dtype: str | None) -> tuple[Run, list[Row]]:
    """The run whose ranks of a sequence exchange what takes the fewest seconds on their links; and rows on it.

    dtype: the compute type, if this rank knows it. The same on all ranks; the configuration keeps auto. A collective
    over the default group.
    """
    config, asked = run.config, run.sequence
    assert asked is not None
    is_first = dist.get_rank() == 0
    comm = Communicator(local_size=config.local_size, timeout_s=config.timeout)
    topology, links = comm.topology, run.links
    if links is None:
        if is_first:
            print(f"--sequence.method {AUTO}: measuring the links ...", flush=True)
        links = measure_links(comm, operations=[ALL_TO_ALL])
    comm.close()
    told: tuple[str, str] = "", ""
    if is_first:
        tokens, itemsize = derive(config, config.num_shares).micro_batch * config.seq_len, 2 if dtype == "bf16" else 4
        axes = list(config.mesh_shape.sizes.items())
        inner = axes[[name for name, _ in axes].index("sequence") + 1 :]
        members = neighbours(0, asked.parallel, math.prod(size for _, size in inner))
        local_size = along(topology, members)
        network = network_of(links, asked.parallel, local_size)
        shape = attention_of(skeleton_of(config), tokens, itemsize)
        layout, why = choose_layout(asked, shape, local_size, network)
        told = str(layout), why
    method, why = told_by_first(told, "the attention of sequences")
    rows = [(f"--sequence.method {AUTO}", method, why), measured_row(links)]
    return replace(run, sequence=replace(asked, method=method), attention_links=links), rows


def measured_row(links: Links) -> Row:
    """A row about the links that were measured."""
    lines = [
        f"{level} {seconds_text(line.alpha_s)} + {8e-6 / line.beta_s:,.0f} Mbit/s"
        for (operation, level), line in links.lines.items()
        if operation == ALL_TO_ALL
    ]
    return "measured for it", ", ".join(lines) or "no links", "an all-to-all of all ranks at once, of each rank"


def sizes_timed(model: nn.Module) -> tuple[int, int, int]:
    """Of two of a mixture's experts, [experts, inner, hidden]; of usual ones where another model is refused later."""
    sizes = mixture_of(model)
    return USUAL_EXPERTS if sizes is None else (TIMED_EXPERTS, sizes.inner, sizes.width)
