"""The sharded optimizer on real processes, against single-process training and against the cost formula."""

from __future__ import annotations

import copy
import io
import math
import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from tests.conformance.strategy_suite import ROWS, STEPS, Net, batch, distance, hash_of, make_optimizer, single_process
from tests.workers import run_workers
from thinwire.layout.formats import WireFormat
from thinwire.methods.data.sdp4bit import SDP4Bit
from thinwire.methods.data.zero import Zero
from thinwire.methods.sharded import ShardedMethod


def train(
    rank: int,
    world_size: int,
    name: str,
    local_size: int,
    bucket_numel: int | None = None,
    overlap: bool = False,
    kind: str = "adamw",
    micro_batches: int = 1,
    num_steps: int = STEPS,
) -> dict:
    """Some steps; ranks start from different weights, so that the start is tested too."""
    model = Net(seed=rank)
    model, optimizer = thinwire.zero(
        model,
        make_optimizer(model, kind),
        ROWS[name].strategy,
        local_size=local_size,
        bucket_numel=bucket_numel,
        overlap=overlap,
        timeout_s=300,
        checked=True,
    )
    hashes, sent = [], []
    for step in range(num_steps):
        before = optimizer.meter.snapshot()
        own = batch(step).chunk(world_size)[rank].chunk(micro_batches)
        with optimizer.no_sync():
            for tokens in own[:-1]:
                (model(tokens, step % 2 == 1) / micro_batches).backward()
        if micro_batches > 1:
            assert (optimizer.meter.snapshot() - before).sent_bytes == 0
        (model(own[-1], step % 2 == 1) / micro_batches).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        hashes.append(hash_of(model))
        sent.append((optimizer.meter.snapshot() - before).sent_bytes)
    told = {
        "weights": {key: p.detach().clone() for key, p in model.named_parameters()},
        "hashes": hashes,
        "sent": sent,
        "formula": optimizer.bytes_per_step,
    }
    optimizer.close()
    return told


def trainings(rank: int, world_size: int, ways: list[dict[str, Any]]) -> list[dict]:
    """One training after the other in the same processes; each with its options of `train`."""
    return [train(rank, world_size, **way) for way in ways]


@pytest.mark.parametrize("name", ["zero", "sdp4bit"])
def test_overlap_and_accumulation_change_nothing(name: str) -> None:
    plain: dict[str, Any] = {"name": name, "local_size": 1}
    ways = [plain, plain | {"overlap": True}, plain | {"overlap": True, "micro_batches": 2}]
    alone, overlapped, accumulated = run_workers(trainings, 2, ways)[0]
    assert alone["hashes"] == overlapped["hashes"]
    tolerance = 1e-5 if name == "zero" else 0.45
    assert distance(accumulated["weights"], alone["weights"]) < tolerance


def test_bucket_size_does_not_matter() -> None:
    grids = [(name, local_size) for name in ("zero", "sdp4bit-small-groups") for local_size in (1, 2)]
    ways = [
        # Differences of weights refer to those of the step before: after some steps nothing is new.
        {"name": name, "local_size": local_size, "bucket_numel": bucket_numel, "num_steps": 5}
        for name, local_size in grids
        for bucket_numel in (1 << 20, 1)
    ]
    results = run_workers(trainings, 4, ways)[0]
    for grid, one, many in zip(grids, results[::2], results[1::2], strict=True):
        assert many["formula"] != one["formula"], "the bucket size was not used"
        assert distance(many["weights"], one["weights"]) < 1e-5, grid


def test_elementwise_optimizers_follow_too() -> None:
    kinds = ("sgd", "adagrad", "amsgrad")
    for results in run_workers(trainings, 2, [{"name": "zero", "local_size": 1, "kind": kind} for kind in kinds]):
        for kind, result in zip(kinds, results, strict=True):
            for key, weight in result["weights"].items():
                torch.testing.assert_close(weight, single_process(kind)[key], rtol=0, atol=1e-6)


def send_large(rank: int, world_size: int, ways: list[tuple[int, bool]]) -> list[tuple[int, int, float]]:
    """Bytes of a step that are sent, received, and sent without compression, for every (local size, papers)."""
    return [send_one_step(*way) for way in ways]


