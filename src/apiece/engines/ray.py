"""Ray: whole chunks of a cohort go to actors on a cluster, one per GPU or per group of cores.

Each actor computes its chunks as the vectorized or the sequential engine would. The resident examples are put
into the object store once, the broadcast once per phase; rows and states of clients travel with their chunk,
and what becomes of the chunk comes back: its weighted sum and the new states. Answers are taken in the order
of the chunks, so results do not depend on the number of actors, nor on their deaths. The server and the
states stay here, on the CPU. The only file that knows Ray, and only when it is used.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apiece import importing, tree
from apiece.data.federated import Clients, Federated, Ragged
from apiece.engines.base import Call, Engine, Federation, Program
from apiece.engines.capture import Captured, vectorized
from apiece.engines.lowering import fastest, lowered
from apiece.engines.packing import BOARD, RESIDENT, SLOT, Posted, Room, packed, unpacked
from apiece.engines.pool import Child, Failure, GoneError, Pool, examples, received, sent
from apiece.engines.processes import cpus
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.errors import ApieceError
from apiece.params import Params
from apiece.shard import Rows
from apiece.store import Store
from apiece.task import Task
from apiece.tree import Tree

log = logging.getLogger("apiece")

Made = TypeVar("Made")
Bytes = NDArray[np.uint8]

CPU = torch.device("cpu")
STORE = 512 << 20  # bytes of the object store that is begun here, besides room for the examples
KNOCKING = 10.0  # seconds, for a cluster to answer
PATIENCE = 120.0  # seconds, for the first actor to begin
FAILURES = 3  # actors in a row that die before they have begun
RESIDENTS = 4  # sets of examples that are held at once: the run's own, and those scored besides


# The cluster


class Cluster(NamedTuple):
    """What a run uses of a cluster."""

    device: torch.device  # of each actor
    actors: int  # at the most; 0: as many as there is room for when the first is begun
    threads: int  # of each actor


def inside(engine: str) -> str:
    """The engine that the actors of `ray` or `ray(NAME)` are: "auto" or NAME; of another engine, ""."""
    if engine == "ray":
        return "auto"
    return engine[4:-1] if engine.startswith("ray(") else ""


def join(address: str, device: str, actors: int, threads: int, data: Clients | None = None) -> Cluster:
    """Connect to a cluster and see what it has; `actors` 0: as many as it has GPUs, or CPUs in groups."""
    if device not in ("auto", "cpu", "cuda"):
        raise ApieceError(f"--device {device} is not for the ray engine: auto, cpu, or cuda for its GPUs")
    threads = threads or 1
    ray = _connected(address, actors * threads, data)
    held = ray.cluster_resources()
    gpus = int(held.get("GPU", 0))
    if device == "cuda" and not gpus:
        raise ApieceError("--device cuda was asked for, but the Ray cluster has no GPU: see `ray status`")
    on = torch.device("cuda" if gpus and device != "cpu" else "cpu")
    room = gpus if on.type == "cuda" else int(held.get("CPU", 0) // threads)
    if not room:
        raise ApieceError(f"the Ray cluster has no room for an actor of {threads} CPUs: see `ray status`")
    if actors > room:
        log.warning("the Ray cluster has room for %d of %d actors: the others wait for more", room, actors)
    return Cluster(on, actors or room, threads)


def _connected(address: str, cores: int, data: Clients | None = None) -> Any:
    """Ray, connected: to the cluster at `address`, or at RAY_ADDRESS, or to one that is begun here.

    One that is begun here ends with this process, and has at least so many CPUs to give away.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns of a change to come
    try:
        import ray
    except ImportError as error:
        raise ApieceError("the ray engine needs Ray: pip install 'apiece[ray]'") from error
    if ray.is_initialized():
        return ray
    place = address or os.environ.get("RAY_ADDRESS", "")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    # Ray's messages before it knows how few are wanted, as of its authentication tokens; and what it prints
    # of lost machines, to where `--json` prints.
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray._private.worker._worker_logs_enabled = False
    if place:
        try:
            _knock(place)
            ray.init(place, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            raise ApieceError(
                f"cannot connect to a Ray cluster at {place!r}: {_first_line(error)} Begin one with "
                f"`ray start --head`, or leave --address out for one on this machine alone. If it is there: "
                f"do both have the same token (RAY_AUTH_MODE=token, `ray get-auth-token`)?"
            ) from error
    else:
        room = STORE + (2 * tree.nbytes((data.x, data.y)) if data is not None else 0)
        here = max(cpus(), cores)
        ray.init("local", num_cpus=here, include_dashboard=False, object_store_memory=room, **quiet)
    return ray


def _knock(place: str) -> None:
    """OSError where nobody listens: Ray would try for minutes."""
    host, colon, port = place.rpartition(":")
    if colon and port.isdecimal() and "://" not in place:
        socket.create_connection((host, int(port)), timeout=KNOCKING).close()


def measured_layers(cluster: Cluster, task: Task, x: Tree, y: Tensor, clients: int) -> dict[str, str]:
    """`lowering.fastest`, by an actor."""
    ray = _connected("", 0)
    actor = next(iter(_CREW.free(ray, cluster)), None) or _CREW.hire(ray, cluster)
    there = ray.cloudpickle.dumps(replace(task, device=cluster.device))
    try:
        told = actor.handle.layers.remote(_surroundings(), there, x, y, clients)
        found: dict[str, str] = ray.get(told, timeout=PATIENCE)
    except ray.exceptions.RayError as error:
        raise ApieceError(f"no actor could measure layers: {_first_line(error)} See `ray status`.") from error
    return found


def spread(work: Callable[..., object], orders: Sequence[tuple[Any, ...]], cluster: Cluster) -> Iterator[int]:
    """`work(*order)` of every order as a task on the cluster; their numbers, as they are done.

    The work must stand being begun again: it is, on another machine, when its own dies.
    """
    ray = _connected("", 0)
    for actor in [*_CREW.actors]:  # it takes the room that they have
        actor.end()
    needs = {"num_gpus": 1} if cluster.device.type == "cuda" else {"num_cpus": cluster.threads}
    task = ray.remote(max_retries=FAILURES, scheduling_strategy="SPREAD", **needs)(_work)
    surroundings = _surroundings()
    due = {task.remote(surroundings, work, order): at for at, order in enumerate(orders)}
    while due:
        (done,), _ = ray.wait(list(due))
        try:
            failure = ray.get(done)
        except ray.exceptions.RayError as error:
            raise ApieceError(f"the cluster lost a run {FAILURES + 1} times: {_first_line(error)}") from error
        if isinstance(failure, Failure):
            raise failure.told()
        yield due.pop(done)


def _work(surroundings: _Surroundings, work: Callable[..., object], order: tuple[Any, ...]) -> Failure | None:
    surroundings.take_over()
    try:
        work(*order)
    except Exception as error:
        return Failure.of(error)
    return None


def serving() -> bool:
    """Is this process one of a cluster's, that others share a machine with?"""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    return bool(ray.get_runtime_context().worker.mode == ray.WORKER_MODE)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


class _Surroundings(NamedTuple):
    """What of this process another needs to compute the same."""

    path: tuple[str, ...]
    files: tuple[Path, ...]  # of methods and models of one's own
    switches: tuple[bool, bool, bool]

    def take_over(self) -> None:
        sys.path += [place for place in self.path if place not in sys.path]
        for file in self.files:
            importing.import_file(file)
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = self.switches


def _surroundings() -> _Surroundings:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    switches = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic)
    return _Surroundings(tuple(sys.path), tuple(importing.FILES.values()), switches)


