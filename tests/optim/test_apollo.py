"""APOLLO against its algorithm on whole tensors, in one process and over pieces that ranks have."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.workers import run_workers
from thinwire._compat import default_store
from thinwire.checkpoint import Disk, Keep, Saver, Source
from thinwire.codecs import derive_seed
from thinwire.codecs.normals import normals
from thinwire.codecs.random import named_seed
from thinwire.compose import apply
from thinwire.errors import ConfigError
from thinwire.hosts.sums import looking_across
from thinwire.hosts.tensor import cut_parameters
from thinwire.methods.data.fsdp import FSDP
from thinwire.methods.sums import planned_with
from thinwire.optim import SummingOptimizer
from thinwire.optim.apollo import MOMENTS, Projection
from thinwire.run.config import TrainConfig
from thinwire.run.run import Run
from thinwire.training.engine import build_optimizer

# Channels are columns, rows and rows; four ranks cut each, in their rows too.
SHAPES = {"wide": (24, 50), "tall": (50, 24), "square": (20, 20), "table": (37, 24), "bias": (24,)}
CHOSEN = "wide|tall|square"
PERIOD, STEPS = 3, 7
# In the middle of a period.
SAVED = 4
KINDS: dict[str, dict[str, Any]] = {
    "apollo": {},
    "apollo-rows": {"channels": "rows", "rank": 5},
    "apollo-free": {"limit": None, "rank": 3, "scale": 4.0},
    "apollo-mini": {},
}


class Held(nn.Module):
    """Parameters with gradients of their own, of another size in each step; in one, some have none."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        size = (0.0 if step == 4 else 1.0) * 10.0 ** -(step % 2)
        drawn = {name: (torch.randn(p.shape, generator=generator) + 0.5) * size for name, p in self.named_parameters()}
        used = [(p, drawn[name]) for name, p in self.named_parameters() if step != 2 or name != "tall"]
        return sum((p * gradient).sum() for p, gradient in used)  # type: ignore[return-value]


def made(kind: str, model: nn.Module) -> SummingOptimizer:
    cls = thinwire.ApolloMini if kind == "apollo-mini" else thinwire.Apollo
    options = {"lr": 0.01, "weight_decay": 0.1, "period": PERIOD, "seed": 3, **KINDS[kind]}
    return cls(model.named_parameters(), matrices=CHOSEN, **options)


class Plain:
    """The paper's algorithm 1 on whole tensors, beside torch's AdamW; written apart from the optimizer."""

    def __init__(self, kind: str, model: nn.Module) -> None:
        self.options = {"channels": "larger", "rank": None, "scale": 1.0, "limit": 1.01, **KINDS[kind]}
        self.is_mini = kind == "apollo-mini"
        if self.is_mini:
            self.options |= {"rank": 1, "scale": 128.0}
        named = dict(model.named_parameters())
        self.matrices = {name: named[name] for name in CHOSEN.split("|")}
        rest = [param for name, param in named.items() if name not in self.matrices]
        self.adamw = torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.1)
        self.state: dict[str, Any] = {}
        self.norms: dict[str, list[float]] = {name: [] for name in self.matrices}

    @torch.no_grad()
    def step(self) -> None:
        for name, param in self.matrices.items():
            if param.grad is not None:
                self.step_matrix(name, param, param.grad)
        self.adamw.step()

    def step_matrix(self, name: str, param: Tensor, grad: Tensor) -> None:
        rows, columns = param.shape
        turned = rows >= columns or self.options["channels"] == "rows"
        g = grad.T if turned else grad
        m, n = g.shape
        r = self.options["rank"] or m // 4
        mean, square, step, last = self.state.get(name, (torch.zeros(r, n), torch.zeros(r, n), 0, 0.0))
        step += 1
        seed = derive_seed(named_seed(3, name), (step - 1) // PERIOD)
        p = normals(seed, 0, m * r).view(m, r).T / math.sqrt(r)
        low = p @ g
        mean, square = 0.9 * mean + 0.1 * low, 0.999 * square + 0.001 * low * low
        adapted = mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-6)
        dim = (0, 1) if self.is_mini else 0
        update = g * (adapted.norm(dim=dim) / (low.norm(dim=dim) + 1e-8))
        norm = float(update.norm())
        if last and self.options["limit"] and norm > self.options["limit"] * last:
            update, norm = update * (self.options["limit"] * last / norm), self.options["limit"] * last
        # Where there was no gradient, the next step is not bound.
        last = norm if norm >= 0.01 * last else last
        self.state[name] = mean, square, step, last
        self.norms[name].append(norm)
        param -= 0.01 * math.sqrt(self.options["scale"]) * (update.T if turned else update)
        param *= 1 - 0.01 * 0.1


