"""A pipeline axis beside a data axis: gradients and weights of one process, equal replicas, bytes of the formula."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import thinwire
from tests.workers import run_workers
from thinwire._compat import flattened
from thinwire.cost import Network
from thinwire.errors import ConfigError
from thinwire.hosts.agreeing import AgreeingOptimizer
from thinwire.hosts.pipeline import memory, plans as plans_module
from thinwire.hosts.pipeline.memory import kept_by
from thinwire.hosts.pipeline.part import check_trained, take_part
from thinwire.hosts.pipeline.recovery import Holdings
from thinwire.hosts.pipeline.stage import PipelineStage
from thinwire.hosts.ranks import Axis, open_ranks
from thinwire.methods.pipeline import Costs, Pipeline, cut, fitted, simulate, token_shares
from thinwire.methods.pipeline.drift import drifted, plan_from
from thinwire.methods.pipeline.recompute import MORE_BYTES, keeping, mode_of
from thinwire.models import build_model
from thinwire.state.replicas import digest

STEPS = 20
EXACT: dict[str, Any] = {"forward": "fp32", "backward": "fp32"}
# name: ranks of the pipeline, micro-batches, options.
GRADIENTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "gpipe 2": (2, 5, {"plan": "gpipe"}),
    "1f1b 2": (2, 5, {"plan": "1f1b"}),
    "fitted 2": (2, 5, {"in_flight": 2}),
    "v-half 2": (2, 2, {"plan": "v-half", "recompute": "always"}),
    "first 2": (2, 3, {"head": "first"}),
    "one 2": (2, 1, {}),
    "gpipe 4": (4, 5, {"plan": "gpipe"}),
    "1f1b 4": (4, 6, {"plan": "1f1b", "recompute": "except-last"}),
    "fitted 4": (4, 5, {"layers": "1,1,1,1"}),
    "swap 4": (4, 5, {"recover": "swap"}),
    "auto 4": (4, 6, {"plan": "1f1b", "recompute": "auto"}),
}
METHODS: dict[str, Any] = {
    "zero": thinwire.Zero(),
    "ddp": thinwire.DDP(),
    "sdp4bit": thinwire.SDP4Bit(),
    "powersgd": thinwire.PowerSGD(rank=2, start_step=2, min_compression=1.0),
}


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return build_model("tiny", 64, 16, overrides={"tie_word_embeddings": True, "num_hidden_layers": 4}).to(dtype)


def batches(step: int, num: int, share: int = 0, num_shares: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of 4 sequences, of which every replica has its part; some targets count for nothing."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for _ in range(num):
        tokens, targets = torch.randint(0, 64, (2, 4, 8), generator=generator)
        targets[:, :2] = -100
        own = slice(4 * share // num_shares, 4 * (share + 1) // num_shares)
        found.append((tokens[own], targets[own]))
    return found


def adamw(whole: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(whole.parameters(), lr=2e-3)


class Alone(AgreeingOptimizer):
    """Replicas see the same data, in fp64, which other hosts do not take."""

    def _reduce(self) -> None:
        pass

    def _counts(self, name: str) -> bool:
        return self.comm.rank == 0


def stage_of(whole: nn.Module, mesh: DeviceMesh, method: Any, **options: Any) -> thinwire.PipelinedModel:
    stage = thinwire.parallelize(
        whole, adamw(whole), mesh, [thinwire.Pipeline(**options), method], local_size=1, announce=False
    )
    assert isinstance(stage, thinwire.PipelinedModel)
    return stage


def gradients(rank: int, name: str) -> Any:
    stages, num, options = GRADIENTS[name]
    mesh = init_device_mesh("cpu", (stages, 4 // stages), mesh_dim_names=("pipeline", "data"))
    whole = model(torch.float64)
    part = take_part(whole, adamw(whole), thinwire.Pipeline(**EXACT, **options), mesh["pipeline"])
    axis = Axis(mesh["data"], flattened(mesh), num_names=part.num_names)
    members = open_ranks(axis, local_size=1, timeout_s=300, checked=False)
    optimizer = Alone(whole, adamw(whole), members, dict(whole.named_parameters()), 0, [])
    own = PipelineStage(part, mesh["pipeline"], optimizer, seed=0, timeout_s=300, checked=False)
    stage = thinwire.PipelinedModel(whole, optimizer, [], own)
    if name == "auto 4":
        settled_in_little_room(own, num)
    stage.forward_backward(batches(0, num))
    found = {key: param.grad.numpy().copy() for key, param in whole.named_parameters() if param.grad is not None}
    norm, loss = float(stage.reduce()), stage.optimizer.mean_loss
    tokens, targets = batches(1, 1)[0]
    forward = float(whole(tokens, targets)), whole(tokens).numpy()
    if name == "auto 4":
        stage.update()
        # The second step's times choose again, and the row and the prediction name what runs.
        own.forward_backward(batches(1, num))
        mode = mode_of(own.plans.runner(num).plan)
        assert own.plans.on_recompute[0][1].startswith(f"{mode}: ")
        assert own.plans.prediction is not None and str(own.plans.prediction).endswith(f"; recompute auto: {mode}")
    stage.close()
    return found, norm, loss, forward


def settled_in_little_room(own: PipelineStage, num: int) -> None:
    """Of four stages each has room for the activations of one micro-batch and a half."""
    (chunk,), trained = own.part.chunks.values(), sum(param.numel() for param in own.part.made.model.parameters())
    kept, _ = kept_by(chunk, (4, 8, 64), torch.float64, batches(0, 1)[0])
    free = (MORE_BYTES * trained + 1.5 * kept) / memory.USED
    on_meta = [(tokens.to("meta"), targets.to("meta")) for tokens, targets in batches(0, num)]
    with patch.object(memory, "free_bytes", lambda *_: free):
        (row,) = own.settle(on_meta)
    assert row[1].startswith("always") and "no choice fits" not in row[2], row
    assert own.plans.runner(num).plan == Pipeline(plan="1f1b", recompute="always").plan_of(4, num)
    assert not own.settle(on_meta)
    # Last messages of sequences take memory of both sides of each border.
    plain, part, rows = own.plans.activations, own.plans.part, own.plans.on_recompute
    options = replace(part.options, forward="int8/64:nearest", delta=True, delta_mb=1)
    own.plans.part, own.plans.activations = replace(part, options=options), None
    with patch.object(memory, "free_bytes", lambda *_: free):
        own.settle(on_meta)
    assert plain is not None and own.plans.activations is not None
    less = [before - after for before, after in zip(plain.free, own.plans.activations.free, strict=True)]
    assert less == pytest.approx([1e6, 2e6, 2e6, 1e6])
    own.plans.part, own.plans.activations, own.plans.on_recompute = part, plain, rows


def trained(rank: int, name: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    whole = model()
    if mesh["data"].get_local_rank():
        # Replicas of a stage start from the first one's weights.
        with torch.no_grad():
            next(whole.parameters()).add_(1.0)
    stage = stage_of(whole, mesh, METHODS[name], **EXACT)
    hashes, norms, losses, sent, probes = [], [], [], [], []
    for step in range(STEPS):
        before = stage.optimizer.meter.snapshot()
        given = batches(step, 2, mesh["data"].get_local_rank(), 2)
        expected = stage.next_loss(given) if step == 7 else None
        stage.forward_backward(given)
        norms.append(float(stage.step(0.5)))
        losses.append(stage.optimizer.mean_loss)
        assert expected is None or expected == pytest.approx(losses[-1], abs=1e-12)
        stage.optimizer.synchronize()
        hashes.append(digest([param.detach() for param in whole.parameters()]).tolist())
        spent = stage.optimizer.meter.snapshot() - before
        probes.append(sum(spent.sent_by(f"probe_{way}") for way in ("forward", "backward")))
        sent.append(spent.sent_bytes - probes[-1])
    assert stage.pipeline.plans.prediction is not None
    links = stage.pipeline.plans.prediction.timeline.link_bytes
    stage.optimizer.check_replicas()
    borders = stage.pipeline.plans.runner(2).sent_bytes(batches(0, 2, 0, 2))
    found = {
        "weights": {key: param.detach().numpy().copy() for key, param in whole.named_parameters()},
        "place": (mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()),
        "hashes": hashes, "norms": norms, "losses": losses, "sent": sent,
        "promised": borders + stage.optimizer.bytes_per_step, "loss": float(whole(*batches(99, 1)[0])),
        "skipped": skipped(stage, mesh), "probes": probes, "borders": borders,
        "predicted": sum(num for (source, _), num in links.items() if source == mesh["pipeline"].get_local_rank()),
    }  # fmt: skip
    stage.close()
    return found


def skipped(stage: thinwire.PipelinedModel, mesh: DeviceMesh) -> tuple[int, bool]:
    """A gradient that is not finite on one rank: steps that are skipped, and whether weights are as before."""
    param = next(iter(stage.module.parameters()))
    hook = param.register_hook(lambda grad: grad * (float("nan") if mesh.get_rank() == 3 else 1.0))
    stage.forward_backward(batches(5, 2, mesh["data"].get_local_rank(), 2))
    weights = [param.detach().clone() for param in stage.module.parameters()]
    stage.step(0.5)
    stage.optimizer.synchronize()
    hook.remove()
    return stage.optimizer.skipped_steps, all(map(torch.equal, weights, stage.module.parameters()))


def replanned(rank: int) -> Any:
    """Paths after each step of micro-batches that skip a stage; links are measured every 2 steps, and one drifts."""
    even = Network.even(4, rate=1e8, delay_s=1e-6)
    slow = replace(even, rates=tuple(tuple(1e4 if {a, b} == {0, 1} else 1e8 for b in range(4)) for a in range(4)))
    probes = iter([even, even, slow])
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("pipeline", "data"))
    stage = stage_of(model(), mesh, thinwire.Zero(), head="first", skip=0.25, **EXACT)
    own, found = stage.pipeline, []
    order: list[str] = []
    send = stage.optimizer.send_accumulated

    def measured_links(*_: Any, all_pairs: bool) -> Network:
        order.append("links")
        return next(probes)

    def send_accumulated() -> None:
        order.append("gradients")
        send()

    noted = patch.object(stage.optimizer, "send_accumulated", send_accumulated)
    with noted, patch.multiple(plans_module, MEASURED_EVERY=2, measured_links=measured_links):
        for step in range(6):
            stage.forward_backward(batches(step, 6))
            stage.step(0.5)
            found.append((own.plans.runner(6).plan, own.plans.network, own.plans.why_planned))
    kept = json.loads(json.dumps(own.plans.kept()))
    # Links are free of gradients while they are measured.
    assert order == ["gradients", *["links", "gradients", "gradients"] * 2, "links", "gradients"]
    assert list(kept) == ["6"] and plan_from(kept["6"]) == (found[-1][0], slow)
    # A step of another number of micro-batches has a plan for these links too, though none has drifted.
    other = patch.multiple(plans_module, MEASURED_EVERY=1, measured_links=lambda *_, all_pairs: slow)
    with other:
        stage.forward_backward(batches(6, 4))
        stage.step(0.5)
    assert not own.plans.why_planned and own.plans.network == slow and list(own.plans.kept()) == ["4", "6"]
    assert own.plans.runner(4).plan != own.plans.plan_of(4)
    checked_taken(own, kept, slow)
    stage.close()
    return found


def checked_taken(own: PipelineStage, kept: dict[str, Any], links: Network) -> None:
    """A resumed run goes on along paths that were made for what it asks for, and along no others."""
    part = own.part

    def taken(**options: Any) -> tuple[str, bool, bool]:
        own.plans.part, own.plans.network = replace(part, options=replace(part.options, **options)), None
        own.plans.forget()
        told = own.plans.take(kept)
        return told, own.plans.network == links, own.plans.runner(6).plan == plan_from(kept["6"])[0]

    assert taken() == ("taken over for steps of 6 micro-batches, until links drift", True, True)
    said = "dropped: they were made for skip 0.25, recompute never, and this run has skip 0.5, recompute always"
    assert taken(skip=0.5, recompute="always") == (said, False, False)
    told, *is_taken = taken(in_flight=2)
    assert told == "dropped: they were made for in_flight None, and this run has in_flight 2" and not any(is_taken)
    assert taken(skip=0.0)[0] == "dropped: no stage is skipped now"
    # Where recompute is "auto", the memory here says what is computed again along the same paths, which change no bit.
    asked = kept["6"]["asked"] | {"recompute": "auto"}
    own.plans.part = replace(part, options=replace(part.options, recompute="auto"))
    ones = (1.0,) * part.made.num_chunks
    own.plans.activations = memory.Activations(ones, (0.0,) * len(ones), (0.5,) * 4)
    told = own.plans.take({num: text | {"asked": asked} for num, text in kept.items()})
    assert told.endswith("; recompute always by the memory here, was never") and own.plans.network == links
    assert keeping(own.plans.runner(6).plan) == plan_from(kept["6"])[0] != own.plans.runner(6).plan
    assert own.plans.on_recompute[0][1].startswith("always")
    own.plans.part, own.plans.activations = part, None


def unvisited(rank: int) -> bool:
    """Whether a step changes this stage's weights, where no micro-batch visits stage 2 and nothing decays."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("pipeline", "data"))
    whole = model()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=2e-3, weight_decay=0.0)
    options = thinwire.Pipeline(head="first", skip=0.25, **EXACT)
    stage: Any = thinwire.parallelize(whole, optimizer, mesh, [options, thinwire.Zero()], local_size=1, announce=False)
    own: PipelineStage = stage.pipeline
    own.plans._runners[4] = own.running(fitted((0, 1, 2, 3, 0), [(0, 1, 3, 4), (0, 3, 1, 4)] * 2, Costs.even(5)))
    before = {name: weight.detach().clone() for name, weight in own.weights.items()}
    stage.forward_backward(batches(0, 4))
    stage.step(0.5)
    stage.optimizer.synchronize()
    changed = [not torch.equal(before[name], weight) for name, weight in own.weights.items()]
    stage.close()
    assert len(set(changed)) == 1
    return changed[0]


