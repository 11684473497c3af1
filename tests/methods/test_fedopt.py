"""FedOpt: clients by a plain PyTorch loop, the server by the paper's recursions in numpy."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from apiece import ApieceError, Params, Recipe, Rule, catalog
from apiece.engines.base import Engine
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.methods.fedavg import FedAvg
from apiece.methods.fedopt import FedOpt
from apiece.train import Training
from tests.methods.test_fedavg import cohort_batches
from tests.methods.test_fedprox import ENGINES, SIZES, assert_fine_tuned, net
from tests.worlds import CPU, dropout_net, federation, servers

ETA, B1, B2, TAU = 0.3, 0.8, 0.6, 0.05
ROUNDS = 4


def flat(params: Params) -> np.ndarray:
    """As a module orders its parameters."""
    return torch.cat([params[name].flatten() for name, _ in net().named_parameters()]).double().numpy()


def mean_move(training: Training, t: int, x_t: np.ndarray) -> np.ndarray:
    """Σ_i n_i (x_i − x_t) / Σ_i n_i over the cohort of round t."""
    data = training.federation.data
    start = net()
    torch.nn.utils.vector_to_parameters(torch.as_tensor(x_t).float(), start.parameters())
    total, examples = np.zeros_like(x_t), 0
    for size, batches in cohort_batches(training, t, 2):
        x = copy.deepcopy(start)
        sgd = torch.optim.SGD(x.parameters(), lr=0.2)
        for rows in batches:
            sgd.zero_grad()
            with torch.enable_grad():
                F.cross_entropy(x(data.x[rows]), data.y[rows]).backward()
            sgd.step()
        after = torch.nn.utils.parameters_to_vector(x.parameters()).detach().double().numpy()
        total, examples = total + size * (after - x_t), examples + size
    return total / examples


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("optimizer", ["adam", "yogi", "adagrad"])
def test_equals_the_papers_recursions(optimizer: str, engine: Engine) -> None:
    personal = Recipe(lr=0.1, batch_size=4, epochs=2)
    local = Recipe(lr=0.2, batch_size=5, epochs=2)
    method = FedOpt(optimizer, ETA, B1, B2, TAU, local, personal)
    training, server = federation(method, engine, SIZES, 3, net)
    x = flat(server.params)
    m, v = np.zeros_like(x), np.full_like(x, TAU**2)
    signs = set()
    for t, ours in enumerate(servers(training, server, ROUNDS)):
        delta = mean_move(training, t, x)
        m = B1 * m + (1 - B1) * delta
        signs |= set(np.sign(v - delta**2))
        if optimizer == "adagrad":
            v = v + delta**2
        elif optimizer == "yogi":
            v = v - (1 - B2) * delta**2 * np.sign(v - delta**2)
        else:
            v = B2 * v + (1 - B2) * delta**2
        x = x + ETA * m / (np.sqrt(v) + TAU)
        np.testing.assert_allclose(flat(ours.params), x, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(flat(ours.m), m, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(flat(ours.v), v, rtol=1e-5, atol=1e-7)
    assert signs >= {-1.0, 1.0}  # both ways of Yogi's v
    model = net()
    torch.nn.utils.vector_to_parameters(torch.as_tensor(x).float(), model.parameters())
    assert_fine_tuned(training, model, ours, ROUNDS)


@pytest.mark.parametrize("optimizer", ["yogi", "adagrad"])
def test_with_a_large_tau_it_is_fedavg(optimizer: str) -> None:
    """v stays τ², so that a step is η / 2τ times the mean move; with η = τ, half of it."""
    local = Recipe(lr=0.1, batch_size=5, epochs=2)
    opt = FedOpt(optimizer, eta=1e3, b1=0.0, tau=1e3, local=local)
    avg = FedAvg(local, outer=Rule("sgd", lr=0.5))
    runs = (federation(method, Vectorized(CPU, 8), SIZES, 3, dropout_net) for method in (opt, avg))
    for ours, theirs in zip(*(list(servers(*run, 3)) for run in runs), strict=True):
        for name in theirs.params:
            torch.testing.assert_close(ours.params[name], theirs.params[name], rtol=1e-6, atol=1e-6)


def test_a_parameter_that_no_client_moves_stays() -> None:
    """0 / (√v + τ): with v₋₁ = τ² > 0 there is no 0 / 0, also where v has shrunk to nothing."""
    method = FedOpt(b2=0.0, local=Recipe(lr=0.0))
    training, server = federation(method, Sequential(CPU), SIZES, 3, net)
    *_, after = servers(training, server, 2)
    assert all(torch.equal(after.params[name], server.params[name]) for name in server.params)


def test_settings_name_the_servers_optimizer_and_the_clients() -> None:
    settings = {"optimizer": "yogi", "b1": 0.5, "lr": 0.3, "local": {"optimizer": "adam", "b1": 0.7}}
    method = catalog.build("apiece.methods.fedopt:FedOpt", settings)
    assert isinstance(method, FedOpt)
    assert (method.optimizer, method.b1) == ("yogi", 0.5)
    assert method.local[:2] == ("adam", 0.3)
    assert method.local.b1 == 0.7


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"optimizer": "adem"}, "unknown server optimizer 'adem': did you mean 'adam'"),
        ({"optimizer": "sgd"}, "unknown server optimizer 'sgd'"),
        ({"eta": 0.0}, "eta and tau must be positive"),
        ({"tau": 0.0}, "eta and tau must be positive"),
        ({"eta": float("nan")}, "eta and tau must be positive"),
        ({"b1": 1.0}, r"must lie in \[0, 1\)"),
        ({"b2": -0.1}, r"must lie in \[0, 1\)"),
    ],
    ids=str,
)
def test_refuses_bad_settings(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ApieceError, match=message):
        FedOpt(**setting)  # type: ignore[arg-type]