def trained(model: nn.Module, optimizer: Any, steps: range) -> dict[str, Tensor]:
    for step in steps:
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad() if not isinstance(optimizer, Plain) else model.zero_grad()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=name)
        assert float((value - Held().get_parameter(name).detach()).abs().max()) > 0.005, name


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_papers_algorithm_on_whole_tensors(kind: str) -> None:
    plain, own = Held(), Held()
    reference, optimizer = Plain(kind, plain), made(kind, own)
    check_equal(trained(own, optimizer, range(STEPS)), trained(plain, reference, range(STEPS)))
    pairs = [pair for norms in reference.norms.values() for pair in itertools.pairwise(norms)]
    assert any(after > 1.02 * before > 0 for before, after in pairs) == (kind == "apollo-free")
    for norms in reference.norms.values():
        assert not all(norms) and norms[-1] > 0.1, "a step without a gradient must not stop the matrix"
    kept = sum(torch.as_tensor(v).numel() for v in optimizer.state[own.get_parameter("wide")].values())
    channels = {"apollo": 50 * 6, "apollo-rows": 24 * 5, "apollo-free": 50 * 3, "apollo-mini": 50}[kind]
    assert kept == 2 * channels + 2 == optimizer.num_kept(optimizer.part_of(own.get_parameter("wide")))  # type: ignore


def mean_gradients(optimizer: Any) -> dict[str, Tensor]:
    """The whole mean gradients of which the ranks have pieces."""
    optimizer.reduce()
    found: dict[str, Tensor] = {}
    for bucket in optimizer.buckets:
        gathered = bucket.comm.wait(bucket.comm.all_gather_exact(bucket.shard_grad)).view(-1)
        used = [slot for slot in bucket.slots if slot.name in optimizer._gradients.used]
        found |= {slot.name: slot.span.of(gathered).clone() for slot in used}
    return found


def shards(rank: int, world_size: int, local_size: int) -> dict[str, Any]:
    """Each kind under a host, one with small buckets; the reference gets the mean gradients, which codecs change."""
    told: dict[str, Any] = {}
    for kind in KINDS:
        hosts = {"zero": thinwire.Zero(), "sdp4bit": thinwire.SDP4Bit()}
        for name, method in hosts.items() if kind in ("apollo", "apollo-mini") else [("zero", thinwire.Zero())]:
            model, whole, other = Held(), Held(), Held()
            model, optimizer = thinwire.zero(
                model, made(kind, model), method, local_size=local_size, timeout_s=60, announce=False,
                bucket_numel=2048 if local_size > 1 else None,
            )  # fmt: skip
            reference, inner = Plain(kind, whole), made(kind, other)
            across, grid = looking_across(inner, dict(other.named_parameters())), optimizer.comm.topology
            plain_plan, cuts = method.plan(other, grid, 1), method.cuts(other, grid, across)
            plan = planned_with(plain_plan, inner, cuts, across, grid)
            for step in range(STEPS):
                before = optimizer.meter.snapshot()
                model(step).backward()
                gradients = mean_gradients(optimizer)
                for key, param in whole.named_parameters():
                    param.grad = gradients.get(key)
                reference.step()
                optimizer.step()
                optimizer.zero_grad()
                sent = (optimizer.meter.snapshot() - before).sent_by("projected gradients")
            states = {piece: state for piece, state in optimizer.state.items() if "norm" in state}
            kept = [state[kind].numel() for state in states.values() for kind in MOMENTS]
            assert optimizer._sums is not None
            told[f"{kind} {name}"] = {
                "found": optimizer.masters(list(SHAPES)),
                "expected": {key: param.detach() for key, param in whole.named_parameters()},
                "sent": sent,
                "promised": optimizer._sums.bytes_per_step,
                "planned": sum(num for key, num in plan.sent.items() if key not in plain_plan.sent),
                "kept": 4 * sum(kept),
                "more": 4 * sum(kept) + 8 * len(states) - 8 * sum(piece.numel() for piece in states),
                "planned more": plan.optimizer - plain_plan.optimizer,
            }
            optimizer.close()
    return told


