"""Shell completion: every command with its flags, as tyro writes it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import make_dataclass
from typing import Annotated, Any, Union

import tyro

from thinwire.cli import COMMANDS
from thinwire.compare.options import command_line as of_compare
from thinwire.convert.options import ExportConfig, GenerateConfig, ImportConfig
from thinwire.errors import ConfigError, nearest
from thinwire.flags import CommandLine
from thinwire.lab.command import command_line as of_lab
from thinwire.planner.options import command_line as of_explain
from thinwire.training.settings import command_line as of_train

SHELLS = ("bash", "zsh")


def run_completion(args: Sequence[str]) -> int:
    """Print the script for the shell that the arguments name. Raises ConfigError for another shell."""
    shell = " ".join(args)
    if shell not in SHELLS:
        raise ConfigError(f"completion {shell}: no such shell{nearest(shell, SHELLS)}")
    choice: Any = Union[tuple(subcommand(name, command.line) for name, command in COMMANDS.items())]  # noqa: UP007
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        tyro.cli(choice, args=["--tyro-print-completion", shell], prog="thinwire")
    print(printed.getvalue().rstrip())
    return 0


def subcommand(name: str, line: str) -> Any:
    """A command with its flags, in tyro's form."""
    lines = {"train": of_train, "compare": of_compare, "explain": of_explain, "lab": of_lab}
    classes = {"export": ExportConfig, "import": ImportConfig, "generate": GenerateConfig}
    if name in lines:
        flags = lines[name]().flags()
    elif name in classes:
        flags = CommandLine(f"thinwire {name}", {"": classes[name]}).flags()
    else:
        flags = make_dataclass("Flags", [])
    return Annotated[flags, tyro.conf.subcommand(name, description=line, prefix_name=False)]
