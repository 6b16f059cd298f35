"""Checks everything that can be wrong before a process starts, and does once what every worker would do."""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.checkpoint import CheckpointError, latest
from thinwire.codecs import warm
from thinwire.collectives.topology import Topology
from thinwire.data import load_tokenizer
from thinwire.data.loader import count_sequences
from thinwire.errors import ConfigError, Problems, counted
from thinwire.hosts.offload.sampling import norms_bytes
from thinwire.launch.apart import apart
from thinwire.launch.check_layout import (
    capacity_rows,
    check_choice,
    check_cuts,
    check_expert_ranks,
    check_grid,
    check_mesh,
    check_order,
    check_pipeline,
    check_planned_late,
    check_sequence,
    check_tensor,
    sound_options,
)
from thinwire.launch.check_memory import check_late_residency, check_machine, check_residency
from thinwire.launch.check_parts import (
    check_data,
    check_documents,
    check_fault,
    check_minutes,
    check_model,
    check_teacher,
    device_of,
    fault_row,
    loss_of,
)
from thinwire.launch.check_resume import check_resume, saved_config
from thinwire.launch.machine import check_join, choose_dtype, threads_per_worker
from thinwire.launch.start import Start
from thinwire.methods.pipeline.inside import check_recovers, check_spread
from thinwire.methods.pipeline.options import Pipeline
from thinwire.models import build_skeleton
from thinwire.models.hf import check_hf, look_into
from thinwire.models.kept import is_pruned
from thinwire.models.moe import check_axes
from thinwire.optim import WHOLE
from thinwire.options import PIPELINE, check_unused, model_table
from thinwire.report.progress import Progress
from thinwire.report.trackers import check_trackers
from thinwire.run.config import AUTO, AXIS_FLAGS, TrainConfig, derive, range_errors, with_derived
from thinwire.run.effects import batch_row, late_rows, pipeline_rows, rate_row, sparse_rows, unused_rows
from thinwire.run.optimizer import name_of
from thinwire.run.run import Run, island_size, tokens_of
from thinwire.run.run_dir import RunDir
from thinwire.run.settings import to_toml
from thinwire.table import Row, sent_row
from thinwire.tiers import check_folder, checksum
from thinwire.training.clock import choose_model
from thinwire.training.planned import read_plan


def check(config: TrainConfig, problems: Problems) -> Run | None:
    """Build the run, and note every reason why it can't start. Writes nothing. None if the run can't be built."""
    wrong_numbers = list(range_errors(config))
    problems.messages += wrong_numbers
    run = problems.note(Run.of, config)
    if not wrong_numbers:
        with problems.collect():
            check_mesh(config, run)
            derive(config, config.num_shares)
            if run is not None:
                check_order(config, run)
        problems.note(check_grid, config, run)
    if run is not None:
        problems.note(check_minutes, config, run)
        for table in sorted(config.tables.keys() - run.used_tables):
            problems.note(check_unused, table, config.tables[table])
    problems.note(device_of, config, run)
    problems.note(check_trackers, config.track)
    with problems.collect():
        RunDir(config.run_dir).check(config.node, resume=config.resume, overwrite=config.overwrite)
    for text in config.inject:
        problems.note(check_fault, text, config)
    problems.note(check_join, config.join, config.node)
    if config.plan and config.node == 0:
        problems.note(read_plan, config)
    problems.note(check_data, config)
    with problems.collect():
        model = check_model(config)
        if run is not None and model is not None:
            problems.note(run.strategy.check_model, model)
        try:
            sizes = config.mesh_shape.sizes
        except ConfigError:
            problems.note(check_cuts, config, model)
            raise
        if model is not None:
            problems.note(check_axes, model, sizes, AXIS_FLAGS if config.mesh is None else None)
        if config.mesh_shape.tensor > 1:
            problems.note(check_tensor, config, model)
        if config.tensor == AUTO and not config.plans:
            near = f"--stages {AUTO} --tensor {AUTO}"
            problems.messages.append(f"--tensor {AUTO} is found beside the stages; nearest: {near}")
        if config.is_planned_late:
            problems.note(check_planned_late, config, model)
        elif run is not None and not wrong_numbers and config.chooses_stages:
            problems.note(check_choice, config, run, model)
        elif run is not None and not wrong_numbers:
            problems.note(check_pipeline, config, run, model)
            if run.pipeline is not None:
                problems.note(check_recovers, run.pipeline, run.strategy, sizes)
                problems.note(check_spread, run.pipeline, run.strategy, sizes)
        elif not wrong_numbers and not config.chooses_stages and (bare := with_sound_options(config)) is not None:
            problems.note(check_pipeline, config, bare, model)
        if run is not None and not wrong_numbers and model is not None:
            check_sequence(config, run, model)
            check_expert_ranks(config, run, model)
            capacity_rows(config)
        if run is not None and config.plans:
            check_late_residency(config, run)
        elif run is not None and not wrong_numbers and model is not None:
            check_residency(config, run, model)
            check_machine(config, run, model)
    problems.note(check_teacher, config, run)
    problems.note(check_documents, config)
    return run


