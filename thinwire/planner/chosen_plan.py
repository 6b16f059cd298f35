"""`--strategy auto` and `--stages auto` of a run: the ranks measure themselves and their links, and rank 0 plans."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.calibration import calibrate
from thinwire.calibration.process import process_memory
from thinwire.calibration.reach import all_on_this_machine
from thinwire.calibration.work import LONGEST_S
from thinwire.collectives import Communicator
from thinwire.collectives.groups import forget_groups
from thinwire.collectives.store_gather import of_all_ranks, told_by_first
from thinwire.cost import Machine
from thinwire.cost.machine import LAYER, MIXTURE
from thinwire.data import load_tokenizer
from thinwire.device import choose, take
from thinwire.errors import ConfigError
from thinwire.limits import data_bytes
from thinwire.methods.memory import LENT_RATE, read_byte_rate
from thinwire.methods.pipeline.options import Pipeline
from thinwire.models import Llama, build_skeleton
from thinwire.options import CHOSEN_FROM, EXPERTS, PIPELINE, model_table
from thinwire.planner.optimizers import ADAMW, COUNTED
from thinwire.planner.options import AUTO
from thinwire.planner.plan import plan
from thinwire.planner.prices import reserved_bytes
from thinwire.planner.settings import methods_of
from thinwire.planner.sizes import ALL_AXES
from thinwire.planner.training_plan import TrainingPlan, with_tables
from thinwire.report.units import seconds_text
from thinwire.run.config import TrainConfig, derive
from thinwire.run.effects import batch_row, pipeline_rows, unused_rows
from thinwire.run.optimizer import name_of
from thinwire.run.place import ProcessPlace
from thinwire.run.places import residency_options
from thinwire.run.run import Run
from thinwire.run.run_dir import RunDir
from thinwire.table import Row

# Bytes to which what a process holds is rounded up.
HELD_UNIT = 16_000_000


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
    budget = min(of_all_ranks(math.inf if run.memory_bytes is None else run.memory_bytes, "its budget"))
    machine = measured(run, model, dtype, number)
    held = max(of_all_ranks(data_bytes() if budget < math.inf else 0, "what it holds"))
    told: tuple[str, dict[str, Any], list[Row]] = "", {}, []
    if place.rank == 0:
        measured_s = time.perf_counter() - start
        print(f"{asked_by(config)}: planning ...", flush=True)
        try:
            if budget < math.inf:
                # What planning leaves in this process counts too; the first plan shows it.
                with suppress(ConfigError):
                    planned(config, model, machine, dtype, budget, names_least=False)
                held = max(held, data_bytes())
            found = planned(config, model, machine, dtype, budget, held)
            planned_s = time.perf_counter() - start - measured_s
            spent = f"measured in {seconds_text(measured_s)}, planned in {seconds_text(planned_s)}"
            rows = [*found.rows(asked_by(config)), *found.memory_rows(residency_options(config))]
            rows += [*documents_rows(config), *rows_on(machine, spent, config), *optimizer_rows(config)]
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
    # What the choice has no use for; of the rest it was said before.
    said = {asked for asked, _, _ in unused_rows(run)}
    rows += [row for row in unused_rows(made) if row[0] not in said]
    return made, [*rows, batch_row(made.config, batch, made.config.num_shares), *pipeline_rows(made, batch)]


def measured(run: Run, model: Llama, dtype: str, number: int) -> Machine:
    """The ranks and links of a run, measured with the work of its candidates. A collective over the default group."""
    config = run.config

    def say(line: str) -> None:
        if dist.get_rank() == 0:
            print(f"{asked_by(config)}: {line}", flush=True)

    kind, _ = choose(config.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    methods = methods_of(strategies_of(config), config.tables).values()
    borders = Pipeline(**config.tables.get(PIPELINE, {})).codecs
    used = (*borders, *(codec for method in methods for codec in method.codecs))
    codecs = dict.fromkeys(map(str, used))
    comm = Communicator(local_size=config.local_size, timeout_s=config.timeout)
    with disk_folder(run) as folder:
        machine = calibrate(
            comm, layers=[replace(model.config, num_hidden_layers=1)], dtypes=[dtype], codecs=codecs,
            device=take(kind, number), folder=folder, longest_s=LONGEST_S, say=say,
        )  # fmt: skip
    comm.close()
    if (lent := os.environ.get(LENT_RATE)) is not None and folder is not None:
        # Of each rank; those of a machine share its disk.
        most = read_byte_rate(lent) * max(map(machine.cores.hosts.count, machine.cores.hosts))
        machine = replace(machine, disk=(min(machine.disk[0], most), min(machine.disk[1], most)))
    return machine


@contextmanager
def disk_folder(run: Run) -> Iterator[Path | None]:
    """Yield the folder on the disk of a run, if a part may lie there. Removed again, if it was made for this."""
    if run.residency is None or not run.residency.needs_store:
        yield None
        return
    folder = run.residency.folder
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
    if is_new:
        # Another rank may have found something to put there.
        with suppress(OSError):
            folder.rmdir()


def asked_by(config: TrainConfig) -> str:
    """The option that asks for a plan."""
    return f"--strategy {config.strategy}" if config.is_planned_late else f"--stages {config.stages}"


def strategies_of(config: TrainConfig) -> tuple[str, ...]:
    """Those to choose from. Islands have launchers of their own, before the ranks meet."""
    return CHOSEN_FROM if config.is_planned_late else (config.strategy,)


def planned(
    config: TrainConfig, model: Llama, machine: Machine, dtype: str, budget: float = math.inf, held: float = 0.0,
    *, names_least: bool = True,
) -> TrainingPlan:  # fmt: skip
    """The fastest plan, with everything that is stated kept. Raises ConfigError if nothing fits.

    budget: most memory of each process, in bytes. held: what of it a process has before it has a model. names_least:
    see `plan`.
    """
    stages = config.stages if isinstance(config.stages, int) else None
    options = residency_options(config)
    typed, is_held = options.pop("memory", None), budget < math.inf
    # From start to start it differs by some megabytes, and a floor that is named must suffice.
    held = HELD_UNIT * math.ceil(held / HELD_UNIT)
    reserved = max(reserved_bytes(process_memory()), held - machine.base_bytes) if is_held else 0.0
    found = plan(
        model, machine, tokens_per_step=derive(config, config.world_size).tokens_per_step, seq_len=config.seq_len,
        micro_batch=config.micro_batch, memory_bytes=budget if is_held else None,
        strategies=strategies_of(config), stages=1 if config.documents else stages,
        tensor=config.tensor if isinstance(config.tensor, int) else None, dtype=dtype, loss=config.loss,
        tables=config.tables, axes=axes_of(config), optimizer=config.optimizer or ADAMW,
        has_settings=config.is_planned_late, residency=options, reserved_bytes=reserved, names_least=names_least,
        has_groups=config.is_planned_late and config.local_size is None,
    )  # fmt: skip
    return found.held_to(typed, min(budget, machine.memory_bytes))


def axes_of(config: TrainConfig) -> tuple[str, ...]:
    """The axes over which ranks may be divided, besides data and stages."""
    if config.is_planned_late:
        return ALL_AXES
    return ("tensor",) if config.tensor == AUTO else ()


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
    written, read = (1e-6 * rate for rate in machine.disk)
    disk = f", disk {written:.3g} MB/s written and {read:.3g} read" if math.isfinite(written + read) else ""
    return [("measured for it", f"{flops / 1e9:.3g} GFLOP/s a rank{links}{disk}", f"{spent}{where}")]


def documents_rows(config: TrainConfig) -> list[Row]:
    """A row about what is left out for documents."""
    why = "they pass tokens and targets on, and no documents"
    return [("--documents", "without stages", why)] if config.documents else []


def optimizer_rows(config: TrainConfig) -> list[Row]:
    """A row about what the plan does not know of the optimizer."""
    name = name_of(config.optimizer or ADAMW)
    if name == ADAMW:
        return []
    counted = "counted, but AdamW's where ranks share experts" if name in COUNTED else "counted as AdamW's"
    return [(f"--optimizer {config.optimizer}", f"its state is {counted}", "the time of its step is not predicted")]
