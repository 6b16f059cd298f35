"""Where experts lie: parts, their ranges in memory, what can't be divided, and what `explain` says of them."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from thinwire import ConfigError, ExpertParallel
from thinwire.checkpoint import Piece
from thinwire.cost import Line, Links
from thinwire.hosts.experts import expert_parallel
from thinwire.methods.experts import MEASURE, ExpertPlacement, Rows, choose_way, place_experts, sent, way_text
from thinwire.methods.experts.dictionary import every_way
from thinwire.planner.command import run_explain


@pytest.mark.parametrize(
    "placement", [ExpertPlacement(8, 4), ExpertPlacement(8, 4, 2), ExpertPlacement(2, 4, 2), ExpertPlacement(8, 4, 4)]
)
def test_a_part_is_one_range_of_each_of_its_experts(placement: ExpertPlacement) -> None:
    whole = torch.arange(placement.experts * 12 * 5).view(placement.experts, 12, 5)
    parts = [placement.part(whole, rank).contiguous() for rank in range(placement.ranks)]
    assert torch.equal(placement.joined(torch.stack(parts)), whole)
    for rank, part in enumerate(parts):
        run, row, first, offset = placement.range(whole.shape, rank)
        piece = Piece(whole.numel(), offset, part.view(-1), run=run, row=row, first=first)
        read = torch.full((whole.numel(),), -1)
        for box in piece.boxes():
            box.of(read).copy_(box.values(part.view(-1)))
        kept = read.view(whole.shape) >= 0
        assert int(kept.sum()) == part.numel() and torch.equal(placement.part(kept, rank).all(), torch.tensor(True))
        assert torch.equal(read[read >= 0], whole.view(-1)[read >= 0])


@pytest.mark.parametrize(
    ("options", "experts", "words"),
    [
        (ExpertParallel(4), 6, "--experts.parallel 4 with --experts.slices 1: each rank needs as many of the 6"),
        (ExpertParallel(4), 6, "nearest: --experts.parallel 2, or --experts.slices 2"),
        (ExpertParallel(8), 6, "nearest: --experts.parallel 2, or --experts.slices 4"),
        (ExpertParallel(3), 5, "nearest: --experts.parallel 1"),
        (ExpertParallel(4, slices=8), 8, "of --experts.parallel; nearest: 4"),
        (ExpertParallel(6, slices=6), 8, "must divide the 32 hidden units of an expert and the 6 ranks"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest(options: ExpertParallel, experts: int, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        place_experts(options, experts, 32)


def test_rows_that_enter_once_cross_half_as_often() -> None:
    place, rows = ExpertPlacement(8, 4), Rows.even(ExpertPlacement(8, 4), 700, 4, 256, torch.float32, 2)

    def crossing(route: str) -> int:
        options = ExpertParallel(4, route=route)  # type: ignore[arg-type]
        return sum(n for (a, b), n in sent(place, rows, options, 0, 2).items() if a // 2 != b // 2)

    assert crossing("once") < 0.52 * crossing("linear")
    assert crossing("linear") < crossing("2dh") < 1.001 * crossing("linear")


def test_chunks_and_a_loose_capacity_change_no_bytes_and_a_tight_one_does() -> None:
    place = ExpertPlacement(8, 4)
    counts = [[3, 0, 7, 1, 5, 2, 2, 4], [1] * 8, [0] * 8, [9, 0, 0, 0, 0, 0, 0, 1]]

    def total(rows: Rows, **options: Any) -> int:
        return sum(sent(place, rows, ExpertParallel(4, **options), 0, 2).values())

    for codec in ("fp32", "int8/64:nearest"):
        one, five = (total(Rows(counts, 64), chunks=n, dispatch=codec, gradients=codec) for n in (1, 5))
        assert one == five
    # By two hops each chunk has its own numbers in front.
    assert 0 < total(Rows(counts, 64), chunks=2, route="2dh") - total(Rows(counts, 64), route="2dh") < 2000
    loose, tight = (total(Rows.even(place, 64, 2, 64, torch.float32, 2, limit)) for limit in (20, 8))
    even = total(Rows.even(place, 64, 2, 64, torch.float32, 2))
    assert loose == even and tight < 0.52 * even


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunks": 33}, "chunks 33: must be 1 to 32; nearest: 32"),
        ({"chunks": 0}, "nearest: 1"),
        ({"chunks": 4, "chunks_back": 3}, "chunks_back 3 with chunks 4: one must divide the other; nearest: 2"),
        ({"chunks": "auto", "chunks_back": 2}, "both are found, or neither; nearest: 'auto'"),
        ({"move": "experts", "chunks_back": 2}, "rows go in one; nearest: 'same'"),
        ({"chunks": 2, "move": "experts"}, "chunks 2 with move 'experts': no rows travel; nearest: 1"),
        ({"chunks": 2, "route": "once"}, "chunks 2 with route 'once'"),
        ({"capacity": float("inf")}, "capacity inf: must be a finite number; nearest: 0.0"),
        ({"once_a_step": True}, "once_a_step True with move 'tokens': no weights travel; nearest: False"),
        ({"once_a_step": "auto"}, "once_a_step auto with move 'tokens'"),
        ({"weights": "bf16"}, "weights 'bf16' with move 'tokens': no weights travel; nearest: 'fp32'"),
        ({"weights": "bf16", "move": "slices"}, "with move 'slices': no weights travel"),
        ({"move": "slices"}, "move 'slices' with 1 slice: no two ranks share an expert; nearest: 'tokens'"),
        ({"move": "slices=2"}, "some of the 1 ranks of its expert, not one or all; .* nearest: 'tokens'"),
        (
            {"move": "slices=3", "slices": 8},
            "some of the 8 ranks of its expert, not one or all; their number divides these; nearest: 'slices=2'",
        ),
        ({"move": "slices=2", "slices": 2}, "nearest: 'slices'"),
        ({"move": "slice"}, "move 'slice': no such choice; did you mean 'slices'"),
        ({"weights": "int8/64:stochastic", "move": "experts"}, "not at random; nearest: 'int8/64:nearest'"),
    ],
)
def test_what_does_not_fit_names_the_nearest(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ExpertParallel(4, **options)


def test_explain_plans_the_experts_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    command = "--model moe-tiny --nodes 2 --local-size 2 --strategy zero --seq-len 64"
    for more in ("", "--experts.parallel 4 --experts.route once --experts.capacity 0.5"):
        assert run_explain([*command.split(), *more.split()]) == 0
    plain, spread = capsys.readouterr().out.split("experts over 4 ranks")
    assert "capacity_factor 0.5" in plain and "64 rows of an expert, of a rank's 512 tokens" in plain
    with pytest.raises(ConfigError, match=r"would take no row; nearest: 0.016"):
        run_explain([*command.split(), "--experts.parallel", "4", "--moe.capacity-factor", "0.01"])
    once = ["--local-size", "2", "--experts.parallel", "8", "--experts.slices", "4", "--experts.route", "once"]
    with pytest.raises(ConfigError, match="route 'once' with slices 4 on nodes of 2 ranks: an expert must lie in one"):
        run_explain([*command.split(), "--nodes", "4", *once])
    assert "2 of 8 experts a rank" in spread and "experts move tokens" in spread
    assert "no effect" not in spread and "experts over" not in plain


def chosen(
    links: Links, num_tokens: int = 512, top_k: int = 2, slices: int = 1, **options: Any
) -> list[ExpertParallel]:
    """The ways of four ranks in two nodes, the fastest first; an expert has 3 * 48 * 32 weights."""
    place = ExpertPlacement(8, 4, slices)
    rows = Rows.even(place, num_tokens, top_k, 32, torch.float32, 2)
    asked = ExpertParallel(4, slices, **options)
    seconds = choose_way(asked, place, rows, 3 * 8 * 48 * 32 // 4, 2, links)
    rounded = [float(f"{each:.3g}") for each in seconds.values()]
    assert sorted(rounded) == rounded
    return list(seconds)


def test_the_way_of_the_fewest_simulated_seconds_is_taken() -> None:
    quick = Links.stated(1e8, 1e9, 0.0, 2)
    working = replace(quick, product=Line(0.0, 1e-10))
    every = chosen(working, 4096, move="auto", route="auto", chunks="auto")
    # Few weights for many rows; one slice moves as tokens do.
    assert every[0].move == "experts" and {each.move for each in every} == {"tokens", "experts"}
    assert {each.route for each in every if each.move == "tokens"} == {"linear", "2dh", "once"}
    assert chosen(working, num_tokens=16, move="auto")[0].move == "tokens"
    # Two rows of a token cross once, and with codecs that weights have no use for they are all that may move.
    assert chosen(quick, top_k=4, route="auto")[0].route == "once"
    coded = chosen(quick, slices=4, move="auto", dispatch="bf16", weights="bf16")
    assert {each.move for each in coded} == {"slices", "slices=2"}
    with pytest.raises(ConfigError, match="weights 'bf16' with move 'tokens'"):
        chosen(quick, move="auto", dispatch="bf16", weights="bf16")


def test_chunks_are_taken_where_they_hide_work_and_one_is_always_tried() -> None:
    links = Links.stated(1e8, 1e9, 0.0, 2)
    working = replace(links, product=Line(0.0, 2e-10))
    assert chosen(working, chunks="auto")[0].num_chunks > 1
    # Messages that cost a processor more than is hidden.
    dear = replace(working, message_s=0.002)
    assert chosen(dear, chunks="auto")[0].num_chunks == 1
    # Forward and backward apart: half or twice as many chunks in backward, if that is faster; all ways have a number.
    options = ExpertParallel(4, 2, move="auto", chunks="auto", chunks_back="auto")
    place, rows = ExpertPlacement(8, 4, 2), Rows.even(ExpertPlacement(8, 4, 2), 4096, 2, 32, torch.float32, 2)
    seconds = choose_way(options, place, rows, 3 * 8 * 48 * 32 // 4, 2, replace(working, product=Line(0.0, 4e-10)))
    tokens = {way: each for way, each in seconds.items() if way.move == "tokens"}
    best = min(tokens, key=lambda way: tokens[way])
    assert best.num_back != best.num_chunks > 1
    assert seconds.keys() <= set(every_way(options, place, 2)) and len(every_way(options, place, 2)) < MEASURE
    # More latency than there is to hide, on the links or of a product.
    for slow in (replace(working, product=Line(0.01, 2e-10)), replace(Links.stated(1e8, 1e9, 0.05, 2), product=Line())):
        assert [each.chunks for each in chosen(slow, chunks="auto")] == [1, 2]


def test_auto_weighs_weights_that_move_once_a_step_where_it_has_several_micro_batches() -> None:
    place, links = ExpertPlacement(8, 4), Links.stated(1e8, 1e9, 0.001, 2)
    asked, sizes = ExpertParallel(4, move="auto", once_a_step="auto"), (3 * 8 * 48 * 32 // 4, 2, links)
    rows = Rows.even(place, 512, 2, 32, torch.float32, 2, passes=4)
    seconds = choose_way(asked, place, rows, *sizes)
    once = next(way for way in seconds if way.once_a_step)
    # The other three micro-batches send nothing.
    assert once.move == "experts" and seconds[once] == pytest.approx(seconds[replace(once, once_a_step=False)] / 4)
    assert next(iter(seconds)) == once and way_text(once) == "experts once a step, linear, 1 chunk"
    assert not any(way.once_a_step for way in choose_way(asked, place, replace(rows, passes=1), *sizes))
    assert not any(way.once_a_step for way in choose_way(replace(asked, once_a_step=False), place, rows, *sizes))
    # Of slices the rows travel in every micro-batch. All ways have numbers that a word of a step can carry.
    cut = replace(asked, parallel=16, slices=16, route="auto", chunks="auto", chunks_back="auto")
    every = every_way(cut, ExpertPlacement(8, 16, 16), 4)
    assert {way.move for way in every if way.once_a_step} == {"slices=8", "slices=4", "slices=2", "slices", "experts"}
    assert len(every) < MEASURE


def test_options_that_are_open_are_refused_where_nobody_chooses() -> None:
    with pytest.raises(
        ConfigError, match="route 'auto': thinwire train chooses it, a library states it; nearest: 'lin"
    ):
        expert_parallel(torch.nn.Module(), ExpertParallel(1, route="auto"))


def test_explain_chooses_by_stated_links(capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "--model moe-tiny --nodes 2 --local-size 2 --strategy zero --seq-len 64 --rate 100mbit --experts.parallel 4"
    )
    assert run_explain([*command.split(), *["--experts.move", "auto", "--experts.chunks", "auto"]]) == 0
    told = capsys.readouterr().out
    assert "--experts.move auto --experts.chunks auto" in told and "a simulated layer, forward and backward: " in told
    assert "experts move " in told
    # Ranks that share a sequence leave two that may share experts.
    long = command.partition(" --experts")[0].replace("64", "8192")
    alone = [*long.split(), "--sequence.parallel", "2", "--experts.parallel", "auto"]
    more: tuple[str, ...]
    for more, fewest in ((), 1), (("--experts.dispatch", "int8"), 2):
        assert run_explain([*alone, *more]) == 0
        beside = capsys.readouterr().out
        assert f"--experts.parallel auto: {fewest} (" in beside
        assert ("above 1, as --experts.dispatch int8 asks for experts on several ranks" in beside) == bool(more)
        assert "what travels in a mixture" in beside
    assert "; dispatch int8" in beside
    # Beside each other: replicas, and what travels among 2 and 4 ranks; one of them is marked.
    table = told.partition("what travels in a mixture")[2].partition("fp32, adamw")[0]
    ways = [line.split("│")[1:3] for line in table.splitlines() if "│" in line]
    assert [(ranks.strip(), way.split()[0].strip(",")) for ranks, way in ways] == [
        ("1", "replicas"), ("2", "tokens"), ("2", "experts"), ("4", "tokens"), ("4", "experts"),
    ]  # fmt: skip
    assert sum("*" in way for _, way in ways) == 1
    often = ["--micro-batches", "8", "--experts.move", "auto", "--experts.once-a-step", "auto"]
    assert run_explain([*command.split(), *often]) == 0
    told = capsys.readouterr().out
    assert "--experts.move auto --experts.once-a-step auto" in told and "experts once a step, linear, 1 chunk" in told


def test_rows_are_priced_in_the_compute_type_and_weights_that_move_in_fp32(capsys: pytest.CaptureFixture[str]) -> None:
    command = "--model moe-tiny --nodes 2 --strategy zero --seq-len 64 --mesh data=1,expert=2 --experts.move"
    told: list[float] = []
    for move, dtype in product(("tokens", "experts"), ("fp32", "bf16")):
        assert run_explain([*command.split(), move, "--dtype", dtype]) == 0
        found = re.search(rf"experts move {move}: ([\d.]+) MB sent", capsys.readouterr().out)
        assert found is not None
        told.append(float(found[1]))
    assert told[0] == pytest.approx(2 * told[1], rel=1e-3) and told[2] == told[3]
