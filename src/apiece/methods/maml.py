"""MAML: Finn, Abbeel, Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", ICML 2017,
federated as in Chen, Luo, Dong, Li, He, "Federated Meta-Learning with Fast Convergence and Efficient
Communication", 2018, Algorithm 1 (FedMeta with MAML).

    min_θ mean over clients u of L(θ_u, Q_u),  θ_u = θ − α∇L(θ, S_u)

S_u and Q_u are client u's support and query. The gradient is taken through the inner step, so it holds second
derivatives. FOMAML (`first_order`; Finn et al., Section 5.2) takes it at θ_u, as if that did not depend on θ.

Departures: the inner loop may have several steps, on batches of the support (the algorithm has one, on all of
it). S_u and Q_u are the same in every round. A client without a query does not count in the mean. A client
deploys θ adapted to its whole training shard, and the test shard plays the query. The server may step with
any optimizer on the mean gradient: Algorithm 1 has SGD, the experiments name Adam, the default. Its lr is
ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.func import grad

from apiece.local import sgd
from apiece.meta import check_plain, check_support
from apiece.method import Client, Method, Model, Reply, Round, Span
from apiece.optim import Recipe, Rule, Stepped
from apiece.params import Params
from apiece.shard import Shard
from apiece.task import Task


@dataclass(frozen=True)
class MAML(Method):
    """FedMeta with MAML: an initial model that a few gradient steps adapt well; second derivatives."""

    paper = "Chen et al. 2018"
    kind = "meta"
    search = {"local.lr": Span(0.01, 0.5), "outer.lr": Span(0.001, 0.1)}

    local: Recipe = Recipe(lr=0.05, batch_size=0, steps=5)  # lr is α
    personal: Recipe = Recipe()
    outer: Rule = Rule("adam", lr=0.01)  # lr is β
    support: float = 0.5  # share of a client's examples in S_u
    first_order: bool = False  # leave the second derivatives out

    def __post_init__(self) -> None:
        super().__post_init__()
        check_plain(self.local, "local")
        check_support(self.support)

    def init(self, task: Task, params: Params, key: int) -> Stepped:
        return self.outer.start(params)

    def broadcast(self, server: Stepped, round: Round) -> Model:
        return Model(server.params)

    def client_update(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Reply:
        S, Q = data.split(self.support)

        def adapted(theta: Params) -> Params:
            return sgd(task.objective, theta, S, self.local)

        def query_loss(theta: Params) -> tuple[Tensor, Params]:
            theta_u = adapted(theta)
            return task.objective(theta_u, Q.all()), theta_u

        if self.first_order:
            theta_u = adapted(broadcast.params)
            g = grad(task.objective)(theta_u, Q.all())
        else:
            g, theta_u = grad(query_loss, has_aux=True)(broadcast.params)
        return Reply(-g, weight=(Q.size > 0).float(), model=theta_u)

    def server_update(self, task: Task, server: Stepped, update: Params, round: Round) -> Stepped:
        return self.outer.step(server, update)

    def personalize(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Params:
        return sgd(task.objective, broadcast.params, data, self.personal)
