"""A run under a plan looks at its links again, and names those that have changed by the ranks of the plan."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.collectives import Topology
from thinwire.cost import Network
from thinwire.errors import ConfigError
from thinwire.report.page import plan_table
from thinwire.report.run import read_run
from thinwire.run.config import TrainConfig, range_errors
from thinwire.training import planned
from thinwire.training.planned import Planned, other_nodes, read_plan
from thinwire.training.reporter import Reporter

HOSTS = ["a", "b", "c"]
RANKS: Any = SimpleNamespace(rank=0, world_size=3, broadcast_=lambda x: x, wait=lambda x: x)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan with links of 100 Mbit/s, made elsewhere; the run's directory is a folder beside it."""
    monkeypatch.setattr(planned, "all_on_this_machine", lambda world_size: False)
    monkeypatch.setattr(planned, "of_all_ranks", lambda mine, what: HOSTS)
    monkeypatch.setattr(planned, "told_by_first", lambda mine, what: mine)
    rates = [[None if a == b else 12.5e6 for b in range(3)] for a in range(3)]
    path, run_dir = tmp_path / "plan.json", tmp_path / "run"
    # Nothing travels between 1 and 2, and little from 2 to 0.
    carried = [[0.0, 5e6, 5e6], [5e6, 0.0, 0.0], [1e3, 0.0, 0.0]]
    path.write_text(json.dumps(
        {"rates": rates, "order": [0, 2, 1], "predicted": {"step_s": 1.0}, "link_bytes": carried}
    ))  # fmt: skip
    run_dir.mkdir()
    (run_dir / "summary.json").write_text('{"step_s": 1.5}')
    return path


def config(path: Path, run_dir: Path | None = None, **more: Any) -> TrainConfig:
    return TrainConfig(plan=str(path), run_dir=str(run_dir or path.parent / "run"), workers=3, **more)


def test_links_that_have_changed_are_named(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Places 0 and 1 are ranks 0 and 2. The others are a fifth slower.
    now = tuple(tuple(1.25e6 if {a, b} != {0, 2} else 10e6 for b in range(3)) for a in range(3))
    asked: list[Any] = []
    machines: list[Topology] = []

    def rates(comm: Any, wanted: Any, grid: Topology) -> Network:
        asked.append(wanted)
        machines.append(grid)
        return Network((0, 1, 2), now, ((0.0,) * 3,) * 3)

    monkeypatch.setattr(planned, "measured_rates", rates)
    warnings: list[str] = []
    found = Planned(config(plan, order=(0, 2, 1)), RANKS, warnings.append)
    assert len(warnings) == 1 and "the link 0 to 2 has drifted since the plan was made: 100 Mbit/s" in warnings[0]
    assert [list(each) for each in found.content["drifted"]] == [[0, 2, 12.5e6, 1.25e6, 0.0, 0.0]]
    # Only what the plan uses is measured, by the run's ranks.
    assert asked == [{(0, 1), (0, 2), (1, 0), (2, 0)}]
    # Ranks 0 and 1, places 0 and 2, are on one node.
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"nodes": [0, 0, 1]}))
    Planned(config(plan, order=(0, 2, 1)), RANKS, warnings.append)
    assert asked[1] == {(0, 1), (1, 0)}
    # Machines are those of the plan, whatever the run takes for a node.
    assert machines == [Topology(3, 1), Topology(2, 1)]
    page = plan_table(read_run(plan.parent / "run"))
    assert "the border between computing and waiting is not predicted" in page
    assert "0 to 2" in page and "-90 %" in page
    assert "<td>the step (step_s)</td><td>1 s</td><td>1.50 s</td><td>50 % more</td>" in page


def test_a_run_names_a_plan_whose_rates_are_too_low(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planned, "measured_rates", lambda comm, wanted, grid: Network.even(3, 12.5e6))
    warnings: list[str] = []
    for share, told in ((0.24, 1), (0.9, 0)):
        warnings.clear()
        plan.write_text(json.dumps(json.loads(plan.read_text()) | {"core_share": share}))
        Planned(config(plan), RANKS, warnings.append)
        assert sum("a rank got a core for 24% of the time" in each for each in warnings) == len(warnings) == told
        reporter = Reporter(config(plan), first_step=0, world_size=3, uncompressed_bytes=0.0, rows=[])
        reporter._say_plan(0.5)
        reporter.close()
        printed = capsys.readouterr().out
        assert "the plan predicted 1 s a step, and it took 0.5 s in the median: 50% less" in printed
        assert printed.count("and the rates are too low); part by part") == told


