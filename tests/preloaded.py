"""What ranks of tests would each load or compile, in the memory of the server that forks them; see `workers`."""

import gc

from torch.distributed.pipelining import _backward  # noqa: F401  (loaded with the first half of a backward)

from tests.conformance import codec_suite, reduction_suite, strategy_suite  # noqa: F401
from thinwire.codecs import warm

warm(case.codec for case in codec_suite.CASES)
# The collector would write to every object, and so copy the memory that ranks share with the server.
gc.freeze()
