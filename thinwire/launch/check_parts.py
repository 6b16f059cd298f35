"""Whether data, model, teacher, device, faults and addresses of a run are what they must be."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire import _compat
from thinwire.collectives import faults
from thinwire.collectives.topology import Topology
from thinwire.data import documents, load_tokenizer
from thinwire.device import choose as choose_device
from thinwire.errors import ConfigError, Problems
from thinwire.losses import head_of, loss_in_effect
from thinwire.methods.interface import Method
from thinwire.methods.pipeline.cut import SPREAD
from thinwire.models import build_model, build_skeleton
from thinwire.models.distil import check_alike
from thinwire.models.hf import check_hf
from thinwire.options import EXPERTS, PIPELINE, RESIDENCY, SEQUENCE, has_islands, model_table
from thinwire.run.config import AXIS_FLAGS, TrainConfig, derive
from thinwire.run.run import Run, island_size, tables_in_effect
from thinwire.run.run_dir import RunDir
from thinwire.table import Row


def device_of(config: TrainConfig, run: Run | None) -> tuple[str, str]:
    """The kind of device on which each worker of this machine trains, and the reason.

    Raises ConfigError if impossible.
    """
    if run is not None and run.strategy.cpu_only:
        if config.device == "cuda":
            raise ConfigError(f"--device cuda: strategy {config.strategy} runs on the CPU alone; nearest: --device cpu")
        return "cpu", f"strategy {config.strategy} runs on the CPU alone"
    return choose_device(config.device, int(os.environ.get("LOCAL_WORLD_SIZE", config.workers)))


def check_compiled(config: TrainConfig, strategy: Method, topology: Topology) -> None:
    """Raise ConfigError if torch.compile can't work: weights come and go with a layer, or there is no compiler."""
    if not config.compile:
        return
    if why := strategy.not_compiled(topology):
        raise ConfigError(f"--compile: {strategy.name} {why}; nearest that can: sdp4bit, zero or ddp")
    if config.mesh_shape.tensor > 1:
        raise ConfigError(f"--compile: --mesh {config.mesh} cuts matrices inside of a layer; leave one of the two out")
    if problem := _compat.compiler_problem(device_of(config, None)[0]):
        raise ConfigError(f"--compile: {problem}; leave it out")


def check_minutes(config: TrainConfig, run: Run) -> None:
    """Raise ConfigError for --minutes in a run whose first steps can't be repeated."""
    if config.minutes is None:
        return
    if why := run.strategy.not_measured:
        raise ConfigError(f"--minutes {config.minutes:g}: {config.strategy} {why}; nearest: --steps {config.steps}")


def check_fault(text: str, config: TrainConfig) -> None:
    """Raise ConfigError for a fault that can't be read, or that can't fire in this run."""
    fault, num_ranks, stages = faults.parse(text), config.world_size, config.mesh_shape.pipeline
    if fault.stage is not None and config.plans and not isinstance(config.stages, int):
        raise ConfigError(f"--inject {text!r}: the ranks choose the stages later; name a rank, or state --stages")
    if fault.stage is not None and fault.stage >= stages:
        raise ConfigError(f"--inject {text!r}: stages are numbered from 0 to {stages - 1}")
    if not has_islands(config.strategy):
        if fault.island is not None:
            raise ConfigError(f"--inject {text!r}: strategy {config.strategy} has no islands; name a rank")
    else:
        num_ranks = island_size(config)
        num_islands = config.world_size // num_ranks
        if fault.island is None:
            raise ConfigError(f"--inject {text!r}: name the island too, such as island=0; ranks count inside of it")
        if fault.island >= num_islands:
            raise ConfigError(f"--inject {text!r}: islands are numbered from 0 to {num_islands - 1}")
    if fault.rank is not None and fault.rank >= num_ranks:
        raise ConfigError(f"--inject {text!r}: ranks are numbered from 0 to {num_ranks - 1}")
    if fault.step is not None and fault.step > config.steps and config.minutes is None:
        raise ConfigError(f"--inject {text!r}: the run ends after step {config.steps}")


def fault_row(text: str, run: Run) -> Row:
    """A row that says what an injected fault will do."""
    kind = faults.parse(text).kind
    ends = kind == "kill" and run.config.mesh_shape.pipeline > 1 and not run.recovers and not run.has_islands
    more = ", and with it the run: --pipeline.recover average would go on without a stage" if ends else ""
    return f"--inject {text!r}", "armed", faults.KINDS[kind] + more


def check_data(config: TrainConfig) -> None:
    """Read the first document. A dataset on the network is read later, when it is tokenised."""
    if not config.data.startswith("hf:"):
        next(documents(config.data, config.text_field), None)


