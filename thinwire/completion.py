"""Shell completion: every command with its flags, as tyro writes it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Union

import tyro

from thinwire.cli import COMMANDS, Command, loaded
from thinwire.errors import ConfigError, Problems, nearest
from thinwire.flags import CommandLine

SHELLS = ("bash", "zsh")


@dataclass(frozen=True)
class CompletionLine:
    """Print a script that completes commands and flags in a shell. To have it in every new one:

    bash: thinwire completion bash > ~/.local/share/bash-completion/completions/thinwire

    zsh: thinwire completion zsh > ~/.zfunc/_thinwire (with ~/.zfunc in $fpath)
    """

    shell: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SHELL")]
    """bash or zsh."""


def command_line() -> CommandLine:
    """The flags of `thinwire completion`."""
    return CommandLine("thinwire completion", CompletionLine)


def run_completion(args: Sequence[str]) -> int:
    """Print the script for the shell that the arguments name. Raises ConfigError for another shell."""
    problems = Problems()
    stated = command_line().read(args, problems)[""]
    problems.raise_any()
    shell = stated["shell"]
    if shell not in SHELLS:
        raise ConfigError(f"completion {shell}: no such shell{nearest(shell, SHELLS)}")
    choice: Any = Union[tuple(subcommand(name, command) for name, command in COMMANDS.items())]  # noqa: UP007
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        tyro.cli(choice, args=["--tyro-print-completion", shell], prog="thinwire")
    print(printed.getvalue().rstrip())
    return 0


def subcommand(name: str, command: Command) -> Any:
    """A command with its flags, in tyro's form."""
    line = loaded(command.flags)()
    line.load_tables()
    return Annotated[line.flags(), tyro.conf.subcommand(name, description=command.line, prefix_name=False)]
