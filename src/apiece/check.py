"""check_method: the public conformance suite. What every engine and every later feature relies on.

    from apiece import check_method
    check_method(MyMethod())

runs the method on eight ragged clients (of 0, 1, 4, 9, 14, 17, 21 and 25 examples) with a model that has
dropout and a normalization layer.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from apiece import random, tree
from apiece.data.federated import Examples, Federated, federate
from apiece.engines.base import Engine, Member, client_phase
from apiece.engines.capture import vectorized
from apiece.engines.sequential import Sequential
from apiece.errors import ApieceError
from apiece.evaluate import models
from apiece.method import Broadcast, Method, Reply, Round, Server, Wrapper, inner_methods
from apiece.optim import Recipe, Rule
from apiece.params import Params
from apiece.sample import uniform
from apiece.shard import Rows, Shard
from apiece.spec import keep_form, place, spec
from apiece.store import Store
from apiece.task import Dropout, Task
from apiece.train import Training, assemble, describe
from apiece.tree import Tree

SIZES = (0, 1, 4, 9, 14, 17, 21, 25)
ROUNDS = 4
COHORT = 6
TOLERANCE = 1e-5
MOST_STATIC_VALUES = 3
LATE = 10**6  # a round of the last stage, in a method of several
WEIGHT = 7.25  # that no reply would carry by chance


class Finding(NamedTuple):
    rule: str
    ok: bool
    detail: str


class NonConformingError(AssertionError):
    """A method that breaks a rule; the message lists every broken one."""


def check_method(method: Method, device: str = "cpu") -> None:
    """Raise NonConformingError, with what is wrong and why it matters, unless the method keeps every rule."""
    broken = [finding for finding in examine(method, device) if not finding.ok]
    if broken:
        lines = "\n".join(f"- {finding.rule}: {finding.detail}" for finding in broken)
        raise NonConformingError(f"{type(method).__name__} breaks {len(broken)} rules:\n{lines}")


@torch.no_grad()
def examine(method: Method, device: str = "cpu") -> list[Finding]:
    """Every rule with its verdict."""
    with _one_thread():
        return list(_findings(_World.build(_stressed(method), torch.device(device))))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors of a few numbers are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _findings(world: _World) -> Iterator[Finding]:
    held: list[Finding] = []  # what raised before `runs`: it raises there too, and is told there alone
    running = False
    for rule, test in _RULES.items():
        raised = False
        try:
            complaints = list(test(world))
        except Exception as error:
            raised, complaints = True, [_told(error, world.method)]
        finding = Finding(rule, not complaints, "; ".join(complaints))
        if rule == "runs":
            if complaints:
                yield finding
                return
            running = True
            yield from held
        if raised and not running:
            held.append(finding)
        else:
            yield finding


def _told(error: Exception, method: Method) -> str:
    text = str(error) if isinstance(error, ApieceError) else f"{type(error).__name__}: {error}"
    asides = "; ".join(filter(None, [place(error, method), *getattr(error, "__notes__", [])]))
    return text + (f" ({asides})" if asides else "")


def _stressed(method: Method) -> Method:
    """The method with several batches and two epochs, where padding and counters show."""
    inner = {name: _stressed(value) for name, value in inner_methods(method).items()}
    own = {f.name for f in dataclasses.fields(method)}  # type: ignore[arg-type]
    recipes = {
        name: getattr(method, name)._replace(epochs=2, batch_size=4 * bool(getattr(method, name).batch_size))
        for name in ("local", "personal")
        if name in own
    }
    return dataclasses.replace(method, **inner, **recipes)  # type: ignore[type-var]


@dataclass(frozen=True)
class _World:
    """A tiny federation for one method."""

    method: Method
    task: Task
    data: Federated
    start: Params
    root: int = random.fold(0, "check")

    @staticmethod
    def build(method: Method, device: torch.device) -> _World:
        draw = np.random.Generator(np.random.Philox(key=7))
        n = sum(SIZES)
        x = draw.normal(size=(n, 4)).astype(np.float32)
        y = (x @ draw.normal(size=(4, 3))).argmax(1).astype(np.int64)
        edges = np.cumsum((0, *SIZES))
        parts = [np.arange(a, b) for a, b in pairwise(edges)]
        names = [str(i) for i in range(len(SIZES))]
        examples = Examples(x, y, 3, ("a", "b", "c"))
        data = federate(examples, parts, names, key=1, test=0.0, unseen=0.0).to(device)
        task = Task(_model, device=device)
        start = task.init(3)
        rows = _rows(np.arange(6)[None], device, key=11)
        proxy = Shard(data.x, data.y, tree.take(rows, 0), True)
        task = dataclasses.replace(task, proxy=proxy, prior=task.init(5))
        return _World(method, task, data, start)

    def with_method(self, method: Method) -> _World:
        return dataclasses.replace(self, method=method)

    def server(self) -> Server:
        return self.method.init(self.task, self.start, random.fold(self.root, "method"))

    def training(self, engine: Engine, data: Federated | None = None) -> Training:
        data = data or self.data

        def store(state: Tree) -> Store:
            return Store(state, data.population, self.task.device, None, mapped=False)

        parts = (self.method, self.task, self.start, data, COHORT, self.root, uniform, store)
        return assemble(engine, *parts)[0]

    def round(self, index: int = 0) -> Round:
        return describe(index, self.data, COHORT, self.root)

    def broadcast(self) -> Broadcast:
        return self.method.broadcast(self.server(), self.round())

    def shard(self, client: int, key: int) -> Shard:
        rows = _rows(self.data.train[client][None], self.task.device, key)
        return Shard(self.data.x, self.data.y, tree.take(rows, 0), True)

    def client(self, broadcast: Broadcast) -> Tree:
        key = random.as_key(random.fold(self.root, "client", 5), self.task.device)
        return self.method.init_client(self.task.for_clients(), broadcast, self.start, key)

    def reply(self, broadcast: Broadcast, client: Tree, key: int = 1, who: int = 5) -> Reply:
        return self.method.client_update(self.task.for_clients(), broadcast, client, self.shard(who, key))

    def play(self, engine: Engine) -> Iterator[_Snapshot]:
        """What there is to see after each round."""
        training, server = self.training(engine), self.server()
        for index in range(ROUNDS):
            seen = _turn(training, server, index)
            server = seen.server
            yield seen


def _turn(training: Training, server: Server, index: int) -> _Snapshot:
    """What there is to see after round `index`."""
    (closed,) = training.rounds(server, index, index + 1)
    everyone = list(range(len(SIZES)))
    broadcast, f = training.broadcast(closed.server, index + 1), training.federation
    states = f.states(training.engine, broadcast, everyone)
    found = models(training.engine, f, broadcast, everyone, index + 1)
    return _Snapshot(closed.ids, closed.finite, closed.server, states, found)


class _Snapshot(NamedTuple):
    cohort: tuple[int, ...]
    finite: Tensor  # per client of the cohort: was its reply?
    server: Server
    clients: Tree
    models: list[tuple[Params, Params]]  # initial, personalized


def _model() -> nn.Module:
    hidden = {
        "hidden": nn.Linear(4, 8),
        "norm": nn.GroupNorm(1, 8),
        "relu": nn.ReLU(),
        "dropout": Dropout(0.25),
    }
    return nn.Sequential(OrderedDict(hidden, head=nn.Linear(8, 3)))


def _rows(index: Any, device: torch.device, key: int) -> Rows:
    n, width = index.shape
    keys = random.fold(random.as_key(key, device), torch.arange(n, device=device))
    sizes = torch.full((n,), width, device=device)
    return Rows(torch.as_tensor(index, device=device), sizes, keys, keys)


def _bits_differ(a: Tree, b: Tree) -> list[str]:
    """Paths of leaves that are not bit-equal."""
    left, right = tree.flatten(a), tree.flatten(b)
    if left.keys() != right.keys():
        return sorted(left.keys() ^ right.keys())

    def equal(x: Any, y: Any) -> bool:
        if not isinstance(x, Tensor):
            return bool(x == y)
        return torch.equal(x.view(torch.uint8) if x.dim() else x, y.view(torch.uint8) if y.dim() else y)

    return [path for path in left if not equal(left[path], right[path])]


def _distance(a: Tree, b: Tree) -> tuple[float, str]:
    """The largest difference relative to its leaf, or to 1 if that is larger, and that leaf's path."""
    worst = (0.0, "")
    right = tree.flatten(b)
    for path, x in tree.flatten(a).items():
        if isinstance(x, Tensor) and x.numel():
            x, y = x.double(), right[path].double()
            gap = float((x - y).abs().max() / y.abs().max().clamp(min=1.0))
            worst = max(worst, (math.inf if math.isnan(gap) else gap, path))
    return worst


