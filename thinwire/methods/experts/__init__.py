"""Experts of a mixture over several ranks: which rank holds which part of which expert, and the bytes of rows."""

from thinwire.methods.experts.choice import choose_way, idle_s, room_bytes
from thinwire.methods.experts.dictionary import MEASURE, Load, WayDictionary, way_text
from thinwire.methods.experts.inside import averages_apart, check_data_method
from thinwire.methods.experts.layout import ExpertPlacement, check_once, place_experts
from thinwire.methods.experts.options import ExpertParallel
from thinwire.methods.experts.traffic import Rows, facts, sent

__all__ = [
    "MEASURE",
    "ExpertParallel",
    "ExpertPlacement",
    "Load",
    "Rows",
    "WayDictionary",
    "averages_apart",
    "check_data_method",
    "check_once",
    "choose_way",
    "facts",
    "idle_s",
    "place_experts",
    "room_bytes",
    "sent",
    "way_text",
]
