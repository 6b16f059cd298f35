"""A lost stage begins with its neighbours' layers and with copies of its ends; the others are as they were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from tests.hosts.pipeline.test_stage import adamw, batches
from tests.workers import HANG_S, run_workers
from thinwire.collectives import Mailbox, Topology
from thinwire.collectives.store_gather import of_all_ranks
from thinwire.device import random_state
from thinwire.hosts.pipeline.recovery import EndCopies, Holdings, packed
from thinwire.methods.pipeline.recover import between
from thinwire.models import build_model
from thinwire.state.portable import StateDict, state_dict_of
from thinwire.training.recovery import Reunion, StepStart, Survivor

STAGES = 4
# recover, the stages that are lost, tied ends, layers.
ROWS: dict[str, tuple[str, tuple[int, ...], bool, str]] = {
    "middle": ("average", (2,), False, "1,1,1,1"),
    "ends": ("average", (0, 3), False, "1,1,1,1"),
    "uneven": ("uniform", (1,), False, "1,2,1,1"),
    "tied": ("average", (0, 2), True, "1,1,1,1"),
    "swap": ("swap", (1, 3), True, "1,1,1,1"),
}
# The ranks that are lost, of three stages with two replicas each: rank 2 s + r is replica r of stage s.
REPLICAS, LOST_RANKS = 2, {"replica": (3,), "stage": (2, 3), "both": (2, 3, 4)}
Weights = dict[str, np.ndarray]


def weights_of(stage: thinwire.PipelinedModel) -> Weights:
    return {name: value.detach().clone().numpy() for name, value in stage.pipeline.weights.items()}


def _row(rank: int, recover: str, lost: tuple[int, ...], tied: bool, layers: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (STAGES, 1), mesh_dim_names=("pipeline", "data"))
    num_layers = sum(map(int, layers.split(",")))

    def built(recover: Any) -> thinwire.PipelinedModel:
        whole = build_model("tiny", 64, 16, overrides={"tie_word_embeddings": tied, "num_hidden_layers": num_layers})
        plan = "fitted" if recover == "swap" else "1f1b"
        options = thinwire.Pipeline(plan=plan, layers=layers, recover=recover)
        stage = thinwire.parallelize(
            whole, adamw(whole), mesh, [options, thinwire.Zero()], local_size=1, announce=False
        )
        assert isinstance(stage, thinwire.PipelinedModel)
        return stage

    def train(stage: thinwire.PipelinedModel, steps: range) -> float:
        for step in steps:
            stage.forward_backward(batches(step, STAGES))
            stage.step(1.0)
        return stage.optimizer.mean_loss

    found: dict[str, Any] = {}
    if len(lost) == 1:
        plain = built("none")
        train(plain, range(2))
        found["plain"] = weights_of(plain)
        plain.close()
    stage = built(recover)
    train(stage, range(2))
    before, found["norm"] = weights_of(stage), stage.pipeline.norm
    # What is predicted is what is sent, with tied weights and copies of ends.
    assert stage.pipeline.plans.prediction is not None
    links = stage.pipeline.plans.prediction.timeline.link_bytes
    predicted = sum(num for (source, _), num in links.items() if source == rank)
    assert predicted == stage.pipeline.sent_bytes(batches(0, STAGES))[rank]
    if layers == "1,2,1,1":
        # A gradient that is not finite leaves the norm of the last one, by which a mean of layers is weighted.
        param = stage.module.get_parameter(stage.pipeline.part.holdings.within(rank)[0])
        hook = param.register_hook(lambda gradient: gradient * float("nan"))
        train(stage, range(2, 3))
        hook.remove()
        assert stage.pipeline.norm == found["norm"] and same(weights_of(stage), before)
    ends = stage.pipeline.ends
    assert ends is not None
    copies, state = stage.pipeline.rescue(), stage.optimizer.state_dict()
    kept = {other: ends.holdings.split(copy, ends.holdings.ends[other]) for other, copy in ends.held.items()}
    found["kept"] = {other: {name: value.numpy() for name, value in each.items()} for other, each in kept.items()}
    norms = [float(norm) for norm in stage.pipeline.comm.wait(
        stage.pipeline.comm.all_gather_exact(torch.tensor(stage.pipeline.norm, dtype=torch.float64))
    )]  # fmt: skip
    num_before = stage.pipeline.num_before
    stage.close()
    again = built(recover)
    is_lost = rank in lost
    if not is_lost:
        again.optimizer.load_state_dict(state)
    sent = again.optimizer.meter.snapshot().sent_bytes
    again.pipeline.recover(lost, norms, {} if is_lost else copies, {1: 1})
    sent = again.optimizer.meter.snapshot().sent_bytes - sent
    after, moments = weights_of(again), len(again.optimizer.state_dict()["numbers"]["scalars"])
    again.optimizer.steps = 2
    again.pipeline.restore(num_before)
    loss = train(again, range(2, 3))
    finite = all(bool(value.isfinite().all()) for value in again.pipeline.weights.values())
    saved = state_dict_of(again.snapshot(), again.optimizer.param_groups)
    again.pipeline.recoveries = {}
    again.restore(StateDict(saved))
    result = found | {
        "before": before, "after": after, "sent": sent, "moments": moments, "loss": loss,
        "lr": again.lr_factor, "finite": finite,
    }  # fmt: skip
    again.close()
    return result


def _rows(rank: int, world_size: int) -> dict[str, Any]:
    return {name: _row(rank, *row) for name, row in ROWS.items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_workers(_rows, STAGES, local_size=1)


@pytest.mark.parametrize("name", ROWS)
def test_only_lost_stages_change_and_moments_begin_anew(name: str, ranks: list[dict[str, Any]]) -> None:
    _, lost, _, _ = ROWS[name]
    for rank, found in ((rank, told[name]) for rank, told in enumerate(ranks)):
        assert same(found.get("plain", found["before"]), found["before"]), "until a loss it trains as without recovery"
        assert found["finite"] and np.isfinite(found["loss"])
        assert found["lr"] == pytest.approx(1.1 ** ((rank in lost) + (rank == 1)))
        if rank not in lost:
            assert same(found["before"], found["after"]) and found["moments"]
        else:
            assert not same(found["before"], found["after"]) and not found["moments"]


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def layer(weights: Weights, number: int) -> Weights:
    prefix = f"layers.{number}."
    return {name.partition(prefix)[2]: value for name, value in weights.items() if prefix in name}


@pytest.mark.parametrize(("name", "stage"), [("middle", 2), ("tied", 2), ("uneven", 1)])
def test_the_layers_of_a_lost_stage_are_the_mean_of_its_neighbours(
    name: str, stage: int, ranks: list[dict[str, Any]]
) -> None:
    told = [rank[name] for rank in ranks]
    norms = (0.0, 0.0) if name == "uneven" else (told[stage - 1]["norm"], told[stage + 1]["norm"])
    assert all(one["norm"] > 0 for one in told)
    # In the uneven row stage 1 has layers 1 and 2, its neighbours one each.
    own, before, after = ((1, 2), 0, 3) if name == "uneven" else ((2,), 1, 3)
    for number in own:
        found = layer(told[stage]["after"], number)
        first = layer(told[stage - 1]["before"], before)
        second = layer(told[stage + 1]["before"], after)
        assert found and found.keys() == first.keys()
        for key, value in found.items():
            expected = between(torch.from_numpy(first[key]), torch.from_numpy(second[key]), *norms)
            assert np.array_equal(value, expected.numpy())
    if name == "middle":
        assert sum(one["sent"] for one in told) == 2 * sum(value.nbytes for value in told[2]["after"].values())


def test_ends_come_back_from_copies_and_layers_from_the_one_neighbour(ranks: list[dict[str, Any]]) -> None:
    told = [rank["ends"] for rank in ranks]
    for end, beside, at, theirs in ((0, 1, 0, 1), (3, 2, 3, 2)):
        outside = {name: value for name, value in told[end]["after"].items() if "layers." not in name}
        before = {name: told[end]["before"][name] for name in outside}
        assert outside and same(outside, before) and same(outside, told[beside]["kept"][end])
        assert same(layer(told[end]["after"], at), layer(told[beside]["before"], theirs))
    swapped = [rank["swap"] for rank in ranks]
    for lost, other in ((1, 0), (3, 2)):
        assert same(layer(swapped[lost]["after"], lost), layer(swapped[other]["before"], other))
    first, last = ranks[0]["tied"], ranks[3]["tied"]
    (shared,) = [name for name in first["after"] if "layers." not in name]
    # The last rank has the tied weight as it was before the update: it comes back before the next forward.
    assert np.array_equal(first["after"][shared], last["before"][shared])


def _replicas(rank: int, world_size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (3, REPLICAS), mesh_dim_names=("pipeline", "data"))

    def built(method: Any) -> thinwire.PipelinedModel:
        whole = build_model("tiny", 64, 16, overrides={"num_hidden_layers": 3})
        options = thinwire.Pipeline(plan="1f1b", recover="average")
        stage = thinwire.parallelize(whole, adamw(whole), mesh, [options, method], local_size=1, announce=False)
        assert isinstance(stage, thinwire.PipelinedModel)
        return stage

    def train(stage: thinwire.PipelinedModel, steps: range) -> None:
        for step in steps:
            stage.forward_backward(batches(step, 3, rank % REPLICAS, REPLICAS))
            stage.step(1.0)
        stage.optimizer.check_replicas()

    found: dict[str, Any] = {}
    for name, lost in LOST_RANKS.items():
        method = thinwire.SDP4Bit() if name == "both" else thinwire.Zero()
        stage = built(method)
        train(stage, range(2))
        pipeline, before = stage.pipeline, weights_of(stage)
        norm, whole = pipeline.norm, {name: value.detach().clone() for name, value in pipeline.weights.items()}
        start = StepStart(2, {}, pipeline.num_before, random_state(), None)
        state, copies = stage.optimizer.state_dict(), pipeline.rescue()
        stage.close()
        survivor = None if rank in lost else Survivor(start, state, whole, norm, copies, {}, {"of": rank}, None)
        again, loader = built(method), SimpleNamespace(load_state_dict=lambda state: None)
        engine: Any = SimpleNamespace(stage=again, optimizer=again.optimizer, loader=loader)
        reunion = Reunion.of(survivor, 1, replicas=REPLICAS, tied=False)
        reunion.restore(survivor, engine, lambda step: step)
        after, moments = weights_of(again), len(again.optimizer.state_dict()["numbers"]["scalars"])
        event, lr = reunion.event("average", 0.0), again.lr_factor
        assert reunion.plan == {"of": 0}, "all take the paths of one rank"
        train(again, range(2, 4))
        found[name] = {
            "before": before, "after": after, "norm": norm, "moments": moments, "lr": lr, "how": event.how,
            "lost": event.lost, "loss": again.optimizer.mean_loss,
        }  # fmt: skip
        again.close()
    return found


def test_a_live_replica_is_copied_bit_for_bit_and_only_whole_stages_are_averaged() -> None:
    told = run_workers(_replicas, 3 * REPLICAS, local_size=1)
    for name, lost in LOST_RANKS.items():
        ranks = [one[name] for one in told]
        averaged = name != "replica"
        for rank, found in enumerate(ranks):
            beside = ranks[rank ^ 1]
            assert np.isfinite(found["loss"]) and same(found["after"], beside["after"])
            assert bool(found["moments"]) == (rank not in lost)
            assert found["lr"] == pytest.approx(1.1 if averaged and rank in (2, 3) else 1.0)
            if not (averaged and rank in (2, 3)):
                assert same(found["after"], found["before"]), "what a replica had is what it was"
        # The norms of the first rank of each stage that is left.
        norms = ranks[0]["norm"], ranks[5 if 4 in lost else 4]["norm"]
        for key, value in layer(ranks[2]["after"], 1).items() if averaged else ():
            first, last = (torch.from_numpy(layer(ranks[at]["before"], number)[key]) for at, number in ((0, 0), (5, 2)))
            assert np.array_equal(value, between(first, last, *norms).numpy())
    assert told[0]["replica"]["how"] == "replica 1 of stage 1 is a copy of replica 0"
    both = "stage 1 is the average of 0 and 2; replica 0 of stage 2 is a copy of replica 1"
    assert told[0]["both"]["how"] == both and list(told[0]["both"]["lost"]) == [1, 2]


def test_a_survivor_goes_on_along_the_same_paths_and_draws_as_before_on_a_gpu_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn, engine = torch.arange(16, dtype=torch.uint8), MagicMock()
    restored: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: drawn)
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    engine.stage.pipeline.plans.kept.return_value = {"4": "paths"}
    monkeypatch.setattr("thinwire.training.recovery.forget_groups", lambda: None)
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)
    engine.optimizer.steps, engine.optimizer.comm.world_size = 3, 1
    survivor = Survivor.of(StepStart.of(3, engine, None), None, engine, MagicMock(), None)
    monkeypatch.setattr("thinwire.training.recovery.of_all_ranks", lambda mine, what: [None, mine, mine])
    reunion = Reunion.of(survivor, 1, replicas=1, tied=False)
    assert reunion.lost == [0] and not reunion.why_not
    assert reunion.restore(survivor, engine, lambda step: step) == 3
    assert len(restored) == 1 and torch.equal(restored[0], drawn)
    engine.stage.pipeline.plans.take.assert_called_once_with({"4": "paths"})


def _cut_off(rank: int, world_size: int) -> dict[int, list[float]]:
    like = {name: torch.empty(4) for name in ("first", "last")}
    holdings = Holdings(((), (), ()), (("first",), (), ("last",)), (), like)
    # Whoever waits for rank 2 waits for longer than the test may take.
    mailbox = Mailbox(None, Topology(world_size, 1), timeout_s=2 * HANG_S)
    kept = {end: packed({name: torch.zeros(4)}, [name]) for end, name in ((0, "first"), (2, "last"))}
    copies = EndCopies(mailbox, holdings, kept if rank == 1 else {})
    if rank < 2:
        copies.send({"first": torch.ones(4)})
        # It travels behind the copy, on the same connection.
        group, after = mailbox._wire.group, torch.zeros(1)
        (group.send([after], 1, 0) if rank == 0 else group.recv([after], 0, 0)).wait()
    of_all_ranks(None, "its copies")
    mailbox.break_off()
    held = {**copies.rescue(), **copies.rescue()}
    return {end: copy.view(torch.float32).tolist() for end, copy in held.items()}


def test_after_a_loss_copies_that_have_come_count_and_others_are_not_waited_for() -> None:
    assert run_workers(_cut_off, 3, local_size=1) == [{}, {0: [1.0] * 4, 2: [0.0] * 4}, {}]
