"""ADMM-FedMeta: Yue, Ren, Xin, Lin, Zhang, "Inexact-ADMM Based Federated Meta-Learning for Fast and
Continual Edge Learning", MobiHoc 2021, Algorithm 1.

    min_θ Σ_i w_i L_i(θ − α∇L_i(θ, S_i), Q_i) + λ‖θ − θ_p‖²

S_i and Q_i are client i's support and query, w_i = D_i / Σ D its share of all examples, θ_p the server's
prior. Every client has its own copy θ_i of θ and a dual y_i that makes the copies agree.

Departures: all clients take part in the paper. Here those outside the cohort keep their θ_i and y_i, and the
server's step is over the whole population as Eq. 11 says. Until its first round client i has θ_i = θ^0 and
y_i = 0 (its start is not given), so that nothing need be sent for it. A client sends one vector, the change
of y_i + ρθ_i since its last accepted reply, in place of θ_i and y_i. All clients have one ρ. D_h is the
squared distance; `exact` minimises over θ where Eq. 11 takes the gradient of D_h at the old θ. A client
adapts on its whole training shard, and the test shard plays the query. One δ_t = 1/(t + 100) for all clients;
it, α and ρ are those of the authors' experiments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from apiece.errors import ApieceError
from apiece.local import grad, sgd
from apiece.method import Method, Reply, Round, Span
from apiece.optim import Recipe, Rule
from apiece.params import Params
from apiece.shard import Shard
from apiece.task import Task


class Consensus(NamedTuple):
    params: Params  # θ
    mean: Params  # of y_i + ρθ_i over the population: a sum whose start does not need the population's size


class Sent(NamedTuple):
    params: Params  # θ
    delta: Tensor  # δ_t
    examples: Tensor  # Σ D


class Dual(NamedTuple):
    theta: Params  # θ_i
    y: Params  # y_i


@dataclass(frozen=True)
class ADMMFedMeta(Method):
    """An initial model that adapts in one gradient step, by inexact ADMM; can be held to a prior model."""

    paper = "Yue et al. 2021"
    kind = "meta"
    search = {"local.lr": Span(0.01, 0.5), "rho": Span(0.03, 3.0)}

    local: Recipe = Recipe(lr=0.01, batch_size=0, steps=1)  # lr is α
    personal: Recipe = Recipe()
    rho: float = 0.35
    lam: float = 0.0
    support: float = 0.5  # share of a client's examples in S_i
    exact: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local.rule != Rule(lr=self.local.lr) or self.local.steps != 1 or self.local.batch_size:
            raise ApieceError(
                "ADMM-FedMeta adapts by one plain gradient step on all examples: of `local`, set lr alone"
            )
        for name, fine in (("rho", self.rho > 0), ("lam", self.lam >= 0), ("support", 0 < self.support < 1)):
            if not fine:
                raise ApieceError(
                    f"{name}={getattr(self, name)} is out of range: rho > 0, lam ≥ 0, 0 < support < 1"
                )

    def init(self, task: Task, params: Params, key: int) -> Consensus:
        if self.lam and task.prior is None:
            raise ApieceError(
                f"lam={self.lam} pulls to a prior model and there is none: give --prior RUN, or set lam=0"
            )
        return Consensus(params, self.rho * params)

    def init_client(self, task: Task, broadcast: Sent, start: Params, key: Tensor) -> Dual:
        return Dual(start, start.zeros())

    def broadcast(self, server: Consensus, round: Round) -> Sent:
        number = next(iter(server.params.values())).new_full
        return Sent(server.params, number((), 1 / (round.index + 100)), number((), round.examples))

    def client_update(self, task: Task, broadcast: Sent, client: Dual, data: Shard) -> Reply:
        theta, delta, alpha = broadcast.params, broadcast.delta, self.local.lr
        # The two gradients in g must share their dropout, or 1/δ blows the noise up: one batch, one key.
        S, Q = (part.all() for part in data.split(self.support))
        w = data.size / broadcast.examples
        nabla = grad(task.objective)

        phi = theta - alpha * nabla(theta, S)
        r = nabla(phi, Q)
        g = (nabla(theta + delta * r, S) - nabla(theta - delta * r, S)) / (2 * delta)
        theta_i = theta - (client.y + w * (r - alpha * g)) / self.rho
        y = client.y + self.rho * (theta_i - theta)

        change = (y + self.rho * theta_i) - (client.y + self.rho * client.theta)
        return Reply(change, Dual(theta_i, y), model=phi)

    def server_update(self, task: Task, server: Consensus, update: Params, round: Round) -> Consensus:
        n, theta, theta_p = round.population, server.params, task.prior
        mean = server.mean + update * round.replies / n
        if not self.lam or theta_p is None:
            theta = mean / self.rho
        elif self.exact:
            theta = (2 * self.lam * theta_p + n * mean) / (2 * self.lam + n * self.rho)
        else:
            theta = (n * mean - 2 * self.lam * (theta - theta_p)) / (n * self.rho)
        return Consensus(theta, mean)

    def personalize(self, task: Task, broadcast: Sent, client: Dual, data: Shard) -> Params:
        return sgd(task.objective, broadcast.params, data, self.personal)
