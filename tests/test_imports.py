"""No command waits for what it does not use, and rooms import what the tables of rooms say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import thinwire
from thinwire.cli import COMMANDS
from thinwire.registry import STRATEGIES, class_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "thinwire"
# What no process does that starts so: import what takes seconds.
WITHOUT = """
import builtins, sys
HEAVY = {"torch", "numba", "safetensors", "transformers"}
ours = builtins.__import__

def refusing(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and name.partition(".")[0] in HEAVY:
        raise AssertionError(f"imports {name}")
    return ours(name, globals, locals, fromlist, level)

builtins.__import__ = refusing
from thinwire import cli
"""
# `--help` of every command in one process, which loads no arrays either.
HELP = """
HEAVY.add("numpy")
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
# In the same process: the checkpoints of a run are manifests of JSON.
CHECKPOINTS = """
from pathlib import Path
from tempfile import TemporaryDirectory
from thinwire.checkpoint.folder import Manifest, folder_of
with TemporaryDirectory() as run:
    folder = folder_of(Path(run) / "checkpoints", 500)
    folder.mkdir(parents=True)
    Manifest(500, 2.5, 4, [], {}, {"strategy": "zero"}).write(folder)
    assert cli.run(["checkpoints", run]) == 0
assert not HEAVY & set(sys.modules), sorted(HEAVY & set(sys.modules))
"""
# A line with a mistake of each kind that the words alone tell.
MISTAKES = """
words = "--strategy sdp5bit --inner zeroo --model tinny --lr -1 --sed 3 --data missing.txt --steps ten".split()
words += ["--mesh", "data=2,tenzor=2"]
try:
    cli.run(["train", *words, "--run-dir", "/dev/null/run"])
except cli.ConfigError as error:
    print(error)
"""


def test_help_waits_for_no_torch_and_for_no_other_command() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT + HELP + CHECKPOINTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"# ['{name}', '--help'] ended with 0" in done.stdout and f"usage: thinwire {name}" in done.stdout
    assert "zero on 4 rank(s), not verified  <- latest" in done.stdout
    rooms = {name: re.search(rf"# {name} loaded (.*)", done.stdout) for name in COMMANDS}
    for name, other in {"train": "compare", "lab": "training", "export": "training", "explain": "training"}.items():
        assert (found := rooms[name]) is not None and other not in found[1], done.stdout


def test_who_misspells_a_word_waits_for_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT + MISTAKES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for part in ("9 problems", "'sdp4bit'", "'zero'", "'tiny'", "--lr -1.0: must be above 0", "--seed", "missing.txt",
                 "--steps ten", "/dev/null is a file", "; nearest: tensor"):  # fmt: skip
        assert part in done.stdout, done.stdout


# The rest of the line is checked, too, which takes torch, but neither its checkpoints, its compiler nor numba.
BESIDE_A_MESH = """
import sys
from thinwire import cli
try:
    cli.run(["train", "--modl", "demo", "--stages", "3", "--sdp4bit.wieghts", "fp32", "--run-dir", "/dev/null/run"])
except cli.ConfigError as error:
    print(error)
slow = {"torch.distributed.checkpoint", "torch._dynamo", "numba", "thinwire.launch.agent"}
print("loaded", sorted(slow & set(sys.modules)))
"""


def test_who_misspells_a_flag_beside_a_mesh_waits_for_no_worker() -> None:
    done = subprocess.run([sys.executable, "-c", BESIDE_A_MESH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for part in ("4 problems", "--model'", "did you mean '--sdp4bit.weights'", "--stages 3", "/dev/null", "loaded []"):
        assert part in done.stdout, done.stdout


def test_every_class_of_a_strategy_is_a_name_of_thinwire() -> None:
    classes = {cls.__name__: cls for cls in map(class_of, STRATEGIES)}
    assert classes == {name: getattr(thinwire, name) for name in classes} and classes.keys() <= {*dir(thinwire)}
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        thinwire.Nonsense  # type: ignore[attr-defined]  # noqa: B018
    names: dict[str, object] = {}
    exec("from thinwire import *", names)
    assert {"SDP4Bit", "DiLoCo", "zero", "__version__"} <= names.keys()


# A method of islands that is a file and a row, in a process that has not loaded what runs it.
OWN_METHOD = """
import thinwire.methods.islands.gossip as toy
from thinwire.methods.front import around
from thinwire.registry import STRATEGIES, StrategyRow

class ToyIslands(toy.Gossip):
    pass

toy.ToyIslands = ToyIslands
STRATEGIES["toy"] = StrategyRow("islands.gossip:ToyIslands")
assert around.dispatch(ToyIslands) is around.dispatch(object)
assert around.dispatch(thinwire.ToyIslands) is not around.dispatch(object)
"""


def test_explaining_a_cluster_needs_no_trainer_and_a_method_brings_its_host() -> None:
    program = "import sys, thinwire.planner.table; print(*sys.modules)" + OWN_METHOD
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not [name for name in done.stdout.split() if name.startswith(("thinwire.training", "thinwire.launch"))]


# Of a function, without its docstring.
MOST_LINES = 80
# Rows of a table of rooms: the column in which their names stand.
TABLES = {"README.md": ("## Where things are", 1), "CONTRIBUTING.md": ("## The house", 2)}


def rooms_of(place: str) -> list[set[str]]:
    """The rooms in each row of a page's table; those with a * are independent of their row."""
    heading, column = TABLES[place]
    section = (ROOT / place).read_text().split(heading)[1].split("\n## ")[0]
    cells = [line.split("|")[column] for line in section.splitlines() if line.startswith("|")]
    names = [{name + star for name, star in re.findall(r"`(\w+)(?:\.py)?`(\*?)", cell)} for cell in cells]
    return [row for row in names if row]


def imported_rooms() -> dict[str, set[str]]:
    """The rooms that each room of the package imports, in functions too."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            others = (module.split(".")[1] for module in modules if module.startswith("thinwire."))
            found.setdefault(room, set()).update(other for other in others if other != room)
    rooms = found.keys() - {"__init__", "__main__"}
    return {room: found[room] & rooms for room in rooms}


@pytest.mark.parametrize("place", TABLES)
def test_a_row_of_rooms_imports_only_from_rows_above(place: str) -> None:
    rows, rooms = rooms_of(place), imported_rooms()
    row_of = {name.rstrip("*"): number for number, row in enumerate(rows) for name in row}
    independent = {name.rstrip("*") for row in rows for name in row if name.endswith("*")}
    assert row_of.keys() <= rooms.keys(), row_of.keys() - rooms.keys()
    if place == "CONTRIBUTING.md":
        assert row_of.keys() == rooms.keys()
    for room in row_of:
        below = {other for other in rooms[room] & row_of.keys() if row_of[other] > row_of[room]}
        beside = {other for other in rooms[room] & independent if room in independent and row_of[other] == row_of[room]}
        assert not below | beside, f"{room} imports {sorted(below | beside)}"


def test_a_class_name_stands_for_one_thing() -> None:
    found: dict[str, list[str]] = {}
    aliases: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        tree, place = ast.parse(path.read_text()), str(path.relative_to(ROOT))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(place)
        for node in tree.body:
            # What is Any at run time stands for the class that type checkers see.
            named = node.targets[0] if isinstance(node, ast.Assign) and ast.unparse(node.value) != "Any" else None
            if isinstance(named, ast.Name):
                aliases.setdefault(named.id, []).append(place)
    assert not {name: places for name, places in found.items() if len(places) > 1}
    assert not {name: (found[name], aliases[name]) for name in found.keys() & aliases}


def test_no_function_is_longer_than_its_limit() -> None:
    found: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                described = ast.get_docstring(node, clean=False) is not None
                last = (node.body[0].end_lineno or 0) - node.body[0].lineno + 1 if described else 0
                found[f"{path.relative_to(ROOT)} {node.name}"] = (node.end_lineno or 0) - node.lineno + 1 - last
    assert not {name: num for name, num in found.items() if num > MOST_LINES}


def test_files_import_each_other_in_no_circle() -> None:
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    imported: dict[str, set[str]] = {}
    for name, path in paths.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}": node.module for alias in node.names}
                found |= {longer if longer in paths else shorter for longer, shorter in names.items()}
        # A package is loaded before its modules whatever it imports.
        imported[name] = {one for one in found & paths.keys() if one != name and not name.startswith(f"{one}.")}
    TopologicalSorter(imported).prepare()
