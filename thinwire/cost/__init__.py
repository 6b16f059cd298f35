"""The cost of a step, as arithmetic: needs no process and no tensor."""

from typing import TYPE_CHECKING

from thinwire.cost.cores import Cores
from thinwire.cost.graph import Drawing, GraphJob, Message, StepGraph, Task, Work
from thinwire.cost.links import Line, Links
from thinwire.cost.machine import Machine
from thinwire.cost.network import Network
from thinwire.lazy import lazily

if TYPE_CHECKING:
    from thinwire.cost.clock import Clock
    from thinwire.cost.simulator import Timeline, simulate
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
# Their numpy is not needed to read a machine.
__getattr__ = lazily(__name__, {"clock": ("Clock",), "simulator": ("Timeline", "simulate"), "traffic": ("Traffic",)})