# The engine


class Ray(Pool["_Actor"], Engine):
    """Chunks of up to `limit` clients, several at once, on the actors of a cluster."""

    one, many = "an actor", "actors"
    under_way = 0

    def __init__(
        self, engine: str, limit: int, cluster: Cluster, address: str, layers: Mapping[str, str]
    ) -> None:
        Engine.__init__(self, CPU, limit)
        Pool.__init__(self, cluster.actors)
        self.name = f"ray({engine})"  # type: ignore[misc]
        self._here = Sequential(CPU, limit) if engine == Sequential.name else Vectorized(CPU, limit)
        there = Captured if cluster.device.type == "cuda" and engine != Sequential.name else self._here
        self.overhead = there.overhead
        self._address, self._cluster, self._layers = address, cluster, layers
        self._base: Federation | None = None
        self._desk = _Desk(engine)

    def each(self, program: Program, shared: Tree, clients: tuple[Tree, ...]) -> Tree:
        """Here: first states, and what is asked of one client alone."""
        return self._here.each(program, shared, clients)

    def answers(self, calls: Iterable[Call]) -> Iterator[Tree]:
        pending = iter(calls)
        first = list(islice(pending, 2))
        if len(first) == 1 and first[0].program.together is None and _count(first[0]) == 1:
            # One client's model or scores, as for `apiece export`: no cluster is needed for that.
            yield from super().answers(first)
            return
        if first:
            self._begin(first[0])
            yield from self._computed(chain(first, pending), self._posted(first[0]))

    def _begin(self, call: Call) -> None:
        """Actors that have nothing to do, as after an error; method and task where they find them."""
        federation = call.program.federation
        device, actors, threads = self._cluster
        self._desk.ray = _connected(self._address, actors * threads, federation.data)
        if not actors:
            self._cluster = join(self._address, device.type, 0, threads, federation.data)
            self._most = self._cluster.actors
        self._children = _CREW.free(self._desk.ray, self._cluster)
        for child in self._children:
            child.desk = self._desk
        if not self._fits(federation):
            self._base = federation
            self._desk.post_base(_bare(federation, self._cluster.device), self._layers)

    def _fits(self, federation: Federation) -> bool:
        base = self._base
        return base is not None and base.task is federation.task and base.method == federation.method

    def _posted(self, call: Call) -> dict[int, Posted]:
        """By id: tensors that are not sent with each call, for they are in the object store."""
        resident = examples(call.program.federation) if _lasting(call) else []
        self._desk.post_examples(resident)
        posted = {id(leaf): Posted(leaf, (RESIDENT, at)) for at, leaf in enumerate(resident)}
        board = Room()
        for leaf in tree.tensors(call.shared):
            posted[id(leaf)] = Posted(leaf, (BOARD, *board.put(leaf)))
        self._desk.post_board(board)
        return posted

    def _hire(self) -> _Actor:
        actor = _CREW.hire(self._desk.ray, self._cluster)
        actor.desk = self._desk
        return actor

    def _answered(self, wait: bool) -> list[_Actor]:
        ray, due = self._desk.ray, {child.due: child for child in self._children if child.due is not None}
        waiting = None if any(child.begun for child in self._children) else PATIENCE
        count = 1 if wait else len(due)
        found, _ = ray.wait(list(due), num_returns=count, timeout=waiting if wait else 0) if due else ([], [])
        if wait and not found:
            raise ApieceError(
                f"no actor began within {PATIENCE:.0f} s: the Ray cluster has no room for one "
                f"({self._cluster.threads} CPUs or a GPU each). See `ray status`."
            )
        children = [due[ref] for ref in found]
        for child in children:
            if not child.begun and not child.begin():
                self._children.remove(child)
                child.end()
        return [child for child in children if child.calls]


