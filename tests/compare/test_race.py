"""Whole races through the command line: an emulated network, real trainings, an outside program, signals."""

from __future__ import annotations

import json
import math
import re
import signal
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from tests.training.commands import CommandRunner, children, finish, is_running
from tests.workers import Command
from thinwire.lab import why_unavailable

REASON = why_unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no emulated network here: {REASON}")
NUM_STEPS = 12
PEER_BYTES = 200_000
PEER = f"""
import json, os, pathlib, socket, sys, time
run_dir, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    link = socket.create_server(address).accept()[0]
    run_dir.mkdir(parents=True)
else:
    while True:
        try:
            link = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.05)
for step in range(1, steps + 1):
    start = time.perf_counter()
    if rank == 0:
        link.sendall(b"?")
        left = {PEER_BYTES}
        while left:
            left -= len(link.recv(left))
        with (run_dir / "metrics.jsonl").open("a") as file:
            step_s = time.perf_counter() - start
            values = dict(step=step, loss=9.0 - step, tokens=64 * step, step_s=step_s, sent_bytes=1)
            file.write(json.dumps(values) + "\\n")
    else:
        link.recv(1)
        link.sendall(bytes({PEER_BYTES}))
    time.sleep(0.06)
if rank == 0:
    (run_dir / "summary.json").write_text(json.dumps(dict(heldout_loss=0.5)))
"""
BAD = "import sys; print('no luck today'); sys.exit(4)"


class Races(CommandRunner):
    """Starts `thinwire compare` with a tiny model below one temporary folder."""

    def race(self, name: str, strategies: str, *flags: str, rounds: int = 2, **more: object) -> Command:
        asked = {"--strategies": strategies, "--lab": "nodes=2,rate=20mbit", "--rounds": str(rounds), "--out": name}
        race = [*chain.from_iterable(asked.items()), *flags]
        train = self.flags(name, workers=None, run_dir=None, sample_tokens=None, steps=NUM_STEPS, **more)
        return self.start("compare", *race, "--", *train)

    def result(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name / "compare.json").read_text())

    def losses(self, race: str, contestant: str) -> list[tuple[int, float]]:
        return [(line["step"], line["loss"]) for line in self.metrics(f"{race}/{contestant}/seed0")]


@pytest.fixture(scope="module")
def races(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Races]:
    races = Races(tmp_path_factory.mktemp("races"))
    (races.folder / "peer.py").write_text(PEER)
    yield races
    races.close()


@pytest.fixture(scope="module")
def whole(races: Races) -> str:
    """A race of two strategies, a program that fails and one that works; its standard output."""
    commands = f'cmd:bad={sys.executable} -c "{BAD}" {{run_dir}} {{steps}},cmd:peer={sys.executable} peer.py'
    strategies = f"zero,q=sdp4bit[inter_gradients=int8/64],{commands} {{run_dir}} {{steps}}"
    code, out, err = finish(races.race("whole", strategies, "--target-loss", "auto", "--timed-steps", "3"))
    assert code == 0, err
    return out


@pytest.fixture
def rows(races: Races, whole: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in races.result("whole")["contestants"]}


def test_everyone_has_a_row_and_a_failure_its_reason(races: Races, whole: str, rows: dict[str, Any]) -> None:
    assert {name: row["status"] for name, row in rows.items()} == {
        "zero": "finished", "q": "finished", "bad": "failed", "peer": "finished",
    }  # fmt: skip
    assert re.fullmatch(r"rank [01] ended with 4: no luck today", rows["bad"]["reason"])
    assert rows["bad"]["reason"] in whole and rows["q"]["options"] == {"inter_gradients": "int8/64"}
    result = races.result("whole")
    assert result["reference"] == "zero" and "ddp-bf16 is not in the race" in whole
    assert rows["peer"]["is_whole"]
    for name in ("zero", "q", "peer"):
        assert rows[name]["seeds"][0]["num_steps"] == NUM_STEPS
        assert rows[name]["seeds"][0]["num_timed_steps"] == (3 if name == "peer" else 6)
    assert "3 to 6 of 12 steps were timed" in whole
    assert not list((races.folder / "whole").rglob("step-*")), "checkpoints that nothing goes on from"


def test_all_see_the_same_tokens_in_the_same_order(races: Races, whole: str) -> None:
    zero, quantised = races.losses("whole", "zero"), races.losses("whole", "q")
    assert [step for step, _ in zero] == [step for step, _ in quantised] == list(range(1, NUM_STEPS + 1))
    assert zero[0] == quantised[0], "the first loss is that of the same weights on the same tokens"
    assert zero[-1] != quantised[-1]


