"""FedEC against Algorithm 1 in plain PyTorch, which shares nothing with our code but the order of batches."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apiece import ApieceError, Experiment, Recipe, Rule, Shard, random, run, tree
from apiece.engines.base import Engine
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import models
from apiece.methods.fedec import FedEC
from apiece.methods.reptile import Reptile
from apiece.train import Training
from tests.methods.test_fedavg import cohort_batches
from tests.worlds import CPU, dropout_net, federation, servers

ENGINES = [Sequential(CPU), Vectorized(CPU, 8)]
SIZES = (0, 23, 9, 12, 7, 1, 16)
COHORT, ROUNDS, EPOCHS, ALPHA = 3, 3, 2, 0.8
SGD = Recipe("sgd", lr=0.2, momentum=0.5, batch_size=5, epochs=EPOCHS)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def kl(theta: nn.Module, theta_hat: nn.Module, x: Tensor) -> Tensor:
    p_hat, p = theta_hat(x).detach().softmax(-1), theta(x).softmax(-1)
    return (p_hat * (p_hat / p).log()).sum(-1).mean()


def l2(theta: nn.Module, theta_hat: nn.Module, x: Tensor) -> Tensor:
    pairs = zip(theta.parameters(), theta_hat.parameters(), strict=True)
    return torch.stack([((p - m.detach()) ** 2).sum() for p, m in pairs]).sum()


class Case(NamedTuple):
    """One setting of FedEC, and the same in PyTorch's own words."""

    method: FedEC
    c: Callable[[nn.Module, nn.Module, Tensor], Tensor]
    inner: Callable[[Any], torch.optim.Optimizer]
    outer: Callable[[Any], torch.optim.Optimizer]


def sgd(p: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, lr=0.2, momentum=0.5)


def half_step(p: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, lr=0.5)


HALF = Rule("sgd", lr=0.5)
CASES = {
    "kl": Case(FedEC(ALPHA, "kl", SGD, outer=HALF), kl, sgd, half_step),
    "l2": Case(FedEC(ALPHA / 10, "l2", SGD, outer=HALF), l2, sgd, half_step),
    "client adam": Case(
        FedEC(ALPHA, "kl", SGD._replace(optimizer="adam", lr=0.01), outer=HALF),
        kl,
        lambda p: torch.optim.Adam(p, lr=0.01),
        half_step,
    ),
    "server adam": Case(
        FedEC(ALPHA, "kl", SGD, outer=Rule("adam", lr=0.05)), kl, sgd, lambda p: torch.optim.Adam(p, lr=0.05)
    ),
}


def inner_update(
    case: Case, phi: nn.Module, theta_hat: nn.Module | None, batches: list[Tensor], x: Tensor, y: Tensor
) -> nn.Module:
    theta = copy.deepcopy(phi)
    step = case.inner(theta.parameters())
    for rows in batches:
        loss = F.cross_entropy(theta(x[rows]), y[rows])
        if theta_hat is not None:
            loss = loss + case.method.alpha * case.c(theta, theta_hat, x[rows])
        step.zero_grad()
        loss.backward()
        step.step()
    return theta


def algorithm_1(
    case: Case, training: Training, start: Any
) -> Iterator[tuple[nn.Module, dict[int, nn.Module]]]:
    """(φ, {i: θ̂_i}) after every round."""
    data = training.federation.data
    phi = net()
    phi.load_state_dict(dict(start))
    outer = case.outer(phi.parameters())
    theta_hat: dict[int, nn.Module] = {}
    for t in range(ROUNDS):
        ids = training.sampler(data, training.round(t)).ids
        outer.zero_grad()
        for i, (_, batches) in zip(ids, cohort_batches(training, t, EPOCHS), strict=True):
            theta = inner_update(case, phi, theta_hat.get(i), batches, data.x, data.y)
            for p, q in zip(phi.parameters(), theta.parameters(), strict=True):
                move = (q - p).detach() / len(ids)
                p.grad = -move if p.grad is None else p.grad - move
            if batches:
                theta_hat[i] = theta
        outer.step()
        yield copy.deepcopy(phi), dict(theta_hat)


def assert_close(ours: Any, theirs: nn.Module, at: int | None = None) -> None:
    for name, p in theirs.named_parameters():
        mine = ours[name] if at is None else ours[name][at]
        torch.testing.assert_close(mine, p.detach(), rtol=1e-5, atol=1e-5)