def with_sound_options(config: TrainConfig) -> Run | None:
    """The run with a pipeline's sound options alone, so that faults in others hide none; None: more is wrong."""
    with suppress(ConfigError):
        return Run.of(replace(config, tables={**config.tables, PIPELINE: sound_options(config)}))
    return None


def model_rows(config: TrainConfig) -> list[Row]:
    """Rows about the source of a transformers model's weights."""
    if not config.model.startswith("hf:"):
        return []
    folder = Path(config.model.removeprefix("hf:")).expanduser()
    if look_into(folder):
        rows = [(f"--model {config.model}", "starts from the folder's weights", "")]
        if is_pruned(folder):
            rows.append((f"--model {config.model}", "trains the kept values alone", "the folder says which are kept"))
        num, known = load_tokenizer(config.tokenizer).vocab_size, check_hf(str(folder), 1, 1, {}).vocab_size
        if 2 * num < known:
            own = folder / "tokenizer.json"
            why = "its weights were trained with another tokenizer" + (
                f"; nearest: --tokenizer {own}" if own.exists() else ""
            )
            rows.append((f"--tokenizer {config.tokenizer}", f"uses {num:,} of the model's {known:,} words", why))
        return rows
    return [(f"--model {config.model}", "starts at random", "the folder holds no .safetensors file")]


def resolve(run: Run, asked: TrainConfig, threads: int) -> tuple[Run, list[Row]]:
    """The run with all derived values filled in, and the rows that say so."""
    batch = derive(asked, asked.num_shares)
    dtype: Any
    device: Any
    device, why_device = device_of(asked, run)
    dtype, reason = asked.dtype, "bf16 where the GPU has it, else fp32"
    if device == "cpu" or dtype != "auto":
        dtype, reason = choose_dtype(asked.dtype, threads)
    rows: list[Row] = [(f"--device {asked.device}", device, why_device)]
    rows += [(f"dtype {asked.dtype}", dtype, reason)]
    late = {
        f"--strategy {asked.strategy}": asked.is_planned_late, f"--stages {asked.stages}": asked.chooses_stages,
        "--experts.* auto": asked.chooses_experts,
    }  # fmt: skip
    if asked.dry_run and (what := next((what for what, is_late in late.items() if is_late), None)):
        rows.append((what, "chosen when all ranks have met", "they measure themselves and links"))
    elif not asked.is_planned_late and not asked.chooses_stages:
        rows += [batch_row(asked, batch, asked.num_shares), *pipeline_rows(run, batch)]
    rows += [rate_row(asked), *model_rows(asked), *unused_rows(run), *late_rows(run), *sparse_rows(run)]
    resolved = run.with_island_size()
    if run.has_islands:
        size = resolved.config.local_size or 1
        why = "" if asked.local_size else "every worker of a single machine, else every machine, is an island"
        islands = f"{asked.world_size // size} island(s) of {size} rank(s)"
        rows.append((f"--local-size {asked.local_size or 'by default'}", islands, why))
    if asked.optimizer is None:
        who = f"strategy {asked.strategy}"
        if asked.is_planned_late:
            # None of them is chosen yet.
            who = f"the strategies from which --strategy {asked.strategy} chooses"
        rows.append(("--optimizer", f"{run.config.optimizer}", f"the choice of {who}"))
    loss, batch_rows = by_batch(asked)
    if asked.plans:
        # The plan has other micro-batches.
        loss = asked.loss
    else:
        rows += batch_rows
    if asked.compile:
        rows.append(("--compile", "layers are compiled one by one", "weights arrive before the forward, not during it"))
    return replace(resolved, config=replace(with_derived(resolved.config), dtype=dtype, device=device, loss=loss)), rows


