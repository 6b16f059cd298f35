"""Writes a plan to files: a configuration for training, its prediction, and the timeline of its step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from thinwire.calibration.process import USUAL
from thinwire.cost import Machine
from thinwire.cost.machine import LAYER, starved
from thinwire.data import load_tokenizer
from thinwire.errors import ConfigError, Problems
from thinwire.methods.pipeline.across import STAGES
from thinwire.models import Llama, build_skeleton
from thinwire.options import LAYOUT_TABLES, PIPELINE, check_unused, model_table
from thinwire.planner.choice import unpriced
from thinwire.planner.memory import Estimator, fitted, read_runs
from thinwire.planner.optimizers import ADAMW
from thinwire.planner.outputs import prediction_of, wrong_outputs
from thinwire.planner.plan import plan
from thinwire.planner.plan_options import PlanConfig, read_bytes
from thinwire.planner.prices import reserved_bytes
from thinwire.planner.sizes import wrong_experts, wrong_sizes
from thinwire.planner.table import PLAIN_WIDTH, columns_told, ranking, reasons_of
from thinwire.planner.training_plan import TrainingPlan, with_tables
from thinwire.run.config import TrainConfig, number_errors
from thinwire.run.optimizer import read_optimizer
from thinwire.run.places import residency_of, residency_options
from thinwire.run.settings import to_toml

SEQUENCES = 8
# A width that differs by this factor from the measured one computes at a rate of its own.
FAR = 1.5


def made_plan(config: PlanConfig, problems: Problems) -> TrainingPlan:
    """Plan as asked, and print the reasons. Raises ConfigError with all errors at once."""
    machine = problems.note(Machine.read, config.machine)
    problems.messages += (wrong_numbers := list(number_errors(asked_of(config))))
    options = {} if wrong_numbers else problems.note(residency_options, asked_of(config)) or {}
    own = dict(options)
    typed = own.pop("memory", None)
    memory = None if typed is None else problems.note(read_bytes, typed)
    if (typed is None or memory is not None) and not wrong_numbers:
        problems.note(residency_of, asked_of(config))
    on_gpu = machine is not None and machine.on_gpu
    learnt = None if config.runs is None else problems.note(learnt_memory, config.runs, on_gpu)
    stated = map(str.strip, config.strategies.split(","))
    names = None if config.strategies.strip() == "all" else tuple(filter(None, stated))
    problems.messages += unpriced(names) if names is not None else []
    for used in sorted(config.tables.keys() - LAYOUT_TABLES.keys()):
        problems.note(check_unused, used, config.tables[used])
    if config.optimizer is not None:
        problems.note(read_optimizer, config.optimizer)
    if config.verify < 0:
        problems.messages.append(f"--verify {config.verify}: must be at least 0; nearest: 0")
    if config.verify and config.trace is not None:
        problems.messages.append("--trace and --verify: the way that is written may be another; leave one of both out")
    if config.tables.get(PIPELINE, {}).get("across", STAGES) not in (STAGES, "auto"):
        problems.messages.append("--pipeline.across: a plan finds an order in which stages cross nodes; leave it out")
    problems.messages += wrong_outputs(config)
    if machine is not None and config.verify:
        problems.note(check_raced, machine, config)
    with problems.collect():
        table = config.tables.get(model_table(config.model) or "", {})
        words, seq_len = load_tokenizer(config.tokenizer).vocab_size, max(1, config.seq_len)
        llama = build_skeleton(config.model, words, seq_len, table)
        if isinstance(llama, Llama) and machine is not None:
            problems.messages += wrong_sizes(
                llama, machine.num_ranks, tokens_per_step=tokens_of(config, machine), seq_len=config.seq_len,
                micro_batch=config.micro_batch, stages=config.stages,
            )  # fmt: skip
            problems.messages += wrong_experts(llama, config.tables)
    problems.raise_any()
    assert machine is not None
    found = plan(
        config.model, machine, tokens_per_step=tokens_of(config, machine), seq_len=config.seq_len,
        micro_batch=config.micro_batch, memory_bytes=memory, strategies=names, stages=config.stages, dtype=config.dtype,
        loss=config.loss, vocab_size=load_tokenizer(config.tokenizer).vocab_size, tables=config.tables,
        estimator=None if learnt is None else learnt[0], optimizer=config.optimizer or ADAMW, residency=own,
        reserved_bytes=reserved_bytes(USUAL) if memory is not None and not machine.on_gpu else 0.0,
    )  # fmt: skip
    found = found.held_to(typed, machine.memory_bytes)
    if config.verify > len(found.search.fastest):
        raise ConfigError(
            f"--verify {config.verify}: {len(found.search.fastest)} ways were priced and fit; nearest: "
            f"{len(found.search.fastest)}"
        )
    show(found)
    for asked, effect, why in found.memory_rows(options):
        print(f"{asked}: {effect} ({why})")
    if learnt is not None:
        print(f"memory of a process: {learnt[1]}")
    return found


def check_raced(machine: Machine, config: PlanConfig) -> None:
    """Raise ConfigError for a race of ways for GPUs: the lab's ranks train on the CPU, where others are the fastest."""
    if machine.on_gpu:
        plain = f"thinwire plan --machine {config.machine}"
        raise ConfigError(
            f"--machine {config.machine}: was measured on {machine.device}, and ranks of the lab train on the CPU, "
            f"where another way may be the fastest; nearest: {plain} without --verify"
        )


