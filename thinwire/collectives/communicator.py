"""The communication thread of a process, which keeps jobs in order, and collectives over a group of ranks."""

from __future__ import annotations

import atexit
import gc
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait as wait_for_all
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire.codecs import Codec
from thinwire.collectives import all_to_all, gather, reduce, staging
from thinwire.collectives.exchange import Members, Wire
from thinwire.collectives.groups import give_back, own_members
from thinwire.collectives.link import Link
from thinwire.collectives.meter import Meter
from thinwire.collectives.rounds import Awaited, Rounds
from thinwire.collectives.topology import Topology, node_label
from thinwire.errors import ConfigError, CorruptMessageError

T = TypeVar("T")
LABEL_BYTES = 64
DEFAULT_TIMEOUT_S = 600.0
EXIT_GRACE_S = 10.0
# Jobs of each lane that may run at once, sending or packing. Two keep a link busy; more help where latency is high.
NUM_SLOTS = 4
LANES = NORMAL, URGENT = range(2)


@dataclass(eq=False)
class CollectiveJob:
    """One collective: the function that starts it, its slot of scratch memory, and the future of its result."""

    start: Callable[[int], Rounds[Any]]
    future: Future
    lane: int = NORMAL
    rounds: Rounds[Any] | None = None
    slot: int = -1


class CommunicationThread:
    """Runs the jobs of all communicators of this process in the order of submission. NUM_SLOTS of them may overlap.

    Urgent jobs are a lane of their own, with its own order and NUM_SLOTS slots: what a forward or backward pass waits
    for never stands behind gradients. If both shared slots, a rank full of gradients and a rank full of urgent jobs
    would wait for each other forever.

    While a job waits for its messages, the next one packs and posts its own, so that the link stays busy. All messages
    are posted from this thread: gloo groups that are used from several threads hang, abort or diverge silently. Other
    threads only wait for arrivals, which needs no lock of the group. There is one such thread per slot, because a job
    must not wait behind the messages of another job. The messages of a later job may come only after a peer has the
    result of the earlier job, and that job's next messages would then never leave.
    """

    def __init__(self) -> None:
        self._unfinished: set[Future] = set()
        # None ends a thread.
        self._inbox: queue.SimpleQueue[tuple[CollectiveJob, Exception | None] | None] = queue.SimpleQueue()
        self._awaited: dict[int, queue.SimpleQueue[tuple[CollectiveJob, Sequence[Awaited]] | None]] = {}
        self._free_slots: dict[int, list[int]] = {lane: [] for lane in LANES}
        self._threads = [threading.Thread(target=self._run, name="thinwire-communication", daemon=True)]
        self._threads[0].start()

    def submit(self, start: Callable[[int], Rounds[T]], *, urgent: bool = False) -> Future[T]:
        """Run `start(slot)` after all jobs that were submitted to its lane before have started.

        slot: in range(len(LANES) * NUM_SLOTS).
        """
        future: Future[T] = Future()
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        self._inbox.put((CollectiveJob(start, future, URGENT if urgent else NORMAL), None))
        return future

    def end(self) -> None:
        """Wait a limited time for running jobs, then end the threads.

        If a thread is inside gloo, or frees gloo's memory, while the interpreter exits, the process aborts.
        """
        wait_for_all(list(self._unfinished), timeout=EXIT_GRACE_S)
        self._inbox.put(None)
        # It is the one that adds slots.
        self._threads[0].join(timeout=1.0)
        for awaited in self._awaited.values():
            awaited.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _add_slots(self, lane: int) -> None:
        """Give a lane its slots, and a thread for each."""
        for slot in range(lane * NUM_SLOTS, (lane + 1) * NUM_SLOTS):
            self._awaited[slot] = queue.SimpleQueue()
            watcher = threading.Thread(target=self._watch, args=(slot,), name=f"thinwire-arrivals-{slot}", daemon=True)
            self._threads.append(watcher)
            self._free_slots[lane].append(slot)
            watcher.start()

    def _run(self) -> None:
        submitted: dict[int, deque[CollectiveJob]] = {}
        free_slots = self._free_slots
        while True:
            arrived = self._inbox.get()
            if arrived is None:
                return
            job, error = arrived
            if job.rounds is None:
                # A lane without jobs has no threads.
                if job.lane not in submitted:
                    submitted[job.lane] = deque()
                    self._add_slots(job.lane)
                submitted[job.lane].append(job)
            elif self._ends(job, error):
                free_slots[job.lane].append(job.slot)
            lane = job.lane
            while submitted[lane] and free_slots[lane]:
                started = submitted[lane].popleft()
                started.slot = free_slots[lane].pop()
                started.rounds = started.start(started.slot)
                if self._ends(started, None):
                    free_slots[lane].append(started.slot)
                del started
            # A finished job's tensors must not live until the next job arrives.
            del arrived, job, error

    def _ends(self, job: CollectiveJob, error: Exception | None) -> bool:
        """Run the job until it waits again. Return whether it has ended instead."""
        assert job.rounds is not None
        try:
            awaited = next(job.rounds) if error is None else job.rounds.throw(error)
        except StopIteration as end:
            job.future.set_result(end.value)
        except BaseException as failure:
            job.future.set_exception(failure)
        else:
            self._awaited[job.slot].put((job, awaited))
            return False
        return True

    def _watch(self, slot: int) -> None:
        while True:
            given = self._awaited[slot].get()
            if given is None:
                return
            job, awaited = given
            error = None
            try:
                for arrival in awaited:
                    arrival.wait()
            except Exception as failure:
                error = failure
            self._inbox.put((job, error))
            del given, job, awaited, error


