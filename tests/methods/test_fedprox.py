"""FedProx against a plain PyTorch loop that shares nothing with our code but the order of the batches."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apiece import ApieceError, Recipe, Shard, random, tree
from apiece.engines.base import Engine
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import models
from apiece.methods.fedavg import FedAvg
from apiece.methods.fedprox import FedProx
from apiece.train import Training
from tests.methods.test_fedavg import cohort_batches
from tests.worlds import CPU, dropout_net, federation, servers

ENGINES = [Sequential(CPU), Vectorized(CPU, 8)]
SIZES = (7, 23, 0, 1, 12, 9)
MU = 0.7


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def personal_batches(training: Training, rounds: int, batch_size: int, epochs: int) -> Iterator[list[Tensor]]:
    """Rows of every batch in order, of each client when it personalizes after `rounds` rounds."""
    f = training.federation
    for client in range(f.data.population):
        rows, even = f.rows(f.data.train, [client], [client], random.fold(f.root, "personalize", rounds))
        shard = Shard(torch.arange(len(f.data.y)), f.data.y, tree.take(rows, 0), even)
        yield [batch.x for batch in shard.batches(batch_size, epochs)]


def assert_fine_tuned(training: Training, model: nn.Module, server: object, rounds: int) -> None:
    """Everybody's initial model is `model`, the personalized one a plain fine-tuning of it."""
    f, recipe = training.federation, training.federation.method.personal
    broadcast = training.broadcast(server, rounds)
    ours = models(training.engine, f, broadcast, list(range(f.data.population)), rounds)
    batches = personal_batches(training, rounds, recipe.batch_size, recipe.epochs)
    for (initial, personalized), rows in zip(ours, batches, strict=True):
        assert_close(initial, model)
        tuned = copy.deepcopy(model)
        sgd = torch.optim.SGD(tuned.parameters(), lr=recipe.lr)
        for at in rows:
            sgd.zero_grad()
            F.cross_entropy(tuned(f.data.x[at]), f.data.y[at]).backward()
            sgd.step()
        assert_close(personalized, tuned)


def assert_close(ours: object, model: nn.Module) -> None:
    for name, p in model.state_dict().items():
        torch.testing.assert_close(ours[name], p, rtol=1e-5, atol=1e-6)  # type: ignore[index]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_equals_a_plain_loop(engine: Engine) -> None:
    """The proximal term enters as its gradient μ(w − w_t), added by hand; personalization has none."""
    local = Recipe(lr=0.2, momentum=0.5, weight_decay=0.01, batch_size=5, epochs=2)
    personal = Recipe(lr=0.1, momentum=0.0, weight_decay=0.0, batch_size=4, epochs=3)
    method = FedProx(mu=MU, local=local, personal=personal)
    training, server = federation(method, engine, SIZES, 3, net)
    data = training.federation.data
    model = net()
    model.load_state_dict(dict(server.params))
    for t, ours in enumerate(servers(training, server, 3)):
        clients = cohort_batches(training, t, 2)
        average = {name: torch.zeros_like(p) for name, p in model.state_dict().items()}
        for size, batches in clients:
            w: nn.Module = copy.deepcopy(model)
            sgd = torch.optim.SGD(w.parameters(), lr=0.2, momentum=0.5, weight_decay=0.01)
            for rows in batches:
                sgd.zero_grad()
                with torch.enable_grad():
                    F.cross_entropy(w(data.x[rows]), data.y[rows]).backward()
                for p, p_t in zip(w.parameters(), model.parameters(), strict=True):
                    p.grad += MU * (p.detach() - p_t)  # type: ignore[operator]
                sgd.step()
            for name, p in w.state_dict().items():
                average[name] += p * size / sum(n for n, _ in clients)
        model.load_state_dict(average)
        assert_close(ours.params, model)
    assert_fine_tuned(training, model, ours, 3)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_without_the_term_it_is_fedavg(engine: Engine) -> None:
    local = Recipe(lr=0.1, momentum=0.5, batch_size=5, epochs=2)
    runs = (federation(m, engine, SIZES, 3, dropout_net) for m in (FedProx(0.0, local), FedAvg(local)))
    for ours, theirs in zip(*(list(servers(*run, 3)) for run in runs), strict=True):
        assert all(torch.equal(ours.params[name], theirs.params[name]) for name in theirs.params)


def test_a_strong_term_keeps_clients_near() -> None:
    """Two full steps with lr·μ = 1: w₁ = w_t − lr·g(w_t), and w₂ = w₁ − lr·g(w₁) − (w₁ − w_t)."""
    method = FedProx(mu=5.0, local=Recipe(lr=0.2, batch_size=0, steps=2))
    training, server = federation(method, Sequential(CPU), (8,), 1, net)
    data = training.federation.data
    model = net()

    def gradient(at: dict[str, Tensor]) -> dict[str, Tensor]:
        model.load_state_dict(at)
        loss = F.cross_entropy(model(data.x[:8]), data.y[:8])
        return dict(zip(at, torch.autograd.grad(loss, list(model.parameters())), strict=True))

    w_t = {name: server.params[name] for name in model.state_dict()}
    w_1 = {name: w_t[name] - 0.2 * g for name, g in gradient(w_t).items()}
    w_2 = {name: w_t[name] - 0.2 * g for name, g in gradient(w_1).items()}
    (after,) = servers(training, server, 1)
    for name, w in w_2.items():
        torch.testing.assert_close(after.params[name], w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf")])
def test_refuses_what_is_no_weight(mu: float) -> None:
    with pytest.raises(ApieceError, match="mu must be finite and not negative"):
        FedProx(mu=mu)
