"""FedNova against its definition, d_i = G_i a_i / ‖a_i‖₁, from gradients gathered in a plain PyTorch loop."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apiece import ApieceError, Recipe
from apiece.engines.base import Engine
from apiece.engines.vectorized import Vectorized
from apiece.methods.fedavg import FedAvg
from apiece.methods.fednova import FedNova
from tests.methods.test_fedavg import cohort_batches
from tests.methods.test_fedprox import ENGINES, SIZES, assert_close, assert_fine_tuned, net
from tests.worlds import CPU, dropout_net, federation, servers

LR, DECAY = 0.1, 0.01


def gradients(model: nn.Module, batches: list[Tensor], rho: float, x: Tensor, y: Tensor) -> list[Tensor]:
    """The columns of G_i: what a client meets on its way by SGD with momentum ρ."""
    model = copy.deepcopy(model)
    sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=rho, weight_decay=DECAY)
    found = []
    for rows in batches:
        sgd.zero_grad()
        with torch.enable_grad():
            F.cross_entropy(model(x[rows]), y[rows]).backward()
        found.append(torch.cat([(p.grad + DECAY * p.detach()).flatten() for p in model.parameters()]))
        sgd.step()
    return found


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("rho", [0.0, 0.7])
def test_equals_its_definition(engine: Engine, rho: float) -> None:
    local = Recipe(lr=LR, momentum=rho, weight_decay=DECAY, batch_size=5, epochs=2)
    personal = Recipe(momentum=0.0, weight_decay=0.0, batch_size=4)
    training, server = federation(FedNova(local, personal), engine, SIZES, 4, net)
    data = training.federation.data
    model = net()
    model.load_state_dict(dict(server.params))
    uneven = 0
    for t, ours in enumerate(servers(training, server, 3)):
        clients = cohort_batches(training, t, 2)
        n = sum(size for size, _ in clients)
        w = nn.utils.parameters_to_vector(model.parameters()).detach()
        direction, tau_eff = torch.zeros_like(w), 0.0
        for size, batches in clients:
            tau = len(batches)
            a = [sum(rho**j for j in range(tau - k)) for k in range(tau)]
            if tau and rho:
                closed = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
                assert math.isclose(sum(a), closed)
            for weight, g in zip(a, gradients(model, batches, rho, data.x, data.y), strict=True):
                direction += size / n * weight / sum(a) * g
            tau_eff += size / n * sum(a)
        nn.utils.vector_to_parameters(w - tau_eff * LR * direction, model.parameters())
        assert_close(ours.params, model)
        uneven += len({len(batches) for _, batches in clients}) > 1
    assert uneven == 3  # else it would be FedAvg
    assert_fine_tuned(training, model, ours, 3)


@pytest.mark.parametrize(
    ("sizes", "local"),
    [
        ((12, 9, 10, 11), Recipe(lr=0.1, momentum=0.5, batch_size=4, epochs=2)),
        (SIZES, Recipe(lr=0.1, momentum=0.5, batch_size=4, steps=5)),
    ],
    ids=["as many batches each", "steps"],
)
def test_with_equal_steps_it_is_fedavg(sizes: tuple[int, ...], local: Recipe) -> None:
    runs = (federation(m, Vectorized(CPU, 8), sizes, 3, dropout_net) for m in (FedNova(local), FedAvg(local)))
    for ours, theirs in zip(*(list(servers(*run, 3)) for run in runs), strict=True):
        for name in theirs.params:
            torch.testing.assert_close(ours.params[name], theirs.params[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_a_client_without_examples_takes_no_step_and_is_no_loss(engine: Engine) -> None:
    """0 / ‖a‖₁ with ‖a‖₁ = 0 would be refused as not finite, and stop a run."""
    training, server = federation(FedNova(), engine, SIZES, len(SIZES), net)
    with torch.no_grad():
        (closed,) = training.rounds(server, 0, 1)
    assert closed.finite.all()


@pytest.mark.parametrize("optimizer", ["adam", "yogi", "adagrad"])
def test_refuses_optimizers_it_cannot_normalize(optimizer: str) -> None:
    with pytest.raises(ApieceError, match=rf"not for local.optimizer={optimizer}. Set it to sgd"):
        FedNova(local=Recipe(optimizer=optimizer))
    assert FedNova(personal=Recipe(optimizer=optimizer)).personal.optimizer == optimizer
