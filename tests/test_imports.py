"""No command waits for what it does not use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import thinwire
from thinwire.registry import STRATEGIES, class_of

# A bare package in the place of thinwire: what `import thinwire` itself brings is not what a command asks for.
PROGRAM = """
import sys, types
bare = types.ModuleType("thinwire")
bare.__path__, bare.__version__ = [sys.argv[1]], "0"
sys.modules["thinwire"] = bare
from thinwire import cli
try:
    cli.run(sys.argv[2:])
except SystemExit:
    pass
print(*sys.modules, file=sys.stderr)
"""
HEAVY = {"torch", "numba", "numpy", "safetensors", "transformers", "rich"}


@pytest.mark.parametrize(
    ("command", "other"),
    [
        ("--help", "tyro"),
        ("--version", "tyro"),
        ("checkpoints --help", "tyro"),
        ("lab --help", "thinwire.training"),
        ("compare --help", "thinwire.methods"),
        ("export --help", "thinwire.training"),
        ("import --help", "thinwire.training"),
        ("generate --help", "thinwire.training"),
        ("completion --help", "tyro"),
    ],
)
def test_help_imports_neither_torch_nor_what_another_command_needs(command: str, other: str) -> None:
    (folder,) = map(Path, thinwire.__path__)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), *command.split()], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout, done.stderr
    loaded = set(done.stderr.split())
    assert not loaded & {*HEAVY, other}, sorted(loaded)


def test_every_class_of_a_strategy_is_a_name_of_thinwire() -> None:
    classes = {cls.__name__: cls for cls in map(class_of, STRATEGIES)}
    assert classes == {name: getattr(thinwire, name) for name in classes} and classes.keys() <= {*dir(thinwire)}
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        thinwire.Nonsense  # type: ignore[attr-defined]  # noqa: B018
    names: dict[str, object] = {}
    exec("from thinwire import *", names)
    assert {"SDP4Bit", "DiLoCo", "zero", "__version__"} <= names.keys()


def test_explaining_a_cluster_needs_no_trainer() -> None:
    program = "import sys, thinwire.planner.command; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not [name for name in done.stdout.split() if name.startswith(("thinwire.training", "thinwire.launch"))]
