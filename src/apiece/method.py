"""Method: what a federated method is. Pure functions written for ONE client; engines run many."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from apiece.optim import DEFAULT, Recipe
from apiece.params import Params
from apiece.shard import Shard
from apiece.task import Task
from apiece.tree import Tree

# Server, client and broadcast states: NamedTuples of Params and tensors, each method's own.
Server = Any
Client = Any
Broadcast = Any


class Round(NamedTuple):
    """What the server knows of a round."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs
    key: int  # all randomness of the round descends from it
    cohort_size: int
    population: int
    examples: int  # training examples in the population
    replies: Tensor | int = 0  # replies reduced; set when the round closes. weight 1: mean × replies = sum


class Reply(NamedTuple):
    """What a client answers."""

    update: Tree  # to the server, through decode and reduce
    state: Tree = ()  # stays with the client until it is sampled again
    weight: Tensor | float = 1.0
    model: Params | None = None  # the client's own model after the round; never sent
    metrics: Mapping[str, Tensor] = {}  # for logs only


class Reduce(enum.Enum):
    MEAN = "mean"  # weighted mean of the updates, streamed
    STACK = "stack"  # the server gets Stacked(updates, weights): memory grows with the cohort


MEAN, STACK = Reduce.MEAN, Reduce.STACK


class Stacked(NamedTuple):
    updates: Tree  # a first axis of replies, in the order of client ids
    weights: Tensor


class Model(NamedTuple):
    """The broadcast of methods that send a model and nothing else."""

    params: Params


class Span(NamedTuple):
    """A range of positive numbers to search, on a logarithmic scale."""

    low: float
    high: float


class Method(ABC):
    """Subclasses are final, frozen dataclasses of hyper-parameters, each in one file.

    Fields `local` (training in a round) and `personal` (personalization; inherits what it does not set).
    """

    local: Recipe
    personal: Recipe

    paper: ClassVar[str] = ""
    kind: ClassVar[str] = ""  # global, meta, personalized or baseline
    pooled: ClassVar[bool] = False  # trains on all seen clients' data as one client: no federation
    needs_proxy: ClassVar[bool] = False  # its server trains on data of its own
    # What `apiece tune` searches: a setting → its range, or the values to choose from.
    search: ClassVar[Mapping[str, Span | tuple[Any, ...]]] = {"local.lr": Span(0.01, 0.5)}

    def __init_subclass__(cls) -> None:
        for base in cls.__mro__[1:]:
            if issubclass(base, Method) and not base.__abstractmethods__ and base is not Method:
                raise TypeError(
                    f"{cls.__name__} inherits from {base.__name__}: methods are final, wrap instead"
                )

    def __post_init__(self) -> None:
        for name in ("local", "personal"):
            if not hasattr(self, name):
                raise TypeError(f"a method needs the field {name}: Recipe = Recipe()")
        local = self.local.over(DEFAULT).checked("local")
        object.__setattr__(self, "local", local)
        object.__setattr__(self, "personal", self.personal.over(local).checked("personal"))

    @abstractmethod
    def init(self, task: Task, params: Params, key: int) -> Server:
        """The server's state before round 0."""

    def init_client(self, task: Task, broadcast: Broadcast, start: Params, key: Tensor) -> Client:
        """A client's state at first contact; `start` are the params `init` got."""
        return ()

    @abstractmethod
    def broadcast(self, server: Server, round: Round) -> Broadcast:
        """What the cohort is sent: only what clients read."""

    @abstractmethod
    def client_update(self, task: Task, broadcast: Broadcast, client: Client, data: Shard) -> Reply:
        """One client's work in one round."""

    def decode(self, task: Task, broadcast: Broadcast, update: Tree) -> Tree:
        """On the server, one reply, before the reduction; bytes are counted before it."""
        return update

    def reduce(self, broadcast: Broadcast) -> Reduce:
        return MEAN

    @abstractmethod
    def server_update(self, task: Task, server: Server, update: Tree, round: Round) -> Server:
        """The server's state after the round; `update` is the reduced one."""

    def initial(self, task: Task, broadcast: Broadcast, client: Client) -> Params:
        """The model before personalization."""
        params: Params = broadcast.params
        return params

    @abstractmethod
    def personalize(self, task: Task, broadcast: Broadcast, client: Client, data: Shard) -> Params:
        """The model this client would deploy, from its training shard alone."""


class Wrapper(Method):
    """A Method around a Method: forwards everything; subclasses are final and change what they are about."""

    search: ClassVar[Mapping[str, Span | tuple[Any, ...]]] = {}  # of its own; the inner methods have theirs

    inner: Method

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Method):
            raise TypeError(f"{type(self).__name__} wraps a method, got {self.inner!r}")

    @property
    def pooled(self) -> bool:  # type: ignore[override]
        return self.inner.pooled

    @property
    def needs_proxy(self) -> bool:  # type: ignore[override]
        return self.inner.needs_proxy

    @property
    def local(self) -> Recipe:  # type: ignore[override]
        return self.inner.local

    @property
    def personal(self) -> Recipe:  # type: ignore[override]
        return self.inner.personal

    def init(self, task: Task, params: Params, key: int) -> Server:
        return self.inner.init(task, params, key)

    def init_client(self, task: Task, broadcast: Broadcast, start: Params, key: Tensor) -> Client:
        return self.inner.init_client(task, broadcast, start, key)

    def broadcast(self, server: Server, round: Round) -> Broadcast:
        return self.inner.broadcast(server, round)

    @abstractmethod
    def client_update(self, task: Task, broadcast: Broadcast, client: Client, data: Shard) -> Reply: ...

    def decode(self, task: Task, broadcast: Broadcast, update: Tree) -> Tree:
        return self.inner.decode(task, broadcast, update)

    def reduce(self, broadcast: Broadcast) -> Reduce:
        return self.inner.reduce(broadcast)

    def server_update(self, task: Task, server: Server, update: Tree, round: Round) -> Server:
        return self.inner.server_update(task, server, update, round)

    def initial(self, task: Task, broadcast: Broadcast, client: Client) -> Params:
        return self.inner.initial(task, broadcast, client)

    def personalize(self, task: Task, broadcast: Broadcast, client: Client, data: Shard) -> Params:
        return self.inner.personalize(task, broadcast, client, data)


def newcomer(method: Method, task: Task, broadcast: Broadcast, start: Params, key: Tensor) -> Params:
    """The initial model of a client never met."""
    task = task.for_clients()
    return method.initial(task, broadcast, method.init_client(task, broadcast, start, key))


def inner_methods(method: Method) -> dict[str, Method]:
    """The methods a wrapper wraps, by field name."""
    values = {f.name: getattr(method, f.name) for f in fields(method)}  # type: ignore[arg-type]
    return {name: value for name, value in values.items() if isinstance(value, Method)}
