"""The frontier of loss and bytes: who is beaten in both, where points lie, and what the page says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.report.test_race import FIGURES, row, write_race
from thinwire.report import write_race_report
from thinwire.report.frontier import (
    Outcome,
    beaten,
    best_rates,
    frontier_figure,
    frontier_sentence,
    frontier_svg,
    recommended,
)
from thinwire.report.svg import LogScale, Scale

EXACT, FEW, WORSE = Outcome("exact", 8e9, 2.0, 0.01), Outcome("few", 8e7, 2.1), Outcome("worse", 9e7, 2.2)


def test_only_those_are_beaten_that_another_equals_in_both_and_passes_in_one() -> None:
    assert beaten([EXACT, FEW, WORSE]) == {"worse"}
    assert beaten([EXACT, Outcome("same", 8e9, 2.0)]) == set()
    assert beaten([EXACT, Outcome("as cheap", 8e9, 2.1)]) == {"as cheap"}


def test_losses_are_compared_over_the_seeds_that_both_have() -> None:
    """The second has an easy seed more, by which its mean is lower."""
    hard = Outcome("hard", 2e6, 2.0, by_seed={"0": 2.0})
    more = Outcome("more", 1e6, 1.9, by_seed={"0": 2.1, "1": 1.7})
    assert beaten([hard, more]) == set()
    assert beaten([hard, Outcome("more", 1e6, 2.2, by_seed={"0": 1.9, "1": 2.5})]) == {"hard"}


def test_the_sentence_names_the_frontier_from_the_fewest_bytes_on() -> None:
    assert frontier_sentence([EXACT, WORSE, FEW]).endswith(
        "from the fewest bytes on: few (loss 2.1000), exact (loss 2.0000)."
    )
    assert frontier_sentence([EXACT, FEW]) == ""


def test_a_logarithmic_scale_spaces_ratios_evenly() -> None:
    scale = LogScale(1e6, 1e9, 0.0, 300.0)
    assert scale.place(1e7) == pytest.approx(100.0) and scale.place(1e5) == 0.0 and scale.place(1e12) == 300.0
    assert [text for _, text in scale.labels(6)] == ["1M", "10M", "100M", "1G"]
    assert [text for _, text in LogScale(8.0, 70.0, 0.0, 1.0).labels(6)] == ["10", "20", "50"]


def test_those_that_are_beaten_are_grey_and_errors_are_drawn() -> None:
    figure = frontier_figure([EXACT, FEW, WORSE], {"exact": "c0", "few": "c1", "worse": "c2"})
    svg = figure.svg
    assert "<title>few: 2.1000, 80 MB sent</title>" in svg and "fewer bytes, by ratios" in figure.notes[0]
    assert svg.count('class="dot beaten"') == 1 and 'class="dot c0"' in svg and 'class="dot c2"' not in svg
    assert svg.count('class="line c0"') == 1 and 'class="line c1"' not in svg


@pytest.mark.parametrize("counted", [True, False])
def test_the_page_of_a_race_shows_it(counted: bool, tmp_path: Path) -> None:
    """By the runs' own metrics, or by the kernel where one of the runs counted nothing."""
    losses = {"zero": (2e6, 3.0), "sdp4bit": (2e5, 3.1), "behind": (3e5, 3.3)}
    rows = [
        row(name, FIGURES | {"kernel_sent_bytes_per_step": sent, "heldout_loss": loss})
        for name, (sent, loss) in losses.items()
    ]
    write_race(tmp_path, *rows)
    for name, (sent, _) in losses.items():
        lines = [f'{{"step": {step}, "loss": 3.0, "sent_bytes": {sent}}}\n' for step in range(1, 5)]
        (tmp_path / name / "seed0" / "metrics.jsonl").write_text("".join(lines if counted or name == "zero" else []))
    # What islands send at the end for the mean of their weights.
    (tmp_path / "zero" / "seed0" / "summary.json").write_text('{"last_exchange_bytes": 1000000}')
    page = write_race_report(tmp_path).read_text()
    assert f"zero: 3.0000, {'9 MB' if counted else '8 MB'} sent" in page
    assert "Loss over bytes" in page and "bytes on: sdp4bit (loss 3.1000), zero (loss 3.0000)." in page
    assert page.count('class="dot beaten"') == 1


def test_a_plot_of_its_own_brings_its_colours_and_names_only_the_best_of_many() -> None:
    crowd = [EXACT, FEW, *(Outcome(f"behind {n}", 9e7 + n, 3.0) for n in range(20))]
    svg = frontier_svg(crowd)
    assert "http://www.w3.org/2000/svg" in svg.splitlines()[0] and "--c0" in svg
    assert ">few</text>" in svg and ">behind 0: 3.0000, 90 MB sent</title>" in svg
    assert 'class="name beaten"' not in svg and svg.count('class="dot beaten"') == 20


def test_the_method_that_is_soonest_at_a_rate_is_recommended(tmp_path: Path) -> None:
    def row(method: str, compute_s: float | None, steps: int = 1000, model: str = "tiny") -> dict[str, object]:
        # The more it computes, the less it sends.
        near = None if compute_s is None else {"steps": 9, "compute_s": compute_s, "sent_bytes": 1e9 / compute_s**2}
        shown = {
            "method": f"{method}, as shown",
            "text": method,
            "gap": 0.005,
            "gap_error": 0.002,
            "seeds": 3,
            "lr": 0.01,
            "loss": 2.0,
            "losses": {"0": 2.0},
            "sent_bytes": 1e6,
        }
        return {"model": model, "steps": steps, "methods": 31, "near": near} | shown

    recorded, short = tmp_path / "frontier.json", tmp_path / "short.json"
    other_model = row("short", 1.0, 999, "demo")
    recorded.write_text(json.dumps([other_model, row("slow", 5.0), row("never", None), row("fast", 2.0)]))
    assert recommended(1e6, recorded=recorded)[0] == "slow"
    name, measured = recommended(2e9, recorded=recorded)
    told = "of 3 of 31 methods, soonest within 1% of the exact loss at 2000 Mbit/s: +0.50% ± 0.20%; "
    assert name == "fast" and measured == f"{told}the model tiny, 1,000 steps, 3 seeds, --lr 0.01"
    # The model that is asked about, where it was measured.
    both = [row("fast", 2.0), row("demo's", 3.0, model="demo")]
    recorded.write_text(json.dumps(both))
    assert recommended(25e6, "demo", recorded)[0] == "demo's"
    name, measured = recommended(25e6, "125m", recorded)
    assert name == "fast" and measured.endswith("--lr 0.01; no run of the model 125m")
    short.write_text(json.dumps([other_model]))
    told = "recorded: demo, 999 steps; which is best shows from 1,000 steps on"
    assert recommended(20e6, recorded=short) == ("not known", told)
    assert best_rates("demo", recorded) == ("the model demo, 1,000 steps", {"demo's": 0.01})
    assert best_rates("125m", recorded)[1] == {"fast": 0.01} and best_rates("demo", short) == ("", {})
    assert "no runs" in recommended(20e6, recorded=tmp_path / "none")[1]


def test_a_short_axis_has_ticks_that_differ() -> None:
    labels = [text for _, text in Scale(0.0, 0.0043, 0.0, 300.0, whole=True).labels(6)]
    assert len(set(labels)) == len(labels) > 3 and "0.000000" not in labels
