"""Pipelines as data: which rank computes which layers for which micro-batch, and in which order."""

from thinwire.methods.pipeline.carried import Carried, least_cut, there_and_back
from thinwire.methods.pipeline.check import Limits, check, in_flight
from thinwire.methods.pipeline.chunks import Chunk, Cut
from thinwire.methods.pipeline.costs import Costs
from thinwire.methods.pipeline.cut import cut, token_shares
from thinwire.methods.pipeline.fitted import fitted
from thinwire.methods.pipeline.ground import Ground
from thinwire.methods.pipeline.options import Pipeline
from thinwire.methods.pipeline.orders import ORDERS, plan
from thinwire.methods.pipeline.placement import NodePlacement, place_nodes
from thinwire.methods.pipeline.plan import Action, Plan
from thinwire.methods.pipeline.recompute import recompute
from thinwire.methods.pipeline.simulate import PipelineTimeline, simulate
from thinwire.methods.pipeline.skip import planned_paths, skipping

__all__ = [
    "ORDERS",
    "Action",
    "Carried",
    "Chunk",
    "Costs",
    "Cut",
    "Ground",
    "Limits",
    "NodePlacement",
    "Pipeline",
    "PipelineTimeline",
    "Plan",
    "check",
    "cut",
    "fitted",
    "in_flight",
    "least_cut",
    "place_nodes",
    "plan",
    "planned_paths",
    "recompute",
    "simulate",
    "skipping",
    "there_and_back",
    "token_shares",
]