def send_one_step(local_size: int, papers: bool) -> tuple[int, int, float]:
    model = nn.Sequential(nn.Linear(512, 1024, bias=False), nn.Linear(1024, 512, bias=False))
    model, optimizer = thinwire.zero(
        model,
        torch.optim.AdamW(model.parameters()),
        thinwire.SDP4Bit(inter_gradients="int4+hadamard32", intra_gradients="int8+hadamard32")
        if papers
        else thinwire.SDP4Bit(),
        local_size=local_size,
    )
    before = optimizer.meter.snapshot()
    model(torch.randn(4, 512)).square().mean().backward()
    optimizer.step()
    optimizer.close()
    reading = optimizer.meter.snapshot() - before
    return reading.sent_bytes, reading.received_bytes, optimizer.uncompressed_bytes_per_step


@pytest.mark.parametrize(("world_size", "local_sizes"), [(2, (1,)), (4, (1, 2, 4))])
def test_bytes_are_those_of_the_paper(world_size: int, local_sizes: tuple[int, ...]) -> None:
    """Weights 4 + 32/2048 bits, hop one 8.25 bits on (D-1)/D, hop two 4.25 bits on (1/D)(Y-1)/Y, all of N = 2^20."""
    ways = [(local_size, papers) for local_size in local_sizes for papers in (False, True)]
    for results in run_workers(send_large, world_size, ways):
        for (local_size, _), (sent, received, uncompressed) in zip(ways, results, strict=True):
            n, nodes = 1 << 20, world_size // local_size
            gradients = n * (local_size - 1) / local_size * 8.25 + n / local_size * (nodes - 1) / nodes * 4.25
            weights = n * (world_size - 1) / world_size * (4 + 32 / 2048)
            assert sent == pytest.approx((gradients + weights) / 8, rel=0.01), local_size
            assert received == sent
            assert uncompressed == 8 * n * (world_size - 1) / world_size


class TwoNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[1.0, -1.0]]))


class Ternary(ShardedMethod):
    """Ternary nearest weights, exact gradients."""

    name = "ternary"

    def matrix(self) -> WireFormat:
        exact = thinwire.Identity()
        return WireFormat(thinwire.Integer(bits=2, group=2, rounding="nearest"), True, exact, exact)

    vector = matrix


