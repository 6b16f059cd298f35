"""DiLoCo and its relatives around a loop: held to references in one process, on real islands of one rank each."""

from __future__ import annotations

import copy
import io
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.workers import run_workers
from thinwire.errors import ConfigError
from thinwire.islands.loop import OuterLoop
from thinwire.layout.fragments import cut
from thinwire.layout.layout import Layout
from thinwire.methods.outer.exchange import message_bytes
from thinwire.methods.outer.method import Schedule
from thinwire.methods.outer.parameters import merged

LAYERS = 4


class Net(nn.Module):
    """Layers in a ModuleList, an embedding that is tied to the head, and a norm."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(29, 16)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 20), nn.Tanh(), nn.Linear(20, 16)) for _ in range(LAYERS)
            )
            self.norm = nn.LayerNorm(16)
            self.head = nn.Linear(16, 29, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int) -> Tensor:
    """Eight sequences in which each token follows from the one before; islands take equal parts."""
    start = torch.randint(0, 29, (8, 1), generator=torch.Generator().manual_seed(step))
    return (start + 3 * torch.arange(9)) % 29


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, part: int = 0, parts: int = 1
) -> list[float]:
    losses = []
    for step in steps:
        loss = model(batch(step).chunk(parts)[part])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def outer_hash(loop: OuterLoop) -> list[int]:
    return [outer.fingerprint for outer in loop.exchanges.outer]


def layers_in(fragment: Layout) -> list[str]:
    return sorted({name.split(".")[1] for name in fragment.names if "blocks" in name})


def test_layers_are_dealt_out_strided_or_in_order() -> None:
    strided, ordered = cut(Net(), 2, "strided", 1), cut(Net(), 2, "sequential", 1)
    assert list(map(layers_in, strided)) == [["0", "2"], ["1", "3"]]
    assert list(map(layers_in, ordered)) == [["0", "1"], ["2", "3"]]
    for fragments in (strided, ordered):
        names = [name for fragment in fragments for name in fragment.names]
        assert sorted(names) == sorted(name for name, _ in Net().named_parameters()), "a tied parameter is there once"
        assert {"embed.weight", "norm.weight", "norm.bias"} <= set(fragments[0].names)
    # Three layers to a fragment, where it isn't stated.
    assert len(cut(Net(), None, "strided", 1)) == 2
    padded = cut(Net(), 1, "strided", 64)[0]
    values = weights_of(Net())
    flat = padded.flat(values)
    assert flat.numel() % 64 == 0 and all(torch.equal(view, values[name]) for name, view in padded.views(flat).items())


def test_every_fragment_has_its_turn_and_no_two_meet() -> None:
    for every, num in ((30, 4), (10, 10), (7, 3), (100, 3), (5, 4)):
        schedule = Schedule(every, num)
        due = [schedule.due(step) for step in range(1, 10 * every + 1)]
        assert max(map(len, due)) == 1
        for fragment in range(num):
            turns = [step for step, fragments in enumerate(due, start=1) if fragment in fragments]
            assert 9 <= len(turns) <= 10
            assert all(later - earlier == every for earlier, later in itertools.pairwise(turns))
    post_local = Schedule(4, start_after=6)
    assert [step for step in range(1, 17) if post_local.due(step)] == [1, 2, 3, 4, 5, 6, 10, 14]


def test_mix_is_the_share_of_the_own_weights() -> None:
    weights, outer = torch.tensor([4.0, 8.0]), torch.tensor([0.0, 4.0])
    assert merged(weights, outer, 0.25).tolist() == [1.0, 5.0]
    assert merged(weights, outer, 0.0).tolist() == outer.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_every": 0}, "sync_every 0: must be at least 1"),
        ({"sync_every": 4, "overlap_steps": 4}, "nearest: 3"),
        ({"mix": 1.0}, "mix 1.0"),
        ({"outer_lr": 0.0}, "outer_lr 0.0"),
        ({"outer_momentum": 1.0}, "outer_momentum 1.0"),
        ({"codec": "e3m1"}, "did you mean 'e3m0'"),
        ({"num_fragments": 9}, "nearest: 4"),
        ({"num_fragments": 1, "pattern": "sequential"}, "pattern sequential: no effect"),
        ({"pattern": "stridde"}, "did you mean 'strided'"),
    ],
)
def test_what_can_not_work_is_refused(options: dict[str, Any], message: str) -> None:
    model = Net()
    with pytest.raises(ConfigError, match=message):
        thinwire.StreamingDiLoCo(model, sgd(model), **options, announce=False)


def simulate_diloco(num_islands: int, every: int, num_steps: int, lr: float, momentum: float) -> dict[str, Tensor]:
    """DiLoCo in one process, its outer step by torch.optim.SGD(nesterov=True) on the mean difference."""
    outer = Net()
    rule = torch.optim.SGD(outer.parameters(), lr=lr, momentum=momentum, nesterov=True)
    islands = [copy.deepcopy(outer) for _ in range(num_islands)]
    optimizers = [adamw(island) for island in islands]
    for step in range(num_steps):
        for number, (island, optimizer) in enumerate(zip(islands, optimizers, strict=True)):
            train(island, optimizer, range(step, step + 1), number, num_islands)
        if (step + 1) % every == 0:
            for x, *ws in zip(outer.parameters(), *(island.parameters() for island in islands), strict=True):
                x.grad = torch.stack([x.detach() - w.detach() for w in ws]).sum(0) / num_islands
            rule.step()
            for island in islands:
                island.load_state_dict(outer.state_dict())
    return weights_of(outer)


def reductions(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, make, options in (
        # Islands that start from different weights take the first one's.
        ("averaging", thinwire.LocalSGD, {"sync_every": 1}),
        ("diloco", thinwire.DiLoCo, {"sync_every": 4, "outer_lr": 0.7}),
        ("one fragment", thinwire.StreamingDiLoCo,
         {"sync_every": 4, "num_fragments": 1, "overlap_steps": 0, "mix": 0.0, "outer_lr": 0.7, "codec": "fp32"}),
    ):  # fmt: skip
        model = Net(seed=rank)
        optimizer = sgd(model) if name == "averaging" else adamw(model)
        with make(model, optimizer, **options, announce=False) as islands:
            before = islands.meter.snapshot()
            train(model, optimizer, range(12), rank, world_size)
            sent = (islands.meter.snapshot() - before).sent_bytes
            numel = islands.loop.exchanges.fragments[0].numel
            codec = islands.loop.method.codec
            rounds = 12 // islands.loop.method.sync_every
            assert sent == rounds * islands.bytes_per_round
            assert islands.bytes_per_round == (world_size - 1) * (message_bytes(codec, numel) + 1)
            assert 4 * numel + 32 <= message_bytes(codec, numel) < 4 * numel + 40
            hashes = outer_hash(islands.loop)
        found[name] = weights_of(model), hashes
    return found


def test_reductions_to_known_methods() -> None:
    results = run_workers(reductions, 2)
    whole = Net()
    optimizer = sgd(whole)
    train(whole, optimizer, range(12))
    references = {"averaging": weights_of(whole), "diloco": simulate_diloco(2, 4, 12, 0.7, 0.9)}
    for result in results:
        for name, reference in references.items():
            for key, value in reference.items():
                torch.testing.assert_close(result[name][0][key], value, rtol=0, atol=2e-6)
        for name in result:
            assert result[name][1] == results[0][name][1]
            assert all(torch.equal(result[name][0][key], results[0][name][0][key]) for key in result[name][0])
        assert all(torch.equal(value, result["diloco"][0][key]) for key, value in result["one fragment"][0].items())


def ended(rank: int, world_size: int) -> dict[str, Any]:
    """Each island's own weights before the end, and what the end leaves."""
    found: dict[str, Any] = {}
    exact: dict[str, Any] = {"outer_lr": 0.4, "outer_momentum": 0.9, "codec": "fp32", "sync_every": 100}
    streams = {**exact, "num_fragments": 2, "overlap_steps": 2, "mix": 0.5}
    for name, make, options in (
        ("diloco", thinwire.DiLoCo, exact),
        ("streaming", thinwire.StreamingDiLoCo, streams),
        (
            "mixed at the end",
            thinwire.StreamingDiLoCo,
            {**streams, "num_fragments": 1, "overlap_steps": 0, "sync_every": 3},
        ),
        ("local-sgd", thinwire.LocalSGD, {"codec": "fp32", "sync_every": 100}),
    ):
        model = Net()
        optimizer = sgd(model)
        with make(model, optimizer, **options, announce=False) as islands:
            train(model, optimizer, range(3), rank, world_size)
            own = weights_of(model)
        found[name] = own, weights_of(model), outer_hash(islands.loop)
    return found