def _runs(world: _World) -> Iterator[str]:
    try:
        yield from _not_finite(world)
    except Exception as error:
        open_task = dataclasses.replace(world, task=_Leaky(**_fields(world.task)))
        try:
            list(_not_finite(open_task))
        except Exception:
            yield _told(error, world.method)
        else:
            yield "a client reads task.proxy or task.prior: they are the server's own, not the clients'"


def _not_finite(world: _World) -> Iterator[str]:
    """The first thing in a few rounds that is NaN or infinite: others may come of it."""
    engine, server = Sequential(world.task.device), world.server()
    for index, seen in enumerate(world.play(engine)):
        if not tree.finite(seen.server, world.task.device):
            yield "the server's state is NaN or infinite: guard divisions; eps goes inside square roots"
            return
        for what, values in _of_clients(world.training(engine), server, index, seen).items():
            sizes = [str(SIZES[who]) for who, v in values.items() if not tree.finite(v, world.task.device)]
            if sizes:
                yield (
                    f"{what} is NaN or infinite where data.size is {', '.join(sizes)}: guard divisions by "
                    f"data.size; eps goes inside square roots"
                )
                return
        server = seen.server


def _of_clients(
    training: Training, server: Server, index: int, seen: _Snapshot
) -> dict[str, dict[int, Tree]]:
    """What clients made in round `index`, causes first. Those whose reply was refused still have the state
    from before, so that it is told what of the reply it was.
    """
    states = {who: tree.take(seen.clients, who) for who in range(len(SIZES))}
    fine = dict(zip(seen.cohort, seen.finite.tolist(), strict=True))
    refused = {who: _replayed(training, server, index, who, states[who]) for who in fine if not fine[who]}
    return {
        "the state that init_client returns": states,
        "the update": {who: reply.update for who, reply in refused.items()},
        "the state in client_update's Reply": {who: reply.state for who, reply in refused.items()},
        "the weight": {who: torch.as_tensor(reply.weight) for who, reply in refused.items()},
        "the model that initial returns": {who: pair[0] for who, pair in enumerate(seen.models)},
        "the model that personalize returns": {who: pair[1] for who, pair in enumerate(seen.models)},
    }


