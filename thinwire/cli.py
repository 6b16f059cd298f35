"""The front door: `thinwire COMMAND ...`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from thinwire.errors import ConfigError, ThinwireError, nearest

HELP = ("--help", "-h")
CHECKPOINTS = """usage: thinwire checkpoints RUN
       thinwire checkpoints verify RUN

Lists the checkpoints of a run directory: step, size, training loss of that step, ranks and strategy that saved it, and
whether its checksums were compared; of a run's other islands too. `verify` compares them all; the exit code is 1 where
one is damaged."""

COMPLETION = """usage: thinwire completion SHELL

Prints a script that completes commands and flags in SHELL, bash or zsh. To have it in every new shell:

  bash: thinwire completion bash > ~/.local/share/bash-completion/completions/thinwire
  zsh:  thinwire completion zsh > ~/.zfunc/_thinwire      (with ~/.zfunc in $fpath)"""


@dataclass(frozen=True)
class Command:
    """A command: what it does in a line, and the function that runs it, whose module is loaded only then.

    usage: printed where no argument or --help is given; empty for a command that prints its own.
    """

    line: str
    module: str
    function: str
    usage: str = ""

    def __call__(self, args: Sequence[str]) -> int:
        """Run it; the exit code."""
        if self.usage and (not args or args[0] in HELP):
            print(self.usage)
            return 0
        return getattr(import_module(self.module), self.function)(args)


COMMANDS: dict[str, Command] = {
    "train": Command(
        "Train a language model: here, on several workers, or as one of torchrun's.",
        "thinwire.launch.command", "run_train",
    ),
    "checkpoints": Command(
        "List what a run has saved, or verify it.", "thinwire.checkpoint.command", "run_checkpoints", CHECKPOINTS
    ),
    "compare": Command(
        "Race strategies against each other in one emulated slow network.", "thinwire.compare.command", "run_compare"
    ),
    "completion": Command(
        "Print a script that completes commands and flags: `completion bash`, `completion zsh`.",
        "thinwire.completion", "run_completion", COMPLETION,
    ),
    "explain": Command(
        "Say what each strategy would hold in memory and send, without running anything.",
        "thinwire.planner.command", "run_explain",
    ),
    "codecs": Command(
        "List the codecs that options take, with bits per element and traits.", "thinwire.codecs.command", "run_codecs"
    ),
    "generate": Command(
        "Let a run's last checkpoint, or a folder for transformers, continue a text.",
        "thinwire.convert.command", "run_generate",
    ),
    "export": Command(
        "Write a run's last checkpoint as a folder for transformers, and compare what it loads.",
        "thinwire.convert.command", "run_export",
    ),
    "import": Command(
        "Turn another program's checkpoint into a folder that `--model hf:DIR` starts from.",
        "thinwire.convert.command", "run_import",
    ),
    "lab": Command(
        "Run a command on every node of an emulated slow network, or measure its links.",
        "thinwire.lab.command", "run_lab",
    ),
}  # fmt: skip


def usage() -> str:
    lines = [f"  {name:<10} {command.line}" for name, command in COMMANDS.items()]
    commands = "\n".join(lines)
    return f"""usage: thinwire COMMAND [OPTIONS]

Train large language models on machines joined by slow links.

commands:
{commands}

`thinwire COMMAND --help` lists its options; `thinwire --version` prints the version."""


def run(args: Sequence[str]) -> int:
    """Run one command line; returns the exit code, raises ThinwireError."""
    command, rest = (args[0], args[1:]) if args else ("--help", [])
    if command in (*HELP, "help"):
        print(usage())
        return 0
    if command == "--version":
        from thinwire import __version__

        print(f"thinwire {__version__}")
        return 0
    if command not in COMMANDS:
        raise ConfigError(f"unknown command {command!r}{nearest(command, [*COMMANDS, '--help', '--version'])}")
    return COMMANDS[command](rest)


def main() -> None:
    """The console script; errors of the user are one message and an exit code, without a traceback."""
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except ThinwireError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"thinwire: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # Who read our output has gone, as `head` does; what is still in the buffer has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    sys.exit(code)
