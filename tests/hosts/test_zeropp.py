"""ZeRO++ on FSDP2: exact with exact codecs, silent between nodes where nothing changed, compressed as promised."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import thinwire
from tests.workers import run_workers
from thinwire import ConfigError, DeadGradientError, ZeroPP, compress_fsdp
from thinwire.codecs import Hadamard, Identity, Integer
from thinwire.hosts.fsdp import pattern
from thinwire.hosts.fsdp.compress import CompressedFSDP
from thinwire.hosts.fsdp.unit import LayoutError, StaleWeightsError
from thinwire.layout.sections import Sections
from thinwire.state.watchdog import Watchdog

EXACT = ZeroPP("fp32", "fp32", "fp32", "fp32")
LOSSY = ZeroPP("int8/32:nearest", "int4/32:nearest", "int4/32:nearest")
LOCO = ZeroPP(inter_gradients="int4/32", intra_gradients="int4/32", loco=True, loco_reset=5)
DIFFERENCES = thinwire.SDP4Bit(
    "int4/32", "int8/32:bf16+hadamard32", "int4/32:bf16+hadamard32", "int8/32", "int8/32:bf16+hadamard32"
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Odd sizes, a frozen part, and one that only some steps use."""

    def __init__(self, width: int = 13, num_blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.side = nn.Linear(width, width)
        self.fixed = nn.Linear(width, 5).requires_grad_(False)

    def forward(self, x: torch.Tensor, use_side: bool = True) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        if use_side:
            x = x + self.side(x)
        return self.fixed(x).float().square().mean()


def sharded(net: nn.Module, **options: Any) -> Any:
    for block in net.blocks:  # type: ignore[union-attr]
        fully_shard(block, **options)
    return fully_shard(net, **options)


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def whole(net: nn.Module) -> list[torch.Tensor]:
    return [cast(Any, param).full_tensor().detach() for param in net.parameters()]


def crossing(compressed: CompressedFSDP) -> dict[str, int]:
    """Bytes sent to other nodes so far, by operation."""
    operations = compressed.meter.snapshot().operations
    return {name: reading.sent_bytes for (name, level), reading in operations.items() if level == "inter"}


VARIANTS: dict[str, dict[str, Any]] = {
    "reshard": {"reshard_after_forward": True},
    "keep": {"reshard_after_forward": False},
    "auto": {},
    "int": {"reshard_after_forward": 2},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "bf16 both": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
}


def follow(net: Any, rank: int, variant: str) -> tuple[list[torch.Tensor], list[float]]:
    """Steps of everything that a user's loop may do; the weights and the norms."""
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
    norms = []
    for step in range(4):
        if step == 1:
            # Whole gradients are added up on the way, without a reduction.
            net.set_requires_gradient_sync(False)
            net(inputs(50, rank)).backward()
            net.set_requires_gradient_sync(True)
        if step == 2:
            # Reduced gradients are added up.
            net(inputs(51, rank)).backward()
        net(inputs(step, rank), use_side=step % 2 == 0).backward()
        norms.append(float(cast(Any, nn.utils.clip_grad_norm_(net.parameters(), 0.1)).full_tensor()))
        optimizer.step()
        optimizer.zero_grad()
    return whole(net), norms


def exact_pairs(rank: int, world_size: int, variants: list[str]) -> None:
    for variant in variants:
        plain = sharded(Net(), **VARIANTS[variant])
        ours = sharded(Net(), **VARIANTS[variant])
        compressed = compress_fsdp(ours, EXACT, local_size=2, checked=True, announce=False)
        shown = {row[0]: row[1] for row in compressed.describe()}["reshard after forward"]
        assert (shown == "off") == (variant == "keep"), shown
        expected, norms = follow(plain, rank, variant)
        got, our_norms = follow(ours, rank, variant)
        # gloo sums in another order than we do.
        tolerance = 1e-6 if "bf16" not in variant else 4e-3
        assert our_norms == pytest.approx(norms, rel=1e-5 if "bf16" not in variant else 2e-2)
        for theirs, mine in zip(expected, got, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)
        compressed.close()
        # What is left is FSDP2 as it was.
        ours(inputs(0, rank)).backward()


def test_exact_codecs_follow_plain_fsdp2() -> None:
    run_workers(exact_pairs, 4, list(VARIANTS), local_size=2)


class Loose(Net):
    """Blocks under activation checkpointing, the second one compiled."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            if compiled:
                block.compile(backend="aot_eager")
            else:
                self.blocks[number] = checkpoint_wrapper(block)


def unusual(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard"))["shard"]
    for kind in ("checkpointed", "compiled", "divided", "forced sum", "all", "hook"):
        results = []
        for ours in (False, True):
            net = Loose(kind == "compiled") if kind in ("checkpointed", "compiled") else Net()
            sharded(net, mesh=mesh)
            for module in (m for m in net.modules() if isinstance(m, FSDPModule)):
                if kind == "forced sum":
                    module.set_force_sum_reduction_for_comms(True)
                if kind == "forced sum" or (kind == "divided" and ours):
                    # gloo can't multiply: the plain model's gradients are divided by hand below.
                    module.set_gradient_divide_factor(3.0)
                if kind == "all":
                    module.set_reduce_scatter_unused_params(True)
            if ours:
                compressed = compress_fsdp(net, EXACT, local_size=1, announce=False)
            seen: list[float] = []
            if kind == "hook":
                next(net.parameters()).register_post_accumulate_grad_hook(
                    lambda p, seen=seen: seen.append(float(p.grad.sum()))
                )
            optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
            for step in range(3):
                net(inputs(step, rank), use_side=False).backward()
                if kind == "divided" and not ours:
                    for param in net.parameters():
                        if param.grad is not None:
                            param.grad.mul_(world_size / 3.0)
                optimizer.step()
                optimizer.zero_grad()
            results.append((whole(net), seen))
            if ours and kind in ("hook", "forced sum"):
                described = {row[0]: row for row in compressed.describe()}
                assert "reads it" in str(described) or "after the sum" in str(described)
        (expected, seen), (got, ours_seen) = results
        assert ours_seen == pytest.approx(seen, rel=1e-5)
        for theirs, mine in zip(expected, got, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_checkpointing_compilation_factors_and_hooks() -> None:
    run_workers(unusual, 2)


def secondary(rank: int, world_size: int) -> None:
    nets = {kept: sharded(Net(), reshard_after_forward=True) for kept in (True, False)}
    lossy = {kept: ZeroPP("int8/32:nearest", "fp32", "fp32", secondary=kept) for kept in nets}
    handles = {k: compress_fsdp(nets[k], lossy[k], local_size=2, checked=True, announce=False) for k in nets}
    optimizers = {k: torch.optim.AdamW([p for p in nets[k].parameters() if p.requires_grad], lr=1e-2) for k in nets}
    once = sum(gather.gather_bytes() for gather in handles[True].gathers) // 3
    for step in range(2):
        for kept, net in nets.items():
            before = crossing(handles[kept]).get("weights", 0)
            for micro_batch in range(4):
                net.set_requires_gradient_sync(micro_batch == 3)
                net(inputs(10 * step + micro_batch, rank)).backward()
            with torch.no_grad():
                net(inputs(90, rank))
            gathers = (crossing(handles[kept])["weights"] - before) / once
            # Of nine passes through every module, one crosses. Backward of the last kept ones may need none.
            assert gathers == 1 if kept else gathers == 9
            optimizers[kept].step()
            optimizers[kept].zero_grad()
        assert "weights_again" not in crossing(handles[True])
    for mine, plain in zip(whole(nets[True]), whole(nets[False]), strict=True):
        assert torch.equal(mine, plain)
    described = {row[0]: row[1] for row in handles[True].describe()}
    assert described["secondary partition"] == f"{handles[True].kept_bytes / 1e6:.3f} MB a rank"
    packets = sum(gather.codec.packet_bytes(gather.codec.numel) for gather in handles[True].gathers)
    assert handles[True].kept_bytes == 2 * packets


def test_gathers_of_unchanged_weights_stay_in_the_node() -> None:
    run_workers(secondary, 4, local_size=2)


def edits(rank: int, world_size: int) -> None:
    net = sharded(Net(), reshard_after_forward=True)
    compressed = compress_fsdp(net, EXACT, local_size=1, announce=False)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2, foreach=True)
    last = net.blocks[1]

    def seen(parameter: str = "down.weight") -> torch.Tensor:
        last.unshard()
        values = last.get_parameter(parameter).detach().clone()
        last.reshard()
        return values

    def check(what: str) -> None:
        expected = last.get_parameter("down.weight").full_tensor().detach()
        assert torch.equal(seen(), expected), what
        assert torch.equal(seen(), expected), what

    def crossed() -> int:
        return crossing(compressed).get("weights", 0)

    # Between forward and backward: backward runs on the new weights, as it does with plain FSDP2.
    plain = sharded(Net(), reshard_after_forward=True)
    for model in (net, plain):
        loss = model(inputs(0, rank))
        with torch.no_grad():
            model.blocks[1].down.weight.mul_(2.0)
        loss.backward()
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad.full_tensor(), rtol=0, atol=1e-6)
    check("an edit under no_grad")
    before = crossed()
    check("nothing changed")
    assert crossed() == before
    for what, change in {
        "an optimizer's step": optimizer.step,
        "an edit of the local part": lambda: last.down.weight.to_local().detach().add_(1.0),
        "an initialisation": lambda: nn.init.normal_(last.down.weight),
        "fused": torch.optim.AdamW(last.parameters(), fused=True).step,
        "copies": lambda: net.load_state_dict(net.state_dict()),
    }.items():
        before = crossed()
        with torch.no_grad():
            change()
        check(what)
        assert crossed() > before, what
    other = sharded(Net(), reshard_after_forward=True)
    with torch.no_grad():
        other.blocks[1].down.weight.fill_(3.0)
    net.load_state_dict(other.state_dict())
    check("a loaded state")
    assert seen()[0, 0] == 3.0
    other.blocks[1].down.weight.to_local().detach().fill_(4.0)
    net.load_state_dict(other.state_dict(), assign=True)
    check("a state put in place")
    assert seen()[0, 0] == 4.0
    # What torch doesn't count has to be said.
    last.down.weight.data.to_local().fill_(5.0)
    compressed.weights_changed()
    check("an edit through .data")
    with torch.no_grad():
        torch._foreach_mul_(list(last.parameters()), 2.0)
    with pytest.raises(StaleWeightsError, match=r"call weights_changed\(\)"):
        last.unshard()
    compressed.weights_changed()
    check("a foreach function")


def test_every_change_of_the_weights_is_seen() -> None:
    run_workers(edits, 2, local_size=1)


class Coded(nn.Module):
    """Its gradient is `code`: whole numbers whose largest is 7 in every group of 14."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        # 3 rows a rank, but for the last: its part is padded.
        self.a = nn.Parameter(self.numbers(3 * world_size - 1, 14, 1))
        self.b = nn.Parameter(self.numbers(2 * world_size, 28, 2))
        self.c = nn.Parameter(self.numbers(5 * world_size, 1, 3).flatten())

    @staticmethod
    def numbers(rows: int, columns: int, seed: int) -> torch.Tensor:
        values = torch.randint(-7, 8, (rows, columns), generator=torch.Generator().manual_seed(seed)).float()
        values[:, ::14] = 7.0
        return values

    def forward(self, factor: float) -> torch.Tensor:
        return sum((p * p.detach()).sum() * factor for p in self.parameters())  # type: ignore[return-value]


def coded(rank: int, world_size: int, local_size: int) -> None:
    expected = [p.detach().clone() for p in Coded(world_size).parameters()]
    for gradients in ("int4/14:nearest", "int4/14"):
        net: Any = fully_shard(Coded(world_size))
        strategy = ZeroPP("int4/14:nearest", gradients, gradients)
        compressed = compress_fsdp(net, strategy, local_size=local_size, checked=True, announce=False)
        for _ in range(2):
            net.unshard()
            for param, values in zip(net.parameters(), expected, strict=True):
                assert torch.equal(param, values)
            net.reshard()
        before = compressed.meter.snapshot()
        net(rank + 1.0).backward()
        spent = compressed.meter.snapshot() - before
        for param, values in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), values * (world_size + 1) / 2, rtol=1e-6, atol=1e-5)
        num_nodes = world_size // local_size
        # 42 and 56 elements in groups of 14, five in bf16; each rounded up to whole words.
        per_slice = 36 + 44 + 12
        assert spent.operations["gradients", "inter"].sent_bytes == (num_nodes - 1) * per_slice
        assert spent.operations["gradients", "intra"].sent_bytes == (local_size - 1) * num_nodes * per_slice
        compressed.close()


