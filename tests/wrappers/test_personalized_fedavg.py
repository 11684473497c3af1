"""Personalized FedAvg against plain PyTorch loops that share nothing with the engines but the batch order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apiece import Experiment, Method, Recipe, Rule, Shard, check_method, random
from apiece.data.federated import Federated, Ragged
from apiece.engines.base import Engine
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import models
from apiece.methods.fedavg import FedAvg
from apiece.methods.reptile import Reptile
from apiece.train import Training
from apiece.wrappers.personalized_fedavg import PersonalizedFedAvg
from tests.worlds import CPU, federation, linear_net, servers

SIZES = (7, 23, 1, 12)
BETA, BATCH = 0.2, 5


def client_batches(
    training: Training, part: Ragged, at: int, client: int, key: int, epochs: int, steps: int
) -> tuple[int, list[Tensor]]:
    """(size, rows of every batch in order) of one client."""
    f = training.federation
    rows, even = f.rows(part, [at], [client], key)
    shard = Shard(torch.arange(len(f.data.y)), f.data.y, type(rows)(*(leaf[0] for leaf in rows)), even)
    return int(shard.size), [batch.x for batch in shard.batches(BATCH, epochs, steps)]


def cohort_batches(training: Training, index: int, epochs: int, steps: int) -> list[tuple[int, list[Tensor]]]:
    """The same of each client of round `index`."""
    round = training.round(index)
    cohort = training.sampler(training.federation.data, round)
    key = random.fold(round.key, "client")
    return [
        client_batches(training, cohort.train, at, client, key, epochs, steps)
        for at, client in enumerate(cohort.ids)
    ]


def descend(model: nn.Module, data: Federated, batches: list[Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=BETA)
    for rows in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(data.x[rows]), data.y[rows]).backward()
        optimizer.step()


def copied(model: nn.Module) -> nn.Module:
    copy = linear_net()
    copy.load_state_dict(model.state_dict())
    return copy


@pytest.mark.parametrize("engine", [Sequential(CPU), Vectorized(CPU, 8)], ids=lambda e: e.name)
def test_equals_two_plain_loops_one_after_the_other(engine: Engine) -> None:
    """Two rounds of weighted FedAvg with torch's SGD(1.0, momentum 0.9) on the server, two of unweighted
    Reptile with a new torch Adam, each stepping on minus the mean update; then plain SGD on each client."""
    client = {"lr": BETA, "batch_size": BATCH}
    method = PersonalizedFedAvg(
        first=FedAvg(local=Recipe(**client, epochs=2), outer=Rule("sgd", lr=1.0, momentum=0.9)),
        then=Reptile(local=Recipe(**client, steps=4), personal=Recipe(epochs=3), outer=Rule("adam", lr=0.01)),
        switch=2,
    )
    training, server = federation(method, engine, SIZES, 3, linear_net)
    data = training.federation.data
    model: nn.Module = linear_net()
    model.load_state_dict(dict(server.first.server.params))
    outer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for index, ours in enumerate(servers(training, server, 4)):
        epochs, steps = (2, 0) if index < 2 else (1, 4)
        if index == 2:
            outer = torch.optim.Adam(model.parameters(), lr=0.01)
        clients = cohort_batches(training, index, epochs, steps)
        total = sum(size if index < 2 else 1 for size, _ in clients)
        outer.zero_grad()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for size, batches in clients:
            local = copied(model)
            with torch.enable_grad():
                descend(local, data, batches)
            for p, q in zip(model.parameters(), local.parameters(), strict=True):
                assert p.grad is not None
                p.grad -= (q.detach() - p.detach()) * (size if index < 2 else 1) / total
        outer.step()
        params = ours.first.server.params if index < 2 else ours.then.server.params
        for name, p in model.named_parameters():
            torch.testing.assert_close(params[name], p.detach(), rtol=1e-5, atol=1e-6)

    key = random.fold(training.federation.root, "personalize", 4)
    with torch.no_grad():
        pairs = models(engine, training.federation, training.broadcast(ours, 4), [0, 1, 2, 3], 4)
    for at, (initial, personalized) in enumerate(pairs):
        local = copied(model)
        descend(local, data, client_batches(training, data.train, at, at, key, 3, 0)[1])
        for name, p in model.named_parameters():
            torch.testing.assert_close(initial[name], p.detach(), rtol=1e-5, atol=1e-6)
        for name, p in local.named_parameters():
            torch.testing.assert_close(personalized[name], p.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        (FedAvg(local=Recipe(lr=BETA, batch_size=BATCH, epochs=2)), (10, 10, 10)),
        (Reptile(local=Recipe(lr=BETA, batch_size=BATCH, steps=4)), (7, 23, 3)),
    ],
    ids=["fedavg on equal clients", "reptile on ragged clients"],
)
def test_the_update_is_fedsgds_and_every_fomamls(method: Method, sizes: tuple[int, ...]) -> None:
    """Eq. 5 with g_j the raw gradient of step j: θ_K − θ = −β (g_FedSGD + Σ_{j=1}^{K−1} g_FOMAML(j)).

    g_FOMAML(j) is found by itself for each j: adapt every client by j steps from θ, take the gradient of its
    next batch there, average. FedSGD is FOMAML(0). K = 4: two epochs of two batches, or four steps.
    """
    K = 4
    training, server = federation(method, Sequential(CPU), sizes, 3, linear_net)
    data = training.federation.data
    theta: nn.Module = linear_net()
    theta.load_state_dict(dict(server.params))
    recipe = method.local
    clients = [batches for _, batches in cohort_batches(training, 0, recipe.epochs, recipe.steps)]
    assert [len(batches) for batches in clients] == [K, K, K]

    def fomaml(j: int) -> Tensor:
        gradients = []
        for batches in clients:
            model = copied(theta)
            descend(model, data, batches[:j])
            loss = F.cross_entropy(model(data.x[batches[j]]), data.y[batches[j]])
            named = sorted(model.named_parameters())
            parts = torch.autograd.grad(loss, [p for _, p in named])
            gradients.append(torch.cat([g.flatten() for g in parts]))
        return torch.stack(gradients).mean(0)

    (after,) = servers(training, server, 1)
    moved = torch.cat([(after.params[name] - server.params[name]).flatten() for name in sorted(after.params)])
    g_fedsgd = fomaml(0)
    torch.testing.assert_close(
        moved, -BETA * (g_fedsgd + sum(fomaml(j) for j in range(1, K))), rtol=1e-5, atol=1e-7
    )
    assert not torch.allclose(moved, -BETA * K * g_fedsgd, rtol=1e-2)


def test_out_of_the_box_it_is_the_papers() -> None:
    """§3: SGD 0.02 in batches of 20 on clients, SGD 1.0 with momentum 0.9, then Adam on the server. Clients
    personalize with their optimizer (Algorithm 2, line 3). A default experiment reaches both stages."""
    method = PersonalizedFedAvg()
    client = Rule("sgd", lr=0.02)
    for stage in (method.first, method.then):
        for recipe in (stage.local, stage.personal):
            assert recipe.rule == client
            assert recipe.batch_size == 20
    assert isinstance(method.first, FedAvg)
    assert isinstance(method.then, Reptile)
    assert method.first.outer == Rule("sgd", lr=1.0, momentum=0.9)
    assert method.then.outer.optimizer == "adam"
    assert method.first.personal.epochs == method.then.personal.epochs
    assert method.then.personal.steps == 0
    assert method.switch / Experiment().rounds == pytest.approx(500 / 700, abs=0.02)


def test_keeps_every_rule() -> None:
    """In 4 rounds, two of each stage; the server is restored at the switch."""
    check_method(PersonalizedFedAvg(switch=2))
