"""What a plan makes small, by recorded runs of which all is known."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from thinwire.methods.islands.diloco import DiLoCo
from thinwire.methods.pipeline.options import Pipeline
from thinwire.options import has_islands
from thinwire.planner import choice
from thinwire.planner.candidates import Candidate
from thinwire.planner.choice import StrategyChoice, choice_of, priced
from thinwire.planner.objective import objective_of
from thinwire.planner.settings import make, methods_of, name_of, settings_of, table_of
from thinwire.report.frontier import RECORDED


def recorded(path: Path, steps: int, **until: float | None) -> Path:
    texts = {"zero": "zero", "sdp4bit": "sdp4bit", "diloco": "diloco[sync_every=15]", "slow": "sparseloco"}
    texts |= {"rare": "diloco[sync_every=500]", "wide": "powersgd[rank=8]", "powersgd": "powersgd"}
    near = {name: {"steps": value} if value else None for name, value in until.items()}
    rows = [
        {"model": "tiny", "steps": steps, "method": name, "text": texts[name], "near": point}
        for name, point in near.items()
    ]
    path.write_text(json.dumps(rows))
    return path


def test_seconds_to_a_loss_count_where_all_is_known(tmp_path: Path) -> None:
    known = recorded(tmp_path / "long.json", 5000, zero=4000.0, sdp4bit=4200.0, diloco=5000.0)
    tables = {"diloco": {"sync_every": 15}}
    found = objective_of(methods_of(("zero", "ddp", "sdp4bit", "diloco"), tables), known)
    # ddp has no run, and learns as exact training does.
    assert found.tokens == {"zero": 1.0, "ddp": 1.0, "sdp4bit": 1.05, "diloco": 1.25}
    assert found.why.startswith("seconds to a target loss, 1% above the exact one") and "diloco 1.25" in found.why
    way = Candidate("sdp4bit", 1, 1, 1, 1, Pipeline(), outer="diloco", islands=4)
    assert found.of(way) == 1.05 * 1.25
    # Of other options nothing is known, whatever stands inside the islands.
    other = objective_of(methods_of(("zero", "diloco"), {}), known)
    assert not other.tokens and other.unknown == {"diloco"} and other.why.startswith("seconds a token: diloco never")
    inside = {
        "zero": methods_of(("zero",), {})["zero"],
        "diloco": DiLoCo(sync_every=15, inner=methods_of(("zero",), {})["zero"]),
    }
    assert objective_of(inside, known).tokens == {"zero": 1.0, "diloco": 1.25}


def test_short_runs_say_nothing_of_a_loss(tmp_path: Path) -> None:
    short = objective_of(
        methods_of(("zero", "diloco"), {}), recorded(tmp_path / "short.json", 50, zero=40.0, diloco=9.0)
    )
    assert (
        short.why
        == "seconds a token: docs/methods.md shows 50 steps of tiny, and what is learnt from a token takes 1,000"
    )
    assert short.unknown == {"diloco"}
    missing = objective_of(methods_of(("zero",), {}), tmp_path / "none.json")
    assert "no runs" in missing.why and not missing.unknown
    silent = recorded(tmp_path / "silent.json", 5000, zero=None)
    assert "do not say in how many steps" in objective_of(methods_of(("zero",), {}), silent).why
    never = recorded(tmp_path / "never.json", 5000, zero=4000.0, slow=None)
    assert objective_of(methods_of(("zero", "sparseloco"), {}), never).unknown == {"sparseloco"}


def test_islands_are_left_out_unless_they_are_named_or_known() -> None:
    way = Candidate("zero", 1, 1, 1, 1, Pipeline(), outer="diloco", islands=4)
    free, named = choice_of(None, {}), choice_of(["diloco"], {})
    assert bool(free.why_not(way)) == ("diloco" in free.left_out) and not named.why_not(way)
    assert not named.has_plain and free.has_plain
    assert named.inner == tuple(text for text in free.inner if text == name_of(text))
    assert RECORDED.is_file() and free.objective.why


def test_every_setting_that_is_worth_trying_can_be_made_and_stated() -> None:
    found = settings_of(methods_of(tuple(priced()), {}), {})
    assert {"powersgd[rank=8]", "dion[rank=32]", "diloco[sync_every=500]", "local-sgd[sync_every=8]"} <= found.keys()
    for text, method in found.items():
        assert make(name_of(text), table_of(text)) == method != make(name_of(text), {}), text
        way = Candidate(text, 1, 4, 1, 1, Pipeline())
        if has_islands(name_of(text)):
            way = Candidate("zero", 1, 1, 1, 1, Pipeline(), outer=text, islands=4)
        ((table, options),) = way.settings.items()
        assert all(f"--{table}.{name} {value}" in way.flags for name, value in options.items())
        assert f"--strategy {name_of(text)} " in f"{way.flags} "
    # What is stated, or what a name stands for, stays.
    kept = settings_of(methods_of(tuple(priced()), {}), {"powersgd": {"rank": 4}, "sdp4bit": {"weights": "int4/64"}})
    assert {text for text in found if not text.startswith("powersgd[")} == kept.keys()
    assert not [text for text in found if name_of(text) in ("sdp4bit-weights", "ddp-bf16")]


def test_a_setting_is_chosen_only_where_it_is_known_what_it_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(strategies: list[str] | None, **until: float | None) -> StrategyChoice:
        path = recorded(tmp_path / "runs.json", 5000, **until)
        monkeypatch.setattr(choice, "objective_of", partial(objective_of, recorded=path))
        return choice_of(strategies, {})

    def why_not(own: StrategyChoice, strategy: str) -> str:
        return own.why_not(Candidate(strategy, 1, 4, 1, 1, Pipeline()))

    # A loss counts: the setting with a run competes by its tokens, others are shown.
    known = chosen(["zero", "powersgd"], zero=4000.0, powersgd=4400.0, wide=4100.0)
    assert known.objective.tokens == {"zero": 1.0, "powersgd": 1.1, "powersgd[rank=8]": 1.025}
    assert not why_not(known, "powersgd[rank=8]") and not why_not(known, "powersgd")
    assert "state it to plan with it" in why_not(known, "powersgd[rank=2]") and "rank" not in known.objective.why
    # Seconds count for a strategy of which nothing is known, and for its settings; not for those of another.
    seconds = chosen(["sdp4bit", "powersgd"], zero=4000.0)
    assert seconds.objective.why.startswith("seconds a token: powersgd never")
    assert not seconds.objective.tokens and not why_not(seconds, "powersgd[rank=2]")
    settings = [text for text in seconds.inner if name_of(text) == "sdp4bit" != text]
    assert settings and all(why_not(seconds, text) for text in settings)
    # Islands of which nothing is known are not chosen unasked, and their settings not even priced.
    free = chosen(None, zero=4000.0)
    assert "diloco" in free.left_out and not [text for text in free.methods if text.startswith("diloco[")]
    rare = chosen(["zero", "diloco"], zero=4000.0, rare=6000.0)
    assert not rare.objective.tokens and "diloco[sync_every=50]" in rare.outer and not rare.aside
    assert not [text for text in choice_of(["zero", "powersgd"], {}, has_settings=False).methods if "[" in text]
