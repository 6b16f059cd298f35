"""Options and arithmetic of training with a part of the state on a disk."""

from thinwire.methods.memory.choice import StepRates, fitting, moves_nothing, seconds, settled, soonest
from thinwire.methods.memory.floor import Floor
from thinwire.methods.memory.inside import check_across, check_at_once, check_outer, outer_bytes, resident_method
from thinwire.methods.memory.placement import MemoryPart, efficiency, in_use, intensities, placed
from thinwire.methods.memory.residency import Residency, same_everywhere
from thinwire.methods.memory.setup import Across, Setup
from thinwire.methods.memory.units import LENT_RATE, read_byte_rate, read_bytes

__all__ = [
    "LENT_RATE", "Across", "Floor", "MemoryPart", "Residency", "Setup", "StepRates", "check_across", "check_at_once",
    "check_outer", "efficiency", "fitting", "in_use", "intensities", "moves_nothing", "outer_bytes", "placed",
    "read_byte_rate", "read_bytes", "resident_method", "same_everywhere", "seconds", "settled", "soonest",
]  # fmt: skip
