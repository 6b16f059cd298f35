"""The parts of a race that need no network: the command line, the metrics file, the arithmetic."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from thinwire import cli
from thinwire.compare import Figures, RaceConfig, RaceRow
from thinwire.compare.checks import DEFAULT_STEPS, WARM_UP_STEPS, range_errors, read_race, rounds_of
from thinwire.compare.contestants import Contestant, read_contestants
from thinwire.compare.leg import StopWish
from thinwire.compare.measure import (
    SeedResult,
    first_at_most,
    least_time,
    mean_of,
    per_step,
    ratios,
    reference_of,
    smoothed,
    spread_of,
    times_of,
    weights_share,
)
from thinwire.compare.plan import exchanges_timed, make_plan, recorded_rate, rows_of, timed_steps_of
from thinwire.compare.record import Leg, RaceRecord, SeedEntry, delete_race, load_record
from thinwire.compare.table import Board
from thinwire.compare.watch import LegWatch, MetricsTail
from thinwire.errors import ConfigError, Problems
from thinwire.lab import Counters, LabSpec
from thinwire.report.run import RunFiles, mean_losses, read_run
from thinwire.run.config import TrainConfig


def contestants(text: str) -> list[Contestant]:
    problems = Problems()
    found = read_contestants(text, problems)
    assert not problems.messages
    return found


def test_contestants_with_options_names_and_commands() -> None:
    zero, named, command = contestants(
        "zero, s8=sdp4bit[inter_gradients=int8/64:bf16+hadamard32,weights=int4] ,"
        'cmd:peer=sh -c "echo a,b" {run_dir} {steps}'
    )
    assert zero == Contestant("zero", "zero")
    assert named == Contestant("s8", "sdp4bit", {"inter_gradients": "int8/64:bf16+hadamard32", "weights": "int4"})
    assert command.is_whole and command.words({"run_dir": "d", "steps": "5"}) == ["sh", "-c", "echo a,b", "d", "5"]


def test_options_stand_over_those_of_the_configuration() -> None:
    base = TrainConfig(tables={"sdp4bit": {"inter_gradients": "int8", "weights": "int8"}})
    (named,) = contestants("s=sdp4bit[weights=int4]")
    assert named.config(base).tables == {"sdp4bit": {"inter_gradients": "int8", "weights": "int4"}}
    assert contestants("zero")[0].config(base).strategy == "zero"
    tuned = contestants("sdp4bit[lr=2e-3,weights=int4]")[0].config(base)
    assert tuned.lr == 2e-3 and tuned.tables == named.config(base).tables
    assert contestants("zero[lr=1,weight_decay=0.0]")[0].config(base).weight_decay == 0.0
    inside = contestants("sparseloco[inner=sdp4bit,sync_every=5]")[0].config(base)
    assert inside.inner == "sdp4bit" and inside.tables == {**base.tables, "sparseloco": {"sync_every": 5}}


def test_a_contestant_may_lie_on_the_ranks_in_its_own_way() -> None:
    base, problems = TrainConfig(workers=4), Problems()
    text = "zero,pp=zero[stages=2,micro_batch=2,order=[0,2,1,3],pipeline.forward=int8/64,pipeline.layers='1,2']"
    plain, cut = read_contestants(text, problems, base)
    assert not problems.messages and cut.has_layout and not plain.has_layout
    config = cut.config(base)
    assert (config.stages, config.micro_batch, config.order) == (2, 2, (0, 2, 1, 3))
    assert config.tables == {"pipeline": {"forward": "int8/64", "layers": "1,2"}} and config.mesh_shape.pipeline == 2
    assert plain.config(base) == replace(base, strategy="zero")
    for text, message in (
        ("a=zero[pipeline.fwd=fp32]", "pipeline.unknown key 'fwd'"),
        (
            "a=zero[experts.capacity=2]",
            "experts.capacity is of the model, which all contestants share; nearest: --experts",
        ),
        ("a=zero[experts.parallel=2,experts.mov=tokens]", "experts.unknown key 'mov'; did you mean 'move'"),
        ("a=sdp4bit[stages=0]", "--stages 0"),
    ):
        problems = Problems()
        read_contestants(text, problems, base)
        assert message in "; ".join(problems.messages)


def test_contestants_may_share_sequences_and_experts_in_their_own_way() -> None:
    base, problems = TrainConfig(workers=4, model="moe-tiny", tables={"experts": {"gradients": "bf16"}}), Problems()
    text = "zero,s=zero[sequence.parallel=2,sequence.method=ring],e=zero[experts.parallel=auto,experts.move=experts]"
    plain, sequences, experts = read_contestants(text, problems, base)
    assert not problems.messages and sequences.has_layout and experts.has_layout
    assert plain.config(base) == replace(base, strategy="zero")
    assert sequences.config(base).tables == {**base.tables, "sequence": {"parallel": 2, "method": "ring"}}
    assert sequences.config(base).mesh_shape.sequence == 2
    assert experts.config(base).tables == {"experts": {"gradients": "bf16", "parallel": "auto", "move": "experts"}}


def test_an_option_of_a_layout_that_a_contestant_does_not_use_is_told() -> None:
    base = TrainConfig(workers=2, model="moe-tiny", steps=12)
    found = read_contestants("zero,a=zero[sequence.method=ring,experts.parallel=2]", Problems(), base)
    rows = [row for row in rows_of(RaceConfig(), base, base, found) if "of a" in row[0]]
    assert rows == [
        ("--sequence.method of a", "no effect", "a run without --sequence.parallel does not use it"),
    ]


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        ("stages=4", {}, "4 stages: the model has 3 layers"),
        ("stages=3", {}, "--stages 3: must divide the 4 ranks"),
        ("sequence.parallel=3", {}, "--sequence.parallel 3: must divide the 4 ranks; nearest: --sequence.parallel 2"),
        ("experts.parallel=2", {}, "nearest: a mixture such as moe-demo"),
        # A step of the race has one sequence, which four ranks with data of their own can't share.
        ("sequence.parallel=1", {"tables": {"sequence": {"parallel": 4}}, "micro_batch": 1}, "must be a multiple of"),
    ],
)
def test_layouts_that_do_not_fit_are_told_before_a_race(
    tmp_path: Path, options: str, more: dict[str, Any], message: str
) -> None:
    race = RaceConfig(strategies=f"zero,pp=zero[{options}]", lab="nodes=4,rate=20mbit", out=str(tmp_path / "out"))
    with pytest.raises(ConfigError, match=message):
        make_plan(race, TrainConfig(model="tiny", steps=12, **more), Problems())


@pytest.mark.parametrize(
    ("strategies", "steps", "asked", "expected"),
    [
        ("zero", 1000, None, 10),
        # Two exchanges of islands, so that the mean holds each step of a period equally often.
        ("diloco[sync_every=50]", 1000, None, 100),
        # Whole periods, also where ten steps or a round's length are none.
        ("sparseloco[sync_every=4]", 1000, None, 12),
        ("sparseloco[sync_every=4]", 40, None, 8),
        ("zero", 35, None, None),
        ("zero", 1000, 5, 5),
        ("zero", 1000, 332, None),
    ],
)
def test_few_steps_of_a_long_round_wait_for_the_slow_network(
    strategies: str, steps: int, asked: int | None, expected: int | None
) -> None:
    race, train = RaceConfig(timed_steps=asked), TrainConfig(model="tiny", workers=2, steps=steps)
    contestants = read_contestants(strategies, Problems(), train)
    assert [timed_steps_of(race, train, one) for one in contestants] == [expected]
    rows = [row for row in rows_of(race, train, train, contestants) if row[0].startswith("--timed-steps")]
    # Told where it differs from what was asked.
    assert bool(rows) == (expected != asked)


def test_a_race_in_which_no_exchange_is_timed_is_refused(tmp_path: Path) -> None:
    race = RaceConfig(strategies="zero,diloco[sync_every=50]", lab="nodes=2,rate=20mbit", out=str(tmp_path / "out"))
    train = TrainConfig(model="tiny", steps=6)
    with pytest.raises(
        ConfigError, match=r"diloco exchanges every 50 steps, and no timed step .* nearest: -- --steps 156"
    ):
        make_plan(race, train, Problems())
    # With as many steps, each round times a whole period.
    enough = replace(train, steps=156)
    (diloco,) = read_contestants("diloco[sync_every=50]", Problems(), enough)
    assert exchanges_timed(race, enough, diloco) == 3 and timed_steps_of(race, enough, diloco) == 50
    assert not [row for row in rows_of(race, enough, enough, [diloco]) if row[1] == "no whole period"]
    told = [row for row in rows_of(race, train, train, [diloco]) if row[1] == "no whole period"]
    assert told == [
        ("steps of diloco that are timed", "no whole period", "it exchanges every 50 steps; nearest: -- --steps 156")
    ]


def test_a_contestant_has_to_fit_the_race_and_not_a_run_of_usual_length() -> None:
    text = "onebit-adam[freeze=20]"
    for steps, fits in ((100, True), (300, False)):
        problems = Problems()
        read_contestants(text, problems, TrainConfig(steps=steps))
        assert fits is not any("inside the learning rate's warm-up" in message for message in problems.messages)


def test_a_placeholder_that_is_empty_leaves_no_word() -> None:
    (peer,) = contestants("cmd:peer=sh x.sh {run_dir} {steps} {resume} --until={stop_at}")
    values = {"run_dir": "a b", "steps": "9", "resume": "", "stop_at": "3"}
    assert not peer.is_whole
    assert peer.words(values) == ["sh", "x.sh", "a b", "9", "--until=3"]


def test_a_command_that_can_not_stop_between_rounds_runs_whole() -> None:
    found = contestants("cmd:peer=sh x.sh {run_dir} {steps}")
    base, race = TrainConfig(steps=40), RaceConfig(rounds=2)
    row = ("rounds of peer", "runs whole, in the last round", "its command has no {stop_at}")
    assert row in rows_of(race, base, base, found)
    assert row not in rows_of(replace(race, rounds=1), base, base, found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sdp4bits", "unknown strategy 'sdp4bits'; did you mean 'sdp4bit'"),
        ("sdp4bit[inter_gradient=int8]", "unknown key 'inter_gradient'; did you mean 'inter_gradients'"),
        ("zero[expert.parallel=2]", "unknown key 'expert.parallel'; did you mean 'experts.parallel'"),
        ("zero[experts=2]", r"unknown key 'experts'; did you mean 'experts\.\*'"),
        ("powersgd[rank=many]", "rank = 'many': must be a whole number"),
        ("sdp4bit[weights]", "'weights' must be option=value"),
        ("sdp4bit[inter_gradients=int4/100+hadamard32]", "multiple of 32|100.*32"),
        ("zero[bits=3]", r"choose one of activations, embedding_rows, experts\.\*, grad_clip, local_size, lr"),
        ("zero[inner=demo]", r"unknown key 'inner'; choose one of activations, embedding_rows, experts\.\*"),
        ("sparseloco[inner=demo,optimizer=adamw]", "adamw does not fit --inner demo"),
        ("sdp4bit[lr=-1]", "--lr -1: must be above 0"),
        ("zero[lr=fast]", "lr = 'fast': must be a number"),
        ("zero[optimizer=dgc-sgd]", "--optimizer dgc-sgd does not fit"),
        ("zero,sdp4bit,zero", "'zero' is given 2 times"),
        ("zero[a=1", "a bracket is not closed"),
        ("a/b=zero", "must be STRATEGY, NAME=STRATEGY"),
        ("compute=zero", "the name 'compute' is taken"),
        ("cmd:peer", "must be cmd:NAME=COMMAND"),
        ("cmd:peer=no-such-program {run_dir} {steps}", "there is no program 'no-such-program'"),
        ("cmd:peer=sh {run_dir} {steps} {stop}", "unknown placeholder {stop}; did you mean 'stop_at'"),
        ("cmd:peer=sh {run_dir}", "needs {steps}"),
        (" , ", "--strategies is empty"),
    ],
)
def test_wrong_contestants(text: str, message: str) -> None:
    problems = Problems()
    read_contestants(text, problems)
    with pytest.raises(ConfigError, match=message):
        problems.raise_any()


def test_all_problems_come_at_once_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "race.toml").write_text("stepps = 3\n")
    own = [str(tmp_path / "race.toml"), "--strategies", "zeroo", "--lab", "nodes=2,rate=fast", "--rounds", "0"]
    own += ["--seeds", "0,0", "--target-loss", "low", "--timed-steps", "0", "--smooth", "99", "--bounds"]
    train = ["--", "--steps", "12", "--data", "missing.txt", "--lrr", "3"]
    with pytest.raises(ConfigError) as caught:
        cli.run(["compare", *own, "--out", str(tmp_path / "out"), *train])
    for part in (
        "'stepps'; did you mean 'steps'", "--bounds", "--lrr", "zeroo", "rate 'fast'", "--rounds 0", "nearest: 1",
        "--seeds 0,0", "--target-loss low", "--timed-steps 0", "--smooth 99", "nearest: 12", "missing.txt",
    ):  # fmt: skip
        assert part in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something(tmp_path: Path) -> None:
    race = ["compare", "--strategies", "zero", "--out", str(tmp_path)]
    with pytest.raises(ConfigError, match="holds no race to go on with"):
        cli.run([*race, "--resume"])
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and holds no race"):
        cli.run(race)
    (tmp_path / "compare.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"already holds a race.*--resume.*--overwrite"):
        cli.run(race)


def test_the_part_behind_the_dashes_is_for_the_training(tmp_path: Path) -> None:
    (tmp_path / "race.toml").write_text("steps = 30\nmodel = 'tiny'\n")
    problems = Problems()
    args = [str(tmp_path / "race.toml"), "--rounds", "2", "--no-bound", "--", "--steps", "40", "--lr", "0.1"]
    race, train = read_race(args, problems)
    assert race == RaceConfig(rounds=2, bound=False) and not problems.messages
    assert (train.steps, train.model, train.lr) == (40, "tiny", 0.1)


def test_a_race_takes_its_own_number_of_steps_unless_the_training_states_one(tmp_path: Path) -> None:
    (tmp_path / "race.toml").write_text("model = 'tiny'\n")
    train = TrainConfig(steps=DEFAULT_STEPS)
    assert read_race(["--rounds", "2"], Problems())[1] == train
    assert read_race(["--", "--lr", "0.1"], Problems())[1] == replace(train, lr=0.1)
    assert read_race([str(tmp_path / "race.toml")], Problems())[1].steps == TrainConfig().steps
    said = {row[0]: row[1] for row in rows_of(RaceConfig(), train, train, [])}
    assert said["--steps"] == str(DEFAULT_STEPS)


@pytest.mark.parametrize(("steps", "rounds"), [(3, 1), (8, 2), (9, 3), (100, 3)])
def test_few_steps_make_fewer_rounds_which_is_said(steps: int, rounds: int) -> None:
    race, train = RaceConfig(), TrainConfig(steps=steps, model="tiny")
    assert rounds_of(race, steps) == rounds and not [*range_errors(race, steps)]
    said = [row for row in rows_of(race, train, train, []) if row[0] == "--rounds 3"]
    assert [row[1] for row in said] == ([str(rounds)] if rounds < 3 else [])


def test_too_few_steps_are_told_the_flags_that_would_do() -> None:
    assert [*range_errors(RaceConfig(timeout=1e300), 24)] == [
        "--timeout 1e+300: must be at most 31,536,000; nearest: 31536000"
    ]
    (few,) = range_errors(RaceConfig(rounds=3), 8)
    assert few.endswith("nearest: --rounds 2, or -- --steps 9")
    (none,) = range_errors(RaceConfig(), 2)
    assert none.endswith("nearest: -- --steps 3")


def line(step: Any) -> str:
    return json.dumps({"step": step, "loss": 1.0}) + "\n"


def test_a_metrics_file_is_followed_through_appends_torn_lines_and_rewrites(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert MetricsTail(path).new_rows() == []
    path.write_text(line(1) + line(2))
    tail = MetricsTail(path)
    assert tail.new_rows() == []
    with path.open("a") as file:
        file.write(line(3) + line(4)[:9])
    assert [row["step"] for row in tail.new_rows()] == [3]
    with path.open("a") as file:
        file.write(line(4)[9:] + "no json\n[1]\n" + line("5"))
    assert [row["step"] for row in tail.new_rows()] == [4]
    draft = path.with_suffix(".tmp")
    draft.write_text(line(1) + line(2) + line(6))
    draft.replace(path)
    assert [row["step"] for row in tail.new_rows()] == [6]
    assert tail.new_rows() == []


class FakeNetwork:
    """Two nodes that send 1000 and 3000 bytes between any two readings."""

    def __init__(self) -> None:
        self.num_readings = 0
        self.shaped = True

    def counters(self) -> list[Counters]:
        self.num_readings += 1
        return [Counters(1000 * self.num_readings, 0), Counters(3000 * self.num_readings, 5)]

    def shape(self, shaped: bool) -> None:
        self.shaped = shaped


@pytest.mark.parametrize(
    ("timed_steps", "settled_after", "expected"),
    [
        (None, 0, Leg(1, False, 5, 12, 7, 12, 6, [6000, 18000], [0, 0])),
        (3, 0, Leg(1, False, 5, 12, 7, 9, 3, [3000, 9000], [0, 0])),
        (1, 8, Leg(1, False, 5, 12, 9, 9, 1, [1000, 3000], [0, 0])),
        (None, 20, Leg(1, False, 5, 12)),
    ],
)
def test_warm_up_is_not_counted_and_rates_are_lifted(
    tmp_path: Path, timed_steps: int | None, settled_after: int, expected: Leg
) -> None:
    path, network = tmp_path / "metrics.jsonl", FakeNetwork()
    watch: LegWatch = LegWatch(network, MetricsTail(path), 1, timed_steps, settled_after)  # type: ignore[arg-type]
    for step in range(5, 13):
        with path.open("a") as file:
            file.write(line(step))
        assert watch.look() and not watch.look()
        # Of a first warm-up until step 8, the last two steps are in the slow network.
        first = settled_after - WARM_UP_STEPS if timed_steps is not None else 0
        assert network.shaped == (first <= step and (timed_steps is None or step < 9))
    assert watch.leg == expected


def test_steps_that_arrive_together_are_still_divided_by_their_number(tmp_path: Path) -> None:
    path, network = tmp_path / "metrics.jsonl", FakeNetwork()
    watch: LegWatch = LegWatch(network, MetricsTail(path), 1, 2)  # type: ignore[arg-type]
    for steps in ([1, 2, 3], [4, 5, 6], [7]):
        with path.open("a") as file:
            file.write("".join(map(line, steps)))
        watch.look()
    assert (watch.leg.first_timed, watch.leg.last_timed, watch.leg.last_step) == (3, 4, 7)
    assert (watch.leg.kernel_steps, watch.leg.kernel_sent_bytes) == (3, [1000, 3000])


def test_the_first_signal_is_noted_and_the_second_ends() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopWish() as wish:
        signal.raise_signal(signal.SIGTERM)
        assert wish.name == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_smoothed_loss_and_the_step_at_which_it_reaches_a_target() -> None:
    losses = smoothed([4.0, 2.0, 3.0, 1.0, 0.0], 2)
    assert losses == [4.0, 3.0, 2.5, 2.0, 0.5]
    assert first_at_most(losses, 2.2, 2) == 4
    assert first_at_most(losses, 4.0, 2) == 2, "a window that is not full decides nothing"
    assert first_at_most(losses, 0.1, 2) is None
    assert first_at_most(smoothed([1.0, math.nan, 1.0, 1.0], 2), 1.0, 2) == 4


def test_the_loss_of_islands_is_the_mean_over_those_that_took_the_step(tmp_path: Path) -> None:
    for folder, losses in (("", (4.0, 2.0, 3.0)), ("island-1", (2.0, 1.0)), ("island-2", (0.0, 3.0, 5.0))):
        (tmp_path / folder).mkdir(exist_ok=True)
        lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
        (tmp_path / folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert mean_losses(read_run(tmp_path)) == {1: 2.0, 2: 2.0, 3: 4.0}


def test_bytes_per_step_are_the_median_over_legs_of_their_means() -> None:
    legs = [
        Leg(1, kernel_steps=2, kernel_sent_bytes=[20, 200]),
        Leg(2),
        Leg(2, kernel_steps=1, kernel_sent_bytes=[90, 9]),
    ]
    legs += [Leg(3, kernel_steps=4, kernel_sent_bytes=[80, 40])]
    assert per_step(legs, "kernel_sent_bytes") == [20, 10]
    assert per_step([Leg(1)], "kernel_sent_bytes") == []


def test_the_bound_is_the_slowest_of_computation_and_links() -> None:
    lab = LabSpec(nodes=2, rate="8mbit", slow={1: "4mbit"})
    assert least_time(lab, [1e6, 1e5], [0, 0], 0.3) == 1.0
    assert least_time(lab, [1e5, 1e6], [0, 0], 0.3) == 2.0
    assert least_time(lab, [1e5, 1e5], [0, 2e6], 0.3) == 4.0
    assert least_time(lab, [1e5, 1e5], [0, 0], 0.3) == 0.3
    assert least_time(LabSpec(nodes=2, rate=None), [1e9, 1e9], [0, 0], 0.3) == 0.3
    assert least_time(lab, [1e5, 1e5], [0, 0], None) is None


def test_weights_hide_behind_the_forward_and_gradients_behind_the_backward() -> None:
    lab = LabSpec(nodes=2, rate="8mbit")
    # Weights 0.5 s against a forward of 0.3 s, gradients 0.5 s against a backward of 0.6 s.
    assert least_time(lab, [1e6, 1e6], [0, 0], 0.9, 0.3, 0.5) == pytest.approx(0.5 + 0.6)
    # No weights travel: nothing hides behind the forward.
    assert least_time(lab, [1e6, 1e6], [0, 0], 0.9, 0.3, 0.0) == pytest.approx(0.3 + 1.0)
    assert least_time(lab, [0, 0], [0, 0], 0.9, 0.3, 0.0) == pytest.approx(0.9)
    rows = [{"sent_bytes": 10, "sent_weight_bytes": 4}, {"sent_bytes": 30, "sent_weight_bytes": 6}]
    assert weights_share(rows) == 0.25
    assert weights_share([{"sent_bytes": 10}]) == weights_share([]) == 0.0


def test_means_and_ratios_leave_out_what_is_not_known() -> None:
    mean = mean_of(64, [Figures(step_s=1.0, heldout_loss=2.0, tokens_per_s=64.0), Figures(step_s=3.0)])
    assert (mean.step_s, mean.heldout_loss, mean.tokens_per_s) == (2.0, None, 32.0)
    found = ratios(mean, Figures(step_s=4.0, heldout_loss=2.0, codec_s=0.0))
    assert (found["step_s"], found["heldout_loss"], found["codec_s"]) == (0.5, None, None)


def test_computing_and_waiting_add_up_to_the_step() -> None:
    rows = [
        {"step_s": 1.0, "exposed_comm_s": 0.9, "compute_s": 0.1},
        {"step_s": 2.0, "exposed_comm_s": 0.5, "compute_s": 1.5},
        {"step_s": 3.0, "exposed_comm_s": 0.2, "compute_s": 2.8},
        {"step_s": 9.0, "exposed_comm_s": 8.0, "compute_s": 1.0},
    ]
    times = times_of(rows, median)
    known = {"step_s": 2.5, "exposed_comm_s": 0.7, "codec_s": None}
    assert times == {**known, "exposed_disk_s": None, "compute_s": 1.8}
    disk = times_of([{**row, "exposed_disk_s": 0.5} for row in rows], median)
    assert disk == {**known, "exposed_disk_s": 0.5, "compute_s": pytest.approx(1.3)}
    assert times_of([{"step_s": 1.0}], median)["compute_s"] is None


def test_times_are_spread_over_rounds_and_losses_over_seeds() -> None:
    rows = [{"step": step, "step_s": float(step), "exposed_comm_s": 0.0} for step in range(1, 7)]
    entry = SeedEntry("zero", 0, [Leg(1, first_timed=1, last_timed=3), Leg(2, first_timed=4, last_timed=6), Leg(3)])
    seeds = [SeedResult(n, "", 6, 6, None, None, Figures(step_s=3.5, heldout_loss=2.0 + n)) for n in range(2)]
    run = RunFiles(Path(), rows, {}, "")
    found = spread_of(10, median, seeds, [(entry, run)])
    assert found["step_s"] == (2.0, 5.0) and found["tokens_per_s"] == (2.0, 5.0)
    assert found["heldout_loss"] == (2.0, 3.0) and found["peak_rss_bytes"] is None
    entry.legs = entry.legs[:1]
    assert spread_of(10, median, seeds[:1], [(entry, run)])["step_s"] is None


def test_the_reference_is_ddp_bf16_or_the_first_that_finished() -> None:
    def row(name: str, status: str) -> RaceRow:
        return RaceRow(name, name, {}, "", status, "", False, Figures(), {}, [])

    assert reference_of([row("zero", "finished"), row("ddp-bf16", "finished")]) == ("ddp-bf16", "")
    assert reference_of([row("ddp-bf16", "failed"), row("zero", "finished")]) == ("zero", "ddp-bf16 failed")
    assert reference_of([row("ddp", "failed"), row("zero", "finished")]) == ("zero", "ddp-bf16 is not in the race")
    assert reference_of([row("ddp-bf16", "unfinished")]) == (None, "ddp-bf16 has not finished")


def test_a_record_goes_on_only_with_the_same_race(tmp_path: Path) -> None:
    settings = {"seeds": [0], "train": {"lr": 0.1, "steps": 9}}
    record = RaceRecord(settings, "typed", [SeedEntry("zero", 0, [Leg(1, True, 1, 6)], 5)])
    record.save(tmp_path, {"command": "typed"})
    assert load_record(tmp_path, settings) == record
    record.entries[0].failed = "bad luck"
    record.save(tmp_path, {})
    assert not load_record(tmp_path, settings).entries[0].failed
    with pytest.raises(ConfigError, match=r"train\.lr was 0\.1 and can't become 0\.2"):
        load_record(tmp_path, {"seeds": [0], "train": {"lr": 0.2, "steps": 9}})
    (tmp_path / "zero" / "seed0").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    delete_race(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "compare.json").write_text('{"record": 3}')
    with pytest.raises(ConfigError, match="can't be read"):
        load_record(tmp_path, settings)


def test_before_the_first_turn_has_ended_the_time_left_is_unknown() -> None:
    assert Board()._left == "turn 1 of 0; the time left is known after it"


def test_first_steps_that_are_of_another_kind_are_named() -> None:
    race, train = RaceConfig(), TrainConfig(steps=30)
    contestants = read_contestants("zero,powersgd,late=powersgd[start_step=40]", Problems(), train)
    told = {asked: effect for asked, effect, _ in rows_of(race, train, train, contestants)}
    assert told["first 10 steps of powersgd"] == "not timed" and not any(asked.endswith("of late") for asked in told)
    assert "no step is timed" in told.values()


def test_a_learning_rate_that_was_better_in_recorded_runs_is_named() -> None:
    best = {
        "a": 1.0, "demo": 3.0, "demo[beta=0]": 3.0, "diloco": 1.0, "diloco[sync_every=9]": 2.0,
        "sdp4bit[optimizer=muon,loco=true]": 4.0,
    }  # fmt: skip
    found = contestants(
        "a=demo[density=0.1],b=diloco,c=diloco[sync_every=9],d=diloco[sync_every=7],e=demo[optimizer=sgd-plain],"
        "f=sdp4bit[loco=true,optimizer=muon],g=sdp4bit[optimizer=muon]"
    )
    assert [recorded_rate(one, best) for one in found] == [3.0, 1.0, 2.0, None, None, 4.0, None]
    train = TrainConfig(model="tiny", steps=60)
    told = [row for row in rows_of(RaceConfig(), train, train, contestants("zero,demo[lr=0.1]")) if "--lr" in row[0]]
    assert [row[:2] for row in told] == [("--lr 0.0003", "for all without their own")]
    assert "the model tiny, 5,000 steps: 0.003 for zero; " in told[0][2] and "zero[lr=0.003]" in told[0][2]
    train = replace(train, lr=0.003)
    assert not [row for row in rows_of(RaceConfig(), train, train, contestants("zero")) if row[0].startswith("--lr")]