def check_model(config: TrainConfig) -> nn.Module | None:
    """The model without memory.

    Of a transformers model only the config is checked, unless its experts or sequences lie on several ranks, or a part
    of it on a disk.
    """
    problems = Problems()
    tokenizer = problems.note(load_tokenizer, config.tokenizer)
    if config.model.startswith("hf:") and config.seq_len > 0:
        vocab_size = 1 if tokenizer is None else tokenizer.vocab_size
        problems.note(check_hf, config.model.removeprefix("hf:"), vocab_size, config.seq_len, {})
    problems.raise_any()
    if tokenizer is None or config.seq_len <= 0:
        return None
    if config.model.startswith("hf:"):
        asks = EXPERTS in config.tables or {EXPERTS, SEQUENCE, RESIDENCY} & tables_in_effect(config)
        return build_skeleton(config.model, tokenizer.vocab_size, config.seq_len) if asks else None
    with torch.device("meta"):
        return build_model(
            config.model,
            tokenizer.vocab_size,
            config.seq_len,
            config.seed,
            config.tables.get(model_table(config.model) or ""),
        )


def check_teacher(config: TrainConfig, run: Run | None) -> None:
    """Raise ConfigError, with all reasons, for a teacher that can't run in every forward of the model."""
    problems = Problems()
    if config.teacher is None:
        if config.teacher_weight is not None:
            raise ConfigError("--teacher-weight without --teacher: name the teacher, as hf:DIR")
        return
    if not config.teacher.startswith("hf:"):
        hint, path = "", Path(config.teacher)
        if RunDir(path).config().is_file():
            hint = f"; nearest: thinwire export {path} --to hf DIR, and then --teacher hf:DIR"
        elif (path / "config.json").is_file():
            hint = f"; nearest: --teacher hf:{path}"
        raise ConfigError(f"--teacher {config.teacher}: must be hf:DIR, a folder of a mixture of experts{hint}")
    sizes = load_tokenizer(config.tokenizer).vocab_size, config.seq_len
    with problems.collect():
        teacher = build_skeleton(config.teacher, *sizes)
        with suppress(ConfigError):
            # Whatever is wrong with the model itself is told elsewhere.
            model = build_skeleton(config.model, *sizes, config.tables.get(model_table(config.model) or ""))
            problems.note(check_alike, model, teacher)
    others = config.mesh_shape.sizes.keys() - {"data"}
    near = [f"{flag} 1" for axis, flag in AXIS_FLAGS.items() if axis in others]
    if others and config.mesh is not None:
        near = [f"--mesh data={config.world_size}"]
    near += ["--stages 1"] * config.chooses_stages + ["--experts.parallel 1"] * config.chooses_experts
    if config.is_planned_late or "island" in others or (run is not None and run.has_islands):
        near.append("--strategy zero")
    if near:
        problems.messages.append(
            f"--teacher {config.teacher}: every rank runs all of the teacher, on the data axis alone, without islands "
            f"or auto; nearest: {' '.join(dict.fromkeys(near))}, or leave --teacher out"
        )
    if config.compile or config.memory is not None or config.store is not None:
        problems.messages.append("--teacher with --compile, --memory or --store: not supported; leave one of both out")
    problems.raise_any()


def check_documents(config: TrainConfig) -> None:
    """Raise ConfigError, with all reasons, for documents that can't be kept apart."""
    if not config.documents:
        return
    problems, shape = Problems(), config.mesh_shape
    tokenizer = problems.note(load_tokenizer, config.tokenizer)
    wrong = {
        f"--tokenizer {config.tokenizer}: has no token for the end of a document": tokenizer is not None
        and tokenizer.end_of_document is None,
        f"--model {config.model}: only thinwire's own models keep documents apart": config.model.startswith("hf:"),
        "stages: they pass tokens and targets on, and no documents": shape.pipeline > 1 or config.chooses_stages,
        "--teacher: it is asked about whole sequences": config.teacher is not None,
        "--compile: every batch has other documents": config.compile,
    }
    problems.messages += [f"--documents beside {what}; leave one of both out" for what, is_so in wrong.items() if is_so]
    problems.raise_any()


def loss_of(config: TrainConfig) -> tuple[Any, str]:
    """The loss, "plain" or "cut", and the reason.

    Raises ConfigError for a model whose logits are not its head's output.
    """
    vocab_size: Any = load_tokenizer(config.tokenizer).vocab_size
    vocab_size = config.tables.get(model_table(config.model) or "", {}).get("vocab_size", vocab_size)
    if config.model.startswith("hf:"):
        vocab_size = check_hf(config.model.removeprefix("hf:"), 1, 1, {}).vocab_size
    if PIPELINE in tables_in_effect(config) and config.tables.get(PIPELINE, {}).get("head") == SPREAD:
        if config.loss == "cut":
            raise ConfigError(
                f"--loss cut with head {SPREAD!r}: each stage has its part of the logits, and keeps it for gradients; "
                "nearest: --loss auto, or head 'last'"
            )
        return "plain", f"each stage has its part of the logits: head {SPREAD!r}"
    loss, why = loss_in_effect(config.loss, derive(config, config.num_shares).micro_batch * config.seq_len, vocab_size)
    if loss == "cut" and config.model.startswith("hf:"):
        try:
            head_of(build_skeleton(config.model, 1, 1))
        except ConfigError as error:
            if config.loss == "cut":
                raise
            return "plain", f"{why}, but {error}"
    return loss, why