def test_bytes_of_the_kernel_are_those_of_the_meter_and_headers(rows: dict[str, Any]) -> None:
    zero, quantised = rows["zero"]["mean"], rows["q"]["mean"]
    # So short are these steps that, on a busy machine, up to one may be counted that is not among the timed.
    more = 1 / rows["zero"]["seeds"][0]["num_timed_steps"]
    assert 0.97 - more < zero["kernel_sent_bytes_per_step"] / zero["sent_bytes_per_step"] < 1.08 + more
    assert 0.8 < quantised["kernel_sent_bytes_per_step"] / quantised["sent_bytes_per_step"] < 1.3
    # One of two nodes sends, so the mean over nodes is half, and the worst is all of it.
    peer = rows["peer"]["mean"]
    # A busy machine answers late, and what had arrived is sent again: less than a third step, of those that are timed.
    assert 1.0 < peer["kernel_sent_bytes_per_step_worst_node"] / PEER_BYTES < 1.25
    assert 0.5 < peer["kernel_sent_bytes_per_step"] / PEER_BYTES < 0.65
    assert rows["q"]["ratio"]["kernel_sent_bytes_per_step"] < 0.3


def test_a_timed_step_takes_what_the_link_allows(rows: dict[str, Any]) -> None:
    for name in ("zero", "peer"):
        mean = rows[name]["mean"]
        link_s = 8 * mean["kernel_sent_bytes_per_step_worst_node"] / 20e6
        assert mean["bound_s"] >= 0.95 * link_s
        # The bucket that holds back a link lets a short burst pass, which is a good part of such small steps.
        assert mean["step_s"] > 0.4 * link_s


def test_figures_follow_from_the_metrics(races: Races, rows: dict[str, Any]) -> None:
    result, zero = races.result("whole"), rows["zero"]
    losses = [loss for _, loss in races.losses("whole", "zero")]
    assert result["smooth"] == NUM_STEPS
    target = zero["seeds"][0]["target_loss"]
    assert target == math.ceil(100 * sum(losses) / NUM_STEPS) / 100 and zero["seeds"][0]["target_step"] == NUM_STEPS
    assert zero["mean"]["minutes_to_target"] == pytest.approx(NUM_STEPS * zero["mean"]["step_s"] / 60)
    assert zero["mean"]["tokens_per_s"] == pytest.approx(64 / zero["mean"]["step_s"])
    assert zero["mean"]["heldout_loss"] == races.summary("whole/zero/seed0")["heldout_loss"]
    assert rows["peer"]["mean"]["heldout_loss"] == 0.5 and rows["peer"]["mean"]["peak_rss_bytes"] is None
    assert zero["mean"]["peak_rss_bytes"] > 5e7 and zero["ratio"]["step_s"] == 1.0
    assert result["compute_alone_s"] > 0 and not result["compute_alone_failed"]
    timed = [line["step_s"] for line in races.metrics("whole/peer/seed0") if line["step"] in (3, 4, 5)]
    assert rows["peer"]["mean"]["step_s"] == sorted(timed)[1]


def test_the_page_needs_nothing_else(races: Races, whole: str) -> None:
    page = (races.folder / "whole" / "compare.html").read_text()
    assert "compare.html" in whole
    pictures = [ElementTree.fromstring(picture) for picture in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)]
    lines = [mark for picture in pictures for mark in picture.iter("path") if "line" in (mark.get("class") or "")]
    assert len(lines) == 9, "three contestants over tokens, over time, and less the reference"
    for words in (
        "no luck today",
        "nodes=2,rate=20mbit",
        "thinwire compare --strategies",
        "inter_gradients=int8/64",
        "1.000x",
    ):
        assert words in page
    assert not re.search(r"(?:src|href)=|url\(|@import|<script|nan", page)


def test_an_interrupted_race_goes_on_to_the_same_end(races: Races, whole: str) -> None:
    flags = ("--no-bound", "--target-loss", "5.0")
    process = races.race("stopped", "q=sdp4bit[inter_gradients=int8/64]", *flags, rounds=1)
    races.await_steps("stopped/q/seed0", process, num_steps=2)
    helpers = [pid for child in children(process.pid) for pid in (child, *children(child))]
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130 and "Traceback" not in err, err
    assert "stopped by SIGINT; the same command with --resume goes on" in out
    assert helpers and not any(map(is_running, helpers))
    (row,) = races.result("stopped")["contestants"]
    assert row["status"] == "unfinished" and 2 <= row["seeds"][0]["num_steps"] < NUM_STEPS
    assert "stopped by SIGINT" in (races.folder / "stopped" / "compare.html").read_text()

    code, out, err = finish(races.race("stopped", "q=sdp4bit[inter_gradients=int8/64]", "--resume", *flags, rounds=1))
    assert code == 0, err
    assert races.losses("stopped", "q") == races.losses("whole", "q")
    (row,) = races.result("stopped")["contestants"]
    assert row["status"] == "finished" and not races.result("stopped")["stopped"]
    assert row["mean"]["heldout_loss"] == races.summary("whole/q/seed0")["heldout_loss"]
    assert not (races.folder / "stopped" / "compute").exists()