@pytest.mark.parametrize(("num_nodes", "local_size"), [(2, 2), (2, 4), (4, 2)])
def test_every_slice_reaches_its_owner(num_nodes: int, local_size: int) -> None:
    run_workers(coded, num_nodes * local_size, local_size, local_size=local_size)


def compressed_run(rank: int, world_size: int, strategy: Any, steps: int, **options: Any) -> dict[str, Any]:
    net = sharded(Net(), reshard_after_forward=True)
    compressed = compress_fsdp(net, strategy, local_size=2, announce=False, **options)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
    sent, losses = [], []
    for step in range(steps):
        before = compressed.meter.snapshot()
        loss = net(inputs(step, rank))
        loss.backward()
        sent.append((compressed.meter.snapshot() - before).sent_bytes)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    result = {"weights": whole(net), "sent": sent, "formula": compressed.bytes_per_step, "losses": losses}
    compressed.close()
    return result


def compressed_runs(rank: int, world_size: int) -> None:
    exact = compressed_run(rank, world_size, EXACT, 3)
    for strategy in (
        LOSSY,
        ZeroPP("int8/2048:nearest", "int4/32+hadamard32", "int8/32+hadamard32", "int8/64:nearest"),
        ZeroPP("int8/2048:nearest", "int4/32:nearest", "int4/32:nearest", loco=True),
        thinwire.ZeroBF16(),
        thinwire.SDP4Bit(weights="fp32", vector_weights="fp32"),
        DIFFERENCES,
    ):
        first = compressed_run(rank, world_size, strategy, 3)
        # The first reference is sent exactly.
        assert set(first["sent"][1:]) == {first["formula"]}
        assert (first["sent"][0] > first["formula"]) == (strategy is DIFFERENCES)
        again = compressed_run(rank, world_size, strategy, 3, overlap=False)
        assert all(map(torch.equal, first["weights"], again["weights"])), "not the same bits twice"
        start = [p.detach() for p in Net().parameters()]
        off = sum(float((a - b).square().sum()) for a, b in zip(first["weights"], exact["weights"], strict=True))
        way = sum(float((a - b).square().sum()) for a, b in zip(start, exact["weights"], strict=True))
        assert 1e-12 < off < 0.2 * way
    assert LOSSY.matrix().weights == Integer(8, 32, "nearest")