def _replayed(training: Training, server: Server, index: int, who: int, state: Tree) -> Reply:
    """A client's reply in round `index`, its update decoded."""
    f, round = training.federation, training.round(index)
    task, broadcast = f.task.for_clients(), training.broadcast(server, index)
    rows, even = f.rows(f.data.take([who]).train, [0], [who], random.fold(round.key, "client"))
    reply = f.method.client_update(task, broadcast, state, f.shard(tree.take(rows, 0), even))
    return reply._replace(update=f.method.decode(task, broadcast, reply.update))


class _Leaky(Task):
    """A task that hands clients the server's own data: only to tell who reads it."""

    def for_clients(self) -> Task:
        return self


def _fields(record: Any) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}


def _static_fields(world: _World) -> Iterator[str]:
    for name, value in _untyped(type(world.method)).items():
        kind = type(value).__name__
        yield f"{name} has no type, so it is no setting: write {name}: {kind}, of a constant ClassVar[{kind}]"
    seen: dict[str, set[Any]] = {}
    server = world.server()
    for index in range(6):
        for path, leaf in tree.flatten(world.method.broadcast(server, world.round(index))).items():
            if isinstance(leaf, Tensor):
                continue
            if not isinstance(leaf, bool | int | str):
                yield f"broadcast/{path} is a {type(leaf).__name__}: numbers that change are 0-d tensors"
                return
            seen.setdefault(path, set()).add(leaf)
    for path, values in seen.items():
        if len(values) > MOST_STATIC_VALUES:
            yield f"broadcast/{path} takes a new Python value every round: make it a 0-d tensor"
    for path, leaf in tree.flatten(server).items():
        if isinstance(leaf, float):
            yield f"server/{path} is a Python float: make it a 0-d tensor"


