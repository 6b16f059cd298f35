"""Every strategy is held to single-process training: add a row here and it inherits all of these tests.

A row says which class of equality holds: an exact strategy follows the single process within 1e-6, a compressed one
stays within a stated relative distance of it after 20 steps. Where gradients are estimates of few samples, only the
ranks are compared with each other; the method's own tests hold the estimate to the gradient.
"""

from __future__ import annotations

import functools
import hashlib
import io
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from tests.conformance.schedule import check_schedule
from tests.workers import Rows, run_rows, run_workers
from thinwire.collectives import Topology
from thinwire.compose import apply
from thinwire.hosts.interface import ParallelOptimizer
from thinwire.methods.data.frontier import Frontier
from thinwire.methods.data.fsdp import FSDP
from thinwire.methods.data.one_byte import OneByte
from thinwire.methods.data.powersgd import PowerSGD
from thinwire.methods.data.torch_powersgd import TorchPowerSGD
from thinwire.methods.data.two_way import TwoWay
from thinwire.methods.data.zero import Zero, ZeroBF16
from thinwire.methods.data.zero_compressed import ZeroCompressed
from thinwire.methods.data.zeropp import ZeroPP
from thinwire.methods.plain_ddp import DDP
from thinwire.optim import NAMED, make_optimizer as make_named

STEPS = 20
ALL_GRIDS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
FLAT_GRIDS = ((1, 1), (2, 1), (4, 1))


@dataclass(frozen=True)
class Row:
    # A Method; those of thinwire.zero are also Strategies.
    strategy: Any
    # Largest |w - w_single| / |w_single - w_start| over all weights after 20 steps; 0 means: within 1e-6; None: any.
    drift: float | None
    # (world size, ranks per node) to run on.
    grids: tuple[tuple[int, int], ...] = ALL_GRIDS
    # Steps whose bytes are those of the formula.
    counted: Sequence[int] = range(STEPS)
    # Whether some steps may leave parameters out.
    may_skip_parameters: bool = True
    # The optimizer, the single process's where that differs, and the norm to which the single process clips.
    optimizer: str = "adamw"
    reference: str = ""
    clip: float = 1.0
    # Largest relative error of the first step's norm; signs and sparse values shorten a gradient by design.
    norm_error: float = 0.1

    @property
    def hardest(self) -> tuple[int, int]:
        """The grid of the most ranks, with two levels where there is one."""
        return max(self.grids, key=lambda grid: (grid[0], 1 < grid[1] < grid[0]))


