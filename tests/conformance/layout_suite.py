"""What every layout of a mixture promises beside any strategy; inherit `LayoutSuite`, a row is enough for a new layout.

All rows share one start of the processes. One begins where another one was saved, so that each resumes from a layout
that is not its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from tests.checkpoint.replicas import atoms
from tests.workers import Rows, run_rows
from thinwire import ExpertParallel, SequenceParallel
from thinwire._compat import default_store
from thinwire.checkpoint import Disk, Keep, Saver, Source
from thinwire.collectives.all_to_all import NUMBER_BYTES
from thinwire.losses import cut_loss
from thinwire.methods.interface import Method
from thinwire.models.capacity import RowLoad
from thinwire.models.moe import MoEConfig, MoELlama
from thinwire.pruning.masks import mask_of

# A row that begins anew trains for STEPS and is saved after SAVED of them, from where the others train for FEW.
STEPS, SAVED, FEW, ODD_STEP = 10, 2, 3, 3
SEQUENCES, MICRO_BATCHES, LENGTH, IGNORED = 4, 2, 16, -100
CONFIG = MoEConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=LENGTH, router_aux_loss_coef=0.01,
)  # fmt: skip
TIGHT = replace(CONFIG, capacity_factor=0.6, batch_priority=True, router_aux_loss_coef=0.0)


@dataclass(frozen=True)
class Row:
    """A layout: a mesh of 4 ranks, in nodes of 2, with the options of its axes; and the strategy beside it.

    optimizer: of MAKERS. begins: with fresh weights; others with those of the last exact row before that has the same
    optimizer, sizes and zeros. drift: the largest relative difference of a norm from those of one process; 0: exact,
    1e-4. has_logits: whether the loss is taken without them. recomputes: layers keep their inputs alone. is_pruned:
    half of the weights of attention and experts are zero, and the others train.
    """

    mesh: dict[str, int]
    strategy: Method = field(default_factory=thinwire.Zero)
    experts: ExpertParallel | None = None
    sequence: SequenceParallel | None = None
    optimizer: str = "sgd"
    begins: bool = False
    drift: float = 0.0
    has_logits: bool = True
    config: MoEConfig = CONFIG
    recomputes: bool = False
    is_pruned: bool = False

    @property
    def kind(self) -> tuple[str, MoEConfig, bool]:
        """What rows share that follow the same reference."""
        return self.optimizer, self.config, self.is_pruned


# The ranks follow from the mesh; the slices come first.
spread = functools.partial(ExpertParallel, 1)
PAIRS, FOUR = {"data": 2, "expert": 2}, {"data": 1, "expert": 4}
SHARED, RING = {"data": 2, "sequence": 2}, {"data": 1, "sequence": 4}
ROWS: dict[str, Row] = {
    "pairs": Row(PAIRS, begins=True),
    "replicas": Row({"data": 4}),
    "quarters": Row(FOUR, experts=spread(4)),
    "slices-move": Row(FOUR, experts=spread(2, move="slices", once_a_step=True)),
    "experts-move": Row(PAIRS, experts=spread(2, move="experts", once_a_step=True)),
    "once": Row(FOUR, experts=spread(2, route="once")),
    "2dh-chunks": Row(FOUR, experts=spread(2, route="2dh", chunks=3)),
    "heads": Row(SHARED),
    "ring-ddp": Row(RING, thinwire.DDP(), sequence=SequenceParallel(4, "ring")),
    "fsdp": Row(SHARED, thinwire.FSDP()),
    "heads-and-ring": Row(RING, sequence=SequenceParallel(4, "ulysses=2,ring=2")),
    "inside": Row({"data": 1, "expert": 2, "sequence": 2}, experts=spread(chunks=2, chunks_back=1)),
    "outside": Row({"data": 1, "sequence": 2, "expert": 2}, has_logits=False),
    "ring-moves": Row(
        {"data": 1, "expert": 2, "sequence": 2}, experts=spread(move="experts"), sequence=SequenceParallel(2, "ring")
    ),
    # The last rank has no token that counts.
    "heads-cut": Row(RING, sequence=SequenceParallel(4, "ulysses"), has_logits=False),
    "heads-again": Row(
        {"data": 1, "expert": 2, "sequence": 2}, experts=spread(chunks=2, chunks_back=1), recomputes=True
    ),
    "ring-again": Row(
        {"data": 1, "expert": 2, "sequence": 2}, experts=spread(move="experts", once_a_step=True),
        sequence=SequenceParallel(2, "ring"), recomputes=True,
    ),
    "once-again": Row(FOUR, experts=spread(2, route="once"), recomputes=True),
    "adamw": Row(FOUR, experts=spread(4), optimizer="adamw", begins=True),
    "adamw-pairs": Row(PAIRS, experts=spread(2), optimizer="adamw"),
    "sdp4bit": Row(PAIRS, thinwire.SDP4Bit(), spread(2), optimizer="adamw", drift=0.1),
    "sdp4bit-heads": Row(SHARED, thinwire.SDP4Bit(), optimizer="adamw", drift=0.1),
    "sdp4bit-ring": Row(
        {"data": 1, "sequence": 2, "expert": 2}, thinwire.SDP4Bit(), spread(dispatch="int8"),
        SequenceParallel(2, "ring", wire="int8", gradients="int8"), "adamw", drift=0.1,
    ),
    "zero-bf16": Row(PAIRS, thinwire.ZeroBF16(), optimizer="adamw", drift=0.1),
    "zero-compressed": Row(PAIRS, thinwire.ZeroCompressed("int8/64"), optimizer="adamw", drift=0.1),
    "sdp4bit-weights": Row(
        FOUR, thinwire.SDP4Bit(intra_gradients="fp32", inter_gradients="fp32", vector_gradients="fp32"),
        optimizer="adamw", drift=0.1,
    ),
    "int8": Row(FOUR, experts=spread(dispatch="int8", gradients="int8"), optimizer="adamw", drift=0.1),
    "dion": Row(PAIRS, optimizer="dion", begins=True),
    "dion-four": Row(FOUR, optimizer="dion"),
    "pruned": Row({"data": 4}, optimizer="decay", begins=True, is_pruned=True),
    "pruned-four": Row(FOUR, experts=spread(chunks=2), optimizer="decay", is_pruned=True),
    "pruned-moves": Row(PAIRS, experts=spread(move="experts"), optimizer="decay", is_pruned=True),
    "pruned-sdp4bit": Row(PAIRS, thinwire.SDP4Bit(), optimizer="decay", drift=0.1, is_pruned=True),
    "tight": Row({"data": 4}, config=TIGHT, begins=True),
    "tight-pairs": Row(PAIRS, experts=spread(chunks=2, capacity=TIGHT.capacity_factor), config=TIGHT),
}  # fmt: skip
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    # SGD shows a gradient that is a number of times too large, which AdamW hides.
    "sgd": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    # A moment or decay of a weight that is not kept would wake it.
    "decay": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.5),
    "dion": lambda params: thinwire.DionOptimizer(params, lr=1e-3, eps=1e-4, rank=8),
}


def origin_of(name: str) -> str:
    """The row whose checkpoint a row goes on from."""
    names = list(ROWS)
    before = [each for each in names[: names.index(name)] if ROWS[each].kind == ROWS[name].kind]
    return [each for each in before if not ROWS[each].drift][-1]


def texts(step: int, share: int = 0, num_shares: int = 1) -> list[tuple[Tensor, Tensor]]:
    """A share's sequences of each micro-batch. Late tokens do not count, so ranks of a sequence have unequal ones."""
    draw = torch.Generator().manual_seed(step)
    found = []
    for _ in range(MICRO_BATCHES):
        tokens = torch.randint(CONFIG.vocab_size, (SEQUENCES, LENGTH + 1), generator=draw)
        targets = tokens[:, 1:].clone()
        targets[:, LENGTH * 2 // 3 :] = IGNORED
        found.append((tokens[:, :-1].chunk(num_shares)[share], targets.chunk(num_shares)[share]))
    return found


@dataclass
class Told:
    """What training gave: norms by step, whole weights by the number of steps before, and rows asked of experts."""

    norms: dict[int, float] = field(default_factory=dict)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    rows: RowLoad | None = None


def masks() -> dict[str, Tensor]:
    """The weights that stay if those of the least size go."""
    found = {}
    for name, param in MoELlama(CONFIG).named_parameters():
        size = param.detach().abs()
        if name.endswith("experts.down_proj"):
            found[name] = mask_of(size.transpose(1, 2), "rows", 0.5).transpose(1, 2)
        elif "experts." in name or "self_attn." in name:
            found[name] = mask_of(size, "rows", 0.5)
    return found


def check_zeros(model: MoELlama, ranks: Any) -> None:
    """A rank has zeros where the masks have them, and nowhere else."""
    for name, mask in masks().items():
        place, _, own = name.rpartition(".")
        weight = getattr(model.get_submodule(place), own)
        here = ranks.placement.part(mask, ranks.comm.rank) if ranks is not None and "experts." in name else mask
        assert torch.equal(weight == 0, ~here), name


@functools.cache
def alone(kind: str, is_pruned: bool) -> Told:
    """One process takes the tokens of all ranks."""
    model, told = MoELlama(CONFIG), Told()
    if is_pruned:
        thinwire.keep(model, masks())
    optimizer = MAKERS[kind](model.parameters())
    for step in range(STEPS):
        if step != ODD_STEP:
            for tokens, targets in texts(step):
                (model(tokens, targets) / MICRO_BATCHES).backward()
            told.norms[step] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
        told.weights[step + 1] = {name: value.detach().clone() for name, value in model.named_parameters()}
    return told


def scaled(factor: float) -> Callable[[torch.nn.Module, Any], Tensor]:
    """The model's own loss, times a factor."""
    return lambda model, batch: model(*batch) * factor


def save(stage: thinwire.Stage, folder: Path, rank: int) -> None:
    comm = stage.optimizer.comm

    def gather(number: int) -> list[int]:
        return [int(n) for n in comm.wait(comm.all_gather_exact(torch.tensor([number])))]

    saver = Saver(folder, Disk.find(folder, rank, gather), default_store(), Keep(), 60.0)
    saver.save(SAVED, stage.snapshot(), loss=None, about={})
    saver.close()
    assert not (problems := saver.problems()), problems


def train(rank: int, world_size: int, name: str, folder: Path) -> Told:
    """The row's steps; it is saved before the first of them, or after SAVED where it begins anew."""
    row, told = ROWS[name], Told()
    # The checkpoint's weights are taken, or rank 0's experts.
    states_limit = row.experts is not None and row.experts.capacity is not None
    config = replace(row.config, capacity_factor=0.0) if states_limit else row.config
    model = MoELlama(config, seed=0 if row.begins else rank)
    if row.is_pruned:
        thinwire.keep(model, masks())
    if not row.has_logits:
        cut_loss(model)
    mesh = init_device_mesh("cpu", tuple(row.mesh.values()), mesh_dim_names=tuple(row.mesh))
    share, num_shares = 0, 1
    for at, (axis, size) in zip(mesh.get_coordinate() or (), row.mesh.items(), strict=True):
        share, num_shares = (share, num_shares) if axis == "sequence" else (share * size + at, num_shares * size)
    again = thinwire.Residency(activations="recompute", optimizer="memory") if row.recomputes else None
    methods = [row.strategy, *(each for each in (row.experts, row.sequence, again) if each is not None)]
    stage = thinwire.parallelize(
        model, MAKERS[row.optimizer](model.parameters()), mesh, methods, local_size=2, announce=False
    )
    if not row.begins:
        stage.restore(Source(folder / origin_of(name) / f"step-{SAVED:08}", rank))
        save(stage, folder / name, rank)
    for step in range(STEPS if row.begins else FEW):
        step += 0 if row.begins else SAVED
        if row.begins and step == SAVED:
            save(stage, folder / name, rank)
        # The loss of one rank is not a number: no rank takes the step.
        odd = step == ODD_STEP and rank == 3
        stage.forward_backward(texts(step, share, num_shares), scaled(math.nan if odd else 1.0))
        norm = float(stage.step(1.0))
        told.norms |= {step: norm} if math.isfinite(norm) else {}
        if step + 1 in (SAVED + FEW, STEPS):
            weights = stage.optimizer.masters([name for name, _ in model.named_parameters()])
            told.weights[step + 1] = weights if stage.experts is None else stage.experts.gather(weights)
    if row.is_pruned:
        check_zeros(model, stage.experts)
    assert stage.optimizer.skipped_steps == 1
    stage.optimizer.check_replicas()
    has_rows = stage.experts is not None and stage.experts.options.move != "experts"
    assert (stage.optimizer.meter.snapshot().sent_by("dispatch") > NUMBER_BYTES) == has_rows
    told.rows = model.row_counts.take()
    stage.close()
    return told


class LayoutSuite:
    """Inherit, and every row is tested."""

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("layouts")

    @pytest.fixture(scope="class")
    @classmethod
    def told(cls, folder: Path) -> Rows:
        return run_rows(train, list(ROWS), 4, folder, local_size=2)

    @pytest.mark.parametrize("name", ROWS)
    def test_goes_on_from_another_layout_as_one_process(self, name: str, told: Rows, folder: Path) -> None:
        row, results = ROWS[name], told.of(name)
        # A capacity is of a rank's tokens, so one process drops other rows.
        truth = alone(row.optimizer, row.is_pruned) if row.config is CONFIG else told.of("tight")[0]
        for result in results:
            expected = [truth.norms[step] for step in result.norms]
            torch.testing.assert_close([*result.norms.values()], expected, rtol=row.drift or 1e-4, atol=0)
            assert len(result.norms) == (STEPS if row.begins else FEW) - 1
            for step, weights in result.weights.items():
                for key, value in truth.weights[step].items():
                    atol = 2e-2 if row.drift else 2e-4
                    torch.testing.assert_close(weights[key], value, rtol=0, atol=atol, msg=f"{key} of step {step}")
            # All ranks know how many rows all of them dropped.
            assert result.rows == results[0].rows and result.rows is not None
            assert 0.05 < result.rows.dropped_share < 0.9 if row.config is TIGHT else not result.rows.dropped
        if not row.begins and not row.drift:
            first, again = (atoms(folder / each / f"step-{SAVED:08}") for each in (origin_of(name), name))
            shared = [key for key in first if key.startswith(("weights/", "optimizer/"))]
            assert shared and all(torch.equal(first[key], again[key]) for key in shared)
