"""Meta-SGD against plain autograd by θ and α, and closed forms on a parabola."""

import pytest
import torch

from apiece import ApieceError, Params, Recipe, Rule, spec, tree
from apiece.engines.base import Engine
from apiece.engines.vectorized import Vectorized
from apiece.methods.maml import MAML
from apiece.methods.meta_sgd import Learner, MetaSGD
from tests.methods.test_maml import (
    ENGINES,
    SIZES,
    Plain,
    assert_same,
    location,
    means,
    net,
    one_client,
    personalized,
)
from tests.worlds import CPU, federation, servers


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("batch_size", [0, 4])
def test_equals_autograd_by_theta_and_alpha(engine: Engine, batch_size: int) -> None:
    """Three rounds of four of six clients, of which two have no query and do not count; Adam.

    The personalized models are steps of the α that was learned, no longer one number.
    """
    local = Recipe(lr=0.3, batch_size=batch_size, steps=3)
    method = MetaSGD(local, Recipe(batch_size=0, steps=4), outer=Rule("adam", lr=0.05), support=0.6)
    training, start = federation(method, engine, SIZES, 4, net)
    plain = Plain(training, dict(start.theta.params), method.local, 0.6)
    learned = [*plain.theta.values(), *(a.requires_grad_() for a in plain.alpha.values())]
    adam = torch.optim.Adam(learned, lr=0.05)
    server = start
    for index, after in enumerate(servers(training, start, 3)):
        plain.set_gradients(index, through=True, learned=learned)
        adam.step()
        assert_same(after.theta.params, plain.theta)
        assert_same(after.alpha.params, plain.alpha)
        server = after
    assert min(plain.counted) < 4
    assert all(float(a.detach().std()) > 0.01 for a in plain.alpha.values())
    for client, ours in enumerate(personalized(training, engine, server, 3)):
        assert_same(ours, plain.personalized(client, 4))


@pytest.mark.parametrize("K", [1, 2])
def test_on_a_parabola_by_hand(K: int) -> None:
    """A step takes each coordinate's distance to s to (1 − α) of it: θ_u = s + (1 − α)^K (θ − s).

    With r = θ_u − q: ∂L/∂θ = (1 − α)^K r and ∂L/∂α = −K(1 − α)^(K−1) (θ − s) r, coordinate by coordinate.
    α > 1 and α < 0 are allowed.
    """
    task, data = location(), one_client()
    theta, (s, q) = task.init(0)["theta"], means(data)
    alpha = torch.tensor([-0.2, 0.0, 0.3, 0.8, 1.4], dtype=torch.float64)
    learner = Learner(Params({"theta": theta}), Params({"theta": alpha}))
    reply = MetaSGD(Recipe(batch_size=0, steps=K)).client_update(task, learner, (), data)
    theta_u = s + (1 - alpha) ** K * (theta - s)
    r = theta_u - q
    torch.testing.assert_close(reply.update.params["theta"], -((1 - alpha) ** K) * r)
    torch.testing.assert_close(reply.update.alpha["theta"], K * (1 - alpha) ** (K - 1) * (theta - s) * r)
    assert reply.model is not None
    torch.testing.assert_close(reply.model["theta"], theta_u)


def test_its_first_round_moves_theta_as_maml_does() -> None:
    """α starts at local.lr everywhere."""
    local, outer = Recipe(lr=0.3, batch_size=0, steps=2), Rule("adam", lr=0.05)
    ours, start = federation(MetaSGD(local, outer=outer), Vectorized(CPU, 8), SIZES, 4, net)
    maml, same = federation(MAML(local, outer=outer), Vectorized(CPU, 8), SIZES, 4, net)
    (a,), (b,) = servers(ours, start, 1), servers(maml, same, 1)
    for name in b.params:
        torch.testing.assert_close(a.theta.params[name], b.params[name])


def test_two_models_go_down_and_two_come_up() -> None:
    method, task, data = MetaSGD(), location(), one_client()
    start = task.init(0)
    broadcast = Learner(start, start)
    assert tree.nbytes(broadcast) == 2 * tree.nbytes(start)
    assert spec(method, task, broadcast, start, data._x, data._y).bytes_up == 2 * tree.nbytes(start)


@pytest.mark.parametrize("size", [0, 1])
def test_a_client_without_a_query_has_no_weight(size: int) -> None:
    task = location()
    learner = Learner(task.init(0), task.init(0))
    reply = MetaSGD().client_update(task, learner, (), one_client(size))
    assert float(reply.weight) == 0.0
    assert all(bool(t.isfinite().all()) for t in tree.tensors(reply.update))


def test_what_it_refuses() -> None:
    with pytest.raises(ApieceError, match="local must be plain gradient descent"):
        MetaSGD(local=Recipe(optimizer="adam"))
    with pytest.raises(ApieceError, match="personal must be plain gradient descent"):
        MetaSGD(personal=Recipe(momentum=0.9))
    with pytest.raises(ApieceError, match=r"personal.lr=0.2 has no use"):
        MetaSGD(personal=Recipe(lr=0.2))
    with pytest.raises(ApieceError, match="support"):
        MetaSGD(support=1.0)
