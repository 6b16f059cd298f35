"""The cost of a step, as arithmetic: needs no process and no tensor."""

from thinwire.cost.clock import Clock, Cores
from thinwire.cost.graph import Drawing, GraphJob, Message, StepGraph, Task, Work
from thinwire.cost.links import Line, Links
from thinwire.cost.machine import Machine
from thinwire.cost.network import Network
from thinwire.cost.simulate import Timeline, simulate
from thinwire.cost.traffic import Traffic

__all__ = [
    "Clock",
    "Cores",
    "Drawing",
    "GraphJob",
    "Line",
    "Links",
    "Machine",
    "Message",
    "Network",
    "StepGraph",
    "Task",
    "Timeline",
    "Traffic",
    "Work",
    "simulate",
]
