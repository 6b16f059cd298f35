"""Experts of a mixture over several ranks: which rank holds which part of which expert, and the bytes of rows."""

from thinwire.methods.experts.choice import choose_way
from thinwire.methods.experts.inside import averages_apart, check_data_method
from thinwire.methods.experts.layout import ExpertPlacement, place_experts
from thinwire.methods.experts.options import ExpertParallel
from thinwire.methods.experts.traffic import Rows, facts, sent

__all__ = [
    "ExpertParallel",
    "ExpertPlacement",
    "Rows",
    "averages_apart",
    "check_data_method",
    "choose_way",
    "facts",
    "place_experts",
    "sent",
]