def tokens_of(config: PlanConfig, machine: Machine) -> int:
    """Tokens of a step, as stated or by default."""
    default = SEQUENCES * config.seq_len * machine.num_ranks
    return default if config.tokens_per_step is None else config.tokens_per_step


def learnt_memory(folder: str, on_gpu: bool) -> tuple[Estimator, str]:
    """The estimator that recorded runs have taught, and why that one. Raises ConfigError."""
    return fitted(read_runs(folder, on_gpu=on_gpu))


def write_plan(config: PlanConfig, found: TrainingPlan) -> None:
    """Write the files of a plan, and say where they are."""
    out, prediction = Path(config.out), prediction_of(config)
    prediction.write_text(found.to_json())
    out.write_text(to_toml(training(config, found, prediction)))
    if config.trace is not None:
        Path(config.trace).write_text(json.dumps(found.trace()) + "\n")
    machine, command = found.machine, f"thinwire train {out}"
    nodes = machine.num_ranks // machine.local_size
    if nodes > 1 and len(set(machine.cores.hosts)) == 1:
        group = found.values["local_size"]
        command += (
            f" --nodes 1 --workers {machine.num_ranks} --local-size {group}, all on this machine. The links were "
            "measured between nodes that share it: if `thinwire lab` emulated them, train in it, since without "
            f"it they are fast: thinwire lab --nodes {nodes} and its other flags -- thinwire train {out}"
        )
    elif nodes > 1:
        command += f" --node NUMBER --join HOST:PORT, on each of the {nodes} machines"
    print(f"written to {out}, its prediction to {prediction}; train with: {command}")


def show(found: TrainingPlan) -> None:
    """Print the fastest ways, and why the first was chosen."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(PLAIN_WIDTH, console.width)
    console.print(ranking(found.search))
    for line in (columns_told(), *reasons_of(found.search)):
        console.print(line)
    for asked, effect, why in (*found.left_out, *found.order_rows()):
        console.print(f"{asked}: {effect} ({why})")
    console.print(f"Links and cores were measured {found.machine.measured_at or 'at an unknown time'}.")
    console.print(f"Objective: {found.objective.why}.")
    for line in (*not_measured(found.machine), *other_width(found)):
        console.print(line)


def not_measured(machine: Machine) -> Iterator[str]:
    """Sentences about what the machine's file does not hold, and a plan for it can't know."""
    if told := starved(machine.core_share):
        yield f"Warning: {told}. Measure again when they have ended, by `thinwire calibrate`."
    if machine.num_ranks == 1:
        yield (
            "The machine has one rank, so nothing is sent. To plan for several machines, run `thinwire calibrate` on "
            "all of them with --join, or in `thinwire lab`."
        )
    if not any(kind.startswith(f"{LAYER} ") and kind.endswith(" bf16") for kind in machine.rates):
        yield (
            "All of it is for fp32: bf16 was not measured, and may be several times as fast. To plan for it: `thinwire "
            "calibrate --dtypes fp32 bf16`, then `thinwire plan --dtype bf16`."
        )


def other_width(found: TrainingPlan) -> Iterator[str]:
    """A sentence about a model whose layers are wider or narrower than those that were measured."""
    kind, own = found.pricing.layer, found.pricing.model.config.hidden_size
    measured = int(kind.split()[1])
    if not 1 / FAR < measured / own < FAR:
        yield (
            f"No layer of {own:,} features was measured: the rate and the fixed cost of a pass are those of "
            f"{measured:,}. To plan with its own: `thinwire calibrate --models`, with a preset of that width."
        )


def training(config: PlanConfig, found: TrainingPlan, prediction: Path) -> TrainConfig:
    """The configuration that follows a plan."""
    values, machine = with_tables(found.values, config.tables), found.machine
    base = replace(
        asked_of(config), plan=str(prediction.absolute()), workers=machine.local_size,
        nodes=machine.num_ranks // machine.local_size,
    )  # fmt: skip
    # A plan for GPUs knows of their memory alone, to which no process is held.
    return replace(base, **{"memory": None, **values})


def asked_of(config: PlanConfig) -> TrainConfig:
    """The configuration as it is stated, before anything is chosen."""
    return TrainConfig(
        model=config.model, tokenizer=config.tokenizer, dtype=config.dtype, loss=config.loss, memory=config.memory,
        store=config.store, activations=config.activations, slices=config.slices, optimizer=config.optimizer,
        tables=config.tables,
    )  # fmt: skip
