"""Ground floor: a tensor as it looks on the wire, and back. Pure functions of tensors."""

from thinwire.codecs.base import Codec, Traits
from thinwire.codecs.cast import Cast
from thinwire.codecs.hadamard import Hadamard
from thinwire.codecs.identity import Identity
from thinwire.codecs.integer import Integer
from thinwire.codecs.random import derive_seed

__all__ = ["Cast", "Codec", "Hadamard", "Identity", "Integer", "Traits", "derive_seed"]
