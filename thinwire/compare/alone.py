"""`python alone.py RUN_DIRS COMMAND ...`: makes one of torchrun's ranks run by itself, as if there were no others.

All ranks then compute at the same time on the same cores as in a race, and nothing travels. RUN_DIRS holds {rank}.
Run as a file, with the standard library alone: the command imports all that is heavy.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    run_dirs, *command = sys.argv[1:]
    rank = int(os.environ["RANK"])
    # Ranks of one node share its ports.
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": int(os.environ["MASTER_PORT"]) + rank}
    os.environ.update({name: str(value) for name, value in alone.items()}, MASTER_ADDR="127.0.0.1")
    os.execvp(command[0], [*command, "--run-dir", run_dirs.replace("{rank}", str(rank))])


if __name__ == "__main__":
    main()
