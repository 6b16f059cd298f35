from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire.report import write_race_report
from thinwire.report.race import figure_text, seconds_note
from thinwire.report.race_charts import bar, style_of
from thinwire.report.svg import LEFT
from thinwire.report.units import sum_text
from thinwire.report.verdict import verdict

FIGURES: dict[str, Any] = {
    "step_s": 0.5, "tokens_per_s": 128.0, "compute_s": 0.3, "exposed_comm_s": 0.2, "codec_s": 0.0,
    "kernel_sent_bytes_per_step": 2.0e6, "kernel_sent_bytes_per_step_worst_node": 2.1e6, "sent_bytes_per_step": 1.9e6,
    "train_loss": 3.0, "heldout_loss": 3.1, "minutes_to_target": 1.5, "peak_rss_bytes": 5e8, "bound_s": 0.4,
    "unhidden_s": 0.1, "step_over_bound": 1.25, "exposed_disk_s": None, "disk_bytes_per_step": None,
}  # fmt: skip
UNKNOWN = dict.fromkeys(FIGURES)


def row(name: str, mean: dict[str, Any], **more: Any) -> dict[str, Any]:
    seed = {
        "seed": 0,
        "run_dir": f"{name}/seed0",
        "num_steps": 4,
        "num_timed_steps": 2,
        "target_loss": 3.0,
        "figures": mean,
    }
    values = {"strategy": name, "options": {}, "command": "", "status": "finished", "reason": "", "is_whole": False}
    ratio = dict.fromkeys(FIGURES, 0.5)
    seeds = [{**seed, "target_step": 3}]
    return {"name": name, **values, "mean": mean, "ratio": ratio, "spread": {}, "seeds": seeds, **more}


def write_race(out: Path, *rows: dict[str, Any], **more: Any) -> str:
    """compare.json, a run for each row, and the page that follows from them."""
    values: dict[str, Any] = {
        "command": "thinwire compare --strategies <a>", "measured_at": "2026-03-04T05:06:07+00:00",
        "machine": {"host": "box", "processor": "Abacus 9", "cores": 2}, "stopped": "",
        "lab": "nodes=2,rate=100mbit", "steps": 4, "tokens_per_step": 64, "smooth": 2, "average": "median",
        "reference": "zero", "reference_why": "ddp-bf16 is not in the race",
        "compute_alone_s": 0.25, "compute_alone_failed": "", "versions": {"torch": "2.13"},
        "effects": [["dtype auto", "fp32", "measured"]], "settings": {"seeds": [0]},
    }  # fmt: skip
    (out / "compare.json").write_text(json.dumps({**values, "contestants": rows, **more}))
    for each in rows:
        run_dir = out / each["seeds"][0]["run_dir"]
        run_dir.mkdir(parents=True)
        lines = (json.dumps({"step": step, "loss": 5.0 - step, "tokens": 64 * step}) for step in range(1, 5))
        (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return write_race_report(out).read_text()


def pictures(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(picture) for picture in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)]


def test_a_race_with_a_failure_and_one_that_misses_the_target(tmp_path: Path) -> None:
    missed = {**FIGURES, "step_s": 1.0, "minutes_to_target": None, "peak_rss_bytes": None}
    failed = row("bad", UNKNOWN, status="failed", reason="rank 1 ended with 4: <no luck>")
    page = write_race(tmp_path, row("zero", FIGURES), row("slow", missed, is_whole=True), failed)
    for words in (
        "rank 1 ended with 4: &lt;no luck&gt;", "not reached", "1.50 min", "2 MB", "0.500x", "in one piece",
        "&lt;a&gt;",
        "1.000x is zero (ddp-bf16 is not in the race)", "2 of 4 steps were timed", "Computing alone takes 250 ms",
        "box · Abacus 9 · 2 cores", "2026-03-04 05:06", "zero reaches the target loss first",
    ):  # fmt: skip
        assert words in page
    assert not re.search(r"(?:src|href)=|url\(|@import|<script|nan|None", page)
    pictures(page)


