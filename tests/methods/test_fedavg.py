"""FedAvg against a plain PyTorch loop that shares nothing with the engines but the order of the batches."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apiece import Recipe, Rule
from apiece.engines.base import Engine
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.methods.fedavg import FedAvg
from apiece.train import Training
from tests.worlds import CPU, cohort_shards, federation, linear_net, servers

SIZES = (7, 23, 1, 12)


def cohort_batches(training: Training, index: int, epochs: int) -> list[tuple[int, list[torch.Tensor]]]:
    """(size, rows of every batch in order) of each client of round `index`."""
    return [
        (int(shard.size), [batch.x for batch in shard.batches(5, epochs)])
        for _, shard in cohort_shards(training, index)
    ]


@pytest.mark.parametrize("engine", [Sequential(CPU), Vectorized(CPU, 8)], ids=lambda e: e.name)
def test_equals_a_plain_loop(engine: Engine) -> None:
    method = FedAvg(local=Recipe(lr=0.2, momentum=0.5, weight_decay=0.01, batch_size=5, epochs=2))
    training, server = federation(method, engine, SIZES, 3, linear_net)
    data = training.federation.data
    model = linear_net()
    model.load_state_dict(dict(server.params))
    for index, ours in enumerate(servers(training, server, 3)):
        clients = cohort_batches(training, index, 2)
        total = sum(size for size, _ in clients)
        average = {name: torch.zeros_like(p) for name, p in model.state_dict().items()}
        for size, batches in clients:
            local: nn.Module = copy.deepcopy(model)
            sgd = torch.optim.SGD(local.parameters(), lr=0.2, momentum=0.5, weight_decay=0.01)
            for rows in batches:
                sgd.zero_grad()
                with torch.enable_grad():
                    F.cross_entropy(local(data.x[rows]), data.y[rows]).backward()
                sgd.step()
            for name, p in local.state_dict().items():
                average[name] += p * size / total
        model.load_state_dict(average)
        for name, p in model.state_dict().items():
            torch.testing.assert_close(ours.params[name], p, rtol=1e-6, atol=1e-6)


def test_fedsgd_is_one_full_batch_step() -> None:
    """One step of gradient descent on the loss of all clients' examples together."""
    method = FedAvg(local=Recipe(lr=0.3, batch_size=0, steps=1))
    training, server = federation(method, Vectorized(CPU, 8), SIZES, len(SIZES), linear_net)
    data = training.federation.data
    model = linear_net()
    model.load_state_dict(dict(server.params))
    F.cross_entropy(model(data.x[:-1]), data.y[:-1]).backward()
    (after,) = servers(training, server, 1)
    for name, p in model.named_parameters():
        torch.testing.assert_close(after.params[name], p.detach() - 0.3 * p.grad, rtol=1e-6, atol=1e-6)


def test_server_momentum_by_hand() -> None:
    """With updates d₀, d₁: w₁ = w₀ + ½d₀ and w₂ = w₁ + ½(0.9 d₀ + d₁)."""
    method = FedAvg(local=Recipe(batch_size=5, epochs=1), outer=Rule("sgd", lr=0.5, momentum=0.9))
    plain = FedAvg(local=method.local)
    training, server = federation(method, Sequential(CPU), SIZES, 3, linear_net)
    w0 = server.params
    w1, w2 = (s.params for s in servers(training, server, 2))
    again, start = federation(plain, Sequential(CPU), SIZES, 3, linear_net)
    d0 = next(servers(again, start, 1)).params - w0
    from apiece.optim import Stepped

    with torch.no_grad():
        d1 = next(iter(again.rounds(Stepped(w1, ()), 1, 2))).server.params - w1
    for name in w0:
        torch.testing.assert_close(w1[name], (w0 + 0.5 * d0)[name])
        torch.testing.assert_close(w2[name], (w1 + 0.5 * (0.9 * d0 + d1))[name])