def test_compressed_training_keeps_its_promises() -> None:
    run_workers(compressed_runs, 4, local_size=2)


def resumed(rank: int, world_size: int, strategy: Any) -> None:
    def fresh() -> tuple[Any, CompressedFSDP, torch.optim.Optimizer]:
        net = sharded(Net())
        compressed = compress_fsdp(net, strategy, local_size=2, announce=False)
        return net, compressed, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)

    def steps(net: Any, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for step in numbers:
            # The errors of what a step leaves out stay.
            net(inputs(step, rank), use_side=step % 2 == 0).backward()
            optimizer.step()
            optimizer.zero_grad()

    net, compressed, optimizer = fresh()
    steps(net, optimizer, range(3))
    memories: list[Any] = [memory for r in compressed.reductions for memory in r.memories if memory is not None]
    held = sum(packet.nbytes for memory in memories for packet in memory.errors.values())
    assert held == strategy.plan(Net(), compressed.comm.topology, 1).other.get("error feedback", 0)
    file = io.BytesIO()
    torch.save((net.state_dict(), compressed.state_dict()), file)
    steps(net, optimizer, range(3, 6))
    compressed.close()
    second, loaded, optimizer = fresh()
    weights, state = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    second.load_state_dict(weights)
    loaded.load_state_dict(state)
    steps(second, optimizer, range(3, 6))
    assert all(map(torch.equal, whole(net), whole(second)))
    with pytest.raises(ConfigError, match="does not fit"):
        loaded.load_state_dict(state | {"layout": state["layout"] | {"rank": 9}})
    loaded.close()
    # Without errors or references it would have gone another way.
    third, _, optimizer = fresh()
    third.load_state_dict(weights)
    steps(third, optimizer, range(3, 6))
    assert not all(map(torch.equal, whole(net), whole(third)))


@pytest.mark.parametrize("strategy", [LOCO, DIFFERENCES], ids=["loco", "differences"])
def test_a_loaded_state_goes_on_bit_for_bit(strategy: Any) -> None:
    run_workers(resumed, 4, strategy, local_size=2)


def differences(rank: int, world_size: int) -> None:
    net = sharded(Net(), reshard_after_forward=True)
    compressed = compress_fsdp(
        net,
        thinwire.SDP4Bit(intra_gradients="fp32", inter_gradients="fp32", vector_gradients="fp32"),
        local_size=2,
        announce=False,
    )
    unit = net.blocks[0]

    def off() -> float:
        """How far the gathered weights are from those of their owners."""
        stored = [p.full_tensor().detach() for p in unit.parameters()]
        unit.unshard()
        seen = [p.detach().clone() for p in unit.parameters()]
        unit.reshard()
        return sum(float((a - b).abs().sum()) for a, b in zip(stored, seen, strict=True))

    assert off() == 0.0
    before = crossing(compressed)["weights"]
    with torch.no_grad():
        for param in unit.parameters():
            param.add_(torch.randn_like(param), alpha=1e-3)
    first = off()
    packets = crossing(compressed)["weights"] - before
    # 4 bits of changes of 1e-3.
    assert 0.0 < first < 0.3 * 1e-3 * sum(p.numel() for p in unit.parameters())
    numel = sum(p.shard_numel for p in compressed.units[1].params)
    # 4 bits of a difference of 1e-3, for all ranks' elements.
    assert 0.0 < first < 0.3 * 1e-3 * world_size * numel
    assert packets < 0.3 * 4 * numel
    assert crossing(compressed)["weights"] - before == packets, "unchanged weights cross again"
    # What one difference lost comes with the next.
    with torch.no_grad():
        unit.norm.weight.add_(0.0)
    assert off() < 0.3 * first
    with torch.no_grad():
        values = {name: torch.full_like(value, 3.0) for name, value in net.state_dict().items()}
    net.load_state_dict(values)
    assert off() == 0.0, "loaded weights are taken exactly"
    assert compressed.kept_bytes == 2 * 4 * sum(unit.numel for unit in compressed.units)
    with pytest.raises(ConfigError, match="vary in length"):
        compress_fsdp(sharded(Net()), thinwire.SDP4Bit("int4/2048+zstd"), announce=False)


def test_differences_to_a_reference_of_the_node() -> None:
    run_workers(differences, 4, local_size=2)


def error_returns(rank: int, world_size: int) -> None:
    """A gradient too small for its group is lost again and again, unless it is remembered, or rounded by chance."""
    sums, differ = {}, {}
    for kind in ("nearest", "stochastic", "loco"):
        net: Any = fully_shard(nn.Linear(64, 2 * world_size, bias=False))
        codec = "int4/64" if kind == "stochastic" else "int4/64:nearest"
        strategy = ZeroPP(inter_gradients=codec, intra_gradients=codec)
        if kind == "loco":
            strategy = replace(strategy, loco=True, loco_beta=0.5)
        compressed = compress_fsdp(net, strategy, local_size=1, announce=False)
        code = torch.full((2 * world_size, 64), 0.03)
        code[:, 0] = 1.0
        total, seen = torch.zeros(2 * world_size, 64), set()
        for _ in range(40):
            net.zero_grad()
            x = torch.eye(64)
            (net(x) * code.T).sum().backward()
            gradient = net.weight.grad.full_tensor()
            total += gradient
            seen.add(gradient.numpy().tobytes())
        sums[kind], differ[kind] = total[:, 1:] / 40, len(seen)
        compressed.close()
    assert float(sums["nearest"].abs().max()) == 0.0
    assert float((sums["loco"] - 0.03).abs().max()) < 0.03
    assert float(sums["loco"].mean()) > 0.01
    # Every step draws anew.
    assert differ["stochastic"] == 40
    assert float(sums["stochastic"].mean()) == pytest.approx(0.03, rel=0.2)


def test_loco_brings_back_what_was_lost() -> None:
    run_workers(error_returns, 2, local_size=1)


def evaluated(rank: int, world_size: int) -> None:
    net = sharded(Net())
    compress_fsdp(net, ZeroPP(), announce=False)
    net(inputs(0, rank)).backward()
    with torch.inference_mode():
        loss = float(net(inputs(1, rank)))
    assert loss == float(net(inputs(1, rank)))


def test_evaluation_may_run_in_inference_mode() -> None:
    run_workers(evaluated, 2, local_size=1)


def refused(rank: int, world_size: int) -> None:
    def words(net: Any, kind: type[Exception] = ConfigError, strategy: Any = EXACT, **options: Any) -> str:
        with pytest.raises(kind) as caught:
            compress_fsdp(net, strategy, announce=False, **options)
        return str(caught.value)

    assert "fully_shard first" in words(Net())
    assert "does not fit a world of 2" in words(fully_shard(nn.Linear(4, 4)), local_size=3)
    trained = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16)))
    assert "FSDP2 refuses the parameters of a Sequential" in words(trained)
    too_early = Net()
    made_before = torch.optim.SGD(too_early.parameters(), lr=0.1)
    net = sharded(too_early)
    others = torch.optim.SGD(sharded(Net()).parameters(), lr=0.1)
    for wrong_one in (made_before, others):
        assert "holds no parameter of this model: make it from model.parameters(), after" in words(
            net, optimizer=wrong_one
        )
        with pytest.raises(ConfigError, match="holds no parameter of this model"):
            thinwire.attach(net, wrong_one, EXACT)
    assert "compress_fsdp got a list as its optimizer: must be" in words(net, optimizer=list(net.parameters()))
    assert "dead_steps -1: must be a whole number, at least 0" in words(net, dead_steps=-1)
    assert "must be a strategy of codecs" in words(net, strategy=thinwire.DDP())
    no_place = "zero-compressed keeps feedback, for which FSDP2 has no place"
    assert no_place in words(net, strategy=thinwire.ZeroCompressed())
    assert "frontier cuts a model in its own way" in words(net, strategy=thinwire.Frontier())
    compressed = compress_fsdp(net, ZeroPP(), announce=False)
    assert "compressed already" in words(net)
    compressed.close()
    weights = whole(net)
    # A torch that puts parameters into its buffers in another order, or pads them otherwise.
    right = pattern.expected_shards
    for wrong in (
        lambda unit, values: right(unit, values).roll(1, dims=0),
        lambda unit, values: torch.cat([right(unit, values), torch.zeros(world_size, 1)], dim=1),
        lambda unit, values: right(unit, [value.flip(0) for value in values]),
    ):
        pattern.expected_shards = wrong
        assert "does not know" in words(net, LayoutError)
    pattern.expected_shards = right
    assert all(map(torch.equal, weights, whole(net)))
    converted = sharded(Net())
    compress_fsdp(converted, ZeroPP(), announce=False)
    converted.to(torch.bfloat16)
    with pytest.raises(ConfigError, match="convert the model before it"):
        converted(inputs(0, rank).to(torch.bfloat16))
    # The other half of the layout is seen when the first gradient arrives.
    compressed = compress_fsdp(net, ZeroPP(), announce=False, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    for reduction in compressed.reductions:
        reduction.unit.params.reverse()
    with pytest.raises((LayoutError, RuntimeError)):
        net(inputs(0, rank)).backward()


def test_what_cannot_work_is_refused() -> None:
    run_workers(refused, 2, local_size=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": "int5"}, "weights 'int5' of ZeroPP: .*nearest is 4"),
        ({"inter_gradients": "fp31"}, "did you mean 'fp32'"),
        ({"intra_gradients": "int4/66+hadamard33"}, "power of two"),
        ({"loco_beta": 1.0}, "loco_beta 1.0"),
        ({"loco_reset": 0}, "loco_reset 0"),
        ({"loco_reset": 9}, "changes nothing without loco; nearest: "),
        ({"vectors": "int8:up"}, "vectors 'int8:up'"),
    ],
)
def test_refused_options_say_why(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ZeroPP(**options)


def dead(rank: int, world_size: int) -> None:
    net = sharded(Net())
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    compressed = compress_fsdp(net, EXACT, optimizer=optimizer, dead_steps=3, announce=False)
    steps = 0
    with pytest.raises(DeadGradientError, match=r"3 steps in a row, up to step 5, .* norm, 0, is zero"):
        for steps in range(20):
            # One rank that still learns keeps the others going; then nobody does.
            factor = 1.0 if steps < 2 and rank == 0 else 0.0
            (net(inputs(steps, rank)) * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert steps == 5
    compressed.close()


def test_a_dead_gradient_stops_the_run_on_all_ranks() -> None:
    run_workers(dead, 2, local_size=1)


def test_the_watchdog_counts_steps_in_a_row() -> None:
    dog = Watchdog(2)
    for norm in (0.0, 1.0, float("nan"), 1.0, float("inf")):
        dog.note(norm, 1)
    with pytest.raises(DeadGradientError, match=r"up to step 7.*is not finite"):
        dog.note(float("nan"), 7)
    silent = Watchdog(0)
    for step in range(50):
        silent.note(0.0, step)


def test_sections_are_their_codecs_one_after_the_other() -> None:
    parts = [(Integer(4, 16, "stochastic"), 40), (Identity(), 3), (Identity(), 5), (Hadamard(Integer(8, 32), 32), 70)]
    sections = Sections.of(parts)
    assert (sections.parts[1].codec, sections.parts[1].length) == (Identity(), 8)
    x = torch.randn(sections.numel, generator=torch.Generator().manual_seed(0))
    packet = sections.encode(x, seed=5, counter=11)
    assert packet.numel() == sections.packet_bytes(x.numel())
    values, start = sections.decode(packet, x.numel()), 0
    for codec, length in ((part.codec, part.length) for part in sections.parts):
        piece = codec.encode(x[start : start + length], seed=5, counter=11 + start)
        assert torch.equal(values[start : start + length], codec.decode(piece, length))
        start += length
    assert torch.equal(sections.decode_add(packet, x.clone()), x + values)
    assert not sections.traits.lossless and Sections.of([(Identity(), 2)]).traits.lossless
    assert dist.is_available()
