from __future__ import annotations

import json
import math
import os
import platform
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire.listings import run_report
from thinwire.report import write_report
from thinwire.report.charts import bins_of, loss_figure, running_mean, thin_out, time_figure
from thinwire.report.run import read_run

SUMMARY = {
    "heldout_loss": 1.7342,
    "tokens": 40960,
    "step_s": 0.65,
    "tokens_per_s": 6290.2,
    "sent_bytes_per_step": 9_000_000,
    "uncompressed_bytes_per_step": 63_000_000,
    "strategy": "sdp4bit",
    "world_size": 4,
    "versions": {"torch": "2.13.0"},
    "effects": [["dtype auto", "bf16", "measured <faster>"]],
    "sample": "def f(x):\n    return x < 1 & \x00",
}

PLAN = {
    "predicted": {"step_s": 0.7}, "order": [0, 2, 1], "flags": "--stages 3",
    "rates": [[None, 12.5e6, 1.25e6], [12.5e6, None, 12.5e6], [1.25e6, 12.5e6, None]],
    "delays_s": [[None, 1e-3, 1e-3], [1e-3, None, 1e-3], [1e-3, 1e-3, None]],
    "link_bytes": [[None, 4e6, 0.0], [4e6, None, 4e6], [0.0, 4e6, None]],
    "timeline": [
        [0, "training", "forward", 0.0, 0.2], [0, "sending", "sending", 0.2, 0.5], [2, "training", "x", 0.5, 0.7],
    ],
}  # fmt: skip


def row(step: int, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"step": step, "loss": 5.0 / step, "tokens": 4096 * step}
    values |= {"step_s": 0.65, "compute_s": 0.5, "exposed_comm_s": 0.1}
    values |= {"sent_bytes": 9_000_000, "received_bytes": 9_000_000, "lr": 3e-4, "grad_norm": 1.0}
    return values | changes


def write_run(run_dir: Path, rows: list[dict[str, Any]], summary: dict[str, Any] | None = None) -> Path:
    lines = "".join(json.dumps(values) + "\n" for values in rows)
    (run_dir / "metrics.jsonl").write_text(lines)
    (run_dir / "config.toml").write_text('model = "demo" # <b>\n')
    if summary is not None:
        (run_dir / "summary.json").write_text(json.dumps(summary))
    return run_dir


def pictures(page: str) -> list[ElementTree.Element]:
    """Every picture of the page, parsed as XML: a number such as nan or a stray character would stop it."""
    found = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert "nan" not in "".join(re.findall(r'(?:d|x|y|cx|cy|width|height)="[^"]*"', "".join(found)))
    return [ElementTree.fromstring(picture) for picture in found]


def test_a_plan_has_its_links_and_its_simulated_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [row(1), row(2)], SUMMARY)
    (folder / "plan.json").write_text(json.dumps(PLAN))
    page = write_report(folder).read_text()
    pictures(page)
    assert "The slowest link, 0 to 2, carries 10 Mbit/s" in page and "The plan sends nothing between these two." in page
    assert page.count('class="cell used"') == 4 and page.count('class="cell"') == 2
    assert "0 to 1: 100 Mbit/s, 1 ms; the plan sends 4 MB a step" in page
    assert "rank 0, sending: sending, 200 ms to 500 ms" in page and "the plan&#x27;s prediction: 700 ms" in page
    cells = ("the step (step_s)", "700 ms", "650 ms", "7 % less")
    assert "".join(f"<td>{cell}</td>" for cell in cells) in page
    # A plan of an older version, or one that was cut off, has none of it.
    (folder / "plan.json").write_text('{"rates": [[null, "x"], 3], "timeline": [[1]], "predicted": {"step_s": 1}}')
    assert "The plan against the run" in write_report(folder).read_text()