def test_what_a_disk_moves_has_a_column_and_a_part_of_each_bar(tmp_path: Path) -> None:
    disk = {**FIGURES, "compute_s": 0.25, "exposed_disk_s": 0.05, "disk_bytes_per_step": 3e9}
    page = write_race(tmp_path, row("zero", FIGURES), row("on a disk", disk))
    for words in ("disk per step", "3 GB", "waiting for the disk", "of which 50 ms for the disk"):
        assert words in page


def test_losses_stand_over_each_contestants_own_time(tmp_path: Path) -> None:
    page = write_race(tmp_path, row("zero", FIGURES), row("slow", {**FIGURES, "step_s": 1.0}))
    over_time = pictures(page)[0]
    ends = []
    for style in ("line c0", "line c1"):
        (line,) = (mark for mark in over_time.iter("path") if mark.get("class") == style)
        points = [tuple(map(float, pair.split())) for pair in (line.get("d") or "")[1:].split("L")]
        ends.append(points[-1])
    left = LEFT
    assert (ends[1][0] - left) / (ends[0][0] - left) == pytest.approx(2.0, rel=0.01)
    assert ends[1][1] == ends[0][1]


def test_a_bar_is_as_long_as_its_value() -> None:
    picture = ElementTree.fromstring(bar([("compute", 1.0), ("waiting", 2.0), ("codec", math.nan)], 4.0))
    assert [(mark.get("x"), mark.get("width")) for mark in picture] == [("0.0", "250.0"), ("250.0", "500.0")]
    assert bar([("compute", math.nan)], 4.0) == ""
    assert [style_of(n) for n in (0, 7, 8)] == ["c0", "c7", "c0 dashed"]


def test_nothing_is_known_yet(tmp_path: Path) -> None:
    unfinished = row("zero", UNKNOWN, status="unfinished")
    unfinished["seeds"][0]["num_steps"] = 0
    page = write_race(tmp_path, unfinished, reference=None, compute_alone_s=None, stopped="SIGINT")
    assert "stopped by SIGINT" in page and "there are no ratios" in page and not pictures(page)
    assert seconds_note({"contestants": [unfinished]}) == ""


def test_a_missing_target_is_not_one_that_was_missed() -> None:
    plain = row("zero", UNKNOWN)
    plain["seeds"][0]["target_loss"] = None
    assert figure_text("minutes_to_target", plain) == "?"
    assert figure_text("minutes_to_target", row("zero", UNKNOWN, status="unfinished")) == "?"


def test_no_race_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no race that can be read"):
        write_race_report(tmp_path)


def verdict_of(*rows: dict[str, Any]) -> list[str]:
    return verdict({"contestants": rows, "reference": "zero"})


def with_seeds(
    name: str, step_s: float, *losses: float, spread: tuple[float, float] | None = None, timed: int = 10
) -> dict[str, Any]:
    mean = {**FIGURES, "step_s": step_s, "minutes_to_target": None}
    seeds = [
        {"seed": seed, "figures": {**mean, "heldout_loss": loss}, "target_loss": None, "num_timed_steps": timed}
        for seed, loss in enumerate(losses)
    ]
    return row(name, mean, spread={"step_s": spread}) | {"seeds": seeds}


def test_the_verdict_names_the_fastest_and_what_it_costs() -> None:
    zero, fast = with_seeds("zero", 0.5, 3.0, 3.2), with_seeds("fast", 0.1, 3.1, 3.3)
    fast["mean"]["kernel_sent_bytes_per_step"] = 0.5e6
    assert verdict_of(zero, fast) == [
        "fast has the shortest step: 100 ms, 5.00 times as fast as zero (500 ms).",
        "fast sends 500 kB a step, 4.0 times fewer bytes than zero.",
        "The held-out loss of fast minus that of zero: +0.1000 ± 0.0000 (2 seeds).",
    ]
    assert verdict_of(with_seeds("zero", 0.1, 3.0), with_seeds("slow", 0.3, 3.0)) == [
        "zero has the shortest step: 100 ms, 3.00 times as fast as slow (300 ms)."
    ]
    assert verdict_of(with_seeds("zero", 0.1, 3.0, timed=3), with_seeds("slow", 0.3, 3.0, timed=0)) == [
        "zero has the shortest step: 100 ms, 3.00 times as fast as slow (300 ms); from 0 to 3 timed steps, too few to "
        "tell."
    ]
    assert verdict_of(zero) == [] == verdict_of(zero, row("bad", UNKNOWN, status="failed"))