@pytest.mark.parametrize("world_size, local_size", [(4, 2), (2, 1)])
def test_shards_equal_whole_tensors(world_size: int, local_size: int) -> None:
    ranks = run_workers(shards, world_size, local_size, local_size=local_size)
    for row in ranks[0]:
        for told in (rank[row] for rank in ranks):
            check_equal(told["found"], told["expected"])
            assert told["sent"] == told["promised"], row
        if local_size == 1:
            assert max(rank[row]["sent"] for rank in ranks) == ranks[0][row]["planned"], row
            assert max(rank[row]["more"] for rank in ranks) == ranks[0][row]["planned more"], row
    by_kind = {kind: sum(rank[f"{kind} zero"]["sent"] for rank in ranks) for kind in KINDS}
    # Two ranks share a single matrix, whose channels are rows.
    if world_size == 4:
        assert 0 < by_kind["apollo-mini"] < by_kind["apollo"] and by_kind["apollo-rows"] < by_kind["apollo"]
    # A channel's moments lie on one rank.
    numbers = {"apollo": 50 * 6 + 50 * 6 + 20 * 5, "apollo-mini": 50 + 50 + 20}
    for kind, count in numbers.items():
        assert sum(rank[f"{kind} sdp4bit"]["kept"] for rank in ranks) == 4 * 2 * count


def test_bytes_of_the_sums_are_those_of_the_formula() -> None:
    """Rows [0, 3) and half of row 3 on one rank, the rest on another: by hand."""
    grid, named = thinwire.Topology(2, 1), [("x", nn.Parameter(torch.zeros(6, 8)))]
    inner = thinwire.Apollo(named, matrices="x", rank=2)
    groups = {"x": inner.param_groups[0]}
    cuts = {"x": (torch.Size([6, 8]), [(0, 28), (28, 48)])}
    plan = planned_with(thinwire.Zero().plan(Held(), grid, 1), inner, cuts, groups, grid)
    # Half of 8 columns of 2 numbers, and of their squares; 4 scales, and a norm, which takes 8 bytes.
    assert plan.sent["projected gradients", "inter"] == 4 * (4 * 2 + 4) + (16 + 8)
    groups["x"]["channels"] = "rows"
    plan = planned_with(thinwire.Zero().plan(Held(), grid, 1), inner, cuts, groups, grid)
    # The second rank sends its part of row 3, 2 numbers and a square, and a norm; the first one scale and a norm.
    assert plan.sent["projected gradients", "inter"] == (8 + 8) + 8


def keep(replica: tuple[nn.Module, Any], folder: Path) -> None:
    """Save the optimizer."""
    optimizer = replica[1]
    comm = optimizer.comm

    def gather(number: int) -> list[int]:
        return [int(n) for n in comm.wait(comm.all_gather_exact(torch.tensor([number])))]

    saver = Saver(folder, Disk.find(folder, comm.rank, gather), default_store(), Keep(), 60.0)
    saver.save(SAVED, optimizer.snapshot(), loss=None, about={})
    saver.close()
    assert not saver.problems()


def replica(kind: str, method: Any, seed: int) -> tuple[nn.Module, Any]:
    model = Held(seed)
    return apply(
        method, model, made(kind, model), local_size=1, seed=0, timeout_s=60.0, checked=False, overlap=False
    )  # fmt: skip


def moved(rank: int, world_size: int, folder: Path, source: str, host: str) -> dict[str, Any]:
    """Go on from what another world saved, if any, and save it anew; the weights after all steps."""
    told: dict[str, Any] = {}
    method = thinwire.DDP() if host == "ddp" else FSDP() if host == "fsdp" else thinwire.Zero()
    for kind in ("apollo", "apollo-rows", "apollo-mini"):
        model, optimizer = replica(kind, method, seed=7 if not source else 9)
        report = []
        if source:
            found = Source(folder / kind / source / f"step-{SAVED:08d}", rank)
            optimizer.restore(found)
            report = found.report()
        else:
            trained(model, optimizer, range(SAVED))
        keep((model, optimizer), folder / kind / f"{world_size}-{host}")
        trained(model, optimizer, range(SAVED, STEPS))
        told[kind] = optimizer.masters(list(SHAPES)), report
        if source:
            # The same layout, bit for bit.
            again, other = replica(kind, method, seed=9)
            other.restore(Source(folder / kind / f"{world_size}-{host}" / f"step-{SAVED:08d}", rank))
            trained(again, other, range(SAVED, STEPS))
            assert all(torch.equal(value, told[kind][0][name]) for name, value in other.masters(list(SHAPES)).items())
        optimizer.close()
    return told


