"""Stages whose matrices are cut over a tensor axis: as one process, and each byte crosses a border once."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import thinwire
from tests.hosts.pipeline.test_stage import EXACT, adamw, alone, batches, model
from tests.workers import run_workers
from thinwire._compat import flattened
from thinwire.errors import ConfigError
from thinwire.hosts.agreeing import AgreeingOptimizer
from thinwire.hosts.pipeline.part import take_part
from thinwire.hosts.pipeline.stage import PipelineStage
from thinwire.hosts.ranks import Axis, open_ranks
from thinwire.hosts.tensor import TensorAxis, cut_parameters
from thinwire.methods.pipeline import token_shares
from thinwire.models import build_model
from thinwire.models.llama import MLP
from thinwire.models.tensor import COLUMNS, cut_over, cuts_of
from thinwire.models.vocabulary import lose_by_rows
from thinwire.state.replicas import digest

# Options, and micro-batches: 2 stages of 2 tensor ranks.
GRADIENTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fitted": (5, {"in_flight": 2, "recompute": "except-last"}),
    "interleaved-zb": (4, {"plan": "interleaved-zb"}),
    "v-half": (2, {"plan": "v-half", "recompute": "always"}),
    "first": (3, {"head": "first"}),
}
METHODS: dict[str, tuple[Any, int]] = {
    "zero": (thinwire.Zero(), 20),
    "ddp": (thinwire.DDP(), 4),
    "sdp4bit": (thinwire.SDP4Bit(), 4),
}
CUTS = dict(cuts_of(model())) | {"model.embed_tokens": COLUMNS, "lm_head": COLUMNS}


def whole_of(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """A parameter, or its gradient, from the parts of the tensor ranks."""
    style = CUTS.get(name.removesuffix(".weight"))
    return parts[0] if style is None else torch.cat(parts, 0 if style == COLUMNS else 1)


def wide_loss(whole: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A model's loss in fp64, where its own is computed in fp32."""
    return nn.functional.cross_entropy(whole(tokens).flatten(0, 1), targets.flatten())


class Alone(AgreeingOptimizer):
    """Takes fp64, which other hosts do not; there is one replica of each stage."""

    def _reduce(self) -> None:
        pass


class Dropping(MLP):
    """Drops features inside of its cut matrices, and behind them; notes the first numbers that it draws for each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.dropped("inside", nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.dropped("behind", self.down_proj(inside))

    def dropped(self, where: str, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            drawn = torch.rand(4).tolist()
        if self.training and torch.is_grad_enabled():
            self.__dict__.setdefault(where, []).append(drawn)
        return nn.functional.dropout(x, 0.5, self.training)


def of_four_heads() -> Any:
    """A model whose matrices four ranks can cut."""
    overrides = {"num_key_value_heads": 4, "num_hidden_layers": 2}
    return build_model("tiny", 64, 16, overrides=overrides).to(torch.float64)


def four_tensor_ranks() -> Any:
    """Loss, gradients, and how many all_reduce each pass takes on a tensor axis of four ranks; what dropout draws."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tensor",))
    whole, counts = of_four_heads(), []
    cut_over(whole, mesh)
    with CommDebugMode() as comm:
        lose_by_rows(whole)
        loss = whole(*batches(0, 1)[0])
        counts.append(comm.get_total_counts())
        loss.backward()
        counts.append(comm.get_total_counts() - counts[0])
    names = {str(name).replace("_", "") for name in comm.get_comm_counts()}
    assert all("allreduce" in name for name in names), names
    grads = {name: getattr(param.grad, "_local_tensor", param.grad) for name, param in whole.named_parameters()}
    return loss.item(), grads, counts, dropped("never", of_four_heads(), (1, 1, 4))[1]


def dropped(recompute: str, whole: Any = None, shape: tuple[int, ...] = (2, 1, 2)) -> Any:
    """The gradients of a model with dropout, and what each of this stage's layers drew."""
    whole = model(torch.float64) if whole is None else whole
    for layer in whole.model.layers:
        layer.mlp.__class__ = Dropping
    torch.manual_seed(5)
    found = of_stages(whole, 2, {"plan": "gpipe", "recompute": recompute}, shape=shape)[0]
    return found, [(mlp.inside, mlp.behind) for mlp in whole.modules() if isinstance(mlp, Dropping)]


def gradients(name: str) -> Any:
    num, options = GRADIENTS[name]
    return of_stages(model(torch.float64), num, options)