def everything(rank: int, world_size: int) -> dict[str, Any]:
    found = {name: gradients(rank, name) for name in GRADIENTS}
    found["replanned"], found["changed"] = replanned(rank), unvisited(rank)
    return found | {name: trained(rank, name) for name in METHODS}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_workers(everything, 4)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_and_forwards_are_those_of_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    stages, num, _ = GRADIENTS[name]
    whole, given, loss = model(torch.float64), batches(0, num), torch.zeros((), dtype=torch.float64)
    for number, (batch, share) in enumerate(zip(given, token_shares(given), strict=True)):
        layers = list(whole.get_submodule("model.layers").children())
        # Every other micro-batch sees the first two layers, and the last two, in the other order.
        turned = [layers[1], layers[0], layers[3], layers[2]] if name == "swap 4" and number % 2 else layers
        whole.set_submodule("model.layers", nn.ModuleList(turned))
        loss = loss + share * whole(*batch)
        whole.set_submodule("model.layers", nn.ModuleList(layers))
    loss.backward()
    expected = {key: param.grad for key, param in whole.named_parameters() if param.grad is not None}
    norm = float(nn.utils.get_total_norm(list(expected.values())))
    tokens, targets = batches(1, 1)[0]
    with torch.no_grad():
        forward = float(whole(tokens, targets)), whole(tokens).numpy()
    for replica in range(4 // stages):
        told = [rank[name] for rank in ranks[replica :: 4 // stages]]
        found = {key: grad for part, *_ in told for key, grad in part.items()}
        assert sum(len(part) for part, *_ in told) == len(found) == len(expected), "each weight has one home"
        for key, gradient in found.items():
            assert abs(gradient - expected[key].numpy()).max() <= 1e-12, key
        for _, norm_here, loss_here, forward_here in told:
            assert norm_here == pytest.approx(norm, rel=1e-12)
            assert loss_here == pytest.approx(loss.item(), rel=1e-6)
            assert forward_here[0] == pytest.approx(forward[0], abs=1e-12)
            assert abs(forward_here[1] - forward[1]).max() <= 1e-12


@pytest.mark.parametrize("name", ["1f1b 2", "fitted 2", "fitted 4"])
def test_the_plan_changes_no_bit(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        (expected, *_), (found, *_) = rank[f"gpipe {name[-1]}"], rank[name]
        assert all((found[key] == expected[key]).all() for key in expected)


def test_paths_are_planned_for_measured_links_and_anew_when_one_drifts(ranks: list[dict[str, Any]]) -> None:
    told = ranks[0]["replanned"]
    assert all(rank["replanned"] == told for rank in ranks)
    plans, networks, reasons = zip(*told, strict=True)
    assert plans[1] == plans[4]
    assert networks[0] is None and networks[1] == networks[4] and networks[5].rates[0][1] == 1e4
    assert reasons[:5] == ("",) * 5 and reasons[5].partition(": ")[0] in ("0 to 1", "1 to 0")
    assert reasons[5].endswith(": 0.01 MB/s and 0.001 ms where it was 100 MB/s and 0.001 ms")
    costs = Costs.even(5, forward_s=0.01, forward_bytes=1e4)
    step = simulate(plans[5], costs, networks[4])
    # A little slower, or where it makes no difference to a step: no drift.
    for rate in (9e7, 7e7):
        assert not drifted(networks[4], Network.even(4, rate=rate), step)
    assert "where it was 100 MB/s" in drifted(networks[4], Network.even(4, rate=1e6), step)
    # As many bytes a second, each message later.
    assert "MB/s and 50 ms where" in drifted(networks[4], Network.even(4, rate=1e8, delay_s=0.05), step)
    assert not drifted(networks[4], Network.even(4, rate=1e8, delay_s=1e-5), step)


def test_replicas_that_skip_are_said_to_keep_to_themselves() -> None:
    own = MagicMock()
    own.part.options, own.part.made = Pipeline(head="first", skip=0.33), cut(model(), 3, head="first")
    own.part.tied, own.ends = {}, None
    told = {}
    for own.optimizer.comm.world_size in (1, 2):
        rows = PipelineStage.describe(own)
        told[own.optimizer.comm.world_size] = [effect for asked, effect, _ in rows if asked.startswith("skip")]
    assert told[1] == ["2 of 3 stages for each micro-batch"]
    assert told[2] == [*told[1], "each keeps its micro-batches to its own ranks"]


def test_a_stage_that_nobody_visits_keeps_its_weights(ranks: list[dict[str, Any]]) -> None:
    assert [rank["changed"] for rank in ranks] == [True, True, False, True]


@pytest.mark.parametrize("name", METHODS)
def test_replicas_of_a_stage_are_equal_and_bytes_are_those_of_the_formula(
    name: str, ranks: list[dict[str, Any]]
) -> None:
    told = [rank[name] for rank in ranks]
    for stage in range(2):
        one, other = (found for found in told if found["place"][0] == stage)
        assert one["hashes"] == other["hashes"]
    for found in told:
        assert found["norms"] == told[0]["norms"] and found["losses"] == told[0]["losses"]
        assert found["loss"] == told[0]["loss"]
        assert found["skipped"] == (1, True)
        if name != "powersgd":
            # Not where the next loss was asked for.
            assert all(sent == found["promised"] for step, sent in enumerate(found["sent"]) if step not in (7, 8))
        # What is predicted is sent, tied weights included; what was measured is no part of it.
        assert found["predicted"] == found["borders"]
        assert [step for step, num in enumerate(found["probes"]) if num] == [1]


@pytest.mark.parametrize(
    ("stages", "layers", "frozen", "nearest"),
    [
        (2, "2,2", (2, 3), None),  # The last norm is trained.
        (3, "1,2,1", (1, 2), "2 stages"),
        (3, "1,2,1", (1,), None),
        (3, "1,1,2", (1,), "layers '1,2,1'"),
        (4, "", (0, 1, 2), "1 stages"),
    ],
)
def test_a_stage_that_would_train_nothing_is_refused(
    stages: int, layers: str, frozen: tuple[int, ...], nearest: str | None
) -> None:
    whole = model()
    for number in frozen:
        whole.get_submodule(f"model.layers.{number}").requires_grad_(False)
    made = cut(whole, stages, layers)
    if nearest is None:
        check_trained(made, Holdings.of(made))
        return
    with pytest.raises(ConfigError, match=f"stage 1 of {stages}: all .* frozen, .*; nearest: {nearest}"):
        check_trained(made, Holdings.of(made))


def alone(
    steps: int, optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = adamw
) -> tuple[nn.Module, list[float]]:
    """The model after some steps of one process with the batches of two replicas, and the norm of each step."""
    whole = model()
    optimizer, norms = optimizer_of(whole), []
    for step in range(steps):
        for share in range(2):
            for batch in batches(step, 2, share, 2):
                (whole(*batch) / 4).backward()
        norms.append(float(nn.utils.clip_grad_norm_(whole.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return whole, norms


@pytest.mark.parametrize("name", METHODS)
def test_training_is_that_of_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    start = {key: param.detach().clone() for key, param in model().named_parameters()}
    whole, norms = alone(STEPS)
    told = [rank[name] for rank in ranks if rank[name]["place"][1] == 0]
    found = {key: torch.from_numpy(value) for part in told for key, value in part["weights"].items()}
    assert found.keys() == start.keys()
    far = near = 0.0
    for key, param in whole.named_parameters():
        far += float((found[key] - param).detach().square().sum())
        near += float((param - start[key]).detach().square().sum())
        if name in ("zero", "ddp"):
            assert abs(found[key] - param.detach()).max() <= 1e-6, key
    assert far < 0.5 * near
    if name in ("zero", "ddp"):
        assert told[0]["norms"] == pytest.approx(norms, rel=1e-4)
        with torch.no_grad():
            assert told[0]["loss"] == pytest.approx(float(whole(*batches(99, 1)[0])), abs=1e-5)