def test_a_finished_run(tmp_path: Path) -> None:
    rows = [row(step) for step in range(1, 11)]
    path = write_report(write_run(tmp_path, rows, SUMMARY))
    page = path.read_text()
    assert path == tmp_path / "report.html"
    assert len(pictures(page)) == 5
    assert "1.7342" in page and "7.00 times less than fp32" in page and "9 MB" in page
    assert "measured &lt;faster&gt;" in page and "&lt;b&gt;" in page
    assert "return x &lt; 1 &amp; \ufffd" in page and "\x00" not in page
    assert "versions.torch" in page
    assert 'title="6290.2">6290<' in page and ">650 ms<" in page and ">41.0k<" in page, "rounded, and exact below"
    assert "Learning rate and gradient norm" in page and ">3e-4<" in page
    assert platform.node() in page and f"thinwire train {tmp_path}/config.toml --run-dir {tmp_path}-2<" in page
    assert re.search(r"<dt>ended</dt><dd>20\d\d-\d\d-\d\d \d\d:\d\d", page)
    assert not re.search(r"(?:src|href)=|url\(|@import|<script", page), "the page must be self-contained"
    # Where ranks send more than gradients and weights.
    summary = SUMMARY | {"uncompressed_of": "whole models"}
    page = write_report(write_run(tmp_path, [row(1), row(2)], summary)).read_text()
    assert "7.00 times less than whole models in fp32" in page and "whole models (fp32): 63 MB" in page
    assert "Whole models in fp32: 7.00 times a median step." in page


def test_marks_stand_at_their_values(tmp_path: Path) -> None:
    write_run(tmp_path, [row(1, loss=4.0), row(2, loss=2.0), row(3, loss=1.0)])
    (picture,) = pictures(loss_figure(read_run(tmp_path)).svg)
    (line,) = (mark for mark in picture.iter("path") if mark.get("class") == "line train")
    points = [tuple(map(float, pair.split())) for pair in (line.get("d") or "")[1:].split("L")]
    xs, ys = zip(*points, strict=True)
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    assert ys[1] - ys[0] == pytest.approx(2 * (ys[2] - ys[1]), abs=0.3)
    assert ys[0] < ys[2], "a larger loss stands higher"


def test_time_is_stacked_without_a_hole(tmp_path: Path) -> None:
    write_run(tmp_path, [row(1)])
    (picture,) = pictures(time_figure(read_run(tmp_path)).svg)
    bars = [bar for bar in picture.iter("rect") if "bar" in (bar.get("class") or "").split()]
    assert [bar.get("class") for bar in bars] == ["bar compute", "bar waiting", "bar other"]
    feet = [float(bar.get("y", "")) + float(bar.get("height", "")) for bar in bars]
    heads = [float(bar.get("y", "")) for bar in bars]
    assert feet[1:] == pytest.approx(heads[:-1], abs=0.2)
    heights = [foot - head for foot, head in zip(feet, heads, strict=True)]
    assert heights[0] / heights[1] == pytest.approx(5.0, rel=0.02)


def test_a_mixture_shows_its_load_its_bytes_and_its_ways(tmp_path: Path) -> None:
    more = {
        "resumed_after": 2,
        "steps": 3,
        "expert_rows": [[10, 30], [20, 20]],
        "lab": "thinwire lab --nodes 2",
        "sent_by": {"dispatch, inter": 666_667.0},
    }
    rows = [
        row(n, experts_s=0.2 * (n < 3), predicted_experts_s=0.1 * (n == 2), needed_capacity=1.5, dropped_rows=0.0)
        for n in (1, 2, 3)
    ]
    write_run(tmp_path, rows, SUMMARY | more)
    way = {"event": "way", "after_step": 2, "way": "tokens, once, 1 chunk", "why": "the fastest measured"}
    sent = {"event": "traffic", "first_step": 0, "sent_by": {"combine, intra": 3_000_000.0}}
    with (tmp_path / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(way | {"predicted_s": 0.01, "measured_s": 0.02}) + "\n")
        for step in (1, 2):
            metrics.write(json.dumps(sent | {"after_step": step}) + "\n")
        sent |= {"first_step": 2, "after_step": 3, "sent_by": {"dispatch, inter": 2_000_000.0}}
        seconds = {"message_s": {"dispatch, inter": 0.25}, "predicted_message_s": {"dispatch, inter": 0.125}}
        metrics.write(json.dumps(sent | seconds) + "\n")
    assert "rows dropped" not in write_report(tmp_path).read_text()
    for stated in ("[moe]\ncapacity_factor = 1.25\n", "[experts]\ncapacity = 1.25\n"):
        (tmp_path / "config.toml").write_text(stated)
        page = write_report(tmp_path).read_text()
        assert "The capacity dropped 0.00% of the rows" in page and "part of rows dropped" in page
    assert "thinwire lab --nodes 2 -- thinwire train" in page
    for title in ("Rows by expert", "Seconds in layers of experts", "Ways of rows to experts", "Messages of rank 0"):
        assert f"<h2>{title}</h2>" in page
    assert "The busiest expert of a layer had 1.50 of a share." in page and "1: 1.50, 1.00 of an even share" in page
    assert "<td>2</td><td>tokens, once, 1 chunk</td><td>the fastest measured</td><td>10 ms</td><td>20 ms</td>" in page
    assert (
        "<td>3 to 3</td><td>dispatch</td><td>inter</td><td>2 MB</td><td>250 ms</td><td>125 ms</td>" in page
        and "measured: median 200 ms, none at the end" in page
        and "predicted: 100 ms" in page
    )
    assert "step 1: 200 ms measured<" in page and "step 2: 200 ms measured, 100 ms predicted<" in page
    # A run that was killed, and went on, on other ranks, has no experts over ranks at the end.
    assert page.count("<td>combine</td>") == 1
    assert "<td>1 to 2</td><td>combine</td><td>intra</td><td>3 MB</td><td>?</td>" in page
    assert not re.search(r"<td>(expert_rows|sent_by|message_s|predicted_message_s)[.<]", page)
    pictures(page)


