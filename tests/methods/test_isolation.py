"""No method reads what is not its client's: test data, the server's proxy, another client's data."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from apiece import Shard, Task, catalog, tree
from apiece.data.federated import Examples, Federated, federate
from apiece.engines.base import Known, Program
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import models
from apiece.method import Method, Server
from apiece.random import as_key, fold
from apiece.sample import uniform
from apiece.shard import Rows
from apiece.store import Store
from apiece.train import Training, assemble
from apiece.tree import Tree
from tests.methods.test_registry import EVERY_METHOD
from tests.worlds import CPU, normalized_net

SIZES = (12, 20, 4, 28)
ENGINE = Vectorized(CPU, len(SIZES))
EVERYONE = list(range(len(SIZES)))


def world() -> Federated:
    """Four ragged clients; a quarter of the examples is for tests, a tenth of the rest is the server's."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(sum(SIZES), 5)).astype(np.float32)
    y = (x @ draw.normal(size=(5, 3))).argmax(1)
    parts = [np.arange(a, b) for a, b in pairwise(np.cumsum((0, *SIZES)))]
    examples = Examples(x, y, 3, ("a", "b", "c"))
    return federate(examples, parts, [str(i) for i in EVERYONE], key=0, test=0.25, unseen=0.0, proxy=0.1)


def poisoned(data: Federated, rows: np.ndarray) -> Federated:
    x = data.x.clone()
    x[rows] = torch.nan
    return replace(data, x=x)


def proxy(data: Federated, value: float | None = None) -> Shard:
    place = torch.as_tensor(data.proxy)
    assert len(place) >= 3
    x = data.x if value is None else torch.full_like(data.x, value)
    return Shard(x, data.y, Rows(place, as_key(len(place)), as_key(7), as_key(7)), True)


@dataclass(frozen=True)
class Careless(Task):
    """Hands its clients a proxy: not the server's, but one of NaN."""

    def for_clients(self) -> Task:
        return replace(self, proxy=proxy(world(), torch.nan), prior=None)


def begun(method: Method, data: Federated, task: type[Task] = Task) -> tuple[Training, Server]:
    clean = task(normalized_net, proxy=proxy(world()))

    def store(state: Tree) -> Store:
        return Store(state, data.population, CPU, None, mapped=False)

    start = clean.init(1)
    return assemble(ENGINE, method, clean, start, data, len(SIZES), fold(5, "run"), uniform, store)


def left(method: Method, data: Federated, task: type[Task] = Task) -> Tree:
    """Server, client states and both models of everybody after two rounds."""
    training, server = begun(method, data, task)
    with torch.no_grad():
        for closed in training.rounds(server, 0, 2):
            server = closed.server
        broadcast, f = training.broadcast(server, 2), training.federation
        return server, f.states(ENGINE, broadcast, EVERYONE), models(ENGINE, f, broadcast, EVERYONE, 2)


def assert_same_bits(a: Tree, b: Tree) -> None:
    one, other = tree.flatten(a), tree.flatten(b)
    assert one.keys() == other.keys()
    for path, leaf in one.items():
        if isinstance(leaf, torch.Tensor):
            assert torch.equal(leaf, other[path]), path
            assert not leaf.is_floating_point() or bool(leaf.isfinite().all()), path


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_test_data_are_never_read(name: str) -> None:
    method, data = catalog.build(name, {}), world()
    tests = np.concatenate([data.test[client] for client in EVERYONE])
    assert len(tests) >= 12
    assert_same_bits(left(method, data), left(method, poisoned(data, tests)))


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_clients_never_read_the_proxy(name: str) -> None:
    method, data = catalog.build(name, {}), world()
    assert_same_bits(left(method, data), left(method, data, Careless))


def _reply(federation, shards, broadcast, rows, state):  # type: ignore[no-untyped-def]
    reply = federation.method.client_update(
        federation.task.for_clients(), broadcast, state, federation.shard(rows, *shards)
    )
    return reply.update, reply.state, torch.as_tensor(reply.weight).float(), dict(reply.metrics)


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_another_clients_data_do_not_reach_a_reply_or_a_model(name: str) -> None:
    """Client 3's examples are NaN, in the same chunk."""
    method, data = catalog.build(name, {}), world()
    if method.pooled:
        pytest.skip("trains on everybody's data: that is what it is for")
    found = []
    for examples in (data, poisoned(data, data.train[3])):
        training, server = begun(method, examples)
        f = training.federation
        with torch.no_grad():
            broadcast = training.broadcast(server, 0)
            rows, even = f.rows(data.train, EVERYONE, EVERYONE, 11)
            states = f.states(ENGINE, broadcast, EVERYONE)
            known = Known.of([len(data.train[client]) for client in EVERYONE], even, method.local)
            replies = ENGINE.each(Program(_reply, f, (known,)), broadcast, (rows, states))
            found.append((tree.take(replies, slice(0, 3)), models(ENGINE, f, broadcast, EVERYONE, 0)[:3]))
    assert_same_bits(*found)
