"""What a plan makes small, by recorded runs of which all is known."""

from __future__ import annotations

import json
from pathlib import Path

from thinwire.methods.islands.diloco import DiLoCo
from thinwire.methods.pipeline.options import Pipeline
from thinwire.planner.candidates import Candidate
from thinwire.planner.choice import choice_of
from thinwire.planner.objective import methods_of, objective_of
from thinwire.report.frontier import RECORDED


def recorded(path: Path, steps: int, **until: float | None) -> Path:
    texts = {"zero": "zero", "sdp4bit": "sdp4bit", "diloco": "diloco[sync_every=15]", "slow": "sparseloco"}
    rows = [
        {"model": "tiny", "steps": steps, "method": name, "text": texts[name], "steps_to": value}
        for name, value in until.items()
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
    assert not named.has_plain and free.has_plain and named.inner == free.inner
    assert RECORDED.is_file() and free.objective.why
