"""The command line: `thinwire COMMAND ...`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from thinwire.errors import ConfigError, ThinwireError, nearest

HELP = ("--help", "-h")


@dataclass(frozen=True)
class Command:
    """A command: its description, and the places of the functions that run it and read its flags.

    Their modules are loaded only when the command is used.
    """

    line: str
    run: str
    flags: str

    def __call__(self, args: Sequence[str]) -> int:
        """Run the command. Return the exit code."""
        return loaded(self.run)(args)


def loaded(place: str) -> Callable[..., Any]:
    """The function at `place`, written `module:function`."""
    module, _, function = place.partition(":")
    return getattr(import_module(module), function)


COMMANDS: dict[str, Command] = {
    "train": Command(
        "Train a language model: here, on several workers, or as one of torchrun's.",
        "thinwire.launch.command:run_train", "thinwire.launch.line:command_line",
    ),
    "checkpoints": Command(
        "List what a run has saved, or verify it.",
        "thinwire.listings:run_checkpoints", "thinwire.listings:checkpoints_line",
    ),
    "report": Command(
        "Write the report.html of a run that was killed before it could, from the steps that it has recorded.",
        "thinwire.listings:run_report", "thinwire.listings:report_line",
    ),
    "compare": Command(
        "Race strategies against each other in one emulated slow network.",
        "thinwire.compare.command:run_compare", "thinwire.compare.options:command_line",
    ),
    "completion": Command(
        "Print a script that completes commands and flags: `completion bash`, `completion zsh`.",
        "thinwire.completion:run_completion", "thinwire.completion:command_line",
    ),
    "explain": Command(
        "Say what each strategy would hold in memory and send, without running anything.",
        "thinwire.planner.command:run_explain", "thinwire.planner.options:command_line",
    ),
    "calibrate": Command(
        "Measure what machines compute, pack and send, and the links between them.",
        "thinwire.launch.calibrate:run_calibrate", "thinwire.launch.calibrate:calibrate_line",
    ),
    "plan": Command(
        "Find the fastest way to train on machines that were measured.",
        "thinwire.compare.verify:run_plan", "thinwire.planner.plan_options:plan_line",
    ),
    "tune": Command(
        "Measure some ways to train in the lab, and correct the plan by what they take.",
        "thinwire.compare.tune:run_tune", "thinwire.planner.plan_options:tune_line",
    ),
    "codecs": Command(
        "List the codecs that options take, with bits per element and traits.",
        "thinwire.listings:run_codecs", "thinwire.listings:codecs_line",
    ),
    "generate": Command(
        "Let a run's last checkpoint, or a folder for transformers, continue a text.",
        "thinwire.convert.command:run_generate", "thinwire.convert.options:generate_line",
    ),
    "expand": Command(
        "Make a wider and deeper model that computes the same as a trained one.",
        "thinwire.expansion.command:run_expand", "thinwire.expansion.options:expand_line",
    ),
    "export": Command(
        "Write a run's last checkpoint as a folder for transformers, and compare what it loads.",
        "thinwire.convert.command:run_export", "thinwire.convert.options:export_line",
    ),
    "import": Command(
        "Turn another program's checkpoint into a folder that `--model hf:DIR` starts from.",
        "thinwire.convert.command:run_import", "thinwire.convert.options:import_line",
    ),
    "prune": Command(
        "Set the least important weights of a trained model, of its experts above all, to zero.",
        "thinwire.pruning.command:run_prune", "thinwire.pruning.options:prune_line",
    ),
    "lab": Command(
        "Run a command on every node of an emulated slow network, or measure its links.",
        "thinwire.lab.command:run_lab", "thinwire.lab.command:command_line",
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
    """Run one command line. Return the exit code; raises ThinwireError."""
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
    """The console script. A user's error ends in one message and an exit code, without a traceback."""
    if sys.argv[1:2] == ["train"]:
        # A worker needs no BLAS of numpy, which would reserve 73 MB for threads when it is loaded.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
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