ROWS = {
    "zero": Row(Zero(), 0.0),
    "zero-bf16": Row(ZeroBF16(), 0.05),
    "zero-compressed": Row(ZeroCompressed(), 0.9, ((1, 1), (2, 1), (4, 2)), norm_error=0.5),
    "zero-estimates": Row(
        ZeroCompressed("topk20%/1024", feedback="estimates", fresh=0.9), 0.9, ((2, 1), (4, 2)), norm_error=1.0
    ),
    "zero-topk": Row(
        ZeroCompressed("topk20%/1024", weights="bf16", vector_weights="bf16"), 0.6, ((4, 1),), norm_error=0.5
    ),
    "sdp4bit": Row(thinwire.SDP4Bit(), 0.45),
    "sdp4bit-weights": Row(
        thinwire.SDP4Bit(intra_gradients="fp32", inter_gradients="fp32", vector_gradients="fp32"), 0.2
    ),
    "sdp4bit-gradients": Row(thinwire.SDP4Bit(weights="fp32", vector_weights="fp32"), 0.45),
    "sdp4bit-3-bit-nearest": Row(
        thinwire.SDP4Bit(
            "int3/2048:nearest",
            "int8/64:bf16:nearest+hadamard32",
            "int6/64:bf16:nearest+hadamard32",
            "int8/128:nearest",
            "int8/128:bf16:nearest+hadamard32",
        ),
        0.5,
        ((4, 2),),
    ),
    "sdp4bit-small-groups": Row(
        thinwire.SDP4Bit(
            "int4/64:bf16",
            "int8/32:bf16+hadamard32",
            "int4/32:bf16+hadamard32",
            "int8/32:bf16",
            "int8/32:bf16+hadamard32",
        ),
        0.45,
        ((4, 2),),
    ),
    "sdp4bit-loco": Row(thinwire.SDP4Bit(loco=True), 0.45, ((1, 1), (2, 1), (4, 2))),
    # Directions are rounded to bf16, so that a sum in another order may flip a bit.
    "zero-muon": Row(Zero(), 0.02, ((2, 1), (4, 2)), optimizer="muon", reference="torch-muon"),
    "fsdp-muon": Row(FSDP(), 0.02, ((4, 2),), range(1, STEPS, 2), optimizer="muon", reference="torch-muon"),
    "ddp-muon": Row(DDP(), 0.02, ((2, 1),), may_skip_parameters=False, optimizer="muon", reference="torch-muon"),
    "zero-apollo": Row(Zero(), 0.0, ((4, 2),), optimizer="apollo"),
    "fsdp-apollo": Row(FSDP(), 0.0, ((2, 1),), range(1, STEPS, 2), optimizer="apollo-mini"),
    "zero-mfac": Row(Zero(), 0.0, ((4, 2),), optimizer="mfac"),
    "fsdp-mfac": Row(FSDP(), 0.0, ((2, 1),), range(1, STEPS, 2), optimizer="mfac"),
    "zero-dion": Row(Zero(), 0.0, ((2, 1), (4, 2)), optimizer="dion"),
    "fsdp-dion-int8": Row(FSDP(), 0.4, ((4, 2),), range(1, STEPS, 2), optimizer="dion-int8", reference="dion"),
    "ddp": Row(DDP(), 0.0, FLAT_GRIDS, may_skip_parameters=False),
    "ddp-unused": Row(DDP(find_unused_parameters=True), 0.0, ((2, 1),)),
    "ddp-bf16": Row(DDP(codec="bf16"), 0.005, ((4, 1),), may_skip_parameters=False),
    # Net's matrices have 24 to 50 rows: rank 4 is little compression, and enough to see the error come back.
    "powersgd": Row(PowerSGD(start_step=4), 0.25, (*FLAT_GRIDS, (4, 2)), range(4, STEPS), may_skip_parameters=False),
    "powersgd-1": Row(
        PowerSGD(rank=1, start_step=4, codec="bf16", find_unused_parameters=True),
        0.5,
        ((2, 1), (4, 2)),
        range(4, STEPS),
    ),
    "powersgd-torch": Row(TorchPowerSGD(start_step=4), 0.25, ((2, 1),), range(4, STEPS), may_skip_parameters=False),
    # Groups of 512 signs, and matrices of some hundred elements.
    "two-way": Row(
        TwoWay(min_bytes=0), 0.9, ((1, 1), (2, 1), (4, 2), (4, 4)), may_skip_parameters=False, norm_error=0.5
    ),
    "two-way-integer": Row(TwoWay(codec="int4", min_bytes=0, find_unused_parameters=True), 0.45, ((2, 1),)),
    "dgc": Row(
        thinwire.DGC(density=0.2, clip=0.0, warmup=(0.5,), warmup_steps=4),
        0.5,
        ((2, 1), (4, 2)),
        range(4, STEPS),
        may_skip_parameters=False,
        optimizer="dgc-sgd",
        reference="sgd",
        clip=math.inf,
        norm_error=0.5,
    ),
    "dgc-everything": Row(
        thinwire.DGC(density=1.0, clip=0.0, factor_masking=False, warmup=()),
        0.0,
        ((1, 1), (4, 2)),
        may_skip_parameters=False,
        optimizer="dgc-sgd",
        reference="sgd",
        clip=math.inf,
    ),
    "ef-topk": Row(thinwire.EFTopK("topk10%"), 0.6, ((1, 1), (4, 2)), may_skip_parameters=False, norm_error=0.5),
    "ef-integer": Row(thinwire.EFInteger(find_unused_parameters=True), 0.1, ((2, 1),)),
    "lgreco-ef-topk": Row(
        thinwire.LGreCo(thinwire.EFTopK("topk10%"), start=5, samples=3),
        0.6,
        ((4, 2),),
        range(5, STEPS),
        may_skip_parameters=False,
        norm_error=0.5,
    ),
    "lgreco-dgc": Row(
        thinwire.LGreCo(thinwire.DGC(density=0.2, clip=0.0, warmup=(0.5,), warmup_steps=2), start=5, samples=3),
        0.6,
        ((2, 1), (4, 2)),
        range(5, STEPS),
        may_skip_parameters=False,
        optimizer="dgc-sgd",
        reference="sgd",
        clip=math.inf,
        norm_error=0.5,
    ),
    # A decoded sketch is longer than what it stands for, by sqrt(1 + ratio) where all is sketched.
    "sketch": Row(thinwire.Sketch("countsketch2"), 0.9, ((1, 1), (4, 2)), may_skip_parameters=False, norm_error=1.0),
    "onebit-adam": Row(
        thinwire.OneBitAdam(freeze=4, clip=0.0),
        0.8,
        ((4, 1), (4, 2)),
        range(4, STEPS),
        may_skip_parameters=False,
        optimizer="onebit-adam",
        reference="adamw",
        clip=math.inf,
    ),
    # The first step gathers the weights twice; FSDP2 sends no gradients for what a step leaves out.
    "fsdp": Row(FSDP(), 0.0, ((1, 1), (2, 1), (4, 2)), range(1, STEPS, 2)),
    "fsdp-bf16": Row(FSDP(codec="bf16"), 0.05, ((4, 2),), range(1, STEPS, 2)),
    # Net has no layers: the root's weights are gathered once a micro-batch, and once more in the first step.
    "frontier-fp32": Row(
        Frontier(weights="fp32", intra_gradients="fp32", inter_gradients="fp32", refresh="fp32"),
        0.0,
        ((1, 1), (2, 1), (4, 2)),
        range(1, STEPS),
    ),
    "frontier-bf16": Row(
        Frontier(weights="bf16", intra_gradients="bf16", inter_gradients="bf16", refresh="bf16"),
        0.05,
        ((4, 2),),
        range(1, STEPS),
    ),
    "frontier": Row(Frontier(), 0.45, ((2, 1), (4, 2)), range(1, STEPS)),
    "zeropp": Row(ZeroPP(), 0.2, ((2, 1), (4, 2)), range(1, STEPS, 2)),
    "zeropp-exact": Row(ZeroPP("fp32", "fp32", "fp32", "fp32"), 0.0, ((4, 2),), range(1, STEPS, 2)),
    "one-byte": Row(OneByte(samples=3), None, ((1, 1), (2, 1), (4, 2))),
    "zeropp-loco": Row(
        ZeroPP(inter_gradients="int4", intra_gradients="int4", loco=True), 0.2, ((4, 2),), range(1, STEPS, 2)
    ),
}


