"""Elastic around the kinds of methods there are, each in its smallest form."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad

from apiece import (
    ApieceError,
    Method,
    Model,
    Params,
    Recipe,
    Reply,
    Round,
    Rule,
    Shard,
    Task,
    check_method,
    sgd,
    tree,
)
from apiece.engines.base import Engine
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import models
from apiece.methods.fedavg import FedAvg
from apiece.methods.fedec import FedEC
from apiece.methods.local import Local
from apiece.methods.reptile import Reptile
from apiece.penalty import Memory
from apiece.train import Training
from apiece.wrappers.elastic import Elastic, Held
from tests.methods.test_fedavg import cohort_batches
from tests.methods.test_fedec import SIZES, assert_close, assert_same_bits, kl, net
from tests.worlds import CPU, federation, servers

ENGINES = [Sequential(CPU), Vectorized(CPU, 8)]
LOCAL = Recipe(lr=0.2, momentum=0.5, batch_size=8, epochs=2)


class Own(NamedTuple):
    params: Params


class Averaging(Method):
    """The server of FedAvg; abstract."""

    def init(self, task: Task, params: Params, key: int) -> Model:
        return Model(params)

    def broadcast(self, server: Model, round: Round) -> Model:
        return server

    def server_update(self, task: Task, server: Model, update: Params, round: Round) -> Model:
        return Model(server.params + update)


@dataclass(frozen=True)
class HeadSplit(Averaging):
    """As FedRep: the head stays with the client and is trained first, then the body, which is shared."""

    head: str = "3"
    local: Recipe = LOCAL
    personal: Recipe = Recipe()

    def init(self, task: Task, params: Params, key: int) -> Model:
        return Model(params.split((self.head,))[1])

    def init_client(self, task: Task, broadcast: Model, start: Params, key: Tensor) -> Own:
        return Own(start.split((self.head,))[0])

    def fitted_head(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Params:
        body = broadcast.params
        return sgd(lambda h, batch: task.objective(body | h, batch), client.params, data, self.local)

    def client_update(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Reply:
        head = self.fitted_head(task, broadcast, client, data)
        body = sgd(lambda b, batch: task.objective(b | head, batch), broadcast.params, data, self.local)
        return Reply(body - broadcast.params, Own(head), data.size, model=body | head)

    def initial(self, task: Task, broadcast: Model, client: Own) -> Params:
        return broadcast.params | client.params

    def personalize(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Params:
        return broadcast.params | self.fitted_head(task, broadcast, client, data)


@dataclass(frozen=True)
class MetaStep(Averaging):
    """As Per-FedAvg: w ← w − β ∇_w L(w − a ∇L(w, S), Q), the Hessian included."""

    a: float = 0.1
    local: Recipe = LOCAL
    personal: Recipe = Recipe()

    def client_update(self, task: Task, broadcast: Model, client: tuple[()], data: Shard) -> Reply:
        support, query = data.split()

        def meta(w: Params, batch: Any) -> Tensor:
            return task.objective(w - self.a * grad(task.objective)(w, support.all()), batch)

        w = sgd(meta, broadcast.params, query, self.local)
        return Reply(w - broadcast.params, model=w)

    def personalize(self, task: Task, broadcast: Model, client: tuple[()], data: Shard) -> Params:
        return broadcast.params - self.a * grad(task.objective)(broadcast.params, data.all())


@dataclass(frozen=True)
class OwnModel(Averaging):
    """As Ditto: beside the shared model, one that stays with the client."""

    lam: float = 0.5
    local: Recipe = LOCAL
    personal: Recipe = Recipe()

    def init_client(self, task: Task, broadcast: Model, start: Params, key: Tensor) -> Own:
        return Own(start)

    def client_update(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Reply:
        w = sgd(task.objective, broadcast.params, data, self.local)
        v = self.personalize(task, broadcast, client, data)
        return Reply(w - broadcast.params, Own(v), data.size, model=v)

    def initial(self, task: Task, broadcast: Model, client: Own) -> Params:
        return client.params

    def personalize(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Params:
        held = task.penalized(lambda v, batch, outputs: self.lam / 2 * (v - broadcast.params).sqnorm())
        return sgd(held.objective, client.params, data, self.personal)


INNER = [FedAvg(LOCAL), Reptile(LOCAL), HeadSplit(), MetaStep(), OwnModel()]


def name(value: Any) -> str:
    """Of a parameter, in the test's id."""
    if isinstance(value, str):
        return value
    return value.name if isinstance(value, Engine) else type(value).__name__


