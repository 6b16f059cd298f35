"""A mixture whose experts lie on several ranks equals one process, whatever ranks and slices hold them."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from tests.workers import run_workers
from thinwire import ExpertParallel
from thinwire.collectives.exchange import Exchange
from thinwire.hosts.experts import once
from thinwire.hosts.experts.stopwatch import Stopwatch
from thinwire.hosts.experts.trip import Trip
from thinwire.methods.experts import Rows, sent
from thinwire.methods.experts.choice import moves_of
from thinwire.models.moe import Experts, MoE, MoEConfig
from thinwire.models.order import Order
from thinwire.models.row_hooks import EVENTS

CONFIG = MoEConfig(hidden_size=32, intermediate_size=48)
TOKENS = [10, 7, 0, 3]
OPERATIONS = (
    "dispatch", "combine", "combine_gradients", "dispatch_gradients", "expert_weights", "expert_weight_gradients",
)  # fmt: skip


def inputs() -> list[list[Any]]:
    """Each rank's tokens, their experts, and the experts' weights."""
    draws = torch.Generator().manual_seed(5)
    return [
        [
            torch.randn(n, 32, generator=draws, dtype=torch.float64).requires_grad_(),
            torch.rand(n, 8, generator=draws).topk(2, -1).indices,
            torch.rand(n, 2, generator=draws, dtype=torch.float64).requires_grad_(),
        ]
        for n in TOKENS
    ]


def filled(seed: int, num: int = 8) -> Experts:
    config = replace(CONFIG, num_local_experts=num, num_experts_per_tok=min(2, num))
    made, draws = Experts(config).double(), torch.Generator().manual_seed(seed)
    for param in made.parameters():
        param.data.normal_(std=0.2, generator=draws)
    return made


def one_layer(rank: int, options: ExpertParallel) -> tuple[float, bool]:
    """How far outputs and all gradients are from one process, and whether the bytes are those of the formula."""
    truth, given = filled(0), inputs()
    expected = [truth(*each) for each in given]
    torch.stack([y.square().sum() for y in expected]).mean().backward()
    model = torch.nn.Module()
    # Rank 0's experts are taken.
    model.experts = filled(rank)
    ep = thinwire.expert_parallel(model, options, local_size=2)
    place, own = ep.placement, ep.comm.rank
    first, own_counts = rank - own, torch.stack([torch.bincount(each[1].flatten(), minlength=8) for each in given])
    numel = 3 * 8 * 48 * 32 // place.ranks
    group, local_size = given[first : first + place.ranks], ep.comm.topology.local_size
    per_node = 8 * local_size // place.ranks
    entering = [[int((each[1] // per_node == node).any(1).sum()) for node in range(8 // per_node)] for each in group]
    rows = Rows(
        own_counts[first : first + place.ranks].tolist(), 32, torch.float64, entering, 2, torch.float64, torch.float64
    )
    formula = sum(
        num_bytes for (source, _), num_bytes in sent(place, rows, options, numel, local_size).items() if source == own
    )
    # In the second pass both ends expect what comes, so there is one message.
    for _ in range(3):
        x, index, weights = given[rank]
        x, weights = (each.detach().clone().requires_grad_() for each in (x, weights))
        model.zero_grad()
        before = ep.comm.meter.snapshot()
        y = model.experts(x, index, weights)
        y.square().sum().backward()
        traffic = ep.comm.meter.snapshot() - before
    bytes_fit = sum(map(traffic.sent_by, OPERATIONS)) == formula
    pairs = [
        (y.detach(), expected[rank].detach()),
        (x.grad, given[rank][0].grad * 4),
        (weights.grad, given[rank][2].grad * 4),
    ]
    replicas = range(rank % place.ranks, 4, place.ranks)
    whole: dict[str, Tensor] = {}
    for name, param in model.experts.named_parameters():
        assert param.grad is not None
        every = ep.everyone.wait(ep.everyone.all_gather_exact(param.grad))
        whole[f"experts.{name}"] = every[list(replicas)].sum(0) / 4
    for name, grad in ep.gather(whole).items():
        pairs.append((grad, truth.get_parameter(name.removeprefix("experts.")).grad))
    assert all(torch.equal(ep.part(ep.gather(whole))[name], part) for name, part in whole.items())
    ep.close()
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs if len(b)), bytes_fit


def rounded(rank: int, ranks: int, route: Any, chunks: int = 1, back: Any = "same") -> list[Tensor]:
    """Rows that go to experts that change nothing, and back; and their gradients."""
    model = torch.nn.Module()
    model.experts = filled(0)
    asked = ExpertParallel(
        ranks,
        route=route,
        chunks=chunks,
        chunks_back=back,
        dispatch="int8/32",
        combine="int4/16",
        gradients="int4/32",
    )
    ep = thinwire.expert_parallel(model, asked, local_size=2)
    x, index, _ = inputs()[rank]
    order = Order.of(index, 8)
    rows = order.encode(x.detach()).requires_grad_()
    numbers = ep.wire.row_numbers(order, sum(TOKENS[:rank]) + torch.arange(TOKENS[rank]))
    out = Trip(ep.wire, order.counts, numbers).through(rows, lambda rows, _: rows)
    (out * torch.arange(1.0, 1 + out.numel(), dtype=torch.float64).view_as(out).cos()).sum().backward()
    ep.close()
    return [out.detach(), torch.as_tensor(rows.grad)]


def switched(rank: int) -> float:
    """The largest difference from one process while the way of rows changes between passes; and back to the first."""
    truth, given = filled(0), inputs()
    expected = [truth(*each) for each in given]
    torch.stack([y.square().sum() for y in expected]).mean().backward()
    grads, errors = {f"experts.{name}": torch.as_tensor(p.grad) for name, p in truth.named_parameters()}, list[float]()
    changes: dict[int, list[dict[str, Any]]] = {
        2: [
            {"route": "once"}, {"move": "slices"}, {"chunks": 4}, {"move": "experts"}, {"route": "2dh", "chunks": 2},
            {}, {"route": "once"},
        ],
        4: [{"move": "slices=2"}, {}, {"move": "experts"}, {"move": "slices"}],
    }  # fmt: skip
    for slices, ways in changes.items():
        model, first = torch.nn.Module(), ExpertParallel(4, slices=slices)
        model.experts = filled(0)
        ep = thinwire.expert_parallel(model, first, local_size=2)
        for change in ways:
            ep.take(replace(first, **change))
            x, weights = (each.detach().clone().requires_grad_() for each in (given[rank][0], given[rank][2]))
            assert ep.watch.take() == 0.0
            model.zero_grad()
            y = model.experts(x, given[rank][1], weights)
            y.square().sum().backward()
            assert ep.watch.take() > 0.0
            pairs = [(y.detach(), expected[rank].detach())]
            pairs += [(a.grad, 4 * given[rank][at].grad) for a, at in ((x, 0), (weights, 2))]
            pairs += [(model.get_parameter(name).grad, 4 * part) for name, part in ep.part(grads).items()]
            errors += [float((a - b).abs().max() / b.abs().max()) for a, b in pairs if len(b)]
        assert slices != 2 or ep.wire is ep._wires["tokens", "once", 1, 1][0]
        ep.close()
    return max(errors)


def few_experts(rank: int) -> float:
    """How far 1 or 2 experts on four ranks are from one process, whatever travels: outputs and gradients."""
    errors = []
    for num in (1, 2):
        truth, draws = filled(0, num), torch.Generator().manual_seed(6)
        given = [
            (
                torch.randn(n, 32, generator=draws, dtype=torch.float64).requires_grad_(),
                torch.rand(n, num, generator=draws).topk(num, -1).indices,
                torch.rand(n, num, generator=draws, dtype=torch.float64),
            )
            for n in TOKENS
        ]
        expected = [truth(*each) for each in given]
        torch.stack([y.square().sum() for y in expected]).sum().backward()
        for move in moves_of(4 // num):
            model = torch.nn.Module()
            model.experts = filled(0, num)
            ep = thinwire.expert_parallel(model, ExpertParallel(4, slices=4 // num, move=move), local_size=2)
            x = given[rank][0].detach().clone().requires_grad_()
            y = model.experts(x, *given[rank][1:])
            y.square().sum().backward()
            params = model.experts.named_parameters()
            found = ep.gather({f"experts.{name}": torch.as_tensor(param.grad) for name, param in params})
            grads = {name: truth.get_parameter(name.removeprefix("experts.")).grad for name in found}
            pairs = [
                (y.detach(), expected[rank].detach()),
                (x.grad, given[rank][0].grad),
                *((found[name], grad) for name, grad in grads.items()),
            ]
            errors += [float((a - b).abs().max() / b.abs().max()) for a, b in pairs if len(b)]
            ep.close()
    return max(errors)


def layers(rank: int, world_size: int) -> Any:
    layouts: list[tuple[int, int, Any]] = [
        (4, 1, "tokens"), (2, 1, "tokens"), (4, 2, "tokens"), (4, 4, "tokens"), (4, 2, "slices"), (2, 2, "slices"),
        (4, 4, "slices=2"), (4, 2, "experts"),
    ]  # fmt: skip
    plain = [one_layer(rank, ExpertParallel(w, slices=s, move=move)) for w, s, move in layouts]
    plain += [one_layer(rank, ExpertParallel(4, slices=2, route=route)) for route in ("2dh", "once")]
    plain += [
        one_layer(rank, ExpertParallel(4, slices=2, chunks=3)),
        one_layer(rank, ExpertParallel(4, slices=2, chunks=2, move="slices")),
        one_layer(rank, ExpertParallel(4, chunks=32)),
        one_layer(rank, ExpertParallel(4, chunks=4, chunks_back=1)),
        one_layer(rank, ExpertParallel(4, slices=2, route="2dh", chunks=2, chunks_back=6)),
        one_layer(rank, ExpertParallel(4, route="2dh", chunks=4)),
    ]
    routes: list[tuple[Any, int]] = [("linear", 1), ("2dh", 1), ("once", 1), ("linear", 3)]
    coded = [
        one_layer(
            rank,
            ExpertParallel(4, route=route, chunks=n, dispatch="int8/32:nearest", combine="bf16", gradients="int8/32"),
        )
        for route, n in routes
    ]
    moving: list[Any] = ["slices", "experts"]
    coded += [
        one_layer(rank, ExpertParallel(4, slices=2, move=move, weights="int8/32", gradients="int8/32"))
        for move in moving
    ]
    several = (4, "linear", 1), (2, "linear", 1), (4, "2dh", 1), (4, "linear", 5), (4, "2dh", 3), (4, "linear", 2, 4)
    weights = [moved(rank, *each) for each in ((4, 2), (2, 1))]
    errors, messages = (
        max(switched(rank), made_whole(rank), looking_ahead(rank), few_experts(rank)),
        [crossing(rank, route) for route in ("linear", "2dh")],
    )
    return (
        plain,
        coded,
        [rounded(rank, *each) for each in several],
        overlapped(rank),
        weights,
        errors,
        alike(rank),
        messages,
    )


def crossing(rank: int, route: Any) -> dict[int, list[int]]:
    """Bytes of each message of dispatch to ranks of the other node, by rank, once both ends expect what comes."""
    model, found = torch.nn.Module(), dict[int, list[int]]()
    model.experts = filled(0)
    ep = thinwire.expert_parallel(model, ExpertParallel(4, route=route), local_size=2, timeout_s=60)
    for _ in range(3):
        found.clear()
        with pytest.MonkeyPatch.context() as patched:
            send = Exchange.send

            def counted(self: Exchange, peer: int, message: Tensor, send: Any = send) -> None:
                to = self.wire.global_ranks[peer]
                if self.operation == "dispatch" and to // 2 != rank // 2:
                    found.setdefault(to, []).append(self._length(message))
                send(self, peer, message)

            patched.setattr(Exchange, "send", counted)
            model.experts(*inputs()[rank])
            ep.comm.barrier()
    ep.close()
    return found


def made_whole(rank: int) -> float:
    """How far one rank's pass alone is from one process, while the experts are whole; what is changed stays."""
    model, truth, given = torch.nn.Module(), filled(0), inputs()[0]
    model.experts = filled(rank)
    ep = thinwire.expert_parallel(model, ExpertParallel(4, slices=2, dispatch="int8/32"), local_size=2)
    parts = {f"experts.{name}": param.detach().clone() for name, param in model.experts.named_parameters()}
    found = truth(*given)
    with ep.whole(), torch.no_grad():
        if rank == 1:
            found = model.experts(*given)
        for param in model.experts.parameters():
            param.mul_(2)
    for name, param in model.experts.named_parameters():
        assert torch.equal(param, 2 * parts[f"experts.{name}"])
    before, seen = ep.comm.meter.snapshot().sent_by("dispatch"), list[tuple[str, int]]()

    def note(event: str, rows: Tensor) -> None:
        seen.append((event, len(rows)))

    for event in EVENTS:
        thinwire.row_hooks(model.experts).add(event, partial(note, event))
    model.experts(*inputs()[rank])
    assert [event for event, _ in seen] == [*EVENTS] and seen[0][1] == seen[-1][1] == 2 * TOKENS[rank]
    assert rank == 2 or ep.comm.meter.snapshot().sent_by("dispatch") > before
    ep.close()
    return float((found - truth(*given)).detach().abs().max())