def _count(call: Call) -> int:
    count: int = tree.leaves(call.clients)[0].shape[0]
    return count


def _lasting(call: Call) -> bool:
    data = call.program.federation.data
    assert isinstance(data, Federated)  # some clients' alone
    return data.lasting


def _bare(federation: Federation, device: torch.device) -> Federation:
    """The federation without all that actors are sent when they need it, or never."""
    data = federation.data
    assert isinstance(data, Federated)
    none, nobody = np.zeros(0, dtype=np.int64), Ragged.of([])
    empty = replace(data, x=None, y=torch.empty(0), names=(), train=nobody, test=nobody, seen=none > 0)
    stub = replace(empty, proxy=none)
    task, store = federation.task.for_clients(), Store((), 0, CPU, None, mapped=False)
    return Federation(federation.method, replace(task, device=device), Params({}), stub, store, 0)


def _own(call: Call) -> Call:
    """The call with the examples of its clients alone, for data that no actor has."""
    data = call.program.federation.data
    places = [part.place for part in call.clients if isinstance(part, Rows)]
    numbers = [torch.tensor([data.padding]), *(place.flatten() for place in places)]
    kept, found = torch.unique(torch.cat(numbers), return_inverse=True)  # sorted: the padding stays last
    at = iter(torch.split(found, [len(some) for some in numbers])[1:])
    clients = tuple(
        part._replace(place=next(at).reshape(part.place.shape)) if isinstance(part, Rows) else part
        for part in call.clients
    )
    assert isinstance(data, Federated)
    x, y = tree.take((data.x, data.y), kept)
    federation = replace(call.program.federation, data=replace(data, x=x, y=y))
    return call._replace(program=replace(call.program, federation=federation), clients=clients)


