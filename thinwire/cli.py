"""The front door: `thinwire COMMAND ...`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence

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


def train(args: Sequence[str]) -> int:
    """Train a language model: here, on several workers, or as one of torchrun's."""
    from thinwire.launch.command import run_train

    return run_train(args)


def compare(args: Sequence[str]) -> int:
    """Race strategies against each other in one emulated slow network."""
    from thinwire.compare.command import run_compare

    return run_compare(args)


def lab(args: Sequence[str]) -> int:
    """Run a command on every node of an emulated slow network, or measure its links."""
    from thinwire.lab.command import run_lab

    return run_lab(args)


def checkpoints(args: Sequence[str]) -> int:
    """List what a run has saved, or verify it."""
    if not args or args[0] in HELP:
        print(CHECKPOINTS)
        return 0
    from thinwire.checkpoint.command import run_checkpoints

    return run_checkpoints(args)


def explain(args: Sequence[str]) -> int:
    """Say what each strategy would hold in memory and send, without running anything."""
    from thinwire.planner.command import run_explain

    return run_explain(args)


def codecs(args: Sequence[str]) -> int:
    """List the codecs that options take, with bits per element and traits."""
    from thinwire.codecs.command import run_codecs

    return run_codecs(args)


def export(args: Sequence[str]) -> int:
    """Write a run's last checkpoint as a folder for transformers, and compare what it loads."""
    from thinwire.convert.command import run_export

    return run_export(args)


def import_checkpoint(args: Sequence[str]) -> int:
    """Turn another program's checkpoint into a folder that `--model hf:DIR` starts from."""
    from thinwire.convert.command import run_import

    return run_import(args)


def generate(args: Sequence[str]) -> int:
    """Let a run's last checkpoint, or a folder for transformers, continue a text."""
    from thinwire.convert.command import run_generate

    return run_generate(args)


def completion(args: Sequence[str]) -> int:
    """Print a script that completes commands and flags: `completion bash`, `completion zsh`."""
    if not args or args[0] in HELP:
        print(COMPLETION)
        return 0
    from thinwire.completion import script

    print(script(args, {name: (command.__doc__ or "").splitlines()[0] for name, command in COMMANDS.items()}))
    return 0


# A command is one row.
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "checkpoints": checkpoints,
    "compare": compare,
    "completion": completion,
    "explain": explain,
    "codecs": codecs,
    "generate": generate,
    "export": export,
    "import": import_checkpoint,
    "lab": lab,
}


def usage() -> str:
    lines = [f"  {name:<10} {(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
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