def _untyped(cls: type[Method]) -> dict[str, Any]:
    """What a method's class holds as if it were a field; private names are its own affair."""
    known = {*inspect.get_annotations(cls), *vars(Method)}
    return {
        name: value
        for name, value in vars(cls).items()
        if isinstance(value, bool | int | float | str | Recipe | Rule)
        and name not in known
        and name[0] != "_"
    }


def _state_is_constant(world: _World) -> Iterator[str]:
    broadcast = world.broadcast()
    before = world.client(broadcast)
    after = world.reply(broadcast, before).state
    keep_form(world.method, before, after)
    for path, a in tree.flatten(before).items():
        b = tree.flatten(after)[path]
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            yield f"state/{path} is not a tensor"
        elif a.shape != b.shape or a.dtype != b.dtype:
            yield f"state/{path} changes from {tuple(a.shape)} {a.dtype} to {tuple(b.shape)} {b.dtype}"


def _arguments_unchanged(world: _World) -> Iterator[str]:
    broadcast = world.broadcast()
    client = world.client(broadcast)
    kept = tree.clone((broadcast, client))
    world.reply(broadcast, client)
    for path in _bits_differ(kept[0], broadcast):
        yield f"client_update writes into broadcast/{path}, which every client shares"
    for path in _bits_differ(kept[1], client):
        yield f"client_update writes into its old state/{path}: return a new one"


def _engines_agree(world: _World) -> Iterator[str]:
    """After every round that both begin in the same state: what a server amplifies does not add up."""
    device = world.task.device
    engines = (Sequential(device), vectorized(device, len(SIZES)))
    alone, together = (world.training(engine) for engine in engines)
    server = world.server()
    for index in range(ROUNDS):
        one, many = _turn(alone, server, index), _turn(together, server, index)
        server = one.server
        cohort = torch.as_tensor(one.cohort, device=device)
        together.federation.store.put(one.cohort, tree.take(one.clients, cohort))
        gap, path = _distance(one[2:], many[2:])
        if gap > TOLERANCE:
            yield (
                f"sequential and vectorized differ by {gap:.1e} at {path} in round {index}: use local.loop "
                f"for every loop over batches, keep counters in its carry, weigh examples by batch.weight, "
                f"draw from batch.key"
            )
            return


def _deterministic(world: _World) -> Iterator[str]:
    broadcast = world.broadcast()
    client = world.client(broadcast)
    for path in _bits_differ(world.reply(broadcast, client)[:3], world.reply(broadcast, client)[:3]):
        yield f"two equal calls of client_update differ at {path}: hidden state or a generator"
        return


def _rounds_differ(world: _World) -> Iterator[str]:
    broadcast = world.broadcast()
    client = world.client(broadcast)
    one, other = (world.reply(broadcast, client, key)[:2] for key in (1, 2))
    if tree.tensors(one[0]) and not _bits_differ(one, other):
        yield "rounds with different keys give the same reply: draw orders and dropout from data.key"


def _isolated(world: _World) -> Iterator[str]:
    """Another client's NaN must not reach this one's reply."""
    engine = vectorized(world.task.device, len(SIZES))
    poisoned = world.data.x.clone()
    poisoned[world.data.train[5]] = torch.nan
    states = []
    for x in (world.data.x, poisoned):
        training = world.training(engine, dataclasses.replace(world.data, x=x))
        everyone = world.round()._replace(cohort_size=len(SIZES))
        cohort = uniform(training.federation.data, everyone)
        client_phase(engine, Member(training.federation, world.broadcast(), cohort, everyone))
        states.append(training.federation.states(engine, world.broadcast(), [0, 1, 2, 3, 4]))
    for path in _bits_differ(*states):
        yield f"client 5's data reaches the other clients' state/{path}"