def covering() -> set[tuple[str, tuple[int, int]]]:
    """The cells that always run: every row on its hardest grid, and the first row of each class on all of its grids.

    A grid decides who sends what to whom, which is the code of a class; its other rows differ in codecs and options.
    """
    first = {type(row.strategy): name for name, row in reversed(ROWS.items())}
    whole = {(name, grid) for name in first.values() for grid in ROWS[name].grids}
    return whole | {(name, row.hardest) for name, row in ROWS.items()}


CELLS = [(name, grid) for name in ROWS for grid in ROWS[name].grids]
GRIDS = [pytest.param(*cell, marks=() if cell in covering() else pytest.mark.whole) for cell in CELLS]
# Steps of a row before its state is saved, and after.
SAVED, AFTER = 7, 4
# One row of each kind of state, and of each way to average gradients.
STATEFUL = [
    "zero", "zero-bf16", "zero-muon", "fsdp-muon", "ddp-muon", "zero-dion", "fsdp-dion-int8", "zero-apollo",
    "zero-mfac", "zero-estimates", "sdp4bit", "sdp4bit-loco", "zero-compressed", "ddp", "powersgd", "powersgd-torch",
    "two-way", "dgc", "onebit-adam", "fsdp-bf16", "frontier", "zeropp-loco", "one-byte", "lgreco-ef-topk",
    "lgreco-dgc", "ef-topk", "sketch",
]  # fmt: skip
REDUCING = [
    "zero-estimates", "sdp4bit", "sdp4bit-loco", "zero-compressed", "ddp", "powersgd", "powersgd-torch", "two-way",
    "dgc", "onebit-adam", "fsdp", "frontier", "zeropp-loco", "ef-topk", "sketch", "lgreco-dgc",
]  # fmt: skip


