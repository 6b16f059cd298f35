"""SparseLoCo on real islands of one rank each: held to plain averaging, and to itself in one process."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.islands.test_library import Net, adamw, batch, interrupted, outer_hash, train, weights_of
from tests.workers import run_workers
from thinwire.codecs import Codec, derive_seed
from thinwire.collectives import Topology
from thinwire.errors import ConfigError
from thinwire.islands.exchanges import Exchanges
from thinwire.layout.fragments import cut
from thinwire.methods.outer.exchange import message_bytes
from thinwire.methods.outer.parameters import residuals_in
from thinwire.run.config import TrainConfig
from thinwire.run.run import Run

EVERY, NUM_STEPS, DECAY = 4, 12, 0.9
SPARSE = "topk12.5%/64:(sign/8:bf16+twice)"
EXACT = "topk100%/64:fp32"
STREAMS: dict[str, Any] = {"num_fragments": 2, "overlap_steps": 2, "mix": 0.5}


def trained(rank: int, world_size: int) -> dict[str, Any]:
    """Weights, outer hashes, residuals, and losses of each way to exchange."""
    found: dict[str, Any] = {}
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("averaging", thinwire.LocalSGD, {}),
        ("everything", thinwire.SparseLoCo, {"codec": EXACT}),
        ("sparse", thinwire.SparseLoCo, {"codec": SPARSE, "outer_lr": 0.5}),
        ("streams", thinwire.SparseLoCo, {"codec": SPARSE, **STREAMS}),
        ("diloco", thinwire.DiLoCo, {"codec": "int2/64:nearest"}),
    ]
    for name, make, options in cases:
        if name != "averaging":
            options["error_decay"] = DECAY
        model = Net(seed=rank)
        optimizer = adamw(model)
        islands = make(model, optimizer, sync_every=EVERY, **options, announce=False)
        before = islands.meter.snapshot().sent_bytes
        losses = train(model, optimizer, range(NUM_STEPS), rank, world_size)
        islands.loop.drain()
        sent = islands.meter.snapshot().sent_bytes - before
        exchanges = islands.loop.exchanges
        turns = [sum(n in exchanges.schedule.due(step + 1) for step in range(NUM_STEPS)) for n in range(2)]
        sizes = [message_bytes(exchanges.method.codec, fragment.numel) + 1 for fragment in exchanges.fragments]
        assert sent == (world_size - 1) * sum(turn * size for turn, size in zip(turns, sizes, strict=False)), name
        outer = torch.cat([outer.parameters for outer in exchanges.outer])
        lost = residuals(exchanges)
        found[name] = outer_hash(islands.loop), outer, lost, losses
        islands.close()
    return found


def residuals(exchanges: Exchanges) -> list[Tensor]:
    """Copies of the error feedback of each fragment; empty without."""
    return [] if exchanges.state.lost is None else [lost.clone() for lost in exchanges.state.lost.tensors.values()]


def simulated(num_islands: int) -> tuple[Tensor, list[Tensor]]:
    """The method in one process, by its formula: outer parameters, and what each island keeps as residual."""
    codec, model = Codec.parse(SPARSE), Net()
    fragment = cut(model, 1, "strided", codec.block)[0]
    islands = [copy.deepcopy(model) for _ in range(num_islands)]
    optimizers = [adamw(island) for island in islands]
    x, errors = fragment.flat(weights_of(model)), [fragment.zeros() for _ in islands]
    for step in range(NUM_STEPS):
        for number, (island, optimizer) in enumerate(zip(islands, optimizers, strict=True)):
            train(island, optimizer, range(step, step + 1), number, num_islands)
        if (step + 1) % EVERY == 0:
            total, count = fragment.zeros(), (step + 1) // EVERY
            for number, (island, error) in enumerate(zip(islands, errors, strict=True)):
                error.mul_(DECAY).add_(x - fragment.flat(weights_of(island)))
                packet = codec.encode(error, seed=derive_seed(0, count, 0, number))
                error.sub_(codec.decode(packet, fragment.numel))
                total += codec.decode(packet, fragment.numel)
            x -= 0.5 * total / num_islands
            for island in islands:
                for name, value in fragment.views(x).items():
                    island.get_parameter(name).data.copy_(value)
    return x, errors


def test_everything_sent_is_averaging_and_less_is_the_formula() -> None:
    results = run_workers(trained, 3)
    x, errors = simulated(3)
    for result, error in zip(results, errors, strict=True):
        for name, (hashes, _, lost, losses) in result.items():
            assert hashes == results[0][name][0], f"outer parameters differ: {name}"
            assert losses[-1] < losses[0]
            assert bool(lost) == (name != "averaging")
        # Bit for bit, though one has codec and memory, but for its padding to blocks.
        views = [
            cut(Net(), 1, "strided", Codec.parse(codec).block)[0].views(result[name][1])
            for name, codec in (("averaging", "fp32"), ("everything", EXACT))
        ]
        assert all(torch.equal(value, views[1][key]) for key, value in views[0].items())
        assert not any(lost.any() for lost in result["everything"][2])
        torch.testing.assert_close(result["sparse"][1], x, rtol=0, atol=1e-6)
        torch.testing.assert_close(result["sparse"][2][0], error, rtol=0, atol=1e-6)
        assert float(error.norm()) > 0.1 * float(x.norm() / 100)


def test_muloco_is_diloco_by_muon_in_few_bits_and_streams() -> None:
    muloco, streams = (thinwire.strategy_named("muloco", **options) for options in ({}, STREAMS))
    few = {"sync_every": 30, "codec": "sign/64:bf16+twice", "error_decay": 0.9}
    assert muloco.outer() == thinwire.strategy_named("diloco", **few).outer()  # type: ignore[attr-defined]
    assert streams.outer().num_fragments == 2  # type: ignore[attr-defined]
    run = Run.of(TrainConfig(strategy="muloco", workers=2))
    assert run.config.optimizer == "muon" and run.strategy.optimizers[:2] == ("muon", "adamw")
    assert Run.of(TrainConfig(strategy="muloco", workers=2, optimizer="sgd")).config.optimizer == "sgd"
    for inner, told in (
        ("demo", "keeps the momentum itself"),
        ("onebit-adam", "muloco trains islands by muon, and onebit"),
    ):
        with pytest.raises(ConfigError, match=f"{told}.*nearest: --inner ddp, or --strategy sparseloco"):
            Run.of(TrainConfig(strategy="muloco", inner=inner, workers=2))
    with pytest.raises(ConfigError, match="is a contraction"):
        thinwire.strategy_named("muloco", codec="int2")


def stop_and_go_on(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    def start(seed: int) -> tuple[Net, torch.optim.Optimizer, thinwire.Islands]:
        model = Net(seed)
        optimizer = adamw(model)
        return model, optimizer, thinwire.SparseLoCo(
            model, optimizer, sync_every=EVERY, codec=SPARSE, **STREAMS, announce=False
        )  # fmt: skip

    def has_residuals(islands: thinwire.Islands) -> None:
        assert all(lost.any() for lost in residuals(islands.loop.exchanges))

    return interrupted(start, rank, world_size, has_residuals)


def test_a_loaded_state_goes_on_bit_for_bit() -> None:
    for uninterrupted, resumed in run_workers(stop_and_go_on, 2):
        assert uninterrupted == resumed


def moved(rank: int, world_size: int) -> dict[str, Any]:
    """What an island owes, by parameter: at first, and under another cut where all have saved or only the first has."""

    def start(**options: Any) -> tuple[Net, torch.optim.Optimizer, thinwire.Islands]:
        model = Net(rank)
        optimizer = adamw(model)
        options = {"sync_every": EVERY, "codec": SPARSE, "announce": False} | options
        return model, optimizer, thinwire.SparseLoCo(model, optimizer, **options)

    def owed(islands: thinwire.Islands) -> dict[str, Tensor]:
        exchanges, found = islands.loop.exchanges, dict[str, Tensor]()
        for fragment, lost in zip(exchanges.fragments, residuals(exchanges), strict=True):
            found |= fragment.views(lost)
        return found

    found: dict[str, Any] = {}
    model, optimizer, islands = start()
    train(model, optimizer, range(2 * EVERY), rank, world_size)
    saved, found["saved"] = islands.state_dict(), owed(islands)
    islands.close()
    for name, has_own in (("both", True), ("first", rank == 0), ("none", False)):
        _, _, islands = start(num_fragments=2, error_decay=0.5)
        if name != "none":
            assert islands.loop.owe(saved)
        islands.loop.level(has_own=has_own)
        found[name] = owed(islands) if islands.loop.exchanges.state.lost.tensors else {}  # type: ignore[union-attr]
        islands.close()
    # A fragment under way: the island's weights still have what was sent.
    model, optimizer, islands = start(**STREAMS)
    train(model, optimizer, range(2 * EVERY), rank, world_size)
    flying = [islands.loop.exchanges.fragments[flight.fragment].names for flight in islands.loop.exchanges.flights]
    found["flying"], found["left"] = flying, residuals_in(islands.state_dict(), owed_shapes(model))
    islands.close()
    return found


def owed_shapes(model: Net) -> dict[str, torch.Size]:
    return {name: param.shape for name, param in model.named_parameters()}


def test_other_islands_and_methods_owe_the_mean_of_what_was_owed() -> None:
    results = run_workers(moved, 2)
    saved = [result["saved"] for result in results]
    for result in results:
        assert result["none"] == {} and result["both"].keys() == result["first"].keys() == saved[0].keys()
        for name in saved[0]:
            torch.testing.assert_close(result["both"][name], (saved[0][name] + saved[1][name]) / 2)
            assert torch.equal(result["first"][name], saved[0][name])
        (names,) = result["flying"]
        assert not result["left"].keys() & set(names) and result["left"].keys() | set(names) == saved[0].keys()
    assert any(not torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


def unpacked(rank: int, world_size: int) -> list[bool]:
    """An exchange that a loss stopped before it was packed, saved and loaded, sends what it would have sent."""
    model = Net()
    optimizer = adamw(model)
    islands = thinwire.SparseLoCo(model, optimizer, sync_every=EVERY, codec=SPARSE, overlap_steps=2, announce=False)
    exchanges = islands.loop.exchanges
    train(model, optimizer, range(EVERY), rank, world_size)
    exchanges.wait_for_all()
    (flight,) = exchanges.flights
    assert flight.sync is not None
    total, lost = flight.sync.total()[0], residuals(exchanges)[0]
    # As it was before: of the first exchange, delta is all that the message and the error hold together.
    own = flight.sync.codec.decode(flight.sync._packet(flight.sync.message), flight.sync.numel)
    flight.sync.delta, flight.sync.message, flight.sync.received = own + lost, None, None
    exchanges.state.lost["0"] = torch.zeros(len(lost))
    state = islands.state_dict()
    with pytest.raises(ConfigError, match="was saved without what it sends: go on from an earlier checkpoint"):
        exchanges.load_state_dict(state | {"flights": [(0, 1, (0, 1), (*state["flights"][0][3][:5], None), False)]})
    islands.load_state_dict(state)
    exchanges.wait_for_all()
    (again,) = exchanges.flights
    assert again.sync is not None
    pairs = (again.sync.total()[0], total), (residuals(exchanges)[0], lost)
    same = [torch.allclose(one, other, atol=1e-6) for one, other in pairs]
    islands.close()
    return same


def test_an_exchange_that_was_never_packed_is_saved_whole() -> None:
    assert run_workers(unpacked, 2) == [[True, True]] * 2


def one_goes_astray(rank: int, world_size: int) -> bool:
    """An island whose weights are not finite is left out once, and keeps its residual."""
    model = Net()
    optimizer = adamw(model)
    islands = thinwire.SparseLoCo(model, optimizer, sync_every=EVERY, codec=SPARSE, announce=False)
    train(model, optimizer, range(EVERY), rank, world_size)
    before = residuals(islands.loop.exchanges)[0]
    train(model, optimizer, range(EVERY, 2 * EVERY - 1), rank, world_size)
    if rank:
        model.norm.weight.data[0] = torch.nan
    model(batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    kept = torch.equal(residuals(islands.loop.exchanges)[0], before)
    assert all(bool(torch.isfinite(param).all()) for param in model.parameters())
    islands.close()
    return kept


def test_an_island_that_is_left_out_keeps_its_residual() -> None:
    assert run_workers(one_goes_astray, 2) == [False, True]


def test_the_plan_knows_the_memory_and_the_bytes() -> None:
    model = Net()
    method = thinwire.strategy_named("sparseloco", codec=SPARSE)
    plan, plain = (m.plan(model, Topology(2, 1), 1) for m in (method, thinwire.strategy_named("local-sgd")))
    numel = cut(model, 1, "strided", 64)[0].numel
    assert plan.other["error feedback of outer gradients"] == 4 * numel
    assert plan.sent["outer", "inter"] == -(-message_bytes(Codec.parse(SPARSE), numel) // 15)
    assert plan.sent["outer", "inter"] < plain.sent["outer", "inter"] / 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"error_decay": 1.5}, "nearest: 1"),
        ({"error_decay": math.nan}, "error_decay nan: must be from 0 to 1; nearest: 0"),
        ({"mix": 1.0}, "mix 1.0: .* nearest: 0.9"),
        ({"codec": "int2"}, "is a contraction"),
        ({"codec": "topk1%/32"}, "density"),
        ({"codec": "tokp1%"}, "did you mean"),
        ({"sync_every": 0}, "nearest: 1"),
        ({"outer_lr": 0.0}, "outer_lr 0.0"),
    ],
)
def test_what_can_not_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        thinwire.strategy_named("sparseloco", **options)
    with pytest.raises(ConfigError, match="fedspeed"):
        thinwire.strategy_named("diloco", fedspeed=1.0, error_decay=1.0)