def _reply_as_specified(world: _World) -> Iterator[str]:
    broadcast = world.broadcast()
    shape = spec(world.method, world.task, broadcast, world.start, world.data.x, world.data.y)
    update = world.reply(broadcast, world.client(broadcast)).update
    wanted, got = tree.flatten(shape.update), tree.flatten(update)
    if wanted.keys() != got.keys():
        yield f"the update's leaves depend on data: {sorted(wanted.keys() ^ got.keys())}"
        return
    for path, leaf in got.items():
        if leaf.shape != wanted[path].shape or not leaf.is_floating_point():
            expected = f"expected floats of {tuple(wanted[path].shape)}"
            yield f"update/{path} is {tuple(leaf.shape)} {leaf.dtype}, {expected}"


def _restorable(world: _World) -> Iterator[str]:
    """A server that was saved and restored in the middle goes on bit for bit."""
    engine = Sequential(world.task.device)

    def end(save: bool) -> Tree:
        training = world.training(engine)
        server = world.server()
        for closed in training.rounds(server, 0, 2):
            server = closed.server
        if save:
            values = {
                path: torch.clone(v) if isinstance(v, Tensor) else v
                for path, v in tree.flatten(server).items()
            }
            server = tree.restore(world.server(), values)
        for closed in training.rounds(server, 2, ROUNDS):
            server = closed.server
        return server

    for path in _bits_differ(end(False), end(True)):
        yield f"server/{path} differs after a save and a restore: state outside the server's tree"


class Count(NamedTuple):
    rounds: Tensor
    inner: Tree


@dataclass(frozen=True)
class _Probe(Wrapper):
    """Counts in its client state how often the client took part, from 1000."""

    inner: Method
    calls: list[None] = dataclasses.field(default_factory=list)  # of client_update: was it run at all?

    def init_client(self, task: Task, broadcast: Broadcast, start: Params, key: Tensor) -> Count:
        inner = self.inner.init_client(task, broadcast, start, key)
        return Count(torch.full((), 1000.0, device=key.device), inner)

    def client_update(self, task: Task, broadcast: Broadcast, client: Count, data: Shard) -> Reply:
        self.calls.append(None)
        reply = self.inner.client_update(task, broadcast, client.inner, data)
        return reply._replace(state=Count(client.rounds + 1, reply.state), weight=WEIGHT)

    def initial(self, task: Task, broadcast: Broadcast, client: Count) -> Params:
        return self.inner.initial(task, broadcast, client.inner)

    def personalize(self, task: Task, broadcast: Broadcast, client: Count, data: Shard) -> Params:
        return self.inner.personalize(task, broadcast, client.inner, data)


def _inner_is_kept(world: _World) -> Iterator[str]:
    """A wrapper hands on its inner method's state and weight, whichever rounds it runs it in."""
    for name, inner in inner_methods(world.method).items():
        probe: Any = _Probe(inner)
        probed = world.with_method(dataclasses.replace(world.method, **{name: probe}))  # type: ignore[type-var]
        server = probed.server()
        states, weights = [], []
        for index in (0, LATE):
            broadcast = probed.method.broadcast(server, probed.round(index))
            probe.calls.clear()
            reply = probed.reply(broadcast, probed.client(broadcast))
            if probe.calls:
                weights.append(float(reply.weight))
                states.append(tree.tensors(probed.reply(broadcast, reply.state).state))
        counted = [any(leaf.dim() == 0 and float(leaf) == 1002.0 for leaf in state) for state in states]
        if not counted or not all(counted):
            yield f"the state of {name} is lost: hand on reply.state of the inner method"
        if any(weight != WEIGHT for weight in weights):
            yield f"the weight of {name}'s reply is lost: start from reply._replace(...)"


_RULES: dict[str, Callable[[_World], Iterator[str]]] = {
    "client state keeps its shape": _state_is_constant,
    "runs": _runs,
    "static fields": _static_fields,
    "arguments stay unchanged": _arguments_unchanged,
    "reply as specified": _reply_as_specified,
    "deterministic": _deterministic,
    "rounds draw afresh": _rounds_differ,
    "engines agree": _engines_agree,
    "clients are isolated": _isolated,
    "state can be restored": _restorable,
    "wrappers keep the inner reply": _inner_is_kept,
}