def test_a_checkpoint_moves_from_four_ranks_to_two_to_plain(tmp_path: Path) -> None:
    first = run_workers(moved, 4, tmp_path, "", "zero", local_size=1)
    second = run_workers(moved, 2, tmp_path, "4-zero", "fsdp", local_size=1)
    last = run_workers(moved, 1, tmp_path, "2-fsdp", "ddp", local_size=1)
    for kind in ("apollo", "apollo-rows", "apollo-mini"):
        whole = Held()
        expected = trained(whole, made(kind, whole), range(STEPS))
        for weights, report in (first[3][kind], second[1][kind], last[0][kind]):
            check_equal(weights, expected)
            assert not [row for row in report if row[1] in ("dropped", "starts anew")], report
        assert any("exp_avg_projected" in row[0] for row in second[0][kind][1])


def test_projections_keep_lengths_and_scales_follow_the_rank() -> None:
    """Means over 400 draws of |P x|^2 / |x|^2; and s of rank r over s of rank m, near sqrt(r / m)."""
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    drawn = normals(1, 0, 400 * 16 * 64).view(400, 16, 64) / 4
    ratios = (drawn @ x).square().sum(1) / x.square().sum()
    assert float(ratios.mean()) == pytest.approx(1, abs=0.06)
    assert float(ratios.std()) == pytest.approx(math.sqrt(2 / 16), rel=0.15)
    found = {}
    for rank in (8, 32, 64):
        param = nn.Parameter(torch.zeros(64, 128))
        optimizer = thinwire.ApolloMini(
            [("x", param)], 1.0, matrices="x", rank=rank, scale=1.0, limit=None, period=10**9
        )
        generator = torch.Generator().manual_seed(1)
        constant = torch.randn(64, 128, generator=generator)
        for _ in range(50):
            before, gradient = param.detach().clone(), constant + 3 * torch.randn(64, 128, generator=generator)
            param.grad = gradient
            optimizer.step()
        found[rank] = float((before - param.detach()).norm() / gradient.norm())
    for rank in (8, 32):
        assert found[rank] / found[64] == pytest.approx(math.sqrt(rank / 64), rel=0.05)


def loss_of_a_student(make: Callable[[nn.Module], torch.optim.Optimizer], steps: int = 300) -> float:
    """The mean loss of the last ten steps of a 64-256-64 network that learns from another one."""
    torch.manual_seed(0)
    teacher, student = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))
    optimizer, generator, losses = make(student), torch.Generator().manual_seed(1), []
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / steps)
        x = torch.randn(128, 64, generator=generator)
        loss = (student(x) - teacher(x).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses[-10:]) / 10


def test_a_student_learns_faster_by_apollo_than_by_mini_and_sgd() -> None:
    """Each at the best of three rates. Mini's lead over SGD shows behind 1,500 steps alone."""
    options: dict[str, Any] = {"matrices": "weight"}
    apollo = loss_of_a_student(lambda m: thinwire.Apollo(m.named_parameters(), 0.03, rank=16, scale=4.0, **options))
    mini = loss_of_a_student(lambda m: thinwire.ApolloMini(m.named_parameters(), 0.01, **options))
    sgd = loss_of_a_student(lambda m: torch.optim.SGD(m.parameters(), 20.0))
    assert apollo < 0.85 * min(mini, sgd)


def scale_of_channels(rank: int) -> Tensor:
    """By which each channel of a gradient was scaled in the last of 30 steps, 128 channels of 64."""
    param = nn.Parameter(torch.zeros(64, 128))
    optimizer = thinwire.Apollo([("x", param)], 1.0, matrices="x", rank=rank, limit=None, period=10**9)
    generator = torch.Generator().manual_seed(1)
    constant = torch.randn(64, 128, generator=generator)
    for _ in range(30):
        before = param.detach().clone()
        param.grad = constant + 3 * torch.randn(64, 128, generator=generator)
        optimizer.step()
    return (before - param.detach()).norm(dim=0) / param.grad.norm(dim=0)  # type: ignore[union-attr]