def of_stages(
    whole: Any, num: int, options: dict[str, Any], *, shares: bool = True, shape: tuple[int, ...] = (2, 1, 2)
) -> Any:
    """Of one step; shares: whether tensor ranks share what crosses a border, or each sends all of it."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pipeline", "data", "tensor"))
    cut_over(whole, mesh["tensor"])
    optimizer = adamw(whole)
    part = take_part(whole, optimizer, thinwire.Pipeline(**EXACT, **options), mesh["pipeline"])
    tensor: TensorAxis = cut_parameters(whole, optimizer, mesh["tensor"], part.chunks.values())
    part = part.local(tensor)
    axis = Axis(mesh["data"], flattened(mesh), tensor, part.num_names)
    members = open_ranks(axis, local_size=1, timeout_s=300, checked=False)
    alone = Alone(whole, optimizer, members, dict(whole.named_parameters()), 0, [])
    shared = tensor if shares else None
    own = PipelineStage(part, mesh["pipeline"], alone, seed=0, timeout_s=300, checked=False, tensor=shared)
    stage = thinwire.PipelinedModel(whole, alone, [], own, tensor)
    stage.forward_backward(batches(0, num))
    sent = sum(own.mailbox.meter.snapshot().sent_by(f"pipeline_{way}") for way in ("forward", "backward"))
    found = {key: param.grad.clone() for key, param in whole.named_parameters() if param.grad is not None}
    norm, loss = float(stage.reduce()), stage.optimizer.mean_loss
    logits = whole(batches(1, 1)[0][0])
    stage.close()
    return found, norm, loss, logits, part.made.sizes, sent


def all_gradients(rank: int, world_size: int) -> Any:
    found = {name: gradients(name) for name in GRADIENTS}
    for shares in (False, True):
        found[f"shares {shares}"] = of_stages(model(torch.float64), 4, {"plan": "1f1b"}, shares=shares)
    found["four"] = four_tensor_ranks()
    return found | {"dropped": [dropped(recompute) for recompute in ("never", "always")]}


@pytest.fixture(scope="module")
def of_four() -> list[dict[str, Any]]:
    return run_workers(all_gradients, 4)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_one_process(name: str, of_four: list[dict[str, Any]]) -> None:
    whole, given = model(torch.float64), batches(0, GRADIENTS[name][0])
    loss = sum(
        (share * wide_loss(whole, *batch) for batch, share in zip(given, token_shares(given), strict=True)),
        torch.zeros(()),
    )
    loss.backward()
    expected = {key: param.grad for key, param in whole.named_parameters() if param.grad is not None}
    told = [rank[name] for rank in of_four]
    found: dict[str, torch.Tensor] = {}
    for first, second in (told[:2], told[2:]):
        assert first[0].keys() == second[0].keys()
        found |= {key: whole_of(key, [first[0][key], second[0][key]]) for key in first[0]}
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        assert (gradient - expected[key]).abs().max() <= 1e-12, key
    with torch.no_grad():
        logits = whole(batches(1, 1)[0][0])
    norm = float(nn.utils.get_total_norm(list(expected.values())))
    for _, norm_here, loss_here, logits_here, sizes, _ in told:
        assert norm_here == pytest.approx(norm, rel=1e-12) and norm_here == told[0][1]
        assert loss_here == pytest.approx(loss.item(), rel=1e-6)
        assert (logits_here - logits).abs().max() <= 1e-12
        assert sum(sizes) == 4


def test_dropout_is_alike_where_tensors_are_whole_and_each_rank_s_own_where_they_are_cut(
    of_four: list[dict[str, Any]],
) -> None:
    told = [rank["dropped"] for rank in of_four]
    # The same random numbers where a stage computes its activations again.
    for (plain, _), (again, _) in told:
        assert plain.keys() == again.keys() and all(torch.equal(plain[key], again[key]) for key in plain)
    for (first, draws), (second, others) in ((told[0][0], told[1][0]), (told[2][0], told[3][0])):
        assert len(draws) == len(others) == 2
        for (inside, behind), (inside_there, behind_there) in zip(draws, others, strict=True):
            assert behind == behind_there
            assert not any(one == other for one, other in zip(inside, inside_there, strict=True))
        for key in first:
            assert key.removesuffix(".weight") in CUTS or torch.equal(first[key], second[key]), key


def test_four_tensor_ranks_sum_twice_in_each_pass_of_a_layer_and_are_one_process(
    of_four: list[dict[str, Any]],
) -> None:
    whole = of_four_heads()
    loss = wide_loss(whole, *batches(0, 1)[0])
    loss.backward()
    told = [rank["four"] for rank in of_four]
    num_layers = len(whole.model.layers)
    for loss_here, _, counts, _ in told:
        # And behind the embedding, twice for the loss, and once for the gradient behind the head.
        assert abs(loss_here - float(loss)) <= 1e-12 and counts == [2 * num_layers + 3, 2 * num_layers + 1]
    for name, param in whole.named_parameters():
        assert param.grad is not None
        found = whole_of(name, [grads[name] for _, grads, _, _ in told])
        assert (found - param.grad).abs().max() <= 1e-12, name
    inside, behind = ([[draws[where] for draws in drawn] for *_, drawn in told] for where in (0, 1))
    assert all(each == behind[0] for each in behind)
    assert all(one != other for one, other in combinations(inside, 2))


def test_a_shared_border_carries_half_of_the_bytes_and_the_same_bits(of_four: list[dict[str, Any]]) -> None:
    for plain, shared in ((rank["shares False"], rank["shares True"]) for rank in of_four):
        assert plain[1:3] == shared[1:3] and torch.equal(plain[3], shared[3])
        assert all(torch.equal(plain[0][key], shared[0][key]) for key in plain[0])
        # 4 micro-batches of 4 sequences of 8 tokens, 64 features of 8 bytes; half of a tied weight of 64 x 64.
        border, tied = 4 * 4 * 8 * 64 * 8, 64 * 64 * 8 // 2
        assert plain[5] == border + tied and shared[5] == border // 2 + tied


def adamw_with_eps(whole: nn.Module) -> torch.optim.Optimizer:
    """Sums over the tensor axis round otherwise, and AdamW divides by what may be near zero."""
    return torch.optim.AdamW(whole.parameters(), lr=2e-3, eps=1e-5)


def trained(name: str) -> Any:
    """Some steps of 2 stages, 2 replicas and 2 tensor ranks."""
    whole, (method, steps) = model(), METHODS[name]
    stage = thinwire.pipeline(
        whole, adamw_with_eps(whole), method, stages=2, tensor=2, options=thinwire.Pipeline(**EXACT), local_size=2,
        timeout_s=300, checked=True, announce=False,
    )  # fmt: skip
    assert stage.pipeline is not None
    rank = stage.optimizer.everyone.rank
    replica = rank // 2 % 2
    hashes, norms, sent = [], [], []
    for step in range(steps):
        before = stage.optimizer.meter.snapshot().sent_bytes
        given = batches(step, 2, replica, 2)
        stage.forward_backward(given)
        norms.append(float(stage.step(0.5)))
        stage.optimizer.synchronize()
        hashes.append({key: digest([param.detach()]).tolist() for key, param in whole.named_parameters()})
        sent.append(stage.optimizer.meter.snapshot().sent_bytes - before)
    stage.optimizer.check_replicas()
    formula = stage.pipeline.sent_bytes(given)[stage.pipeline.number]
    found = {
        "weights": {key: param.detach().clone() for key, param in whole.named_parameters()}, "hashes": hashes,
        "norms": norms, "sent": sent, "formula": formula, "of_method": stage.optimizer.bytes_per_step,
        "loss": stage.optimizer.mean_loss, "rank": rank,
    }  # fmt: skip
    stage.close()
    return found


def all_trained(rank: int, world_size: int) -> Any:
    return {name: trained(name) for name in METHODS}


@pytest.fixture(scope="module")
def of_eight() -> list[dict[str, Any]]:
    return run_workers(all_trained, 8)


@pytest.mark.parametrize("name", METHODS)
def test_stages_replicas_and_tensor_ranks_train_as_one_process(name: str, of_eight: list[dict[str, Any]]) -> None:
    told, (whole, norms) = [rank[name] for rank in of_eight], alone(METHODS[name][1], adamw_with_eps)
    expected = {key: param.detach() for key, param in whole.named_parameters()}
    start, far, near = dict(model().named_parameters()), 0.0, 0.0
    for stage in (told[:4], told[4:]):
        # Replicas of a stage, by tensor rank.
        assert stage[0]["hashes"] == stage[2]["hashes"] and stage[1]["hashes"] == stage[3]["hashes"]
        for key in stage[0]["weights"]:
            found = whole_of(key, [rank["weights"][key] for rank in stage[:2]])
            far += float((found - expected[key]).square().sum())
            near += float((expected[key] - start[key].detach()).square().sum())
            if name != "sdp4bit":
                assert (found - expected[key]).abs().max() <= 1e-6, key
    assert far < 0.5 * near
    assert all(rank["norms"] == told[0]["norms"] and rank["loss"] == told[0]["loss"] for rank in told)
    if name != "sdp4bit":
        assert told[0]["norms"] == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_a_border_carries_each_byte_once(name: str, of_eight: list[dict[str, Any]]) -> None:
    # 2 micro-batches of 2 sequences of 8 tokens, 64 features of 4 bytes; a tied weight of 64 x 64; half on each rank.
    border, tied = 2 * 2 * 8 * 64 * 4 // 2, 64 * 64 * 4 // 2
    for rank in (rank[name] for rank in of_eight):
        assert rank["formula"] == border + tied
        # Behind a border the ranks gather what has come, and nobody else's share; a tied weight is each rank's part.
        gathered = border
        # The first step has no weights to fetch yet, and behind the second one links are measured.
        assert all(sent == rank["formula"] + gathered + rank["of_method"] for sent in rank["sent"][3:])


class Mean(Alone):
    """The mean over replicas, in fp64."""

    def _reduce(self) -> None:
        for tensor in self.trained.values():
            assert tensor.grad is not None
            tensor.grad = self.comm.wait(self.comm.all_gather_exact(tensor.grad.contiguous())).mean(0)

    def _counts(self, name: str) -> bool:
        return self.comm.rank == 0 and super()._counts(name)


# Ranks of the axes pipeline, data and tensor.
FACTORS = [(p, 8 // p // t, t) for p in (1, 2, 4, 8) for t in (1, 2, 4, 8) if p * t <= 8]


def of_eight_heads() -> Any:
    overrides = {
        "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 8, "num_key_value_heads": 8,
        "num_hidden_layers": 8,
    }  # fmt: skip
    return build_model("tiny", 64, 16, overrides=overrides).to(torch.float64)


def eight_sequences(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = torch.randint(0, 64, (2, 8, 4), generator=torch.Generator().manual_seed(step))
    return tokens, targets


def factorised(sizes: tuple[int, int, int]) -> float:
    """The loss after three steps."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pipeline", "data", "tensor"))
    whole = of_eight_heads()
    cut_over(whole, mesh["tensor"])
    optimizer = adamw_with_eps(whole)
    part = take_part(whole, optimizer, thinwire.Pipeline(**EXACT, plan="1f1b"), mesh["pipeline"])
    tensor: TensorAxis = cut_parameters(whole, optimizer, mesh["tensor"], part.chunks.values())
    part = part.local(tensor)
    axis = Axis(mesh["data"], flattened(mesh), tensor, part.num_names)
    members = open_ranks(axis, local_size=1, timeout_s=300, checked=False)
    mean = Mean(whole, optimizer, members, dict(whole.named_parameters()), 0, [])
    own = PipelineStage(part, mesh["pipeline"], mean, seed=0, timeout_s=300, checked=False, tensor=tensor)
    stage = thinwire.PipelinedModel(whole, mean, [], own, tensor)
    share = slice(*(8 // sizes[1] * (mesh["data"].get_local_rank() + more) for more in (0, 1)))
    for step in range(3):
        tokens, targets = (each[share] for each in eight_sequences(step))
        stage.forward_backward([(tokens, targets)])
        stage.step(0.5)
    tokens, targets = eight_sequences(9)
    loss = nn.functional.cross_entropy(whole(tokens).flatten(0, 1), targets.flatten())
    stage.close()
    return float(loss)


def all_factorised(rank: int, world_size: int) -> list[float]:
    return [factorised(sizes) for sizes in FACTORS]


@pytest.mark.whole
def test_eight_ranks_train_alike_however_they_are_shared_out() -> None:
    whole = of_eight_heads()
    optimizer = adamw_with_eps(whole)
    for step in range(3):
        wide_loss(whole, *eight_sequences(step)).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        expected = float(wide_loss(whole, *eight_sequences(9)))
    told = run_workers(all_factorised, 8)
    assert len(FACTORS) == 10
    for number, sizes in enumerate(FACTORS):
        assert all(abs(losses[number] - expected) <= 1e-9 for losses in told), sizes


def refusals(rank: int, world_size: int) -> list[str]:
    found = []

    def refused(call: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            call()
        found.append(str(caught.value))

    def pipelined(method: Any = None, stages: int = 1, tensor: int = 2, **options: Any) -> None:
        whole = model()
        thinwire.pipeline(
            whole, adamw(whole), method or thinwire.Zero(), stages=stages, tensor=tensor,
            options=thinwire.Pipeline(**options), announce=False,
        )  # fmt: skip

    refused(lambda: pipelined(tensor=3))
    refused(lambda: pipelined(thinwire.OneByte()))
    refused(lambda: pipelined(recover="average"))
    whole = model()
    optimizer = adamw(whole)
    whole(*batches(0, 1)[0]).backward()
    optimizer.step()
    refused(lambda: thinwire.pipeline(whole, optimizer, thinwire.Zero(), stages=1, tensor=2, announce=False))
    refused(lambda: thinwire.pipeline(nn.Linear(2, 2), adamw(whole), thinwire.Zero(), stages=1, tensor=2))
    return found


def test_what_does_not_fit_is_refused_by_name() -> None:
    messages = run_workers(refusals, 2)[0]
    for expected, found in zip(
        (
            "3 tensor ranks on 2 ranks: must divide them; nearest: 2", "one-byte can't share a mesh",
            "recover 'average' beside a tensor axis of 2",
            "cut the model before the first", "Linear: which of its matrices to cut is not known",
        ),
        messages, strict=True,
    ):  # fmt: skip
        assert expected in found