def test_the_end_takes_the_mean_wherever_islands_differ() -> None:
    results = run_workers(ended, 2)
    for name in results[0]:
        for key in results[0][name][0]:
            own = torch.stack([result[name][0][key] for result in results])
            for result in results:
                torch.testing.assert_close(result[name][1][key], own.mean(0), rtol=0, atol=1e-6)
        assert results[0][name][2] == results[1][name][2]
        assert any(not torch.equal(*(result[name][0][key] for result in results)) for key in results[0][name][0])


def test_one_island_trains_as_ever() -> None:
    plain, alone = Net(), Net()
    train(plain, adamw(plain), range(20))
    optimizer = adamw(alone)
    with thinwire.LocalSGD(alone, optimizer, sync_every=5, announce=False):
        train(alone, optimizer, range(20))
    for key, value in weights_of(plain).items():
        torch.testing.assert_close(weights_of(alone)[key], value, rtol=0, atol=1e-6)


def streaming(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for codec in ("fp32", "e3m0"):
        model = Net()
        optimizer = adamw(model)
        options: dict[str, Any] = {"num_fragments": 2, "overlap_steps": 3, "codec": codec, "outer_lr": 0.7}
        with thinwire.StreamingDiLoCo(model, optimizer, 10, **options, announce=False) as islands:
            losses = train(model, optimizer, range(60), rank, world_size)
            own = weights_of(model)
            with islands.outer_parameters():
                assert any(not torch.equal(own[name], value) for name, value in weights_of(model).items())
            assert all(torch.equal(own[name], value) for name, value in weights_of(model).items())
            in_flight, largest = len(islands.loop.exchanges.flights), max(map(islands.traffic.exchange_bytes, range(2)))
            hashes = outer_hash(islands.loop)
            numels = [fragment.numel for fragment in islands.loop.exchanges.fragments]
        assert largest < 0.75 * sum(message_bytes(islands.loop.method.codec, n) + 1 for n in numels) * (world_size - 1)
        found[codec] = losses, hashes, weights_of(model), in_flight, islands.loop.steps
    return found


def test_streams_at_four_bits_while_steps_go_on() -> None:
    results = run_workers(streaming, 4)
    for found in results:
        for codec, (losses, hashes, weights, in_flight, steps) in found.items():
            assert hashes == results[0][codec][1], "outer parameters differ"
            assert all(torch.equal(value, results[0][codec][2][name]) for name, value in weights.items())
            assert losses[-1] < 0.5 * losses[0] and in_flight == 1 and steps == 60
    means = {codec: sum(found[codec][0][-1] for found in results) / 4 for codec in results[0]}
    assert means["e3m0"] == pytest.approx(means["fp32"], abs=0.05)


def late_peer(rank: int, world_size: int, folder: str) -> bool:
    """Island 1 sends only once island 0 has taken two steps more: this would hang if island 0 waited for it."""
    model, mark = Net(), Path(folder, "mark")
    optimizer = sgd(model)
    with thinwire.StreamingDiLoCo(model, optimizer, sync_every=5, overlap_steps=3, num_fragments=1, announce=False):
        train(model, optimizer, range(4), rank, world_size)
        while rank and not mark.exists():
            time.sleep(0.01)
        train(model, optimizer, range(4, 7), rank, world_size)
        mark.touch()
        train(model, optimizer, range(7, 10), rank, world_size)
    return True


def test_steps_go_on_while_an_exchange_is_late(tmp_path: Path) -> None:
    assert run_workers(late_peer, 2, str(tmp_path)) == [True, True]


Start = Callable[[int], tuple[Net, torch.optim.Optimizer, thinwire.Islands]]


def interrupted(
    start: Start, rank: int, world_size: int, look: Callable[[thinwire.Islands], None] = lambda islands: None
) -> tuple[list[str], list[str]]:
    """Weights after each of ten steps, uninterrupted and by fresh objects that load a state with messages in flight.

    start: makes all from a seed. look: at the islands whose state is saved.
    """

    def go_on(model: Net, optimizer: torch.optim.Optimizer) -> list[str]:
        hashes = []
        for step in range(9, 19):
            train(model, optimizer, range(step, step + 1), rank, world_size)
            hashes.append(repr([p.sum(dtype=torch.float64).item() for p in model.parameters()]))
        return hashes

    model, optimizer, islands = start(0)
    train(model, optimizer, range(9), rank, world_size)
    file = io.BytesIO()
    assert islands.loop.exchanges.flights
    torch.save((model.state_dict(), optimizer.state_dict(), islands.state_dict()), file)
    look(islands)
    uninterrupted = go_on(model, optimizer)
    islands.close()
    other, second, again = start(1)
    weights, inner, outer = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    other.load_state_dict(weights)
    second.load_state_dict(inner)
    again.load_state_dict(outer)
    resumed = go_on(other, second)
    again.close()
    return uninterrupted, resumed


def stop_and_go_on(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    def start(seed: int) -> tuple[Net, torch.optim.Optimizer, thinwire.Islands]:
        model = Net(seed)
        optimizer = adamw(model)
        islands = thinwire.StreamingDiLoCo(
            model, optimizer, sync_every=4, num_fragments=2, overlap_steps=3, announce=False
        )
        return model, optimizer, islands

    return interrupted(start, rank, world_size)


def test_a_loaded_state_goes_on_bit_for_bit() -> None:
    for uninterrupted, resumed in run_workers(stop_and_go_on, 2):
        assert uninterrupted == resumed


NUM_INNER, NUM_ROUNDS, LAM = 20, 60, 1.0


def problem(num_islands: int) -> tuple[Tensor, Tensor, Tensor]:
    """Curvatures and minima of the islands' quadratics, and the minimum of their sum."""
    generator = torch.Generator().manual_seed(5)
    curvatures = 0.5 + 2.5 * torch.rand(num_islands, 5, generator=generator)
    minima = torch.randn(num_islands, 5, generator=generator)
    return curvatures, minima, (curvatures * minima).sum(0) / curvatures.sum(0)


def chosen(round_: int, num_islands: int, share: float) -> list[int]:
    """The islands that take part in a round."""
    drawn = torch.randperm(num_islands, generator=torch.Generator().manual_seed(round_))
    return sorted(drawn[: int(share * num_islands)].tolist())


def simulate_fedspeed(num_islands: int, share: float) -> Tensor:
    """FedSpeed in one process, its dual variables h in the place of its corrections."""
    curvatures, minima, _ = problem(num_islands)
    x, h = torch.zeros(5), torch.zeros(num_islands, 5)
    for round_ in range(NUM_ROUNDS):
        ends = []
        for island in chosen(round_, num_islands, share):
            w = x.clone()
            for _ in range(NUM_INNER):
                w = w - 0.05 * (curvatures[island] * (w - minima[island]) + (w - x + h[island]) / LAM)
            h[island] += w - x
            ends.append(w)
        x = torch.stack(ends).mean(0) + h.mean(0)
    return x


def quadratic_islands(rank: int, world_size: int) -> dict[str, Tensor]:
    """Where islands end whose quadratics differ."""
    curvatures, minima, _ = problem(world_size)
    found = {}
    for name, fedspeed, share in (("plain", None, 1.0), ("corrected", LAM, 1.0), ("half", LAM, 0.5)):
        model = nn.Module()
        model.w = nn.Parameter(torch.zeros(5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with thinwire.LocalSGD(model, optimizer, sync_every=NUM_INNER, fedspeed=fedspeed, announce=False) as islands:
            for round_ in range(NUM_ROUNDS):
                # One that is left out in this round stands still.
                islands.weight = float(rank in chosen(round_, world_size, share))
                optimizer.param_groups[0]["lr"] = 0.05 * islands.weight
                for _ in range(NUM_INNER):
                    model.w.grad = curvatures[rank] * (model.w.detach() - minima[rank])
                    optimizer.step()
        found[name] = model.w.detach().clone()
    return found


def test_the_correction_takes_the_bias_of_local_steps() -> None:
    optimum = problem(4)[2]
    for found in run_workers(quadratic_islands, 4):
        off = {name: float((w - optimum).norm() / optimum.norm()) for name, w in found.items()}
        assert off["plain"] > 0.1 and off["corrected"] < 1e-5 and off["half"] < 1e-2
        torch.testing.assert_close(found["corrected"], simulate_fedspeed(4, 1.0), rtol=0, atol=1e-5)
        torch.testing.assert_close(found["half"], simulate_fedspeed(4, 0.5), rtol=0, atol=1e-5)