class Net(nn.Module):
    """Matrices and vectors of awkward sizes, a tied pair, a frozen part and one that is used only in odd steps."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(37, 24)
            self.norm = nn.LayerNorm(24)
            self.up = nn.Linear(24, 50)
            self.down = nn.Linear(50, 24, bias=False)
            self.side = nn.Linear(24, 24)
            self.head = nn.Linear(24, 37, bias=False)
            self.head.weight = self.embed.weight
            self.fixed = nn.Linear(24, 24)
            self.fixed.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, use_side: bool) -> torch.Tensor:
        x = self.norm(self.embed(tokens)) + 0.1 * self.fixed(self.embed(tokens))
        x = x + self.down(torch.tanh(self.up(x)))
        if use_side:
            x = x + torch.tanh(self.side(x))
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int) -> torch.Tensor:
    """Eight sequences, the same for every world; ranks take equal parts."""
    return torch.randint(0, 37, (8, 9), generator=torch.Generator().manual_seed(step))


def make_optimizer(model: nn.Module, kind: str = "adamw") -> Any:
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    if kind == "sgd-plain":
        return torch.optim.SGD(groups, lr=0.05)
    if kind == "muon":
        return thinwire.Muon(groups, lr=0.01, eps=1e-4)
    if kind in NAMED:
        names = {param: name for name, param in model.named_parameters()}
        named = [{**group, "params": [(names[param], param) for param in group["params"]]} for group in groups]
        return make_named(kind, named, 0.003, matrices="up|down|side", eps=1e-4)
    if kind == "mfac":
        return thinwire.MFAC(groups, lr=0.01, window=6, damping=0.1)
    if kind.startswith("dion"):
        codec = "int8/32" if kind == "dion-int8" else "fp32"
        return thinwire.DionOptimizer(groups, lr=0.01, eps=1e-4, rank=8, codec=codec)
    if kind == "torch-muon":
        return TorchMuon(decayed, plain)
    if kind == "dgc-sgd":
        return thinwire.DGCSGD(groups, lr=0.05)
    if kind == "onebit-adam":
        return thinwire.OneBitAdamW(groups, lr=3e-3, eps=1e-4)
    if kind == "adagrad":
        return torch.optim.Adagrad(groups, lr=0.01, eps=1e-4, initial_accumulator_value=0.1)
    if kind == "amsgrad":
        return torch.optim.Adam(groups, lr=3e-3, eps=1e-4, amsgrad=True)
    # With 1e-8 the first steps are the gradient's sign, which rounding alone can flip.
    return torch.optim.AdamW(groups, lr=3e-3, eps=1e-4)


class TorchMuon:
    """torch's own Muon for matrices, beside torch's AdamW."""

    def __init__(self, matrices: list[nn.Parameter], vectors: list[nn.Parameter]) -> None:
        muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(vectors, lr=0.01, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
        self.both: list[torch.optim.Optimizer] = [muon, adamw]

    def step(self) -> None:
        for one in self.both:
            one.step()

    def zero_grad(self) -> None:
        for one in self.both:
            one.zero_grad()


@functools.cache
def single_process(
    kind: str = "adamw", clip: float = 1.0, steps: int = STEPS, may_skip_parameters: bool = True
) -> dict[str, torch.Tensor]:
    """The reference: plain PyTorch over the whole batch."""
    model = Net(seed=0)
    optimizer = make_optimizer(model, kind)
    for step in range(steps):
        model(batch(step), step % 2 == 1 or not may_skip_parameters).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def first_norm(may_skip_parameters: bool) -> float:
    """The norm of the first step's gradient, before clipping: Adam and clipping hide a wrong scale."""
    model = Net(seed=0)
    model(batch(0), not may_skip_parameters).backward()
    return float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def hash_of(model: nn.Module) -> str:
    # Clones: FSDP2 frees its whole weights by shrinking memory, which numpy would pin.
    return hashlib.sha256(b"".join(p.detach().clone().numpy().tobytes() for p in model.parameters())).hexdigest()