def of_other_rank(config: TrainConfig) -> TrainConfig:
    """The configuration of a rank that does not check it.

    It makes the choices that need no measurement, as rank 0 does.
    """
    kept, _ = keep_chosen(config)
    return kept if kept.plans else replace(kept, loss=loss_of(kept)[0])


def by_batch(config: TrainConfig) -> tuple[Any, list[Row]]:
    """The loss in effect, and rows about what follows from the size of a micro-batch. Raises ConfigError."""
    loss, why = loss_of(config)
    return loss, [*capacity_rows(config), (f"--loss {config.loss}", loss, why)]


def plan(config: TrainConfig, problems: Problems) -> tuple[Run, Start]:
    """Check the run, fill in what follows, and state it in rows. Writes nothing.

    Raises ConfigError with all problems.
    """
    threads, why = threads_per_worker(max(1, config.workers))
    rows: list[Row] = [("threads per worker", str(threads), why)]
    with problems.collect():
        config, kept = keep_chosen(config)
        rows += kept
    with problems.collect():
        config, chosen = with_model(config, threads)
        rows += chosen
    run = check(config, problems)
    problems.raise_any()
    assert run is not None
    run, resolved = resolve(run, config, threads)
    rows += resolved
    rows += check_resume(run.config, RunDir(config.run_dir))
    rows += [fault_row(text, run) for text in config.inject]
    # "auto" is what the GPUs will say.
    dtype = None if run.config.dtype == "auto" else run.config.dtype
    return run, Start(dtype, threads, rows, config.stop_at, config.inject, config.allow_resume_drift)


def keep_chosen(config: TrainConfig) -> tuple[TrainConfig, list[Row]]:
    """The configuration of a resumed run, with the steps and the model that were chosen when the run began."""
    if not config.resume or (config.minutes is None and config.model != "auto" and not config.plans):
        return config, []
    before = None
    # One that is damaged is told of later.
    with suppress(CheckpointError):
        saved = latest(RunDir(config.run_dir).checkpoints)
        before = saved_config(saved) if saved else None
    if before is None:
        return config, []
    rows: list[Row] = []
    why = "chosen when the run began, and kept"
    if config.minutes is not None:
        rows.append((f"--minutes {config.minutes:g}", counted(before.steps, "step"), why))
        config = replace(config, steps=before.steps, minutes=None)
    if config.model == "auto":
        rows.append(("--model auto", before.model, why))
        config = replace(config, model=before.model)
    if config.plans:
        planned = f"--strategy {config.strategy}" if config.is_planned_late else f"--stages {config.stages}"
        found = before.strategy if config.is_planned_late else f"{before.stages or 1}"
        rows.append((planned, found, why))
        kept = (
            "strategy",
            "stages",
            "tensor",
            "order",
            "plan",
            "micro_batch",
            "store",
            "activations",
            "slices",
            "tables",
        )
        config = replace(config, **{name: getattr(before, name) for name in kept})
    return config, rows


def with_model(config: TrainConfig, threads: int) -> tuple[TrainConfig, list[Row]]:
    """The configuration with the model that `--model auto` chooses. Raises ConfigError if it can't choose one."""
    if config.model != "auto":
        return config, []
    dtype, _ = choose_dtype(config.dtype, threads)
    model, why = choose_model(config, threads, dtype, load_tokenizer(config.tokenizer).vocab_size)
    return replace(config, model=model), [("--model auto", model, why)]