def looking_ahead(rank: int) -> float:
    """How far layers whose routers look at all tokens are from one process."""
    errors = []
    for router in ("expert-choice", "softmoe"):
        truth, layer = (MoE(replace(CONFIG, router=router)).double() for _ in range(2))
        for each in (truth, layer):
            each.init_weights(torch.Generator().manual_seed(0))
            for param in each.parameters():
                param.data.mul_(10)
        model = torch.nn.Module()
        model.layer = layer
        ep = thinwire.expert_parallel(model, ExpertParallel(4, slices=2), local_size=2)
        x = torch.randn(2, 3 + rank, 32, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        expected = truth(x)
        errors.append(float((layer(x) - expected).detach().abs().max() / expected.detach().abs().max()))
        ep.close()
    return max(errors)


def moved(rank: int, ranks: int, slices: int) -> Tensor:
    """What a rank's tokens become by experts whose rounded weights come to them."""
    model = torch.nn.Module()
    model.experts = filled(0)
    asked = ExpertParallel(ranks, slices=slices, move="experts", weights="int4/32:nearest")
    ep = thinwire.expert_parallel(model, asked, local_size=2, timeout_s=60)
    found = model.experts(*inputs()[rank]).detach()
    ep.close()
    return found


def alike(rank: int) -> Tensor:
    """The gradient of experts that move, rounded at random, where all ranks have the same tokens."""
    model = torch.nn.Module()
    model.experts = filled(0)
    ep = thinwire.expert_parallel(model, ExpertParallel(2, move="experts", gradients="int4/32"), local_size=2)
    x, index, weights = inputs()[0]
    model.experts(x.detach(), index, weights.detach()).square().sum().backward()
    ep.close()
    return torch.as_tensor(model.experts.up_proj.grad)


def overlapped(rank: int) -> list[int]:
    """Chunks that experts have worked on, each once the next one was there, forward and backward."""
    model, done = torch.nn.Module(), list[int]()
    model.experts = filled(0)
    ep = thinwire.expert_parallel(model, ExpertParallel(4, chunks=4), local_size=2, timeout_s=60)
    trips: list[Trip] = []

    class Watched(Trip):
        def depart(self, rows: Tensor) -> None:
            trips.append(self)
            super().depart(rows)

        def arrive(self, number: int) -> Tensor:
            found = super().arrive(number)
            # Comes while this rank computes nothing: a message that waits for the work on this chunk never would.
            beside = [self._under_way[n] for n in (number - 1, number + 1) if n in self._under_way]
            assert beside
            for future in beside:
                future.result(timeout=60)
            done.append(number)
            return found

    once.Trip, x = Watched, inputs()[rank]  # type: ignore[misc]
    model.experts(*x).square().sum().backward()
    once.Trip = Trip  # type: ignore[misc]
    assert len(trips) == 1
    ep.close()
    return done


def test_outputs_gradients_and_bytes_are_those_of_one_process_and_of_the_formula() -> None:
    every = run_workers(layers, 4, local_size=2)
    check_two_hops([of_rank[-1] for of_rank in every])
    # Replicas, here ranks 0 and 2, draw apart.
    first, other = every[0][-2], every[2][-2]
    assert not torch.equal(first, other) and float((first - other).norm() / first.norm()) < 0.3
    for plain, coded, (four, *others), worked, weights, error, *_ in every:
        assert error < 1e-12
        for exact, bytes_fit in plain:
            assert exact < 1e-12 and bytes_fit
        for lossy, bytes_fit in coded:
            assert 1e-4 < lossy < 0.05 and bytes_fit
        # Rows are rounded alike on any number of ranks, by any route, in any chunks; gradients at random too.
        for each in others:
            assert all(map(torch.equal, four, each))
        # So are weights that move, this rank's own too.
        assert torch.equal(*weights)
        assert worked == [0, 1, 2, 3, 3, 2, 1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_numbers_of_experts_keep_their_bits_beside_weights_of_any_dtype(dtype: torch.dtype) -> None:
    size = dtype.itemsize
    for most, each in ((255, 1), (1000, 2), (100_000, 4)):
        weights, numbers = torch.rand(40, 7, dtype=dtype), torch.randint(0, most + 1, (40, 7))
        numbers[0] = most
        both = once.beside(weights, numbers, most)
        # No more than they need, in whole elements.
        assert both.dtype == dtype and both.shape == (40, 7 + math.ceil(7 * each / size))
        found = once.apart(both, 7, most)
        assert torch.equal(found[0], weights) and torch.equal(found[1].long(), numbers)


def check_two_hops(messages: list[list[dict[int, list[int]]]]) -> None:
    """Between two nodes of two ranks: one peer of the other node in place of two, and messages of both ranks' rows."""
    between = {(rank, to): sizes for rank, (linear, _) in enumerate(messages) for to, sizes in linear.items()}
    for rank, (linear, hops) in enumerate(messages):
        far = (rank + 2) % 4
        assert sorted(linear) == sorted({far, far ^ 1}) and list(hops) == [far]
        assert all(len(sizes) == 1 for sizes in (*linear.values(), *hops.values()))
        # What both ranks of this node send to the rank at this place of the other one, but for numbers in front.
        both = between[rank, far][0] + between[rank ^ 1, far][0]
        assert 0 <= hops[far][0] - both <= 8 * 16


def test_seconds_wait_for_what_a_gpu_has_queued() -> None:
    watch, waits = Stopwatch(), list[int]()
    watch.wait = partial(waits.append, 1)
    watch.ends(2 * watch.begins(torch.ones(2, requires_grad=True))).sum().backward()
    assert len(waits) == 4


def lose_a_rank(rank: int, world_size: int) -> str:
    model = torch.nn.Module()
    model.experts = filled(0)
    ep = thinwire.expert_parallel(model, ExpertParallel(2), local_size=1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x, index, weights = inputs()[0]
    with pytest.raises(thinwire.PeerLostError, match="rank 1 is missing: dispatch") as told:
        model.experts(x, index, weights)
    ep.comm.break_off()
    return str(told.value)


def test_a_lost_rank_is_named() -> None:
    assert run_workers(lose_a_rank, 2, may_die=(1,))[0]


def dense_on_one(rank: int, world_size: int) -> str:
    """Trains a model without experts on an expert axis of one rank; what options of experts there are told."""
    found = []
    for axes in (("data",), ("data", "expert")):
        mesh = init_device_mesh("cpu", (world_size, 1)[: len(axes)], mesh_dim_names=axes)
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stage = thinwire.parallelize(model, optimizer, mesh, [thinwire.Zero()], announce=False)
        stage.module(torch.full((1, 4), 1.0 + rank)).sum().backward()
        stage.optimizer.step()
        found.append(model.weight.detach().clone())
        assert stage.experts is None
    assert torch.equal(*found)
    with pytest.raises(thinwire.ConfigError, match="has no experts") as refused:
        thinwire.parallelize(model, optimizer, mesh, [thinwire.Zero(), ExpertParallel(dispatch="int8")], announce=False)
    return str(refused.value)


def test_an_expert_axis_of_one_rank_changes_nothing_for_a_model_without_experts() -> None:
    assert len({*run_workers(dense_on_one, 2)}) == 1
