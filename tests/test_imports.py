"""No command waits for what it does not use."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import thinwire
from thinwire.cli import COMMANDS
from thinwire.registry import STRATEGIES, class_of

# `--help` of every command in one process, which can't import what takes seconds.
PROGRAM = """
import builtins, sys
HEAVY = {"torch", "numba", "numpy", "safetensors", "transformers"}
ours = builtins.__import__

def refusing(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and name.partition(".")[0] in HEAVY:
        raise AssertionError(f"imports {name}")
    return ours(name, globals, locals, fromlist, level)

builtins.__import__ = refusing
from thinwire import cli
for words in (["--version"], ["--help"], *([name, "--help"] for name in cli.COMMANDS)):
    loaded = set(sys.modules)
    try:
        code = cli.run(words)
    except SystemExit as end:
        code = end.code
    print(f"\\n# {words} ended with {code or 0}")
    rooms = {name.split(".")[1] for name in set(sys.modules) - loaded if name.startswith("thinwire.")}
    print(f"# {words[0]} loaded {sorted(rooms)}")
assert not HEAVY & set(sys.modules), sorted(HEAVY & set(sys.modules))
"""


def test_help_waits_for_no_torch_and_for_no_other_command() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"# ['{name}', '--help'] ended with 0" in done.stdout and f"usage: thinwire {name}" in done.stdout
    rooms = {name: re.search(rf"# {name} loaded (.*)", done.stdout) for name in COMMANDS}
    for name, other in {"train": "compare", "lab": "training", "export": "training", "explain": "training"}.items():
        assert (found := rooms[name]) is not None and other not in found[1], done.stdout


def test_every_class_of_a_strategy_is_a_name_of_thinwire() -> None:
    classes = {cls.__name__: cls for cls in map(class_of, STRATEGIES)}
    assert classes == {name: getattr(thinwire, name) for name in classes} and classes.keys() <= {*dir(thinwire)}
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        thinwire.Nonsense  # type: ignore[attr-defined]  # noqa: B018
    names: dict[str, object] = {}
    exec("from thinwire import *", names)
    assert {"SDP4Bit", "DiLoCo", "zero", "__version__"} <= names.keys()


def test_explaining_a_cluster_needs_no_trainer() -> None:
    program = "import sys, thinwire.planner.table; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not [name for name in done.stdout.split() if name.startswith(("thinwire.training", "thinwire.launch"))]
