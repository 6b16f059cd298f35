"""Files that a plan must not write are refused before anything is written, and names may have spaces around them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planner.machines import FAST, machine
from thinwire.compare.verify import run_plan
from thinwire.errors import ConfigError

DEFAULT = ["--model", "tiny", "--seq-len", "64", "--tokens-per-step", "512"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--out machine.toml", "the prediction of --out machine.toml: is the file of --machine machine.json, "
         "machine.json; nearest: --out machine-plan.toml"),
        ("--trace machine.json", "--trace machine.json: is the file of --machine machine.json, machine.json; nearest: "
         "--trace machine-trace.json"),
        ("--out plan.json", "nearest: --out plan.toml"),
        ("--out machine.json", "nearest: --out machine-plan.toml"),
        ("--trace plan.json", "nearest: --trace plan-trace.json"),
        ("--trace ./link.json", "--trace link.json: is the file of --machine machine.json"),
        ("--trace nosuchdir/t.json", "--trace nosuchdir/t.json: its folder does not exist; nearest: --trace t.json"),
        ("--out nosuchdir/p.toml", "--out nosuchdir/p.toml: its folder does not exist; nearest: --out p.toml"),
        ("--out .", "--out .: is a folder; nearest: --out plan.toml"),
        ("--out folder.toml", "the prediction of --out folder.toml: folder.json is a folder"),
    ],
)  # fmt: skip
def test_a_plan_takes_the_place_of_no_other_file(
    flags: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("machine.json").write_text(machine(FAST).to_json())
    Path("link.json").symlink_to("machine.json")
    Path("folder.json").mkdir()
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(ConfigError) as caught:
        run_plan([*DEFAULT, "--strategies", "ddp", *flags.split()])
    assert said in str(caught.value) and caught.value.exit_code == 2
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}


def test_names_of_strategies_may_have_spaces_around_them(tmp_path: Path) -> None:
    file, out = tmp_path / "machine.json", tmp_path / "plan.toml"
    file.write_text(machine(FAST).to_json())
    files = ["--machine", str(file), "--out", str(out)]
    assert run_plan([*DEFAULT, *files, "--strategies", " ddp, zero ,", "--stages", "1"]) == 0
    assert out.is_file()