class _Object(NamedTuple):
    """Something in the object store, by a number of its own that actors know it by."""

    number: int
    ref: Any


_numbers = count()


class _Desk:
    """What lies in the object store for all actors."""

    ray: Any

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.base = self.examples = self.board = _Object(-1, None)
        self._examples: deque[tuple[list[Tensor], _Object]] = deque(maxlen=RESIDENTS)

    def post_base(self, federation: Federation, layers: Mapping[str, str]) -> None:
        # The files that its classes are from must be imported before it can be read.
        parts = _surroundings(), (federation, self.engine, dict(layers))
        texts = [np.frombuffer(self.ray.cloudpickle.dumps(part), dtype=np.uint8) for part in parts]
        self.base = self._put(texts)

    def post_examples(self, tensors: list[Tensor]) -> None:
        for held, put in self._examples:
            if list(map(id, held)) == list(map(id, tensors)):
                self.examples = put
                return
        self.examples = self._put([tensor.numpy() for tensor in tensors])
        self._examples.append((tensors, self.examples))

    def post_board(self, board: Room) -> None:
        self.board = self._put(board.used.numpy())

    def _put(self, thing: Any) -> _Object:
        return _Object(next(_numbers), self.ray.put(thing))


class _Actor(Child):
    """An actor, as the process that asks sees it."""

    begun = False
    desk: _Desk  # of the engine it serves

    def __init__(self, ray: Any, cluster: Cluster) -> None:
        super().__init__()
        self._ray, self._room, self._refs = ray, Room(), deque[Any]()
        needs = {"num_gpus": 1} if cluster.device.type == "cuda" else {"num_cpus": cluster.threads}
        actor = ray.remote(scheduling_strategy="SPREAD", **needs)(_Server)
        self.handle = actor.remote(cluster.threads)
        self.pid, self._machine, self._hello = 0, "", self.handle.hello.remote()

    @property
    def due(self) -> Any:
        """What it is waited for; None: nothing."""
        if not self.begun:
            return self._hello
        return self._refs[0] if self._refs else None

    def begin(self) -> bool:
        """It has said hello, or died before."""
        try:
            self.pid, self._machine = self._ray.get(self._hello)
        except self._ray.exceptions.RayError as error:
            _CREW.failures += 1
            if _CREW.failures == FAILURES:
                why = f"{FAILURES} actors in a row could not begin: {_first_line(error)}"
                raise ApieceError(f"{why} Is apiece installed on all machines of the cluster?") from error
            return False
        self.begun, _CREW.failures = True, 0
        return True

    def ask(self, number: int, call: Call, posted: Mapping[int, Posted]) -> None:
        if not _lasting(call):
            call = _own(call)
        self._room.end = 0
        message = packed((sent(call.program), call.shared, call.clients), self._room, posted)
        self.calls.append(number)
        base, examples, board = self.desk.base, self.desk.examples, self.desk.board
        numbers = (base.number, examples.number, board.number)
        parts = (base.ref, examples.ref, board.ref, message, self._room.used.numpy())
        self._refs.append(self.handle.answer.remote(numbers, *parts))

    def answer(self) -> Tree:
        try:
            found = self._ray.get(self._refs.popleft())
        except self._ray.exceptions.RayTaskError:
            raise
        except self._ray.exceptions.RayError as error:
            raise GoneError from error
        if isinstance(found, Failure):
            return found
        message, slot = found
        return unpacked(message, {SLOT: Room(_copied(slot, CPU))})

    def end(self) -> str:
        _CREW.actors = [actor for actor in _CREW.actors if actor is not self]
        self._ray.kill(self.handle)
        return f"process {self.pid} on {self._machine}"