def assert_same_bits(a: Any, b: Any) -> None:
    assert tree.same_structure(a, b)
    assert all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_equals_algorithm_1(case: Case, engine: Engine) -> None:
    """φ, every θ̂_i and who has one, round by round; then every client's personalized model.

    Three of seven take part at a time: three come back, one is without examples, one never comes.
    """
    training, server = federation(case.method, engine, SIZES, COHORT, net)
    f, everyone = training.federation, list(range(len(SIZES)))
    ids = [training.sampler(f.data, training.round(t)).ids for t in range(ROUNDS)]
    expected = list(algorithm_1(case, training, server.params))
    assert ids == [(0, 4, 6), (1, 4, 5), (1, 3, 6)]

    for (phi, theta_hat), after in zip(expected, servers(training, server, ROUNDS), strict=True):
        assert_close(after.params, phi)
        broadcast = training.broadcast(after, ROUNDS)
        memory = f.states(engine, broadcast, everyone)
        assert memory.known.tolist() == [float(i in theta_hat) for i in everyone]
        for i, theta in theta_hat.items():
            assert_close(memory.theta, theta, i)

    key = random.fold(f.root, "personalize", ROUNDS)
    found = models(engine, f, broadcast, everyone, ROUNDS)
    for i, (initial, personalized) in enumerate(found):
        rows, even = f.rows(f.data.train, [i], [i], key)
        shard = Shard(torch.arange(len(f.data.y)), f.data.y, tree.take(rows, 0), even)
        batches = [batch.x for batch in shard.batches(5, EPOCHS)]
        assert_close(initial, phi)
        assert_close(personalized, inner_update(case, phi, theta_hat.get(i), batches, f.data.x, f.data.y))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_without_constraint_it_is_reptile(engine: Engine) -> None:
    """FedEC-wo, bit for bit: server and personalized models, with dropout."""
    ends = []
    for method in (FedEC(0.0, local=SGD, outer=HALF), Reptile(local=SGD, outer=HALF)):
        training, server = federation(method, engine, SIZES, COHORT, dropout_net)
        played = list(servers(training, server, ROUNDS))
        broadcast = training.broadcast(played[-1], ROUNDS)
        found = models(engine, training.federation, broadcast, list(range(len(SIZES))), ROUNDS)
        ends.append((played, found))
    assert_same_bits(*ends)


class Normed(nn.Linear):
    """Rows of the weight have length 1: NaN at zero params."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / self.weight.square().sum(1, keepdim=True).sqrt(), self.bias)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("constraint", ["kl", "l2"])
def test_a_first_round_has_no_constraint(constraint: str, engine: Engine) -> None:
    """However strong: round 0 is Reptile's bit for bit, also for a model that zero params make NaN."""
    ends = []
    for method in (FedEC(1e4, constraint, SGD), Reptile(local=SGD)):
        training, server = federation(method, engine, SIZES, COHORT, lambda: Normed(5, 3))
        ends.append(next(servers(training, server, 1)))
    assert all(p.isfinite().all() for p in ends[0].params.values())
    assert_same_bits(*ends)


def test_l2_pulls_towards_the_last_model() -> None:
    """One client, α·lr = ¼: a step goes half of the way to θ̂, besides the data's gradient.

    With φ fixed (outer lr 0) and one full-batch step, θ₀ = φ − ηg and
    θ₁ = φ − ηg − 2ηα(φ − θ₀) = θ₀ − 2ηα·ηg = φ − (1 + ½)ηg.
    """
    eta = 0.1
    method = FedEC(0.25 / eta, "l2", Recipe(lr=eta, batch_size=0, epochs=1), outer=Rule("sgd", lr=0.0))
    training, server = federation(method, Sequential(CPU), (12,), 1, net)
    f, phi = training.federation, server.params
    thetas = [f.states(training.engine, None, [0]).theta for _ in servers(training, server, 2)]
    first, second = (tree.take(theta, 0) - phi for theta in thetas)
    for name in phi:
        torch.testing.assert_close(second[name], 1.5 * first[name], rtol=1e-5, atol=1e-6)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ApieceError, match="unknown constraint 'none'"):
        FedEC(constraint="none")
    with pytest.raises(ApieceError, match="alpha"):
        FedEC(alpha=-1.0)
    assert FedEC(local=Recipe(lr=0.3)).personal.lr == 0.3


def test_the_remembered_models_of_a_run_can_be_read() -> None:
    """As docs/methods/fedec.md shows it."""
    small = {
        "model": "logistic",
        "clients": 6,
        "cohort": 2,
        "rounds": 2,
        "engine": "vectorized",
        "threads": 1,
    }
    result = run(Experiment("apiece.methods.fedec:FedEC", {"epochs": 1, "batch_size": 0}, **small))
    s = result.session
    memory = s.federation.states(s.engine, s.training.broadcast(result.server, 2), list(range(6)))
    met = {i for t in range(2) for i in s.training.sampler(s.federation.data, s.training.round(t)).ids}
    assert set(memory.known.nonzero().flatten().tolist()) == met