def play(method: Method, engine: Engine, rounds: int) -> tuple[list[Any], Any, Any]:
    """(server after each round, clients' states, their initial and personalized models)."""
    training, server = federation(method, engine, SIZES, 3)
    played = list(servers(training, server, rounds))
    f, everyone = training.federation, list(range(len(SIZES)))
    broadcast = training.broadcast(played[-1], rounds)
    with torch.no_grad():
        return played, f.states(engine, broadcast, everyone), models(engine, f, broadcast, everyone, rounds)


@pytest.mark.parametrize("engine", ENGINES, ids=name)
@pytest.mark.parametrize("constraint", ["kl", "l2"])
def test_around_reptile_it_is_fedec(constraint: str, engine: Engine) -> None:
    """Bit for bit over four rounds in which clients come back: server, memories, everybody's models."""
    outer = Rule("sgd", lr=0.5)
    elastic = Elastic(Reptile(LOCAL, outer=outer), 0.8, constraint)
    fedec = FedEC(0.8, constraint, LOCAL, outer=outer)
    played, held, found = play(elastic, engine, 4)
    assert_same_bits((played, held.memory, found), play(fedec, engine, 4))
    assert held.inner == ()


@pytest.mark.parametrize("engine", ENGINES, ids=name)
@pytest.mark.parametrize("inner", INNER, ids=name)
def test_without_weight_it_is_the_inner_method(inner: Method, engine: Engine) -> None:
    """Bit for bit: server, the inner states, both models of every client."""
    played, held, found = play(Elastic(Elastic(inner, 0.0), 0.0, "l2"), engine, 2)
    assert_same_bits((played, held.inner.inner, found), play(inner, engine, 2))


@pytest.mark.parametrize("inner", INNER, ids=name)
def test_with_weight_it_is_not(inner: Method) -> None:
    """The first round is the inner method's; when clients come back, it is another, for either constraint."""

    def played(method: Method) -> Iterator[Any]:
        return servers(*federation(method, ENGINES[1], SIZES, 3), 2)

    plain = list(played(inner))
    for constraint in ("kl", "l2"):
        first, second = played(Elastic(inner, 0.5, constraint))
        assert_same_bits(first, plain[0])
        assert any((second.params[n] - plain[1].params[n]).abs().max() > 1e-4 for n in second.params)


@pytest.mark.parametrize(
    ("inner", "constraint"), [(HeadSplit(), "kl"), (MetaStep(), "kl"), (OwnModel(), "l2")], ids=name
)
def test_around_every_kind_it_keeps_every_rule(inner: Method, constraint: str) -> None:
    check_method(Elastic(inner, constraint=constraint))