def prepare(config: TrainConfig, problems: Problems) -> tuple[Run, Start]:
    """Plan the run, claim the run directory, and do once what every worker would do: tokens and kernels.

    Raises ConfigError with all problems at once.
    """
    run, start = plan(config, problems)
    config = run.config
    train, _ = tokens_of(config, load_tokenizer(config.tokenizer)).split(config.seq_len)
    num_sequences = count_sequences(train, config.seq_len)
    check_returns(run, num_sequences)
    check_norms(run, num_sequences)
    logging.getLogger("numba").setLevel(logging.WARNING)
    # What the ranks choose later packs like one of theirs, or as borders do.
    codecs = (*run.codecs, *(Pipeline().codecs if config.is_planned_late else ()))

    def compile_kernels() -> None:
        warm(codecs)
        run.strategy.warm()

    if run.memory_bytes is not None:
        # What a compiler leaves in memory would count against the budget of a worker that prepares the run itself.
        apart(compile_kernels)
        apart(checksum.warm)
    compile_kernels()
    RunDir(config.run_dir).claim(config.node, to_toml(config), overwrite=config.overwrite)
    if run.residency is not None and run.residency.durable and not config.resume:
        # The steps of a run of the same name are of no use to this one.
        shutil.rmtree(run.residency.folder, ignore_errors=True)
    return run, start


def check_norms(run: Run, num_sequences: int) -> None:
    """Raise ConfigError if the disk can't hold the norms of all sequences that this run may see twice."""
    config, residency = run.config, run.residency
    taken = config.steps * (config.tokens_per_step or 0) // config.seq_len
    # Without a store they lie in memory.
    if residency is None or residency.sampled is None or residency.store is None:
        return
    if config.minutes is None and taken <= num_sequences:
        return
    skeleton = build_skeleton(
        config.model, load_tokenizer(config.tokenizer).vocab_size, config.seq_len,
        config.tables.get(model_table(config.model) or ""),
    )  # fmt: skip
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", config.workers))
    of_rank = norms_bytes(skeleton, config.seq_len, num_sequences, config.world_size)
    check_folder(residency.folder, num_here * of_rank)


def check_returns(run: Run, num_sequences: int) -> None:
    """Raise ConfigError for differences to a sequence's last message if no sequence comes twice."""
    config = run.config
    taken = config.steps * (config.tokens_per_step or 0) // config.seq_len
    if run.pipeline is not None and run.pipeline.delta and config.minutes is None and taken <= num_sequences:
        steps = num_sequences // max(1, taken // config.steps) + 1
        raise ConfigError(
            f"delta: no sequence returns in {config.steps} steps, which take {taken:,} of {num_sequences:,} sequences; "
            f"nearest: no delta, or --steps {steps}"
        )


def planned_rows(run: Run) -> list[Row]:
    """Rows that the ranks would add to the table, as far as they follow from the configuration."""
    config, shape = run.config, run.config.mesh_shape
    if config.is_planned_late or config.chooses_stages or config.chooses_experts:
        return []
    of_node = island_size(config) if run.has_islands else config.local_size or config.workers
    grid = Topology.stated(config.world_size, of_node)
    rows: list[Row] = [
        (f"strategy {config.strategy}", run.strategy.name, f"codecs: {', '.join(dict.fromkeys(map(str, run.codecs)))}"),
        ("mesh", str(shape), "axes from the outside in"),
        ("topology", str(grid), "stated" if config.local_size else "the workers of one machine share a node"),
    ]
    if run.chooses_attention:
        rows.append((f"--sequence.method {AUTO}", "chosen when all ranks have met", "they measure their links"))
    cuts = {name for name, size in shape.sizes.items() if size > 1} - {"data", "island"}
    if not cuts and name_of(config.optimizer or "") not in WHOLE:
        tokenizer, overrides = load_tokenizer(config.tokenizer), config.tables.get(model_table(config.model) or "")
        model = build_skeleton(config.model, tokenizer.vocab_size, config.seq_len, overrides)
        found = run.strategy.plan(model, grid, derive(config, config.num_shares).accumulation)
        plain = 8 * sum(param.numel() for param in model.parameters()) * (1 - 1 / config.world_size)
        rows.append(sent_row(sum(found.sent.values()), plain))
    return rows


def dry_run(config: TrainConfig, problems: Problems) -> int:
    """Print the start-up table and the resolved config.toml. Raises ConfigError with all problems at once."""
    run, start = plan(config, problems)
    rows = [*start.effects, *planned_rows(run)]
    Progress(config.steps, run.config.tokens_per_step or 0, 0.0).start_table(rows)
    print(f"\n{to_toml(run.config)}", end="")
    return 0