def test_the_verdict_says_what_may_be_chance() -> None:
    zero = with_seeds("zero", 0.5, 3.0, 3.2, spread=(0.4, 0.6))
    close = with_seeds("close", 0.45, 3.1, 3.1, spread=(0.3, 0.41))
    text = " ".join(verdict_of(zero, close))
    assert text.startswith("close and zero have the shortest steps, 450 ms and 500 ms, and are too close to call: they")
    assert "+0.0000 ± 0.1000 (2 seeds), within twice the standard error." in text
    apart = " ".join(verdict_of(zero, with_seeds("apart", 0.3, 3.1, spread=(0.3, 0.39))))
    assert "overlap" not in apart
    assert "The held-out loss of apart is 0.1000 above that of zero; with one seed, chance is not ruled out." in apart


def test_the_verdict_goes_by_the_target_where_there_is_one() -> None:
    late = row("late", {**FIGURES, "step_s": 0.1, "minutes_to_target": 3.0})
    assert verdict_of(row("zero", FIGURES), late)[0] == (
        "zero reaches the target loss first, in 1.5 minutes: 2.00 times as fast as late (3); from 2 timed steps, too "
        "few to tell."
    )
    tied = row("tied", FIGURES)
    assert verdict_of(row("zero", FIGURES), tied)[0].endswith(
        "in 1.5 minutes: about as fast as tied (1.5); from 2 timed steps, too few to tell."
    )
    never = row("never", {**FIGURES, "step_s": 0.1, "minutes_to_target": None})
    assert verdict_of(row("zero", FIGURES), never)[0].endswith("in 1.5 minutes; no other contestant reaches it.")


def test_the_table_marks_the_best_and_shows_the_spread(tmp_path: Path) -> None:
    slow = {**FIGURES, "step_s": 1.0, "heldout_loss": 3.10001}
    worse = row("worse", {**slow, "heldout_loss": 3.2})
    page = write_race(tmp_path, row("zero", FIGURES, spread={"step_s": (0.45, 0.6)}), row("slow", slow), worse)
    best = re.findall(r'<td class="best" data-label="(.*?)"><span>(.*?)</span>', page)
    assert best.count(("step", "500 ms")) == 1 and ("step", "1 s") not in best
    assert best.count(("held-out loss", "3.1000")) == 2, "equal as far as it is shown"
    assert not [column for column, _ in best if column == "sent per step"], "all are equal"
    assert "<small>450 ms to 600 ms</small>" in page


def test_lines_have_names_and_the_difference_is_drawn(tmp_path: Path) -> None:
    page = write_race(tmp_path, row("zero", FIGURES), row("same", FIGURES))
    losses = [{text.text for text in picture.iter("text")} for picture in pictures(page)[:3]]
    assert all({"zero", "same"} <= names for names in losses)
    assert "Loss less that of zero" in page


@pytest.mark.parametrize(
    ("seconds", "first", "words"),
    [
        (5.395, 3.554, "5.39 s = 3.55 s + 1.84 s"),
        (5.396, 3.551, "5.40 s = 3.55 s + 1.85 s"),
        (0.4046, 0.1005, "405 ms = 100 ms + 305 ms"),
        (0.0, 0.0, "0 ms = 0 ms + 0 ms"),
    ],
)
def test_the_figures_of_a_sum_add_up(seconds: float, first: float, words: str) -> None:
    assert sum_text(seconds, first) == words


def test_the_verdict_says_who_has_not_learnt() -> None:
    zero, same = with_seeds("zero", 1.0, 2.0), with_seeds("same", 0.5, 2.1)
    far = with_seeds("far", 0.1, 3.0)
    for contestant, loss in ((zero, 2.0), (same, 2.1), (far, 3.0)):
        contestant["mean"]["heldout_loss"] = loss
    told = verdict_of(zero, same, far)
    assert "far has learnt far less from these tokens: its held-out loss is 50% above that of zero" in told[-1]
    assert not any("same has learnt" in sentence for sentence in told)