@pytest.mark.parametrize("engine", ENGINES, ids=name)
def test_two_layers_add_up(engine: Engine) -> None:
    """α₁·c + α₂·c = (α₁ + α₂)·c, and both layers remember the same model."""
    two, held, _ = play(Elastic(Elastic(FedAvg(LOCAL), 0.3), 0.5), engine, 4)
    one, alone, _ = play(Elastic(FedAvg(LOCAL), 0.8), engine, 4)
    assert_same_bits(held.memory, held.inner.memory)
    for n in one[-1].params:
        torch.testing.assert_close(two[-1].params[n], one[-1].params[n], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(held.memory.theta[n], alone.memory.theta[n], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES, ids=name)
def test_a_split_model_is_held_as_a_whole(engine: Engine) -> None:
    """HeadSplit in plain PyTorch: both phases fit y and the predictions of the client's last whole model."""
    alpha, rounds = 0.8, 3
    training, server = federation(
        Elastic(HeadSplit("2", LOCAL._replace(batch_size=5)), alpha), engine, SIZES, 3, net
    )
    heads, theta_hat, bodies = _plain_head_split(training, alpha, rounds)
    for body, after in zip(bodies, servers(training, server, rounds), strict=True):
        for n, p in after.params.items():
            torch.testing.assert_close(p, body[n], rtol=1e-5, atol=1e-5)
    held = training.federation.states(engine, training.broadcast(after, rounds), list(theta_hat))
    for at, client in enumerate(theta_hat):
        assert_close(held.memory.theta, theta_hat[client], at)
        for n, p in heads[client].items():
            torch.testing.assert_close(held.inner.params[n][at], p, rtol=1e-5, atol=1e-5)


def _plain_head_split(
    training: Training, alpha: float, rounds: int
) -> tuple[Any, dict[int, nn.Module], list[Any]]:
    data = training.federation.data
    shared = net()
    shared.load_state_dict(dict(training.federation.start))
    start_head = copy.deepcopy(shared[2].state_dict())  # type: ignore[index]
    heads: dict[int, Any] = {}
    theta_hat: dict[int, nn.Module] = {}
    bodies = []
    for index in range(rounds):
        ids = training.sampler(data, training.round(index)).ids
        clients = cohort_batches(training, index, 2)
        total = sum(size for size, _ in clients)
        average = {f"0.{n}": torch.zeros_like(p) for n, p in shared[0].state_dict().items()}  # type: ignore[index]
        for client, (size, batches) in zip(ids, clients, strict=True):
            model: Any = copy.deepcopy(shared)
            model[2].load_state_dict(heads.get(client, start_head))
            for part in (model[2], model[0]):
                step = torch.optim.SGD(part.parameters(), lr=0.2, momentum=0.5)
                for rows in batches:
                    loss = F.cross_entropy(model(data.x[rows]), data.y[rows])
                    if client in theta_hat:
                        loss = loss + alpha * kl(model, theta_hat[client], data.x[rows])
                    model.zero_grad()
                    loss.backward()
                    step.step()
            for n, p in model[0].state_dict().items():
                average[f"0.{n}"] += p * size / total
            if batches:
                theta_hat[client], heads[client] = model, copy.deepcopy(model[2].state_dict())
        shared.load_state_dict(average, strict=False)
        bodies.append(average)
    return {i: {f"2.{n}": p for n, p in h.items()} for i, h in heads.items()}, theta_hat, bodies


def test_both_gradients_of_a_meta_step_are_constrained() -> None:
    """w − β ∇_w L̃(w − a ∇L̃(w, S), Q) by PyTorch's own double backward, L̃ = CE + α KL(p_θ̂ ‖ p)."""
    alpha, a, beta = 0.8, 0.1, 0.2
    method = Elastic(MetaStep(a, Recipe(lr=beta, batch_size=0, epochs=1)), alpha)
    training, server = federation(method, ENGINES[0], (12,), 1, net)
    f = training.federation
    rows, even = f.rows(f.data.train, [0], [0], 5)
    shard = f.shard(tree.take(rows, 0), even)
    theta_hat = f.task.init(9)
    memory = Held(Memory(theta_hat, torch.ones(())), ())
    ours = method.client_update(f.task, server, memory, shard).model
    assert ours is not None

    def loss(w: dict[str, Tensor], batch: Any) -> Tensor:
        logits = torch.func.functional_call(f.task.module, w, (batch.x,))
        p_hat = torch.func.functional_call(f.task.module, dict(theta_hat), (batch.x,)).softmax(-1).detach()
        real = batch.weight / batch.weight.sum()
        divergence = (p_hat * (p_hat.log() - logits.log_softmax(-1))).sum(-1)
        return (real * (F.cross_entropy(logits, batch.y, reduction="none") + alpha * divergence)).sum()

    support, query = (part.all() for part in shard.split())
    w = {n: p.clone().requires_grad_() for n, p in server.params.items()}
    inner = torch.autograd.grad(loss(w, support), list(w.values()), create_graph=True)
    adapted = {n: p - a * g for (n, p), g in zip(w.items(), inner, strict=True)}
    outer = torch.autograd.grad(loss(adapted, query), list(w.values()))
    for (n, p), g in zip(w.items(), outer, strict=True):
        torch.testing.assert_close(ours[n], (p - beta * g).detach(), rtol=1e-5, atol=1e-6)


def test_a_method_without_a_model_is_refused() -> None:
    with pytest.raises(ApieceError, match="Local replies without a model"):
        federation(Elastic(Local()), ENGINES[0], SIZES, 3)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ApieceError, match="unknown constraint 'none'"):
        Elastic(FedAvg(), constraint="none")
    with pytest.raises(ApieceError, match="alpha"):
        replace(Elastic(FedAvg()), alpha=-0.5)