def test_one_projected_number_is_too_few_for_a_channel() -> None:
    """Why Mini has one scale for a matrix: those of channels spread far more than with a rank of 8."""
    whole = scale_of_channels(64)
    spread = {rank: float((scale_of_channels(rank) / whole).std()) for rank in (1, 8)}
    assert spread[8] < 0.2 < 0.5 < spread[1]


def test_a_projection_that_loses_nothing_gives_adams_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """With r = m and P = I: the directions are the gradient's, and the norms of channels those of AdamW's update."""
    monkeypatch.setattr(Projection, "_draw", lambda self, seed, elements, device: torch.eye(self.rank)[elements])
    param, plain = (nn.Parameter(torch.zeros(6, 9)) for _ in range(2))
    apollo = thinwire.Apollo([("x", param)], 1.0, matrices="x", rank=6, limit=None)
    adamw = torch.optim.AdamW([plain], 1.0, eps=1e-6, weight_decay=0.0)
    for step in range(4):
        gradient = torch.randn(6, 9, generator=torch.Generator().manual_seed(step))
        moved = []
        for each, optimizer in ((param, apollo), (plain, adamw)):
            before, each.grad = each.detach().clone(), gradient.clone()
            optimizer.step()
            moved.append(before - each.detach())
        torch.testing.assert_close(moved[0].norm(dim=0), moved[1].norm(dim=0), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(moved[0] / moved[0].norm(dim=0), gradient / gradient.norm(dim=0))


def test_the_state_of_a_large_matrix() -> None:
    """Mini on 4096 x 11008 holds 2 numbers a column and 2; moments of AdamW would be 90.2 million."""
    with torch.device("meta"):
        param = nn.Parameter(torch.empty(4096, 11008))
    mini = thinwire.ApolloMini([("x", param)], matrices="x")
    part = mini.part_of(param)
    assert part is not None and mini.num_kept(part) == 2 * 11008 + 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"matrices": "wides"}, "apollo matrices 'wides': matches the name of no two-dim.*nearest: wide"),
        ({"matrices": "bias"}, "nearest: wide, tall, table"),
        ({"matrices": "("}, "not a regular expression"),
        ({"rank": 25}, "apollo rank 25: must be at most 24, the elements of a channel of 'wide', 24x50; nearest: 24"),
        ({"rank": 0}, "apollo rank 0: must be at least 1"),
        ({"channels": "row"}, "channels row: must be one of larger and rows; did you mean 'rows'"),
        ({"codec": "int8/64+zstd"}, "its packets differ in length"),
        ({"limit": 0.9}, "apollo limit 0.9"),
        ({"period": 0}, "apollo period 0"),
        ({"scale": 0.0}, "apollo scale 0.0"),
        ({"eps": 0.0}, "apollo eps 0.0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        thinwire.Apollo(Held().named_parameters(), **{"matrices": "wide", **options})


def test_who_takes_it() -> None:
    with pytest.raises(ConfigError, match=r"give model\.named_parameters"):
        thinwire.Apollo(Held().parameters())  # type: ignore[arg-type]
    for strategy in ("sdp4bit", "fsdp", "ddp", "diloco"):
        assert Run.of(TrainConfig(strategy=strategy, optimizer="apollo-mini")).config.optimizer == "apollo-mini"
    with pytest.raises(ConfigError, match="apollo does not fit strategy dgc"):
        Run.of(TrainConfig(strategy="dgc", optimizer="apollo"))
    with pytest.raises(ConfigError, match="apollo needs whole tensors, which --mesh"):
        Run.of(TrainConfig(strategy="zero", optimizer="apollo", mesh="data=1,tensor=2", workers=2))
    model = Held()
    with pytest.raises(ConfigError, match="Apollo needs whole tensors, which a tensor axis cuts"):
        cut_parameters(model, made("apollo", model), None)  # type: ignore[arg-type]


def test_the_trainer_projects_the_matrices_of_layers() -> None:
    run = Run.of(TrainConfig(strategy="ddp", optimizer="apollo", seed=5))
    model = nn.Module()
    model.embed, model.head = nn.Embedding(7, 4), nn.Linear(4, 7)
    model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    optimizer = build_optimizer(run.config, model)
    assert isinstance(optimizer, thinwire.Apollo) and optimizer.seed == 5
    assert [optimizer.name_of(param) for param in optimizer.matrices] == ["layers.0.weight", "layers.1.weight"]
    with pytest.raises(ConfigError, match="the model has no layers"):
        build_optimizer(run.config, nn.Linear(4, 4))
