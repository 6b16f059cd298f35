"""`--strategy auto` and `--stages auto` of a run: the ranks measure themselves and their links, and rank 0 plans."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from thinwire.calibration import calibrate
from thinwire.calibration.reach import all_on_this_machine
from thinwire.calibration.work import LONGEST_S
from thinwire.collectives import Communicator
from thinwire.collectives.groups import forget_groups
from thinwire.collectives.store_gather import told_by_first
from thinwire.cost import Machine
from thinwire.cost.machine import LAYER, MIXTURE
from thinwire.data import load_tokenizer
from thinwire.device import choose, take
from thinwire.errors import ConfigError
from thinwire.methods.pipeline.options import Pipeline
from thinwire.models import Llama, build_skeleton
from thinwire.options import CHOSEN_FROM, EXPERTS, PIPELINE, model_table
from thinwire.planner.optimizers import ADAMW, COUNTED
from thinwire.planner.options import AUTO
from thinwire.planner.plan import ALL_AXES, plan
from thinwire.planner.settings import methods_of
from thinwire.planner.training_plan import TrainingPlan, with_tables
from thinwire.report.units import seconds_text
from thinwire.run.config import TrainConfig, derive
from thinwire.run.effects import batch_row, pipeline_rows, unused_rows
from thinwire.run.optimizer import name_of
from thinwire.run.place import ProcessPlace
from thinwire.run.run import Run
from thinwire.run.run_dir import RunDir
from thinwire.table import Row


def plan_run(run: Run, place: ProcessPlace, store: dist.Store, dtype: str | None, number: int) -> tuple[Run, list[Row]]:
    """The run with the fastest plan in place of `auto`, the same on all ranks; and, on rank 0, rows about it.

    `--strategy auto` leaves the strategy and the whole mesh free, `--stages auto` stages, micro-batch, order of ranks
    and, with `--tensor auto`, tensor ranks.
    Leaves machine.json, plan.json and plan-trace.json in the run directory. dtype: the compute type, if this rank knows
    it. number: of this worker on its machine. store: of all ranks, which have no process group yet. A collective over
    all ranks. Raises ConfigError on all of them if nothing fits.
    """
    config, timeout = run.config, timedelta(seconds=run.config.timeout)
    own = dist.PrefixStore("thinwire/calibrate", store)
    dist.init_process_group("gloo", store=own, rank=place.rank, world_size=place.world_size, timeout=timeout)
    start = time.perf_counter()
    dtype = told_by_first(dtype, "its dtype") or "fp32"
    tokenizer = load_tokenizer(config.tokenizer)
    table = config.tables.get(model_table(config.model) or "", {})
    model = build_skeleton(config.model, tokenizer.vocab_size, config.seq_len, table)
    assert isinstance(model, Llama)
    machine = measured(config, model, dtype, number)
    told: tuple[str, dict[str, Any], list[Row]] = "", {}, []
    if place.rank == 0:
        measured_s = time.perf_counter() - start
        try:
            found = planned(config, model, machine, dtype)
            planned_s = time.perf_counter() - start - measured_s
            spent = f"measured in {seconds_text(measured_s)}, planned in {seconds_text(planned_s)}"
            rows = [*found.rows(asked_by(config)), *rows_on(machine, spent, config), *optimizer_rows(config)]
            told = "", {**changes(config, found), "plan": str(RunDir(config.run_dir).plan)}, rows
            RunDir(config.run_dir).machine.write_text(machine.to_json())
            RunDir(config.run_dir).plan.write_text(found.to_json())
            RunDir(config.run_dir).trace.write_text(json.dumps(found.trace()) + "\n")
        except ConfigError as error:
            told = str(error), {}, []
    problem, values, rows = told_by_first(told, "the plan")
    forget_groups()
    dist.destroy_process_group()
    if problem:
        raise ConfigError(f"{asked_by(config)}: {problem}")
    made = Run.of(replace(config, **values))
    batch = derive(made.config, made.config.num_shares)
    if place.rank:
        # Nodes of the lab share a terminal, and the rows are long.
        return made, []
    rows += [row for row in unused_rows(made) if row[0].startswith(f"--{EXPERTS}.")]
    return made, [*rows, batch_row(made.config, batch, made.config.num_shares), *pipeline_rows(made, batch)]


def measured(config: TrainConfig, model: Llama, dtype: str, number: int) -> Machine:
    """The ranks and links of a run, measured with the work of its candidates. A collective over the default group."""

    def say(line: str) -> None:
        if dist.get_rank() == 0:
            print(f"{asked_by(config)}: {line}", flush=True)

    kind, _ = choose(config.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    methods = methods_of(strategies_of(config), config.tables).values()
    borders = Pipeline(**config.tables.get(PIPELINE, {})).codecs
    used = (*borders, *(codec for method in methods for codec in method.codecs))
    codecs = dict.fromkeys(map(str, used))
    comm = Communicator(local_size=config.local_size, timeout_s=config.timeout)
    machine = calibrate(
        comm, layers=[replace(model.config, num_hidden_layers=1)], dtypes=[dtype], codecs=codecs,
        device=take(kind, number), longest_s=LONGEST_S, say=say,
    )  # fmt: skip
    comm.close()
    return machine


def asked_by(config: TrainConfig) -> str:
    """The option that asks for a plan."""
    return f"--strategy {config.strategy}" if config.is_planned_late else f"--stages {config.stages}"


def strategies_of(config: TrainConfig) -> tuple[str, ...]:
    """Those to choose from. Islands have launchers of their own, before the ranks meet."""
    return CHOSEN_FROM if config.is_planned_late else (config.strategy,)


def planned(config: TrainConfig, model: Llama, machine: Machine, dtype: str) -> TrainingPlan:
    """The fastest plan, with everything that is stated kept. Raises ConfigError if nothing fits."""
    stages = config.stages if isinstance(config.stages, int) else None
    stated = ("tensor",) if config.tensor == AUTO else ()
    return plan(
        model, machine, tokens_per_step=derive(config, config.world_size).tokens_per_step, seq_len=config.seq_len,
        micro_batch=config.micro_batch, strategies=strategies_of(config), stages=stages, dtype=dtype,
        loss=config.loss, tables=config.tables, axes=ALL_AXES if config.is_planned_late else stated,
        optimizer=config.optimizer or ADAMW, has_settings=config.is_planned_late,
        has_groups=config.is_planned_late and config.local_size is None,
    )  # fmt: skip


def changes(config: TrainConfig, found: TrainingPlan) -> dict[str, Any]:
    """The changes of the configuration for a plan."""
    values = found.values
    if not found.best.candidate.group:
        values.pop("local_size")
    tables = dict(config.tables)
    if EXPERTS in tables and EXPERTS not in values:
        # Every rank has all of them, and nothing is left to be chosen.
        tables[EXPERTS] = {**tables[EXPERTS], "parallel": 1}
    return {"stages": None, "tensor": None, **with_tables(values, tables)}


def rows_on(machine: Machine, spent: str, config: TrainConfig) -> list[Row]:
    """Rows about the measurements."""
    network = machine.network
    rates = [8e-6 * network.rates[a][b] for a, b in network.pairs if network.ports((a, b))]
    links = f", links {min(rates):.3g} to {max(rates):.3g} Mbit/s" if rates else ""
    flops = next(rate for kind, rate in machine.rates.items() if kind.split()[0] in (LAYER, MIXTURE))
    where = "; loopback, no network: a plan for this machine alone" if all_on_this_machine(machine.num_ranks) else ""
    return [("measured for it", f"{flops / 1e9:.3g} GFLOP/s a rank{links}", f"{spent}{where}")]


def optimizer_rows(config: TrainConfig) -> list[Row]:
    """A row about what the plan does not know of the optimizer."""
    name = name_of(config.optimizer or ADAMW)
    if name == ADAMW:
        return []
    counted = "counted, but AdamW's where the model is cut" if name in COUNTED else "counted as AdamW's"
    return [(f"--optimizer {config.optimizer}", f"its state is {counted}", "the time of its step is not predicted")]
