# ruff: noqa: E402  (the collector is turned off before anything is loaded)
"""What ranks and commands of tests would each load, compile or parse, in the memory of the server that forks them.

See `workers`.
"""

import gc

# Nothing of what is loaded goes again.
gc.disable()

from torch.distributed.pipelining import _backward  # noqa: F401  (loaded with the first half of a backward)

import thinwire.compare.run
import thinwire.launch.train  # noqa: F401  (as the line above: a command loads it when it has read its flags)
from tests.conformance import codec_suite, reduction_suite, strategy_suite  # noqa: F401
from thinwire.cli import COMMANDS, loaded
from thinwire.codecs import warm
from thinwire.errors import Problems
from thinwire.options import option_tables

warm(case.codec for case in codec_suite.CASES)
option_tables()
for command in COMMANDS.values():
    loaded(command.run)
    # tyro keeps what it has read of the classes behind the flags.
    loaded(command.flags)().read([], Problems())
# The collector would write to every object, and so copy the memory that ranks share with the server.
gc.freeze()
gc.enable()
