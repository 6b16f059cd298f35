"""torchrun's elastic agent and its dynamic rendezvous, parts of which are private.

- Rendezvous: its list of nodes, leaving it while others stay, and the interval at which it looks.
- agent_starts_by: the function by which the agent starts a worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import api as elastic_processes
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout


class Rendezvous:
    """torchrun's dynamic rendezvous among nodes that come and go; raises its RendezvousError.

    Args:
        state: a store connection that nothing else uses. Waiting for a key keeps a connection busy, and a node that
            can't send its heartbeat counts as dead.
        store: where the nodes of one round exchange values.
        name: decides the order of the nodes.
        dead_after_s: a node without a heartbeat for this long is removed, by the nodes' own clocks.
        last_call_s: a round is complete this long after its first node came, or when max_nodes are there.
        look_every_s: at most 1.
    """

    def __init__(
        self, state: dist.Store, store: dist.Store, *, name: str, max_nodes: int, dead_after_s: float,
        last_call_s: float, look_every_s: float, patience_s: float,
    ) -> None:  # fmt: skip
        self._look_every_s = look_every_s
        backend, attempts = C10dRendezvousBackend(state, "thinwire"), 4
        timeout = RendezvousTimeout(
            join=timedelta(seconds=patience_s), last_call=timedelta(seconds=last_call_s),
            heartbeat=timedelta(seconds=dead_after_s),
        )  # fmt: skip
        settings = dynamic_rendezvous.RendezvousSettings(
            "thinwire", 1, max_nodes, timeout, timedelta(seconds=dead_after_s / attempts), attempts
        )
        node = DynamicRendezvousHandler._node_desc_generator.generate(name)
        # By default what was seen is taken for true for a second more, in which a node that waits would seem dead.
        holder = dynamic_rendezvous._BackendRendezvousStateHolder(backend, settings, cache_duration=0)
        self._handler = DynamicRendezvousHandler(node, settings, backend.name, store, holder)
        # Each of them notes events, with the name of the caller, for which Python reads the sources of the whole stack:
        # a large part of a second for every heartbeat.
        for part in (holder, self._handler, self._handler._op_executor):
            vars(part)["_record"] = lambda *args, **kwargs: None

    def meet(self) -> tuple[dist.Store, int, int]:
        """Leave the last round and wait for the next. Return its store, this node's rank, and the number of nodes."""
        with _store_not_shared(), _looking_every(self._look_every_s):
            info = self._handler.next_rendezvous()
        self._round = set(self._handler._state_holder.state.participants)
        return info.store, info.rank, info.world_size

    def look(self) -> tuple[bool, int, int, int]:
        """Whether this node is in the round; nodes in the round, nodes that wait for the next, and those in both."""
        num_waiting = self._handler.num_nodes_waiting()
        state, node = self._handler._state_holder.state, self._handler._this_node
        return node in state.participants, len(state.participants), num_waiting, len(self._round & state.wait_list)

    def fall_silent(self) -> None:
        """Stop sending heartbeats until the next round."""
        self._handler._stop_heartbeats()

    def leave(self) -> None:
        """Leave the rendezvous at once and stop sending heartbeats."""
        handler = self._handler
        self.fall_silent()
        deadline = handler._get_deadline(handler.settings.timeout.heartbeat)
        handler._op_executor.run(dynamic_rendezvous._RendezvousExitOp(), deadline)


@contextmanager
def agent_starts_by(start: Callable[..., Any]) -> Iterator[None]:
    """Make torchrun's agent start workers by `start(words, env, stdout, stderr)`, which returns a Popen's like."""

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple, env: dict[str, str]) -> Any:
            return start(args, env, self._stdout, self._stderr)

    module: Any = elastic_processes
    before, module.get_subprocess_handler = module.get_subprocess_handler, Handler
    try:
        yield
    finally:
        module.get_subprocess_handler = before


@contextmanager
def _looking_every(every_s: float) -> Iterator[None]:
    """A node that waits looks so often, for which torch has a second."""
    before = dynamic_rendezvous._delay
    dynamic_rendezvous._delay = lambda seconds: before(every_s if seconds == 1 else seconds)
    try:
        yield
    finally:
        dynamic_rendezvous._delay = before


@contextmanager
def _store_not_shared() -> Iterator[None]:
    """A node that is first among others would start a store for their default group, for which newcomers then wait."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
