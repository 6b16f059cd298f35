"""An emulated slow network on one machine: real processes, real sockets, links shaped by the kernel.

Every node is a network namespace of its own, joined to the others by a bridge; each link is held to its rate in both
directions by the kernel's token bucket. Nothing is visible in the machine's own network, and the kernel removes all
of it when the last process that uses it is gone.

    from thinwire.lab import LabNetwork, LabSpec, start

    with LabNetwork(LabSpec(nodes=4, rate="100mbit")) as network:
        job = start(network, ["python", "train.py"])
        print(job.wait(), network.counters())

The caller needs no privileges and is never re-executed: a helper process enters the namespaces, as root or inside a
user namespace. `LabNetwork` raises ConfigError where the system allows neither.
"""

from thinwire.lab.network import Counters, LabError, LabNetwork, why_unavailable
from thinwire.lab.run import Job, environment, start
from thinwire.lab.spec import LabSpec

__all__ = ["Counters", "Job", "LabError", "LabSpec", "LabNetwork", "environment", "start", "why_unavailable"]
