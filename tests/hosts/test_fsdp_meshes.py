"""compress_fsdp on HSDP and tensor-parallel meshes, meta models and mixed types: plain FSDP2 with exact codecs."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import thinwire
from tests.workers import run_workers
from thinwire import ConfigError, ZeroPP, compress_fsdp
from thinwire.hosts.fsdp.watch import UnequalStepError
from thinwire.state.replicas import ReplicaError, digest

EXACT = thinwire.Zero()
LOCO = ZeroPP(inter_gradients="int4/32", intra_gradients="int4/32", loco=True, loco_reset=3)


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Odd sizes, and a part that only some steps use."""

    def __init__(self, hidden: int = 21) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 13)
        self.blocks = nn.ModuleList(Block(13, hidden) for _ in range(2))
        self.side = nn.Linear(13, 13)

    def forward(self, x: Tensor, use_side: bool = True) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (x + self.side(x) if use_side else x).square().mean()


def sharded(net: Net, mesh: Any, **options: Any) -> Any:
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def replicated(net: Net, **options: Any) -> Any:
    return sharded(net, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), **options)


def tensor_parallel(net: Net, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    # 21 rows are cut into 11 and 10, so that ranks that hold the same norms hold other numbers of elements.
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    for block in net.blocks:
        parallelize_module(block, mesh["tensor"], plan)
    return sharded(net, mesh["data"], **options)


MESHES: dict[str, Callable[..., Any]] = {"hsdp": replicated, "tensor": tensor_parallel}


def inputs(kind: str, step: int, rank: int) -> Tensor:
    # Ranks of one tensor-parallel group see the same data.
    seed = 100 * step + (rank // 2 if kind == "tensor" else rank)
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(seed))


def parts(net: nn.Module) -> list[Tensor]:
    return [p.to_local().detach() for p in net.parameters() if isinstance(p, DTensor)]


def follow(net: Any, kind: str, rank: int) -> list[Tensor]:
    """Steps of a loop that accumulates both ways, and leaves a part out; its weights and clipped norms."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)
    weights: list[Tensor] = []
    for step in range(4):
        if step == 0:
            net.set_requires_gradient_sync(False)
            net(inputs(kind, 50, rank)).backward()
            net.set_requires_gradient_sync(True)
        if step == 1:
            net(inputs(kind, 51, rank)).backward()
        if step == 2:
            # Sums over shards wait for those over replicas.
            net.set_requires_all_reduce(False)
            net(inputs(kind, 52, rank)).backward()
            net.set_requires_all_reduce(True)
        net(inputs(kind, step, rank), use_side=step != 1).backward()
        if kind == "hsdp":
            norm: Any = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            weights.append(norm.full_tensor())
        optimizer.step()
        optimizer.zero_grad()
        weights += [part.clone() for part in parts(net)]
    return weights


def exact(rank: int, world_size: int, kind: str) -> None:
    for options in ({}, {"reshard_after_forward": True}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}):
        plain, ours = MESHES[kind](Net(), **options), MESHES[kind](Net(), **options)
        compressed = compress_fsdp(ours, EXACT, local_size=2, checked=True, announce=False)
        expected, got = follow(plain, kind, rank), follow(ours, kind, rank)
        for theirs, mine in zip(expected, got, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=4e-3 if "mp_policy" in options else 1e-6)
        compressed.close()
        # What is left is FSDP2 as it was.
        ours(inputs(kind, 0, rank)).backward()


@pytest.mark.parametrize("kind", MESHES)
def test_exact_codecs_follow_plain_fsdp2(kind: str) -> None:
    run_workers(exact, 4, kind, local_size=2)


def lossy(rank: int, world_size: int, kind: str, local_size: int) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for method in (None, ZeroPP(), thinwire.SDP4Bit("int4/32"), LOCO):
        net = MESHES[kind](Net(), reshard_after_forward=True)
        compressed = compress_fsdp(net, method, local_size=local_size, announce=False) if method else None
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)
        hashes, sent, losses = [], [], []
        for step in range(4):
            before = compressed.meter.snapshot().sent_bytes if compressed else 0
            loss = net(inputs(kind, step % 2, rank))
            loss.backward()
            if compressed:
                sent.append(compressed.meter.snapshot().sent_bytes - before)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            # Norms, biases of the second matrix and what is not parallelised are whole on every tensor-parallel rank.
            shared = [p for name, p in net.named_parameters() if kind == "hsdp" or ".up." not in name]
            shared = [p for p in shared if kind == "hsdp" or p.shape != (13, 21)]
            hashes.append(digest(part for part in (p.to_local().detach() for p in shared)).tolist())
        told[method.name + str(method is LOCO) if method else "plain"] = hashes, losses
        if compressed:
            assert set(sent[1:]) == {compressed.bytes_per_step}
            if kind == "hsdp":
                assert "gradients over replicas" in {row[0] for row in compressed.describe()}
            compressed.close()
    return told


@pytest.mark.parametrize(("kind", "local_size"), [("hsdp", 2), ("hsdp", 1), ("tensor", 2)])
def test_compressed_replicas_stay_the_same_bits(kind: str, local_size: int) -> None:
    told = run_workers(lossy, 4, kind, local_size, local_size=local_size)
    # Rank = 2 * replica + shard, or 2 * data + tensor.
    pairs = [(0, 2), (1, 3)] if kind == "hsdp" else [(0, 1), (2, 3)]
    for one, other in pairs:
        for name, (hashes, _) in told[one].items():
            assert hashes == told[other][name][0], name
    plain = told[0].pop("plain")[1]
    for _, losses in told[0].values():
        assert 0 < abs(losses[-1] - plain[-1]) < 0.1 * plain[0]


def resumed(rank: int, world_size: int) -> None:
    def steps(net: Any, numbers: range) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in numbers:
            net(inputs("hsdp", step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()

    net = replicated(Net())
    compressed = compress_fsdp(net, LOCO, local_size=1, announce=False)
    steps(net, range(2))
    file = io.BytesIO()
    torch.save((net.state_dict(), compressed.state_dict()), file)
    steps(net, range(2, 5))
    compressed.close()
    second = replicated(Net())
    loaded = compress_fsdp(second, LOCO, local_size=1, announce=False)
    weights, state = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    second.load_state_dict(weights)
    loaded.load_state_dict(state)
    steps(second, range(2, 5))
    assert all(map(torch.equal, parts(net), parts(second)))


def test_a_loaded_state_goes_on_bit_for_bit() -> None:
    run_workers(resumed, 4, local_size=2)


def late(rank: int, world_size: int) -> None:
    """compress_fsdp before the values are there, after, and plain FSDP2."""
    ends = []
    for when in ("before", "after", "plain"):
        with torch.device("meta"):
            net: Any = Net()
        sharded(net, None)
        if when == "before":
            early = torch.optim.SGD(net.parameters(), lr=0.1)
            with pytest.raises(ConfigError, match="to_empty, init the weights, make the optimizer, compress_fsdp"):
                compress_fsdp(net, EXACT, early, announce=False)
            compressed = compress_fsdp(net, EXACT, announce=False)
            assert compressed.bytes_per_step > 0
        net.to_empty(device="cpu")
        with torch.no_grad():
            for param in net.parameters():
                param.fill_(0.0).add_(0.1)
        if when == "after":
            compressed = compress_fsdp(net, EXACT, announce=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            net(inputs("", step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if when != "plain":
            assert compressed.meter.snapshot().sent_bytes > 0
            compressed.close()
        ends.append(parts(net))
    for other in ends[1:]:
        for mine, theirs in zip(ends[0], other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_a_model_without_values_is_compressed_when_it_has_them() -> None:
    run_workers(late, 2, local_size=1)


class Mixed(nn.Module):
    """A frozen matrix in bf16 of odd size beside trained fp32, as with adapters; one of int8, one of float64."""

    def __init__(self, large: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(7, 5).to(torch.bfloat16).requires_grad_(False)
        self.low = nn.Linear(7, 5)
        self.codes = nn.Parameter(torch.randint(-128, 128, (3, 5), dtype=torch.int8), requires_grad=False)
        self.large = nn.Linear(5, 3).double() if large else None
        self.scale = nn.Parameter(torch.rand(3, dtype=torch.float64), requires_grad=False)
        if large:
            fully_shard(self.large)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x.bfloat16()).float() + self.low(x)
        y = y @ self.codes.float().T / 128 * self.scale.float()
        if self.large is not None:
            y = y + self.large((x[:, :5]).double()).float()
        return y.square().mean()


def mixed(rank: int, world_size: int) -> None:
    for method, tolerance in (
        (EXACT, 1e-6),
        (thinwire.SDP4Bit(weights="fp32", vector_weights="fp32"), 1.0),
        (thinwire.SDP4Bit(), 1.0),
    ):
        ends = []
        for ours in (False, True):
            net: Any = fully_shard(Mixed(large=True))
            if ours:
                compressed = compress_fsdp(net, method, local_size=1, announce=False)
                rows = {row[0]: row for row in compressed.describe()}
                assert "weights of other types" in rows and "gradients in float64" in rows
            optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)
            sent = []
            for step in range(3):
                before = compressed.meter.snapshot().sent_bytes if ours else 0
                net(inputs("", step, rank)).backward()
                sent.append(compressed.meter.snapshot().sent_bytes - before if ours else 0)
                optimizer.step()
                optimizer.zero_grad()
            net.unshard()
            ends.append([net.codes.detach().clone(), net.scale.detach().clone(), net.low.weight.detach().clone()])
            net.reshard()
        assert sent[-1] == compressed.bytes_per_step
        for theirs, mine in zip(*ends, strict=True):
            lossless = mine.dtype in (torch.int8, torch.float64)
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0 if lossless else tolerance)


def test_modules_of_mixed_types_are_gathered_as_they_are() -> None:
    run_workers(mixed, 2, local_size=1)


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, name: str, x: Tensor) -> Tensor:
        return self.get_submodule(name)(x).square().mean()


def uneven(rank: int, world_size: int) -> None:
    """Ranks that use other parameters of equal size; a load on one rank; a rank that asks for something else."""
    for kind in ("other parameters", "load"):
        net: Any = fully_shard(Either())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        compress_fsdp(net, EXACT, optimizer, local_size=1, announce=False)
        words = "'[ab].weight'.* had no gradient" if kind == "other parameters" else "loaded weights"
        with pytest.raises(UnequalStepError, match=words):
            for _ in range(3):
                if kind == "load" and rank:
                    net.load_state_dict(net.state_dict())
                net("ab"[rank] if kind == "other parameters" else "a", torch.randn(2, 8)).backward()
                optimizer.step()
                optimizer.zero_grad()
    for odd in ({"seed": rank}, {"local_size": 1 + rank}):
        with pytest.raises(ConfigError, match=f"{next(iter(odd))} of rank 1 is"):
            net = fully_shard(nn.Linear(4, 4))
            compress_fsdp(net, EXACT, announce=False, **odd)  # type: ignore[arg-type]


def test_ranks_that_do_different_things_are_told() -> None:
    run_workers(uneven, 2, local_size=1)


def refused(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    apart: Any = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ReplicaError, match="which holds the same part: give all ranks the same seed"):
        fully_shard(apart, mesh=mesh)
        compress_fsdp(apart, EXACT, announce=False)
    table: Any = fully_shard(nn.Embedding(8, 4, sparse=True))
    compress_fsdp(table, EXACT, announce=False)
    with pytest.raises(ConfigError, match=r"'weight' is sparse.*sparse=False"):
        table(torch.tensor([1, 2])).sum().backward()


def test_what_fsdp2_cannot_reduce_is_refused_by_name() -> None:
    run_workers(refused, 2, local_size=1)


def scaled(rank: int, world_size: int) -> None:
    ends = []
    for ours in (False, True):
        torch.manual_seed(0)
        net: Any = fully_shard(nn.Linear(7, 3))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if ours:
            compress_fsdp(net, EXACT, optimizer, announce=False)
        scaler = torch.amp.GradScaler("cpu")
        for step in range(3):
            # What overflows on one rank is skipped on all.
            x = inputs("", step, rank) * (float("inf") if step == rank == 1 else 1.0)
            scaler.scale(net(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        ends.append([*parts(net), torch.tensor(scaler.get_scale())])
    for theirs, mine in zip(*ends, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_a_gradient_scaler_works_as_with_plain_fsdp2() -> None:
    run_workers(scaled, 2, local_size=1)