def test_a_link_over_another_way_is_named(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All links carry what was planned; that from 0 to 2 is 75 ms longer, and another by what a busy machine adds."""
    delays = [[0.0, 5e-3, 80e-3], [5.9e-3, 0.0, 5e-3], [5e-3, 5e-3, 0.0]]
    links = Network((0, 1, 2), ((12.5e6,) * 3,) * 3, tuple(map(tuple, delays)))
    monkeypatch.setattr(planned, "measured_rates", lambda comm, wanted, grid: links)
    content = json.loads(plan.read_text()) | {"delays_s": [[5e-3] * 3] * 3}
    warnings: list[str] = []
    # Two messages of a step are late by 15% of it, one message by 7.5%; 100 by 9%, which is no more than jitter.
    for number, names in ((2, 1), (1, 1), (0, 0)):
        warnings.clear()
        numbers = [[0, 0, number], [100, 0, 0], [0, 0, 0]]
        plan.write_text(json.dumps(content | {"link_messages": numbers}))
        found = Planned(config(plan), RANKS, warnings.append).content["drifted"]
        assert len(warnings) == len(found) == names
    plan.write_text(json.dumps(content | {"link_messages": [[0, 0, 2], [0] * 3, [0] * 3]}))
    Planned(config(plan), RANKS, warnings.append)
    assert "the link 0 to 2 has drifted" in warnings[0] and "100 now, 5 ms planned, 80 now" in warnings[0]
    page = plan_table(read_run(plan.parent / "run"))
    assert "0 to 2" in page and "0 %, 5 to 80 ms of delay" in page


def test_a_fresh_plan_and_loopback_are_not_measured(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "measured_rates", lambda comm, wanted, grid: pytest.fail("measured"))
    own = plan.rename(plan.parent / "run" / "plan.json")
    assert Planned(config(own, own.parent), RANKS, print).is_fresh
    monkeypatch.setattr(planned, "all_on_this_machine", lambda world_size: True)
    assert Planned(config(own.rename(plan)), RANKS, print).content["drifted"] == []


def test_a_plan_of_other_nodes_is_refused(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "measured_rates", lambda comm, wanted, grid: Network.even(3, 12.5e6))
    content = json.loads(plan.read_text()) | {"nodes": [0, 1, 2], "names": ["a", "c", "b"]}
    plan.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"made for the nodes a, c, b, .* on a, b, c; nearest: start the nodes in th"):
        Planned(config(plan), RANKS, print)
    # Places 1 and 2 are ranks 2 and 1. Nodes that share a name are emulated, and some plans have no names.
    assert not Planned(config(plan, order=(0, 2, 1)), RANKS, print).content["drifted"]
    assert not other_nodes(content, ["d", "d", "d"]) and not other_nodes({**content, "names": ["d"] * 3}, HOSTS)
    assert not other_nodes({"nodes": [0, 1, 2]}, HOSTS) and other_nodes(content, ["a", "c", "d"])
    assert not other_nodes({"nodes": [0, 0, 0], "names": ["d"] * 3}, ["a"] * 3)
    # A run that goes on elsewhere has its plan in its own folder.
    warnings: list[str] = []
    own = plan.rename(plan.parent / "run" / "plan.json")
    assert Planned(config(own, own.parent), RANKS, warnings.append).is_fresh
    assert len(warnings) == 1 and "made for the nodes a, c, b" in warnings[0]


def test_what_is_no_plan_of_this_run_is_refused(plan: Path) -> None:
    with pytest.raises(ConfigError, match="of 3 ranks, and the run has 2"):
        read_plan(TrainConfig(plan=str(plan), workers=2))
    with pytest.raises(ConfigError, match="no plan can be read there"):
        read_plan(TrainConfig(plan=str(plan.parent / "none.json")))
    (broken := plan.parent / "broken.json").write_text('{"rates": [[null]], "predicted": {}, "link_bytes": [[0]]}')
    with pytest.raises(ConfigError, match="no plan can be read there"):
        read_plan(TrainConfig(plan=str(broken)))
    for order, near in (((0, 1), "0 1 2"), ((1, 0, 2), "0 1 2"), ((0, 2, 2), "0 2 1")):
        (told,) = range_errors(TrainConfig(order=order, workers=3))
        assert told.endswith(f"nearest: --order {near}")