def distance(weights: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """|w - reference| over the way the reference went."""
    start = {name: p.detach() for name, p in Net(seed=0).named_parameters()}
    off = sum(float((weights[name] - reference[name]).square().sum()) for name in reference)
    way = sum(float((start[name] - reference[name]).square().sum()) for name in reference)
    return math.sqrt(off / way)


class Replica:
    """One rank's model under a row's strategy."""

    def __init__(self, name: str, rank: int, world_size: int, *, seed: int, local_size: int = 1) -> None:
        self.row, self.rank, self.world_size = ROWS[name], rank, world_size
        self.model = Net(seed)
        self.norms: list[float] = []
        self.wrapped: nn.Module
        self.optimizer: ParallelOptimizer
        self.wrapped, self.optimizer = apply(self.row.strategy,
            self.model, make_optimizer(self.model, self.row.optimizer), local_size=local_size, seed=0, timeout_s=300,
            checked=True, overlap=True,
        )  # fmt: skip

    def backward(self, step: int, micro_batches: int = 1, scale: float = 1.0) -> None:
        """All of this rank's part of the step's batch; only the last micro-batch communicates."""
        use_side = step % 2 == 1 or not self.row.may_skip_parameters
        *first, last = batch(step).chunk(self.world_size)[self.rank].chunk(micro_batches)
        for tokens in first:
            with self.optimizer.no_sync():
                (self.wrapped(tokens, use_side) * scale / micro_batches).backward()
        (self.wrapped(last, use_side) * scale / micro_batches).backward()

    def step(self, step: int, **backward: Any) -> str:
        """One whole step; the hash of the weights after it."""
        self.backward(step, **backward)
        self.optimizer.note_loss(float(self.rank))
        self.norms.append(float(self.optimizer.clip_grad_norm_(1.0)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer.synchronize()
        return hash_of(self.model)


def train(rank: int, world_size: int, name: str, local_size: int, micro_batches: int = 1) -> dict[str, Any]:
    """Twenty steps; ranks start from different weights, so that the start is tested too.

    On its hardest grid a row of STATEFUL tells what a replica computes that goes on from the state in between.
    """
    replica = Replica(name, rank, world_size, seed=rank, local_size=local_size)
    optimizer = replica.optimizer
    hashes, sent = [], []
    start = optimizer.meter.snapshot()
    for step in range(STEPS):
        before = optimizer.meter.snapshot()
        if (rank, step) == (world_size - 1, STEPS - 1):
            optimizer.request_stop()
        assert not optimizer.stop_requested
        hashes.append(replica.step(step, micro_batches=micro_batches))
        sent.append((optimizer.meter.snapshot() - before).sent_bytes)
        if step == SAVED - 1:
            state = saved(replica)
    reading = optimizer.meter.snapshot() - start
    optimizer.check_replicas()
    assert optimizer.stop_requested and optimizer.mean_loss == (world_size - 1) / 2
    assert optimizer.all_mean(rank) == (world_size - 1) / 2
    told = {
        "weights": {key: p.detach().clone() for key, p in replica.model.named_parameters()},
        "hashes": hashes,
        "norm": replica.norms[0],
        "reading": reading,
        "sent": [sent[step] for step in ROWS[name].counted],
        "formula": optimizer.bytes_per_step,
        "uncompressed": optimizer.uncompressed_bytes_per_step,
    }
    optimizer.close()
    if name in STATEFUL and (world_size, local_size) == ROWS[name].hardest:
        told["resumed"] = go_on(Replica(name, rank, world_size, seed=9, local_size=local_size), state)
    return told


def saved(replica: Replica) -> bytes:
    """The state of a rank, and what it does not train."""
    file = io.BytesIO()
    torch.save((replica.optimizer.state_dict(), replica.model.fixed.state_dict()), file)
    return file.getvalue()


def go_on(replica: Replica, state: bytes) -> list[str]:
    """Hashes of the steps after SAVED, of a fresh replica that loads the state."""
    own, frozen = torch.load(io.BytesIO(state), weights_only=True)
    replica.optimizer.load_state_dict(own)
    replica.model.fixed.load_state_dict(frozen)
    hashes = [replica.step(step) for step in range(SAVED, SAVED + AFTER)]
    replica.optimizer.close()
    return hashes


def nan_on_one_rank(rank: int, world_size: int, name: str) -> tuple[list[str], int, float]:
    """Hashes around a step in which rank 1 has no number, the steps skipped, and the last loss."""
    replica = Replica(name, rank, world_size, seed=0)
    hashes = [replica.step(step) for step in range(6)]
    hashes.append(replica.step(6, scale=float("nan") if rank == 1 else 1.0))
    hashes += [replica.step(step) for step in range(7, 10)]
    with torch.no_grad():
        loss = float(replica.model(batch(0), True))
    replica.optimizer.close()
    return hashes, replica.optimizer.skipped_steps, loss


def one_rank_dies(rank: int, world_size: int, name: str) -> str:
    """What a survivor says; rank 1 is killed before its fourth backward."""
    replica = Replica(name, rank, world_size, seed=0)
    with pytest.raises(thinwire.PeerLostError) as caught:
        for step in range(100):
            if (rank, step) == (1, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            replica.step(step)
    # The others read on the way out whom this rank misses.
    time.sleep(1.0)
    return str(caught.value)


# What rows told that shared a start of the processes, by what they have in common.
_told: dict[tuple, Rows] = {}


def together(request: pytest.FixtureRequest, function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """What the ranks say of this test's row; with it run those of the other cases that were selected.

    They are the cases of this test, and those of others on the same grid.
    """
    this: Any = request.node
    key, grid = (function, world_size, *args), this.callspec.params.get("grid")
    if key not in _told:
        selected: list[Any] = [item for item in request.session.items if item.parent is this.parent]
        like = [item for item in selected if item.originalname == this.originalname or grid is not None]
        cases = [item.callspec.params for item in like if hasattr(item, "callspec")]
        names = dict.fromkeys(case["name"] for case in cases if case.get("grid") == grid)
        _told[key] = run_rows(function, list(names), world_size, *args)
    return _told[key].of(this.callspec.params["name"])


class StrategySuite:
    """Inherit, and every row is tested."""

    @pytest.mark.parametrize(("name", "grid"), GRIDS)
    def test_follows_single_process_with_equal_replicas(
        self, request: pytest.FixtureRequest, name: str, grid: tuple[int, int]
    ) -> None:
        row, (world_size, local_size) = ROWS[name], grid
        results = together(request, train, world_size, local_size)
        kind = row.reference or row.optimizer
        reference = single_process(kind, row.clip, may_skip_parameters=row.may_skip_parameters)
        num_trained = sum(p.numel() for p in Net(0).parameters() if p.requires_grad)
        for result in results:
            assert result["hashes"] == results[0]["hashes"], "replicas differ"
            assert set(result["sent"]) == {result["formula"]}, "bytes sent are not what the formula says"
            assert result["uncompressed"] == pytest.approx(8 * num_trained * (world_size - 1) / world_size)
            if row.drift is None:
                continue
            norm = pytest.approx(first_norm(row.may_skip_parameters), rel=row.norm_error if row.drift else 1e-5)
            assert result["norm"] == norm
            if row.drift == 0.0 or world_size == 1:
                for key, weight in result["weights"].items():
                    torch.testing.assert_close(weight, reference[key], rtol=0, atol=1e-6)
            else:
                assert 1e-6 < distance(result["weights"], reference) < row.drift

    @pytest.mark.parametrize(("name", "grid"), [(name, ROWS[name].hardest) for name in STATEFUL])
    def test_a_loaded_state_goes_on_bit_for_bit(
        self, request: pytest.FixtureRequest, name: str, grid: tuple[int, int]
    ) -> None:
        for result in together(request, train, *grid):
            assert result["resumed"] == result["hashes"][SAVED : SAVED + AFTER]

    @pytest.mark.parametrize("name", ROWS)
    def test_a_schedule_has_the_bytes_of_its_plan(self, name: str) -> None:
        row = ROWS[name]
        world_size, local_size = row.hardest
        check_schedule(row.strategy, Net(0), Topology(world_size // local_size, local_size))

    @pytest.mark.parametrize("name", REDUCING)
    def test_a_nan_on_one_rank_skips_the_step_on_all(self, request: pytest.FixtureRequest, name: str) -> None:
        for hashes, num_skipped, loss in together(request, nan_on_one_rank, 2):
            assert num_skipped == 1
            assert hashes[6] == hashes[5] and len(set(hashes)) == 9
            assert math.isfinite(loss)

    @pytest.mark.parametrize("name", ["ddp", "fsdp"])
    def test_accumulated_micro_batches_equal_the_whole(self, request: pytest.FixtureRequest, name: str) -> None:
        reference = single_process(may_skip_parameters=ROWS[name].may_skip_parameters)
        for result in together(request, train, 2, 1, 2):
            assert set(result["sent"]) == {result["formula"]}
            for key, weight in result["weights"].items():
                torch.testing.assert_close(weight, reference[key], rtol=0, atol=1e-6)

    @pytest.mark.parametrize("name", ["ddp", "powersgd", "fsdp", "frontier", "one-byte"])
    def test_survivors_of_a_killed_rank_name_it(self, name: str) -> None:
        results = run_workers(one_rank_dies, 4, name, may_die=(1,))
        assert all("rank 1 is missing" in results[rank] for rank in (0, 2, 3)), results