def both_toys(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    return toy(True), toy(False)


def toy(direct: bool) -> list[float]:
    """f(w) = |w|^2 with gradient (4 w1, 0) or (0, 4 w2), step 0.1; direct: the weights themselves are quantised."""
    model = TwoNumbers()
    model, optimizer = thinwire.zero(model, torch.optim.SGD(model.parameters(), lr=0.1), Ternary(), local_size=1)
    ternary = thinwire.Integer(bits=2, group=2, rounding="nearest")
    generator = torch.Generator().manual_seed(3)
    for _ in range(100):
        side = int(torch.randint(0, 2, (1,), generator=generator))
        (2 * model.w[0, side].square()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if direct:
            with torch.no_grad():
                model.w.copy_(ternary.decode(ternary.encode(model.w), 2).view(1, 2))
    return model.w.detach().flatten().tolist()


def test_direct_weight_quantisation_sticks_and_differences_converge() -> None:
    for stuck, converged in run_workers(both_toys, 2):
        assert stuck == [1.0, -1.0]
        assert max(map(abs, converged)) < 1e-3


def low_precision(rank: int, world_size: int) -> tuple[str, float, torch.dtype]:
    model = Net(seed=0).to(torch.bfloat16)
    model, optimizer = thinwire.zero(model, make_optimizer(model), SDP4Bit(), local_size=1)
    loss = torch.tensor(0.0)
    for _ in range(30):
        loss = model(batch(0).chunk(world_size)[rank], True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    far = max(float((b.master - b.own.float()).abs().max()) for b in optimizer.buckets)
    import hashlib

    raw = b"".join(p.detach().view(torch.int16).numpy().tobytes() for p in model.parameters())
    assert far < 0.05, "the replica drifted from the masters"
    return hashlib.sha256(raw).hexdigest(), float(loss), optimizer.buckets[0].master.dtype


def test_bf16_replicas_with_fp32_masters() -> None:
    results = run_workers(low_precision, 2)
    assert results[0][0] == results[1][0]
    assert results[0][1] < 3.2
    assert results[0][2] == torch.float32


def mistakes(rank: int, world_size: int) -> dict[str, str]:
    found = {}

    def fresh(**options: Any) -> tuple[Net, thinwire.ShardedOptimizer]:
        model = Net(seed=0)
        return thinwire.zero(model, make_optimizer(model), Zero(), local_size=1, **options)

    model, optimizer = fresh()
    model(batch(0), True).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    found["clip"] = str(caught.value)

    # Neither write is counted by torch.
    for way in ("data", "numpy"):
        model, optimizer = fresh()
        model(batch(0), True).backward()
        grad = model.embed.weight.grad
        assert grad is not None
        if way == "data":
            grad.data.mul_(0.5)
        else:
            grad.numpy()[:] *= 0.5
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        found[way] = str(caught.value)

    table = nn.Embedding(8, 4, sparse=True)
    wrapped, optimizer = thinwire.zero(table, torch.optim.SGD(table.parameters()), Zero(), announce=False)
    with pytest.raises(thinwire.ConfigError) as refused:
        wrapped(torch.tensor([1, 2])).sum().backward()
    found["sparse"] = str(refused.value)

    model, optimizer = fresh()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(0), True)).backward()
    with pytest.raises(thinwire.ConfigError) as refused:
        scaler.step(optimizer)
    found["scaler"] = str(refused.value)

    model, optimizer = fresh(bucket_numel=1)
    model(batch(0), True).backward()
    with pytest.raises(RuntimeError) as caught:
        model(batch(0), True).backward()
    found["no_sync"] = str(caught.value)

    model, optimizer = fresh()
    model.fixed.requires_grad_(True)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    found["thawed"] = str(caught.value)
    with pytest.raises(RuntimeError) as caught:
        optimizer.add_param_group({"params": list(model.fixed.parameters())})
    found["added"] = str(caught.value)
    held = Net(seed=0)
    for name, candidate in {
        "lbfgs": torch.optim.LBFGS(held.parameters()),
        "adafactor": torch.optim.Adafactor(held.parameters()),
        "lans": thinwire.LANS(held.parameters()),
        "muon": torch.optim.Muon([p for p in held.parameters() if p.dim() == 2]),
    }.items():
        with pytest.raises(thinwire.ConfigError) as refused:
            thinwire.zero(held, candidate, Zero())
        found[name] = str(refused.value)
    return found


def test_mistakes_are_refused_with_the_way_out() -> None:
    for found in run_workers(mistakes, 2):
        for name in ("clip", "data", "numpy"):
            assert "optimizer.clip_grad_norm_" in found[name], name
        assert "'weight' is sparse" in found["sparse"] and "GradScaler" in found["scaler"]
        assert "no_sync" in found["no_sync"]
        assert "frozen when zero() was called" in found["thawed"]
        assert "before calling zero()" in found["added"]
        for name in ("lbfgs", "adafactor", "lans", "muon"):
            assert "can't be sharded" in found[name], found[name]


def disagreements(rank: int, world_size: int) -> dict[str, str]:
    """What a rank is told where another was given something else, before a message fits no other."""
    said = {}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    asked: dict[str, dict[str, Any]] = {
        "lr": {}, "local_size": {"local_size": 1 + rank}, "bucket_numel": {"bucket_numel": 1000 * (1 + rank)},
        "seed": {"seed": rank}, "mesh lr": {}, "mesh seed": {"seed": rank}, "mesh methods": {},
    }  # fmt: skip
    for name, options in asked.items():
        model = nn.Linear(8, 8)
        lr = 0.1 * (1 + rank) if name.endswith("lr") else 0.1
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        with pytest.raises(thinwire.ConfigError) as refused:
            if name.startswith("mesh"):
                method = thinwire.DDP() if rank and name == "mesh methods" else Zero()
                thinwire.parallelize(model, optimizer, mesh, [method], announce=False, **options)
            else:
                thinwire.zero(model, optimizer, Zero(), announce=False, **options)
        said[name] = str(refused.value)
    return said


def test_a_rank_that_was_told_otherwise_is_named_on_all() -> None:
    for said in run_workers(disagreements, 2):
        for name, message in said.items():
            option = name.removeprefix("mesh ")
            words = "lr of parameter group 0 of rank 1 is 0.2" if option == "lr" else f"{option} of rank 1 is"
            assert message.startswith(words) and "must be the same on all ranks" in message, name


def loaded_from_outside(rank: int, world_size: int) -> tuple[float, str]:
    model = Net(seed=0)
    model, optimizer = thinwire.zero(model, make_optimizer(model, "sgd"), SDP4Bit(), local_size=1)
    model.load_state_dict(Net(seed=5).state_dict())
    model(batch(0).chunk(world_size)[rank], False).backward()
    optimizer.step()
    expected = dict(Net(seed=5).named_parameters())
    off = max(float((p - expected[name]).abs().max()) for name, p in model.named_parameters())
    return off, hash_of(model)


def test_weights_loaded_from_outside_are_kept() -> None:
    results = run_workers(loaded_from_outside, 2)
    assert results[0][1] == results[1][1]
    assert results[0][0] < 0.1


def one_rank_dies(rank: int, world_size: int) -> str:
    model = Net(seed=0)
    model, optimizer = thinwire.zero(model, make_optimizer(model), SDP4Bit(), local_size=2, overlap=True)
    with pytest.raises(thinwire.PeerLostError) as caught:
        for step in range(100):
            loss = model(batch(step).chunk(world_size)[rank], True)
            if (rank, step) == (1, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    time.sleep(1.0)
    return str(caught.value)


def test_survivors_of_a_killed_rank_name_it() -> None:
    results = run_workers(one_rank_dies, 4, may_die=(1,))
    assert all("rank 1 is missing: gradients" in results[rank] for rank in (0, 2, 3)), results


class Reader(nn.Module):
    """A parent that reads its child's weight before it calls the child, as a regulariser does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.child = nn.Linear(512, 512)
        self.rest = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = self.child.weight.square().sum()
        return penalty + self.rest(self.child(x)).square().mean()


def both_read_early(rank: int, world_size: int) -> list[list]:
    return [read_early(rank, overlap) for overlap in (False, True)]


def read_early(rank: int, overlap: bool) -> list:
    model: Any = Reader()
    model, optimizer = thinwire.zero(
        model,
        torch.optim.SGD(model.parameters(), lr=0.02),
        thinwire.SDP4Bit(),
        local_size=1,
        overlap=overlap,
    )
    seen: list = []
    for step in range(4):
        loss = model(torch.ones(2, 512) * (rank + step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        copied, file = copy.deepcopy(model) if step % 2 else None, io.BytesIO()
        torch.save(model, file)
        seen += [float(loss), float(model.rest[2].weight.sum()), float(model.child.state_dict()["bias"].sum())]
        file.seek(0)
        for other in filter(None, (copied, torch.load(file, weights_only=False))):
            assert all(torch.equal(p, q) for p, q in zip(other.parameters(), model.parameters(), strict=True))
            other(torch.ones(2, 512)).backward()
    model.load_state_dict(Reader().state_dict())
    optimizer.synchronize()
    fresh = Reader().state_dict()
    seen.append(all(torch.equal(value, fresh[name]) for name, value in model.state_dict().items()))
    return seen


def test_overlapped_weights_are_waited_for_by_whoever_reads_them() -> None:
    for plain, overlapped in run_workers(both_read_early, 2):
        assert plain == overlapped
        assert plain[-1] is True


def by_hand(rank: int, world_size: int) -> dict:
    found: dict = {}
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    model, optimizer = thinwire.zero(model, torch.optim.SGD(model.parameters(), lr=1.0), Zero())
    start = model.weight.detach().clone()
    model.weight.grad = torch.full((8, 8), float(rank))
    optimizer.step()
    found["manual gradient"] = torch.allclose(model.weight, start - 0.5)
    optimizer.zero_grad()
    with torch.no_grad():
        model.weight.copy_(model.weight.flip(0))
    flipped = model.weight.detach().clone()
    optimizer.step()
    found["flip"] = torch.equal(model.weight, flipped)
    model(torch.ones(1, 8) * 10).sum().backward()
    first, second = optimizer.clip_grad_norm_(1.0), optimizer.clip_grad_norm_(0.5)
    before = model.weight.detach().clone()
    optimizer.step()
    found["clipped twice"] = (float(first), float(second), float((model.weight - before).norm()))
    model.weight.data = model.weight.data.clone()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    found["moved"] = str(caught.value)
    other = nn.Linear(8, 8, bias=False)
    other, optimizer = thinwire.zero(other, torch.optim.SGD(other.parameters(), lr=1.0), Zero())
    other.load_state_dict({"weight": torch.ones(8, 8)}, assign=True)
    other(torch.ones(1, 8)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    found["replaced"] = str(caught.value)
    return found


def test_weights_and_gradients_handled_by_hand() -> None:
    for found in run_workers(by_hand, 2):
        assert found["manual gradient"]
        assert found["flip"]
        assert found["clipped twice"] == pytest.approx((80.0, 1.0, 0.5), rel=1e-3)
        assert "no longer lies where zero() put it" in found["moved"]
        assert "'weight' no longer lies where zero() put it" in found["replaced"]


class WithExperts(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(8, 8)
        torch.manual_seed(rank % 2)
        self.expert = nn.Linear(8, 8)


def own_groups_for_experts(rank: int, world_size: int) -> list[tuple]:
    return [own_group_for_experts(rank, use_mesh) for use_mesh in (False, True)]


def own_group_for_experts(rank: int, use_mesh: bool) -> tuple:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if use_mesh:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        group = mesh["dp"]
    else:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group = groups[rank % 2]
    model = WithExperts(rank)
    model, optimizer = thinwire.zero(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        Zero(),
        group_for=lambda name, _: group if name.startswith("expert") else None,
        local_size=1,
    )
    x = torch.full((2, 8), float(rank + 1))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    (model.shared(x) + model.expert(x)).sum().backward()
    own = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = optimizer.clip_grad_norm_(1e9)
    optimizer.step()
    return before, own, {name: p.detach().clone() for name, p in model.named_parameters()}, float(norm)


def test_some_parameters_in_a_group_of_their_own() -> None:
    told = run_workers(own_groups_for_experts, 4)
    for results in zip(*told, strict=True):
        squares = 0.0
        for rank, (before, _, after, norm) in enumerate(results):
            for name in before:
                members = [r for r in range(4) if r % 2 == rank % 2] if name.startswith("expert") else range(4)
                # Of the mean over all ranks of the losses.
                mean = torch.stack([results[r][1][name] for r in members]).sum(0) / 4
                torch.testing.assert_close(after[name], before[name] - 0.1 * mean, rtol=1e-5, atol=1e-6)
                squares += float(mean.square().sum()) / len(list(members))
            assert norm == results[0][3]
        assert results[0][3] == pytest.approx(math.sqrt(squares), rel=1e-5)


def test_a_parameter_without_gradients_has_no_state_to_lose(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    model.forward = lambda x: model["used"](x)
    wrapped, optimizer = thinwire.zero(model, torch.optim.AdamW(model.parameters()), Zero())
    wrapped(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert "starts anew" not in caplog.text
    # What was saved in part is told.
    lost = next(name for name in state["tensors"] if "exp_avg_sq" in name)
    del state["tensors"][lost]
    optimizer.load_state_dict(state)
    assert "starts anew" in caplog.text


def test_world_of_one_without_torch_distributed() -> None:
    model = Net(seed=0)
    model, optimizer = thinwire.zero(model, make_optimizer(model), SDP4Bit())
    for step in range(STEPS):
        model(batch(step), step % 2 == 1).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, weight in single_process().items():
        torch.testing.assert_close(dict(model.named_parameters())[name], weight, rtol=0, atol=1e-6)
    assert optimizer.meter.snapshot().sent_bytes == 0
    assert any("single rank sends nothing" in why for _, _, why in optimizer.describe())


class Scaled(nn.Module):
    """A parameter without dimensions, registered first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.linear = nn.Parameter(torch.tensor(1.5)), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scale * self.linear(x)).square().mean()


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adagrad, torch.optim.AdamW])
def test_a_parameter_without_dimensions_keeps_its_state(optimizer_class: type[torch.optim.Optimizer]) -> None:
    weights = []
    for is_wrapped in (False, True):
        model, x = Scaled(), torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
        optimizer: Any = optimizer_class(model.parameters(), lr=0.01)  # type: ignore[call-arg]
        for step in range(4):
            if step == 2 and is_wrapped:
                # Every optimizer has a state by then; Adagrad has one from the start.
                model, optimizer = thinwire.zero(model, optimizer, thinwire.Zero(), announce=False)
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append([param.detach().clone() for param in model.parameters()])
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-6)


def small_gradients(rank: int, world_size: int) -> list[float]:
    """How far weights go whose gradients are too small for their group, without LoCo and with it."""
    moved = []
    for options in ({}, {"loco": True, "loco_beta": 0.5}):
        model = nn.Linear(64, 8, bias=False)
        nn.init.zeros_(model.weight)
        codec, code = "int4/64:nearest", torch.full((8, 64), 0.03)
        code[:, 0] = 1.0
        method = thinwire.SDP4Bit(weights="fp32", intra_gradients=codec, inter_gradients=codec, **options)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, sharded = thinwire.zero(model, optimizer, method, local_size=1, announce=False)
        for _ in range(20):
            (model.weight * code).sum().backward()
            sharded.step()
            sharded.zero_grad()
        moved.append(-float(model.weight[:, 1:].mean()) / 20)
        sharded.close()
    return moved


def test_loco_brings_back_small_gradients() -> None:
    for plain, fed_back in run_workers(small_gradients, 2):
        assert plain == 0.0
        assert 0.01 < fed_back < 0.05
