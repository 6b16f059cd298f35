"""`python alone.py RUN_DIRS COMMAND ...`: runs one of torchrun's ranks alone, as a world of one.

All ranks then compute at the same time on the same cores as in a race, and send nothing. RUN_DIRS contains {rank}. The
file is run by path and imports only the standard library; the command imports the rest.
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