def test_a_lost_stage_is_in_the_page(tmp_path: Path) -> None:
    write_run(tmp_path, [row(1), row(2)])
    lost = {"event": "membership", "after_step": 1, "generation": 2, "members": [0, 1, 2], "lost": [1], "joined": [1]}
    with (tmp_path / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(lost | {"cost_s": 4.7, "how": "stage 1 is the average", "noun": "stage"}) + "\n")
        metrics.write('{"event": "membership", "lost": 3}\n')
    page = write_report(tmp_path).read_text()
    cells = ("1", "1", "1", "0, 1, 2", "4.70 s", "stage 1 is the average")
    assert "<h2>Stages that were lost or joined</h2>" in page
    assert "".join(f"<td>{cell}</td>" for cell in cells) in page
    assert "Rank 0 waited the time shown from when it missed the other." in page


def test_a_pipeline_shows_what_was_predicted_over_what_was_measured(tmp_path: Path) -> None:
    def event(name: str, stage: int, start_s: float, row: str) -> dict[str, Any]:
        return {"name": name, "cat": name[0], "ph": "X", "pid": stage, "tid": row, "ts": 1e6 * start_s, "dur": 1e6}

    rows: list[tuple[str, int, float]] = [("F0", 0, 0), ("F0", 1, 1), ("B0", 1, 2), ("B0", 0, 3)]
    events = [event(*each, "predicted") for each in rows] + [event(*each, "measured") for each in rows]
    run = write_run(tmp_path, [row(step) for step in range(1, 4)])
    broken = [{"name": "F0", "pid": "x", "ts": 0, "dur": 1}, 7]
    (run / "timeline.json").write_text(json.dumps({"traceEvents": [*events, *broken]}))
    page = write_report(run).read_text()
    picture = next(each for each in pictures(page) if each.get("aria-label") == "what each stage does")
    bars = [bar for bar in picture.iter() if "bar" in bar.get("class", "")]
    assert len(bars) == 8 and "A step of the pipeline" in page and "simulated 4 s, measured 4 s" in page
    above, below = (float(bars[index].get("y", "nan")) for index in (0, 4))
    assert above < below and bars[0].get("x") == bars[4].get("x") and float(bars[1].get("y", "nan")) < above
    assert "stage 1, micro-batch 0: backward, measured, from 2 s to 3 s" in page
    (run / "timeline.json").write_text('{"traceEvents": [')
    assert "A step of the pipeline" not in write_report(run).read_text()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_young_run(tmp_path: Path, num_steps: int) -> None:
    page = write_report(write_run(tmp_path, [row(step + 1) for step in range(num_steps)])).read_text()
    assert "broken off after step" in page
    assert ("No step has finished" in page) == (num_steps == 0)
    assert len(pictures(page)) == (5 if num_steps else 0)


