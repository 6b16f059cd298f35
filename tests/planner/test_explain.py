"""`thinwire explain`: its bytes are those that a run's meter counts, its memory that of a run's tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance.strategy_suite import Net, batch, make_optimizer
from tests.workers import run_workers
from thinwire.collectives import Topology
from thinwire.compose import apply
from thinwire.errors import ConfigError, Problems
from thinwire.methods.data.dgc import DGC
from thinwire.methods.data.powersgd import PowerSGD
from thinwire.models import build_skeleton
from thinwire.optim import OPTIMIZERS
from thinwire.options import has_islands
from thinwire.planner import explained_notes
from thinwire.planner.command import run_explain
from thinwire.planner.explain import explain, strategy_of
from thinwire.planner.options import ExplainConfig
from thinwire.registry import STRATEGIES
from thinwire.run.config import TrainConfig
from thinwire.run.run import optimizer_of

SUMS = [("projected gradients", level) for level in ("intra", "inter")]
# Methods that begin with steps of another kind begin with fewer.
OPTIONS: dict[str, dict[str, Any]] = {
    "powersgd": {"start_step": 2},
    "powersgd-torch": {"start_step": 2},
    "lgreco-powersgd": {"base": PowerSGD(start_step=2)},
    "lgreco-dgc": {"base": DGC(warmup=())},
    "dgc": {"warmup": ()},
    "onebit-adam": {"freeze": 2},
}

# Texts of codecs, short or with every part, in place of what a method does best with.
TEXTS: list[tuple[str, dict[str, Any]]] = [
    ("sdp4bit", {"weights": "int8", "intra_gradients": "bf16", "inter_gradients": "e3m0", "vector_gradients": "fp32"}),
    ("zero-compressed", {"gradients": "randomk1%:bf16:biased", "weights": "bf16"}),
    ("frontier", {"weights": "e3m0:nearest", "inter_gradients": "int2", "refresh": "int4"}),
    ("zeropp", {"weights": "fp32", "inter_gradients": "sign", "intra_gradients": "int8+hadamard32"}),
    ("powersgd", {"codec": "int8", "start_step": 2}),
    ("two-way", {"codec": "topk", "min_bytes": 0}),
    ("ef-topk", {"codec": "threshold10%:int4"}),
    ("ef-integer", {"codec": "e3m0:nearest"}),
    ("dgc", {"values": "int8", "warmup": ()}),
    ("demo", {"values": "int4"}),
]
BY_THE_CLOCK = {"fedfix", "gossip", "dadao"}


def rows() -> list[tuple[str, dict[str, Any]]]:
    """Strategies with their options. Islands are worlds of their own, which tests/islands has; the clock decides
    what others send."""
    names = (name for name in STRATEGIES if not has_islands(name) and name not in BY_THE_CLOCK)
    return [*((name, OPTIONS.get(name, {})) for name in names), *TEXTS]


def run(rank: int, world_size: int) -> dict[str, list[tuple[dict, dict]]]:
    """Bytes by operation and level: of the meter for steps of 1 and 2 micro-batches, and of the formula."""
    found = {}
    for name, options in rows():
        strategy, model = STRATEGIES[name](**options), Net(0)
        wrapped, optimizer = apply(strategy,
            model, make_optimizer(model, strategy.optimizers[0]), local_size=2, seed=0, timeout_s=300,
            checked=False, overlap=False,
        )  # fmt: skip
        optimizer_bytes = []
        # A method's first steps may differ from those that follow.
        for step, micro_batches in enumerate((1, 1, 1, 2)):
            before = optimizer.meter.snapshot()
            *first, last = batch(step).chunk(world_size)[rank].chunk(micro_batches)
            for tokens in first:
                with optimizer.no_sync():
                    wrapped(tokens, True).backward()
            wrapped(last, True).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step < 2:
                continue
            operations = (optimizer.meter.snapshot() - before).operations
            metered = {key: reading.sent_bytes for key, reading in operations.items() if reading.sent_bytes}
            with torch.device("meta"):
                plan = strategy.plan(Net(0), Topology(2, 2), micro_batches)
            optimizer_bytes.append((metered, {key: num for key, num in plan.sent.items() if num}))
        optimizer.close()
        found[f"{name} {options}"] = optimizer_bytes
    return found


def test_bytes_are_those_of_the_meter_for_every_strategy() -> None:
    for results in run_workers(run, 4):
        assert results.keys() == {f"{name} {options}" for name, options in rows()}
        for name, steps in results.items():
            for metered, planned in steps:
                assert metered == planned, name


def memory(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """Bytes of zero's and ddp's optimizer, counted and planned."""
    found = {}
    for name in ("zero", "ddp"):
        model = Net(0)
        strategy = STRATEGIES[name]()
        wrapped, optimizer = apply(
            strategy, model, make_optimizer(model), local_size=1, seed=0, timeout_s=300, checked=False, overlap=False
        )
        wrapped(batch(0), True).backward()
        optimizer.step()
        inner: Any = optimizer
        held = [value for state in inner.inner.state.values() for value in state.values() if value.dim()]
        held += [bucket.master for bucket in getattr(optimizer, "buckets", ())]
        plan = strategy.plan(Net(0), Topology(world_size, 1), 1)
        found[name] = sum(value.nbytes for value in held), plan.optimizer
        optimizer.close()
    return found


def test_memory_is_that_of_the_tensors() -> None:
    for found in run_workers(memory, 2):
        for name, (held, planned) in found.items():
            assert held == pytest.approx(planned, rel=0.02), name


def test_an_optimizer_of_choice_is_counted() -> None:
    """Under DDP by hand: a matrix of [m, n] has 2 n r numbers, and 2 more; what lies in no layer has two moments."""
    asked: dict[str, Any] = {"strategy": "ddp,zero,frontier,fsdp", "model": "tiny", "nodes": 4}
    found, plain = (explain(ExplainConfig(**asked, optimizer=name), Problems()) for name in ("apollo", "adamw"))
    with torch.device("meta"):
        model = build_skeleton("tiny", 256, 256, None)
    held = 0
    for name, param in model.named_parameters():
        is_matrix = param.dim() == 2 and ".layers." in name
        held += 2 * max(param.shape) * (min(param.shape) // 4) + 2 if is_matrix else 2 * param.numel()
    assert found.plans["ddp"].optimizer == 4 * held < plain.plans["ddp"].optimizer
    assert found.plans["ddp"].sent == {**plain.plans["ddp"].sent, **dict.fromkeys(SUMS, 0)}
    for name in ("zero", "frontier", "fsdp"):
        assert found.plans[name].optimizer < plain.plans[name].optimizer
        assert found.plans[name].sent[SUMS[1]] > 0 or name == "frontier"
    joint = explain(ExplainConfig(**{**asked, "strategy": "ddp,zero"}, optimizer="mfac"), Problems()).plans
    assert joint["ddp"].optimizer == 4 * 33 * sum(param.numel() for param in model.parameters())
    assert joint["zero"].sent["products of gradients", "inter"] == 3 * 8 * 33


def test_an_optimizer_that_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, why in {
        "--strategy dgc --optimizer apollo": "does not fit strategy dgc, which keeps the momentum of SGD itself; ",
        "--strategy dgc --optimizer sgd-plain": "its state is not counted; counted are dgc-sgd; nearest: leave it out",
        "--strategy zero,demo --optimizer adamm": "no such optimizer; did you mean 'adamw'",
        "--strategy zero --tensor 2 --optimizer muon": "counted on the data axis alone",
        "--strategy zero --tensor 2 --optimizer apollo": "needs whole tensors, which --mesh data=1,tensor=2 cuts",
        "--optimizer lans": "no strategy's plan counts its state; counted are adamw, muon",
    }.items():
        with pytest.raises(ConfigError, match=why):
            run_explain([*flags.split(), "--model", "tiny"])
    assert run_explain(["--optimizer", "apollo-mini", "--model", "tiny"]) == 0
    capsys.readouterr()
    notes = explain(ExplainConfig(model="tiny", optimizer="apollo-mini"), Problems()).notes
    without = {why: asked for asked, effect, why in notes if effect == "left out"}
    assert any("dgc, " in asked for asked in without.values())
    assert len(without) == sum(effect == "left out" for _, effect, _ in notes)
    assert run_explain(["--optimizer", "sgd-plain", "--model", "tiny"]) == 0
    assert "fp32, sgd-plain. " in (told := capsys.readouterr().out) and " demo " in told and " zero " not in told


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_a_run_refuses_is_refused_with_the_same_words(optimizer: str) -> None:
    refused: dict[str, str] = {}
    for name in STRATEGIES:
        try:
            optimizer_of(TrainConfig(strategy=name, optimizer=optimizer), strategy_of(name, ExplainConfig()), None)
        except ConfigError as error:
            refused[name] = str(error)
    with pytest.raises(ConfigError) as caught:
        explain(ExplainConfig(strategy=",".join(refused), optimizer=optimizer, model="tiny"), Problems())
    assert set(caught.value.problems) == set(refused.values()) and caught.value.exit_code == 2


def test_each_strategy_is_planned_with_its_own_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    """Muon's of islands steps inside each of them: one momentum for matrices of layers, two moments for others."""
    model = build_skeleton("tiny", 256, 256, None)
    one = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and ".layers." in name)
    all_of_them = sum(param.numel() for param in model.parameters())
    assert run_explain(["--strategy", "zero,demo,dgc,muloco", "--model", "tiny", "--nodes", "4"]) == 0
    assert "fp32, adamw (demo: sgd-plain; dgc: dgc-sgd; muloco: muon). " in capsys.readouterr().out
    asked: dict[str, Any] = {"strategy": "diloco,muloco", "model": "tiny", "nodes": 4}
    for optimizer, muon in ((None, ["muloco"]), ("muon", ["muloco", "diloco"]), ("adamw", [])):
        for name, plan in explain(ExplainConfig(**asked, optimizer=optimizer), Problems()).plans.items():
            assert plan.optimizer == 4 * (2 * all_of_them - (one if name in muon else 0)), (optimizer, name)