_thread: CommunicationThread | None = None


def _end() -> None:
    global _thread
    if _thread is not None:
        _thread.end()
        _thread = None


def communication_thread() -> CommunicationThread:
    """The process's communication thread, which the first call starts."""
    global _thread
    if _thread is None:
        _thread = CommunicationThread()
        atexit.register(_end)
    return _thread


class Communicator:
    """Collectives over a group of ranks, on the communication thread and on a process group of their own.

    A group of one sends nothing and leaves values exact.

    Args:
        group: a ProcessGroup, global ranks, one dimension of a DeviceMesh, or None for the world; without
            torch.distributed it is a group of one. Members: a process group outside of the default world, which from
            then on belongs to this communicator.
        local_size: ranks per node; None: found from LOCAL_WORLD_SIZE or host names.
        timeout_s: how long one message may take, in seconds.
        checked: put sequence number, operation, length and checksum in front of each message.
        meter: the meter of an earlier communicator, whose counts go on.

    Every rank must make the same calls in the same order. Raises ConfigError for a group that does not fit.
    PeerLostError and MismatchError are raised by the returned futures and by every later call. CorruptMessageError is
    raised by one future only: the job may be run again if it ended in the same round on all ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Sequence[int] | DeviceMesh | Members | None = None,
        *,
        local_size: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        checked: bool = False,
        meter: Meter | None = None,
    ) -> None:
        self._broken: Exception | None = None
        self._is_outside = isinstance(group, Members)
        self._wire = Wire(own_members(group, timeout_s), timeout_s, checked, meter)
        self.global_ranks = self._wire.global_ranks
        self.world_size = len(self.global_ranks)
        self.rank = self._wire.rank
        self._num_jobs = 0
        self._unfinished: set[Future] = set()
        self._memory: list[dict[str, Tensor]] = [{} for _ in range(len(LANES) * NUM_SLOTS)]
        # The grid is flat until the nodes are known; the exchange of node labels needs no more.
        self.topology = Topology(self.world_size, 1)
        self.topology, self.topology_reason = self._find_topology(local_size)

    @property
    def meter(self) -> Meter:
        return self._wire.meter

    def submit(self, job: Callable[[Link], Rounds[T]], *, urgent: bool = False) -> Future[T]:
        """Run `job(link)`, a generator of the messages it waits for, on the communication thread.

        It starts after all jobs submitted before have started. Up to NUM_SLOTS jobs run at once. urgent: in a lane of
        its own, of which the same is true; for jobs that a forward or backward pass waits for.
        """
        self._num_jobs += 1
        number = self._num_jobs
        origin = staging.OriginStream.here()
        future = communication_thread().submit(lambda slot: self._guarded(job, slot, number, origin), urgent=urgent)
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        return future

    def wait(self, future: Future[T]) -> T:
        """The future's result. The time that this thread waits is counted as exposed_s."""
        if future.done():
            return future.result()
        with self.meter.timed("exposed_s"):
            return future.result()

    def all_gather(self, shard: Tensor, codec: Codec, *, seed: int = 0) -> Future[Tensor]:
        """Every rank's shard after the codec, equal on all ranks.

        Shape:
            shard: fp32 [n].
            result: fp32 [world_size, n], in rank order.
        """
        return self.submit(lambda link: gather.all_gather(link, shard, codec, seed=seed))

    def reduce_scatter(
        self, x: Tensor, intra: Codec, inter: Codec | None = None, *, seed: int = 0, counter: int = 0
    ) -> Future[Tensor]:
        """This rank's slice of the sum over ranks of `x`, taken in fp32 in rank order.

        Args:
            x: any shape of n elements.
            intra, inter: codecs of the hop inside a node and of the hop between nodes, by default the same.
            seed, counter: of the codecs' random numbers; counter: the number of the first element of `x`.

        Shape:
            result: fp32 [n / world_size].

        Raises ConfigError where x does not cut into world_size slices of whole codec blocks.
        """
        inter = inter or intra
        _check_slices(x.numel(), self.topology, intra, inter)
        flat = x.reshape(-1).float()

        def job(link: Link) -> Rounds[Tensor]:
            total = yield from reduce.reduce_scatter(link, flat, intra, inter, seed=seed, counter=counter)
            return total.clone()

        return self.submit(job)

    def all_reduce(
        self,
        x: Tensor,
        intra: Codec,
        inter: Codec | None = None,
        gather: Codec | None = None,
        *,
        seed: int = 0,
    ) -> Future[Tensor]:
        """The sum over ranks of `x`, equal on all ranks.

        Args:
            intra, inter: as for reduce_scatter.
            gather: codec of the way back; by default `inter`.

        Shape:
            x: any; result: the same, fp32.
        """
        inter = inter or intra
        return self.submit(lambda link: reduce.all_reduce(link, x, intra, inter, gather or inter, seed=seed))

    def all_to_all_rows(
        self, rows: Tensor, counts: Sequence[int], receives: Sequence[int], codec: Codec | None = None,
        *, urgent: bool = True, **options: Any,
    ) -> Future[Tensor]:  # fmt: skip
        """Send any number of rows to every rank; see `all_to_all.all_to_all_rows`, which has the other options."""
        return self.submit(
            lambda link: all_to_all.all_to_all_rows(link, rows, counts, receives, codec, **options), urgent=urgent
        )

    def broadcast_(self, x: Tensor, source: int = 0) -> Future[Tensor]:
        """Overwrite contiguous `x` with the bits of group rank `source`."""
        return self.submit(lambda link: gather.broadcast_(link, x, source))

    def all_gather_exact(self, x: Tensor) -> Future[Tensor]:
        """Every rank's `x`, bit for bit; for small values on which ranks must agree.

        Shape:
            result: [world_size, *x.shape], in x's dtype.
        """
        return self.submit(lambda link: gather.all_gather_exact(link, x))

    def barrier(self) -> None:
        """Wait until every rank has arrived and all jobs submitted before are done."""
        self.wait(self.all_gather_exact(torch.zeros(1, dtype=torch.uint8)))

    def release(self) -> None:
        """Free the jobs' scratch memory. Call it while no job is running."""
        for held in self._memory:
            held.clear()

    def close(self) -> None:
        """Wait for submitted jobs, then leave the process group to the next communicator over these ranks."""
        wait_for_all(list(self._unfinished))
        if not self._is_outside and self._broken is None:
            give_back(self._wire.members)
        self._broken = self._broken or RuntimeError(
            "close() was called, so nothing can be sent: train, and read weights that are cut over ranks, before it"
        )

    def break_off(self) -> None:
        """End running jobs with errors, here and on the peers, after a loss. No job can be run afterwards."""
        self._broken = self._broken or RuntimeError("this communicator is closed")
        # The rank that breaks off knows the reason, so it does not wait for reports of missing ranks.
        self._wire.abandon()
        wait_for_all(list(self._unfinished))

    def abort(self) -> None:
        """End running jobs with errors, and release the sockets and threads of a group outside the default world."""
        assert self._is_outside, "a group of the default world is kept for the next communicator"
        self.break_off()
        # An error keeps its frames alive, and the frames keep the group alive.
        error: BaseException | None = self._broken
        while error is not None:
            error.__traceback__, error = None, error.__context__
        self._wire.members = replace(self._wire.members, group=None, store=None)
        # A round and its messages form a reference cycle.
        gc.collect()

    def _guarded(
        self, job: Callable[[Link], Rounds[T]], slot: int, number: int, origin: staging.OriginStream | None
    ) -> Rounds[T]:
        if self._broken is not None:
            raise self._broken
        try:
            link = Link(self._wire, self.topology, number, self._memory[slot])
            return (yield from staging.beside(job(link), origin, slot))
        except CorruptMessageError:
            raise
        except Exception as error:
            # After a failed message the ranks no longer agree on what comes next.
            self._broken = self._broken or error
            raise

    def _find_topology(self, local_size: int | None) -> tuple[Topology, str]:
        if local_size is not None:
            return Topology.stated(self.world_size, local_size), "stated"
        if self.world_size == 1:
            return Topology(1, 1), "a group of one"
        label = node_label(self.global_ranks[self.rank]).encode()[:LABEL_BYTES].ljust(LABEL_BYTES, b"\0")
        labels = self.wait(self.all_gather_exact(torch.frombuffer(bytearray(label), dtype=torch.uint8)))
        return Topology.from_labels([bytes(row.numpy()).rstrip(b"\0").decode() for row in labels])


def _check_slices(num_elements: int, topology: Topology, intra: Codec, inter: Codec) -> None:
    unit = topology.world_size
    for codec, hops in ((intra, topology.local_size), (inter, topology.num_nodes)):
        if hops > 1 and num_elements % (topology.world_size * codec.block):
            unit = max(unit, topology.world_size * codec.block)
    if num_elements % unit:
        raise ConfigError(
            f"{num_elements} elements do not cut into {topology.world_size} slices of whole codec blocks: "
            f"pad to {-(-num_elements // unit) * unit}"
        )