def test_a_killed_run_with_a_torn_last_line_and_cut_summary(tmp_path: Path) -> None:
    write_run(tmp_path, [row(1), row(2)])
    with (tmp_path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 3, "lo')
    (tmp_path / "summary.json").write_text('{"heldout_loss": 1.')
    run = read_run(tmp_path)
    assert [values["step"] for values in run.steps] == [1, 2] and run.summary == {}
    write_report(tmp_path)


def test_a_killed_run_has_a_report_of_each_island_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One island was killed before it could say anything, the other after it had gone on behind an earlier end."""
    (tmp_path / "island-1").mkdir()
    write_run(tmp_path, [row(1), row(2)])
    other = write_run(tmp_path / "island-1", [row(1), row(2), row(3)], {**SUMMARY, "steps": 2})
    assert run_report([str(tmp_path)]) == 0
    assert "island-1 has ended; report: " in capsys.readouterr().out
    os.utime(other / "summary.json", (0, 0))
    assert run_report([str(tmp_path)]) == 0
    first, second, way = capsys.readouterr().out.splitlines()
    assert first == f"{tmp_path} was broken off after step 2, or goes on; report: {tmp_path / 'report.html'}"
    assert second.startswith(f"{other} was broken off after step 3, or goes on; report: ")
    assert way == "no checkpoint is saved, so start anew"
    assert all("broken off after step" in (path / "report.html").read_text() for path in (tmp_path, other))
    with pytest.raises(ConfigError, match="holds no run"):
        run_report([str(tmp_path / "none")])


def test_losses_that_are_not_finite_are_said(tmp_path: Path) -> None:
    losses = [math.nan, 5.0, math.inf, None, 4.0, "NaN"]
    write_run(tmp_path, [row(step, loss=loss) for step, loss in enumerate(losses, start=1)])
    page = write_report(tmp_path).read_text()
    assert "The loss was not finite in 4 of 6 steps" in page
    assert sum(mark.get("class") == "line bad" for mark in pictures(page)[0].iter("path")) == 4


@pytest.mark.parametrize("loss", [math.nan, 0.0, 1e-30, 1e30, -2.0])
def test_extreme_values_are_drawn(tmp_path: Path, loss: float) -> None:
    rows = [row(1, loss=loss, sent_bytes=0, step_s=0.0, compute_s=0.0, exposed_comm_s=0.0), {"step": 2}]
    assert len(pictures(write_report(write_run(tmp_path, rows, {"heldout_loss": math.nan})).read_text())) == 5


def test_medians_of_a_resumed_run_say_from_where_they_are(tmp_path: Path) -> None:
    rows = [row(step) for step in range(1, 6)]
    resumed = write_report(write_run(tmp_path, rows, {**SUMMARY, "resumed_after": 3})).read_text()
    assert re.search(r"sent: median [^<]* after step 3<", resumed)
    assert " after step 3<" not in write_report(write_run(tmp_path, rows, SUMMARY)).read_text()


def test_a_step_done_twice_counts_once(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, [row(1), row(2, loss=9.0), row(2, loss=1.0)]))
    assert [values["loss"] for values in run.steps] == [5.0, 1.0]


def test_a_slow_first_step_does_not_flatten_the_rest(tmp_path: Path) -> None:
    write_run(tmp_path, [row(step, step_s=60.0 if step == 1 else 0.65) for step in range(1, 21)])
    figure = time_figure(read_run(tmp_path))
    assert figure.notes == ["1 bar is cut off at 910 ms; the longest step took 60 s."]


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    write_run(tmp_path, [row(step) for step in range(1, 20_001)], SUMMARY)
    assert write_report(tmp_path).stat().st_size < 300_000
    bins = bins_of(read_run(tmp_path).steps)
    assert len(bins) <= 150
    assert all(left.right == right.left for left, right in pairwise(bins))


def test_thinning_keeps_spikes_and_gaps() -> None:
    points = [(float(x), 1.0) for x in range(10_000)]
    points[1234] = (1234.0, 50.0)
    points[4321] = (4321.0, -9.0)
    points[7000] = (7000.0, math.nan)
    kept = thin_out(points)
    assert len(kept) <= 1300
    assert {(1234.0, 50.0), (4321.0, -9.0)} <= set(kept)
    assert any(math.isnan(y) for _, y in kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_running_mean_skips_what_is_not_finite() -> None:
    means = running_mean([(1.0, 1.0), (2.0, math.nan), (3.0, 3.0), (4.0, 5.0)], 3)
    assert [y for _, y in means] == [1.0, 2.0, 4.0, 4.0]


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        write_report(tmp_path)


def test_a_target_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, [row(1)])
    (tmp_path / "report.html").mkdir()
    with pytest.raises(ConfigError, match="can't be written"):
        write_report(tmp_path)