def test_all_strategies_stand_side_by_side(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_explain(["--nodes", "4", "--local-size", "8", "--parameters", "7e9", "--rate", "10gbit"]) == 0
    out = capsys.readouterr().out
    for name in STRATEGIES:
        assert f" {name} " in out
    # Options in brackets are printed, too: a console may take them for the name of a colour.
    text = "sparseloco[sync_every=6,optimizer=muon]"
    monkeypatch.setattr(explained_notes, "recommended", lambda rate, model: (text, "so"))
    assert run_explain(["--nodes", "4", "--model", "tiny", "--rate", "10gbit"]) == 0
    told = f"method for this rate: {text} (so; thinwire train --strategy sparseloco "
    assert f"{told}--sparseloco.sync-every 6 --optimizer muon)" in capsys.readouterr().out
    monkeypatch.setattr(explained_notes, "recommended", lambda rate, model: ("not known", "no runs"))
    assert run_explain(["--nodes", "4", "--model", "tiny", "--rate", "10gbit"]) == 0
    assert "method for this rate: not known (no runs)" in capsys.readouterr().out
    assert "7 G parameters" in out or "7.00G parameters" in out or "7G parameters" in out
    assert "inside a pair" in out and "on the link" in out


def test_one_strategy_is_shown_in_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--strategy", "frontier", "--model", "tiny", "--nodes", "2", "--local-size", "4", "--micro-batches", "4"]
    assert run_explain([*args, "--frontier.weights-over", "4", "--sdp4bit.inter-gradients", "int3"]) == 0
    out = capsys.readouterr().out
    assert "gradient sums" in out and "between nodes" in out
    assert "--sdp4bit.inter-gradients: no effect" in out
    assert run_explain(["--strategy", "powersgd", "--model", "tiny"]) == 0
    assert "error feedback" in capsys.readouterr().out


def test_ranks_of_a_sequence_are_priced_on_the_stated_links(capsys: pytest.CaptureFixture[str]) -> None:
    for rate, taken in (("100mbit", "ulysses=2,ring=2"), ("100gbit", "ulysses")):
        flags = f"--strategy zero --nodes 2 --local-size 2 --rate {rate} --local-rate 1gbit --sequence.parallel 4"
        assert run_explain(["--model", "demo", "--seq-len", "256", *flags.split()]) == 0
        out = capsys.readouterr().out
        assert f"sequence method auto: {taken} (of a layer and micro-batch" in out


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        run_explain(
            [
                "--strategy",
                "sdp4,frontier",
                "--nodes",
                "0",
                "--rate",
                "fast",
                "--frontier.weights",
                "int3",
                "--noodes=2",
            ]
        )
    text = str(caught.value)
    assert "5 problems" in text and caught.value.exit_code == 2
    for part in (
        "did you mean 'sdp4bit'",
        "--nodes 0: must be from 1",
        "rate 'fast'",
        "--frontier.weights int3",
        "--noodes",
    ):
        assert part in text
    for args, words in (
        (["--nodes", "0"], "--nodes 0: must be from 1 to 1,000,000; nearest: 1"),
        (["--nodes", "1234567"], "--nodes 1,234,567: must be from 1 to 1,000,000; nearest: 1,000,000"),
        (["--parameters", "1.5"], "--parameters 1.5: must be a whole number; nearest: 2"),
        (["--parameters", "7b"], "--parameters 7b: must be a number; nearest: 7e9"),
        (["--parameters", "0.5"], "--parameters 0.5: must be from 1 to 1,000,000,000,000,000; nearest: 1"),
        (["--model", "tiny", "--mesh", "data=3"], "--mesh data=3 has 3 ranks.*nearest: --nodes 3 --local-size 1"),
        (["--model", "tiny", "--slices", "1.5"], "^--slices 1.5: must be a whole number; nearest: 2$"),
        (["--memory", "1gb", "--model", "tiny", "--slices", "0"], "^--slices 0: must be at least 1; nearest: 1"),
        (["--memory", "1gb", "--model", "tiny", "--residency.slices", "0"], "^--residency.slices 0: must be"),
        (
            ["--stages", "9", "--nodes", "3", "--model", "tiny"],
            "--stages 9: must divide the 3 ranks; nearest: --stages 3$",
        ),
        (
            ["--nodes", "4", "--model", "moe-tiny", "--experts.parallel", "3"],
            r"^--experts\.parallel 3: must divide the 4 ranks of the data axis; nearest: --experts\.parallel 2$",
        ),
        (
            ["--nodes", "4", "--model", "moe-tiny", "--experts.parallel", "2", "--mesh", "data=4"],
            r"^--experts\.parallel 2 beside --mesh data=4: leave one of them out$",
        ),
        (["--tokens-per-step", "64"], "unknown flag --tokens-per-step: .*; nearest: --micro-batches"),
        (
            ["--memory", "1gb", "--model", "tiny", "--store", "none", "--residency.weights", "disk"],
            "^--store none: nothing lies on a disk, and that needs one: --residency.weights disk",
        ),
        (["--memory", "1gb", "--model", "tiny", "--slices", "100"], "^--slices 100: a micro-batch has 8 sequences"),
        (["--memory", "1gb", "--residency.memory", "2gb"], "^--memory 1gb and --residency.memory 2gb: give one of"),
        (["--residency.memory", "1mb", "--model", "tiny"], "memory of 1 MB is below the floor"),
        (["--disk-rate", "1MB/s", "--residency.disk-rate", "2MB/s"], "^--disk-rate 1MB/s and --residency.disk-rate"),
        (["--activations", "sample:5"], "^--activations sample:5: the share must be above 0 and at most 1"),
        (["--strategy", "diloco", "--inner", "sdp4bit"], "unknown flag --inner: .* nearest: --strategy NAME"),
        (["--memory", "1gb", "--model", "125m", "--store", "none"], "memory of 1000 MB is below the floor"),
        (["--parameters", "nan"], "--parameters nan: must be from 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            run_explain(args)
    with pytest.raises(ConfigError, match="weights_over 3 of frontier does not fit"):
        run_explain(["--strategy", "frontier", "--frontier.weights-over", "3"])
    with pytest.raises(ConfigError, match="did you mean 'demo'"):
        run_explain(["--model", "demoo"])


def test_a_store_is_no_folder_to_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_explain(["--memory", "2gb", "--model", "tiny", "--store", "none"]) == 0
    out = capsys.readouterr().out
    assert "--store" not in out and "0 B to and from the disk in a step" in out
    assert run_explain(["--memory", "2gb", "--model", "tiny", "--store", "/nowhere"]) == 0
    assert "--store /nowhere: no effect" in capsys.readouterr().out


def test_figures_that_surprise_are_said_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_explain(["--model", "125m", "--strategy", "ddp,fsdp,diloco,local-sgd"]) == 0
    out = capsys.readouterr().out
    assert "85.2M parameters on" in out
    assert "the vocabulary is the 256 tokens of --tokenizer bytes; with the 50,304 of 125m: 124M" in out
    assert " diloco * " in out and " ddp * " not in out
    assert "* diloco: exchanges once in 100 steps, so the bytes of a step are the mean over 100 steps." in out
    assert "* local-sgd: exchanges once in 16 steps" in out
    assert "fsdp: weights are the rank's shard and the whole model, kept from forward to backward" in out
    assert run_explain(["--strategy", "diloco"]) == 0
    out = capsys.readouterr().out
    assert "what one rank sends in a step, mean over" in out and "the vocabulary is" not in out
    assert run_explain(["--strategy", "zero", "--model", "125m", "--llama.vocab-size", "50304"]) == 0
    assert "124M parameters" in (out := capsys.readouterr().out) and "the vocabulary is" not in out


def test_embeddings_by_rows_count_with_the_tokens_of_a_step() -> None:
    """Of 256 rows at most 64 travel; whole ones of `zero` stay, as `auto` leaves small embeddings alone."""
    common = {"model": "demo", "strategy": "sdp4bit,zero", "nodes": 4, "micro_batch": 1, "seq_len": 64}
    by_rows, whole = (
        explain(ExplainConfig(**common, tables={"sdp4bit": {"embedding_rows": way}}), Problems())  # type: ignore[arg-type]
        for way in ("on", "off")
    )
    saved = whole.plans["sdp4bit"].sent_on("inter") - by_rows.plans["sdp4bit"].sent_on("inter")
    embedding = 256 * 512 * 4.25 / 8 * 3 / 4
    assert 0.7 * embedding < saved < 0.75 * embedding
    assert by_rows.plans["zero"] == whole.plans["zero"]
    (row,) = (row for row in by_rows.notes if "embedding_rows" in row[0])
    assert row[0] == "sdp4bit: embedding_rows of model.embed_tokens.weight" and "at most 64 of its 256 rows" in row[2]
    assert not any("embedding_rows" in asked for asked, _, _ in whole.notes)
