"""Stages before they run: their activations, bytes and seconds, and which ways to train are found."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from thinwire.errors import ConfigError, Problems
from thinwire.layout.mesh import MeshShape
from thinwire.methods.pipeline import Pipeline, cut
from thinwire.models import Llama
from thinwire.models.llama import PRESETS, LlamaConfig
from thinwire.planner.candidates import AxisSizes, candidates
from thinwire.planner.command import run_explain
from thinwire.planner.explain import Explained, explain
from thinwire.planner.forward import forward_of, layer_and_ends
from thinwire.planner.options import read_explain
from thinwire.planner.parts import sizes_of
from thinwire.planner.stages import Grid, stages_of
from thinwire.planner.table import reasons, tables
from thinwire.report.units import bytes_text

ARGS = [
    "--model",
    "demo",
    "--seq-len",
    "64",
    "--nodes",
    "4",
    "--rate",
    "20mbit",
    "--gflops",
    "40",
    "--micro-batch",
    "1",
]


def explained(*args: str) -> Explained:
    problems = Problems()
    return explain(read_explain([*ARGS, *args], problems), problems)


def test_activations_are_those_that_torch_keeps() -> None:
    config, tokens = PRESETS["tiny"], torch.zeros(2, 64, dtype=torch.int64)
    model, kept = Llama(config), {}
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), tokens)}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model(tokens, tokens)
    assert loss.requires_grad
    found = sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in own)
    assert forward_of(config, 2, 64).kept_bytes == found
    layer, ends = layer_and_ends(config, 64)
    assert 2 * (config.num_hidden_layers * layer.kept_bytes + ends.kept_bytes) == pytest.approx(found, rel=0.01)
    matrices = sum(param.numel() for param in model.model.layers[0].parameters() if param.dim() == 2)
    attention = 2 * 64 * config.hidden_size
    assert layer.operations == 2 * 64 * (matrices + attention)
    # A fused kernel has the same products.
    long, _ = layer_and_ends(replace(config, max_position_embeddings=2048), 2048)
    assert long.operations == 2 * 2048 * (matrices + 2 * 2048 * config.hidden_size)


def test_activations_in_bf16_are_those_that_torch_keeps_and_copies_of_weights_do_not_grow() -> None:
    config, found = PRESETS["tiny"], []
    model = Llama(config)
    for batch in (1, 2):
        tokens, kept = torch.zeros(batch, 64, dtype=torch.int64), dict[int, torch.Tensor]()
        own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), tokens)}

        def keep(tensor: torch.Tensor, kept: dict[int, torch.Tensor] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = model(tokens, tokens)
        assert loss.requires_grad
        found.append(sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in own))
    counted = [forward_of(config, batch, 64, dtype="bf16") for batch in (1, 2)]
    assert [each.kept(1) for each in counted] == found and counted[0].copied_bytes == counted[1].copied_bytes
    matrices = sum(param.numel() for name, param in model.named_parameters() if name.endswith("proj.weight"))
    assert counted[0].copied_bytes == 2 * (matrices + model.lm_head.weight.numel())
    layer, ends = layer_and_ends(config, 64, dtype="bf16")
    assert config.num_hidden_layers * layer.kept(2) + ends.kept(2) == pytest.approx(found[1], rel=0.01)
    assert layer.operations == layer_and_ends(config, 64)[0].operations
    assert layer.kept_bytes < 0.85 * layer_and_ends(config, 64)[0].kept_bytes


def test_every_strategy_counts_the_activations_of_a_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", "tiny", "--seq-len", "64", "--micro-batch", "2", "--strategy", "zero,ddp"]
    found = explain(read_explain(asked, Problems()), Problems())
    kept = forward_of(PRESETS["tiny"], 2, 64).kept_bytes
    assert found.activations_of("zero") == found.activations_of("ddp") == kept
    assert run_explain(asked) == 0
    out = capsys.readouterr().out
    assert f" {bytes_text(kept)} " in out and "Not counted: scratch" in out and "--micro-batch 2: no effect" not in out
    assert run_explain(["--parameters", "1e6", "--micro-batch", "2", "--strategy", "zero"]) == 0
    out = capsys.readouterr().out
    assert "Not counted: activations, and scratch" in out and "--micro-batch 2: no effect" in out
    cut = explain(read_explain([*asked, "--local-size", "2", "--tensor", "2"], Problems()), Problems())
    assert 0.5 * kept < (cut.activations_of("zero") or 0) < 0.85 * kept


def test_a_cut_loss_keeps_no_logits() -> None:
    config = replace(PRESETS["tiny"], vocab_size=4096)
    plain, cut = (layer_and_ends(config, 64, is_cut=is_cut)[1] for is_cut in (False, True))
    logits, hidden = 4 * 64 * 4096, 4 * 64 * config.hidden_size
    assert cut.operations == plain.operations
    assert logits - hidden <= plain.kept_bytes - cut.kept_bytes <= 2 * logits
    found = explained("--stages", "4", "--strategy", "zero", "--loss", "cut")
    whole = explained("--stages", "4", "--strategy", "zero", "--loss", "plain")
    assert found.stages is not None and whole.stages is not None
    assert found.stages.peak_bytes[3] < whole.stages.peak_bytes[3]
    assert any(note[:2] == ("--loss cut", "cut") for note in found.notes)


def test_tensor_ranks_share_borders_matrices_and_work() -> None:
    asked = ("--stages", "2", "--micro-batches", "4", "--strategy", "zero", "--local-size", "2")
    whole, cut = explained(*asked).stages, explained(*asked, "--tensor", "2").stages
    assert whole is not None and cut is not None
    assert cut.link_bytes[0, 1] == whole.link_bytes[0, 1] / 2
    # Two pipelines share a node's link, or the two ranks of one do, each with its half of the border.
    grid = Grid(4, 2, 40e9, rate=1e6)
    assert cut.crossing_bytes(grid) == whole.crossing_bytes(grid) / 2 == whole.link_bytes[0, 1]
    layers = [sum(param.numel() for param in found.parts[0]["layers0"].parameters()) for found in (whole, cut)]
    norms = sum(param.numel() for param in cut.parts[0]["layers0"].parameters() if param.dim() == 1)
    assert layers[1] == (layers[0] - norms) // 2 + norms
    kept = [found.peak_bytes[0] for found in (whole, cut)]
    assert 0.5 * kept[0] < kept[1] < 0.85 * kept[0]
    assert cut.step_s < 0.7 * whole.step_s
    by_mesh = explained(*asked[2:], "--mesh", "pipeline=2,data=2,tensor=2")
    assert by_mesh.stages is not None and by_mesh.stages.link_bytes == cut.link_bytes
    for flags, message in (
        (("--tensor", "3"), "--tensor 3: must divide the 4 ranks .* nearest: --tensor 2"),
        (("--stages", "auto", "--tensor", "2"), "leave --mesh and --tensor out"),
    ):
        with pytest.raises(ConfigError, match=message):
            explained("--local-size", "2", "--nodes", "2", *flags)


def test_a_step_of_stages_counts_borders_and_the_stage_that_holds_most() -> None:
    found = explained("--stages", "4", "--micro-batches", "8", "--strategy", "zero", "--pipeline.plan", "1f1b")
    assert found.stages is not None and found.grid is not None
    forward, backward = 64 * 544 + 16, 64 * 288 + 16
    assert found.stages.link_bytes[1, 2] == pytest.approx(8 * forward, rel=0.01)
    assert found.stages.link_bytes[2, 1] == pytest.approx(8 * backward, rel=0.01)
    # An inner stage sends both ways; ranks tell each other little beside.
    link_s = found.link_s(found.plans["zero"])
    assert link_s == pytest.approx(8 * (found.stages.sent_bytes(1) + 66) / 20e6, rel=0.01)
    assert found.stages.held == (4, 3, 2, 1) and found.heaviest == {"zero": 0}
    layer, _ = layer_and_ends(PRESETS["demo"], 64)
    assert found.stages.peak_bytes[:3] == tuple(held * layer.kept_bytes for held in (4, 3, 2))
    # Stages 1 and 2 have the same layers, and 1 keeps one micro-batch more.
    held, plan = found.held["zero"], found.plans["zero"]
    assert held.keys() == {0, 1, 2, 3} and held[1] - held[2] == layer.kept_bytes
    assert held[0] == sum(plan.memory.values()) + found.stages.peak_bytes[0]
    (table,) = (each for each in tables(found) if each.title == "a step of the pipeline")
    assert table.columns[-1].header == "memory, zero"
    assert list(table.columns[-1].cells) == [bytes_text(held[stage]) for stage in range(4)]
    many = explained("--stages", "4", "--strategy", "zero,ddp,ddp-bf16,sdp4bit", "--pipeline.plan", "1f1b")
    assert any("the memory of every stage name at most 3" in line for line in reasons(many))
    # Micro-batches beyond those that are simulated cost what each one more does.
    longer = explained("--stages", "4", "--micro-batches", "128", "--strategy", "zero", "--pipeline.plan", "1f1b")
    half = explained("--stages", "4", "--micro-batches", "64", "--strategy", "zero", "--pipeline.plan", "1f1b")
    assert longer.stages is not None and half.stages is not None
    assert longer.stages.step_s == pytest.approx(2 * half.stages.step_s, rel=0.1)
    assert longer.stages.link_bytes[0, 1] == 2 * half.stages.link_bytes[0, 1]


def test_numbers_that_an_order_does_not_take_are_not_simulated_and_all_that_is_kept_counts() -> None:
    sizes = ("--nodes", "3", "--stages", "3", "--llama.num-hidden-layers", "6")
    asked = (*sizes, "--strategy", "zero", "--pipeline.plan")
    found = explained(*asked, "interleaved", "--micro-batches", "66").stages
    less = explained(*asked, "interleaved", "--micro-batches", "60").stages
    assert found is not None and less is not None
    assert found.step_s == pytest.approx(1.1 * less.step_s, rel=0.02)
    assert found.link_bytes[0, 1] == pytest.approx(1.1 * less.link_bytes[0, 1])
    with pytest.raises(ConfigError, match="nearest that works: 66"):
        explained(*asked, "interleaved", "--micro-batches", "65")
    layer, _ = layer_and_ends(PRESETS["demo"], 64)
    whole = explained(*asked, "gpipe", "--micro-batches", "128").stages
    assert whole is not None and whole.held == (128,) * 3
    assert whole.peak_bytes[0] == 128 * whole.sizes[0] * layer.kept_bytes
    # A step of so many micro-batches is long enough to begin as many as may be in flight.
    slow = ("--pipeline.in-flight", "70", "--micro-batches", "300", "--rate", "1mbit")
    ahead = explained("--stages", "2", "--nodes", "2", "--strategy", "zero", *slow).stages
    assert ahead is not None and ahead.held[0] == 70


def test_a_tied_weight_costs_its_messages_in_every_prediction() -> None:
    grid, options = Grid(4, 1, 40e9, rate=2.5e6), Pipeline(plan="1f1b")
    wide = replace(PRESETS["demo"], vocab_size=8192)
    tied, untied = (
        stages_of(skeleton(replace(wide, tie_word_embeddings=is_tied)), options, 4, 8, 1, 64, grid)
        for is_tied in (True, False)
    )
    num_bytes = 4 * 8192 * wide.hidden_size
    assert tied.tied_bytes == num_bytes and not untied.tied_bytes
    # The last rank waits for the weight, then the first for the gradient.
    assert tied.step_s - untied.step_s == pytest.approx(2 * num_bytes / 2.5e6, rel=0.1)
    assert tied.link_bytes[3, 0] == num_bytes and (3, 0) not in untied.link_bytes
    assert tied.sent_bytes(0) == untied.sent_bytes(0) + num_bytes
    # Of more micro-batches than are simulated there is still one.
    of_many = skeleton(replace(wide, tie_word_embeddings=True))
    assert stages_of(of_many, options, 4, 128, 1, 64, grid).link_bytes[3, 0] == num_bytes
    # An end that has no copy elsewhere sends one for a recovery.
    kept = stages_of(skeleton(replace(wide, tie_word_embeddings=False)), Pipeline(recover="average"), 4, 8, 1, 64, grid)
    assert kept.link_bytes[0, 1] == pytest.approx(untied.link_bytes[0, 1] + num_bytes)


def test_last_messages_of_sequences_are_memory_of_each_border() -> None:
    asked = ("--stages", "4", "--strategy", "zero", "--pipeline.plan", "1f1b")
    plain, delta = explained(*asked), explained(*asked, "--pipeline.delta", "True", "--pipeline.delta-mb", "3")
    assert plain.stages is not None and delta.stages is not None
    more = [delta.stages.last_messages_bytes(stage) for stage in range(4)]
    assert more == [3e6, 6e6, 6e6, 3e6] and not plain.last_messages_of("zero")
    stage = delta.heaviest["zero"]
    held = [found.stages.memory_bytes(stage, plain.plans["zero"]) for found in (plain, delta) if found.stages]
    assert held[1] - held[0] == more[stage] == delta.last_messages_of("zero")


def skeleton(config: LlamaConfig) -> Llama:
    with torch.device("meta"):
        return Llama(config)


@pytest.mark.parametrize("head", ["last", "first"])
def test_the_cut_that_is_priced_is_that_of_the_run(head: Any) -> None:
    config = replace(PRESETS["tiny"], vocab_size=2048, num_hidden_layers=8, max_position_embeddings=2048)
    options = Pipeline(head=head)
    sizes = {length: sizes_of(skeleton(config), options, 2, length, 1) for length in (8, 2048)}
    model = Llama(config)
    for length, found in sizes.items():
        assert cut(model, 2, head=head, seq_len=length).sizes == found
    # Attention grows with the square of the tokens, and the head does not.
    assert sizes[8] != sizes[2048]


def test_replicas_on_one_node_share_its_link() -> None:
    links = Grid(2, 4, 1e9, rate=8.0).links(4)
    assert links.nodes == (0, 0, 1, 1)
    assert links.rates[1][2] == 4.0 and links.rates[0][1] == float("inf")


def test_candidates_are_the_ways_that_exist() -> None:
    found = list(candidates(8, 4, 32, ["zero", "sdp4bit"], {"plan": "1f1b"}, axes=AxisSizes(tensors=(1, 2))))
    assert len(set(found)) == len(found)
    assert {(each.stages, each.tensor) for each in found} == set(product((1, 2, 4), (1, 2)))
    for each in found:
        assert each.stages * each.tensor * each.replicas == 8
        assert each.replicas * each.micro_batch * each.num_micro_batches == 32
        assert each.pipeline.plan == "1f1b"
        assert each.num_ranks == 8 and not each.not_yet
    # Those that the house can't train yet are listed, and say so; the rule is the mesh's own.
    axes = AxisSizes(tensors=(1, 2), sequences=(1, 2), islands=(2,), local_size=2)
    found = list(candidates(4, 4, 8, ["zero"], {"plan": "1f1b"}, 1, axes, ["diloco"]))
    assert len(set(found)) == len(found)
    for each in found:
        assert each.num_ranks == 4 and each.inside.num_ranks == 4 // each.islands
        is_apart = each.sequence > 1 and max(each.stages, each.tensor, each.islands) > 1
        assert bool(each.not_yet) == is_apart
        if not is_apart:
            assert MeshShape.parse(each.mesh).world_size == 4
    assert {"pipeline=2,sequence=2", "island=2,pipeline=2", "island=2,tensor=2"} <= {each.mesh for each in found}


def test_a_step_has_as_many_micro_batches_as_in_training() -> None:
    assert explained("--stages", "4", "--strategy", "zero").micro_batches == 4
    assert explained("--mesh", "pipeline=2,data=2", "--strategy", "zero").micro_batches == 2
    assert explained("--strategy", "zero").micro_batches == 1


def test_auto_ranks_what_fits_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--stages", "auto", "--micro-batches", "2", "--pipeline.plan", "1f1b"]
    assert run_explain([*ARGS, *args]) == 0
    out = capsys.readouterr().out
    assert "Fastest, by the simulation: --stages 4 --micro-batch 1" in out and "times as long" in out
    assert "--strategy all: zero and sdp4bit are tried" in out and "no effect" not in out
    found = explained(*args)
    assert found.search is not None
    steps = [priced.step_s for priced in found.search.fastest]
    assert steps == sorted(steps) and {priced.candidate.stages for priced in found.search.fastest} == {1, 2, 4}
    # Half way between the smallest and the largest some are left out, and only then is anything computed twice.
    sizes = sorted(priced.memory_bytes for priced in found.search.fastest)
    assert {priced.candidate.pipeline.recompute for priced in found.search.fastest} == {"never"}
    limited = explained(*args, "--memory-gb", str(sizes[len(sizes) // 2] / 1e9)).search
    assert limited is not None and limited.too_large
    assert all(priced.memory_bytes <= sizes[len(sizes) // 2] for priced in limited.fastest)
    # On a fast link nothing is gained by rounding, and exact comes first.
    fast = explained(*args, "--rate", "100gbit").search
    assert fast is not None and fast.fastest[0].candidate.pipeline.forward == "fp32"


ONE_ORDER = ("--pipeline.plan", "1f1b", "--pipeline.recompute", "never")


def test_tensor_ranks_are_searched_with_the_stages_and_stay_on_a_machine() -> None:
    auto = ("--stages", "auto", "--tensor", "auto", "--nodes", "2", "--local-size", "4", *ONE_ORDER)
    found = explained(*auto, "--local-rate", "100gbit")
    assert found.search is not None
    ways = {(priced.candidate.stages, priced.candidate.tensor): priced for priced in reversed(found.search.fastest)}
    # Two key-value heads.
    assert ways.keys() == set(product((1, 2, 4), (1, 2)))
    # With as many as other heads, a machine's two ranks are the limit.
    small = ("--nodes", "4", "--local-size", "2", "--llama.num-key-value-heads", "4")
    heads = explained("--stages", "auto", "--tensor", "auto", *small, *ONE_ORDER, "--local-rate", "100gbit").search
    assert heads is not None and {priced.candidate.tensor for priced in heads.fastest} == {1, 2}
    # A sum over tensor ranks takes its time: on links inside that are 5,000 times slower nothing is cut so.
    slow = explained(*auto, "--local-rate", "20mbit").search
    assert slow is not None and slow.fastest[0].candidate.tensor == 1
    cut = next(priced for priced in slow.fastest if priced.candidate == ways[2, 2].candidate)
    way = cut.candidate
    sums = 4 * PRESETS["demo"].num_hidden_layers // 2 * way.num_micro_batches * way.micro_batch
    more_s = sums * 64 * PRESETS["demo"].hidden_size * 4 / 2.5e6
    assert cut.step_s - ways[2, 2].step_s >= 0.99 * more_s
    # The fullest stage decides what fits, and then more ranks may have to hold it.
    least = min(each.memory_bytes for each in slow.fastest if each.candidate.tensor == 1)
    limited = explained(*auto, "--local-rate", "20mbit", "--memory-gb", str(0.999 * least / 1e9)).search
    assert limited is not None and all(priced.candidate.tensor > 1 for priced in limited.fastest)
    assert f"--tensor {limited.fastest[0].candidate.tensor} " in limited.fastest[0].candidate.flags


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--workers", "4"], "--workers: the ranks are --nodes times --local-size; nearest: --local-size"),
        (["--tensor", "auto"], "--tensor auto is found beside the stages; nearest: --stages auto --tensor auto"),
        (["--stages", "auto", "--memory-gb", "0.001"], r"no way to train fits; the least is .* MB"),
        (["--stages", "five"], "--stages five: must be a whole number from 1 to 10,000, or auto"),
        (["--stages", "auto", "--mesh", "data=4"], "leave --mesh and --tensor out"),
        (["--stages", "auto", "--parameters", "1e6"], "only presets such as demo"),
    ],
)
def test_what_can_not_be_planned_is_refused(args: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        explained(*args)