@dataclass
class _Crew:
    """The actors of this process. They serve whichever engine computes, for to begin one takes seconds."""

    kind: tuple[Any, ...] = ()
    actors: list[_Actor] = field(default_factory=list)
    failures: int = 0

    def free(self, ray: Any, cluster: Cluster) -> list[_Actor]:
        """Some of this kind; those that have something to do, as after an error, and all others end."""
        context = ray.get_runtime_context()
        kind = (context.gcs_address, context.get_job_id(), cluster.device, cluster.threads)
        if self.kind[:2] != kind[:2]:  # of a cluster that this process has left
            self.actors, self.failures = [], 0
        for actor in [actor for actor in self.actors if actor.calls or self.kind != kind]:
            actor.end()
        self.kind = kind
        return self.actors[: cluster.actors]

    def hire(self, ray: Any, cluster: Cluster) -> _Actor:
        self.actors.append(_Actor(ray, cluster))
        return self.actors[-1]


_CREW = _Crew()


# An actor's side


class _Latest:
    """Things made of what is in the object store, the latest few."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: OrderedDict[int, Any] = OrderedDict()

    def get(self, number: int, make: Callable[[], Made]) -> Made:
        if number not in self._made:
            self._made[number] = make()
            if len(self._made) > self._most:
                self._made.popitem(last=False)
        self._made.move_to_end(number)
        made: Made = self._made[number]
        return made


class _Server:
    """What an actor is: a process that computes chunks."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._bases, self._residents, self._boards = _Latest(1), _Latest(RESIDENTS), _Latest(1)

    def hello(self) -> tuple[int, str]:
        return os.getpid(), platform.node()

    def layers(
        self, surroundings: _Surroundings, task: bytes, x: Tree, y: Tensor, clients: int
    ) -> dict[str, str]:
        import ray

        surroundings.take_over()
        there = ray.cloudpickle.loads(task)
        there = there.on(there.device)
        return fastest(there, tree.to(x, there.device), y.to(there.device), clients)

    def answer(
        self,
        numbers: tuple[int, int, int],
        base: list[Bytes],
        resident: list[NDArray[Any]],
        board: Bytes,
        message: bytes,
        slot: Bytes,
    ) -> Failure | tuple[bytes, Bytes]:
        try:
            engine, federation = self._bases.get(numbers[0], lambda: _received_base(base))
            device = engine.device
            mine = self._residents.get(numbers[1], lambda: [_viewed(array).to(device) for array in resident])
            posted = self._boards.get(numbers[2], lambda: Room(_copied(board, device)))
            rooms = {BOARD: posted, SLOT: Room(_copied(slot, device))}
            program, shared, clients = unpacked(message, rooms, mine)
            found = engine.each(received(federation, program), shared, clients)
            room = Room(torch.empty(0, dtype=torch.uint8, device=device))
            return packed(found, room), room.used.cpu().numpy()
        except Exception as error:
            return Failure.of(error)


def _received_base(texts: list[Bytes]) -> tuple[Engine, Federation]:
    import ray

    surroundings, base = texts
    ray.cloudpickle.loads(surroundings).take_over()
    federation, name, layers = ray.cloudpickle.loads(base)
    task = federation.task
    if task.device.type != "cpu":
        task = lowered(task.on(task.device), layers)
    one_by_one = name == Sequential.name
    engine = Sequential(task.device) if one_by_one else vectorized(task.device, sys.maxsize)
    return engine, replace(federation, task=task)


def _viewed(array: NDArray[Any]) -> Tensor:
    """The array where it lies: in the object store, for all actors of a machine once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it cannot be written to, and nobody does
        return torch.from_numpy(array)


def _copied(array: Bytes, device: torch.device) -> Tensor:
    return _viewed(array).to(device, copy=True)
