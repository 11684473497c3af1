"""FedDyn: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic
Regularization", ICLR 2021, Algorithm 1.

    min_θ 1/m Σ_k L_k(θ)

Client k minimises L_k(θ) − ⟨g_k, θ⟩ + α/2 ‖θ − θ^{t−1}‖². At the minimum g_k − α(θ_k − θ^{t−1}) is ∇L_k(θ_k):
it becomes the next g_k without a further gradient. h on the server is the mean of g_k over the population.

Departures: the minimum is approached by `local`; the paper writes argmin. The authors' experiments add weight
decay and clip gradients; here neither is done unless asked for (`local.weight_decay`). P_t are the clients
whose replies arrived. The personalized model is the broadcast one fine-tuned without the regularizer, which
the paper does not do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from apiece.errors import ApieceError
from apiece.local import sgd
from apiece.method import Method, Model, Reply, Round, Span
from apiece.optim import Recipe
from apiece.params import Params
from apiece.shard import Batch, Shard
from apiece.task import Task


class Dynamic(NamedTuple):
    params: Params  # θ
    h: Params  # the mean of g_k over the population


class Slope(NamedTuple):
    g: Params  # ∇L_k(θ_k) at the client's last model


@dataclass(frozen=True)
class FedDyn(Method):
    """Clients minimise a regularized loss whose minima agree with the minimum of the population's loss."""

    paper = "Acar et al. 2021"
    kind = "global"
    search: ClassVar = {"local.lr": Span(0.01, 0.5), "alpha": Span(0.01, 1.0)}

    alpha: float = 0.1
    local: Recipe = Recipe(epochs=5)
    personal: Recipe = Recipe()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.alpha > 0:
            raise ApieceError(f"alpha must be above 0, got {self.alpha}: the server divides by it")

    def init(self, task: Task, params: Params, key: int) -> Dynamic:
        return Dynamic(params, params.zeros())

    def init_client(self, task: Task, broadcast: Model, start: Params, key: Tensor) -> Slope:
        return Slope(start.zeros())

    def broadcast(self, server: Dynamic, round: Round) -> Model:
        return Model(server.params)

    def client_update(self, task: Task, broadcast: Model, client: Slope, data: Shard) -> Reply:
        theta_t, g, alpha = broadcast.params, client.g, self.alpha

        def dynamic(theta: Params, batch: Batch, outputs: Tensor) -> Tensor:
            return alpha / 2 * (theta - theta_t).sqnorm() - g.dot(theta)

        theta_k = sgd(task.penalized(dynamic).objective, theta_t, data, self.local)
        return Reply(theta_k - theta_t, Slope(g - alpha * (theta_k - theta_t)), model=theta_k)

    def server_update(self, task: Task, server: Dynamic, update: Params, round: Round) -> Dynamic:
        m, alpha = round.population, self.alpha
        h = server.h - alpha * update * (round.replies / m)
        return Dynamic(server.params + update - h / alpha, h)

    def personalize(self, task: Task, broadcast: Model, client: Slope, data: Shard) -> Params:
        return sgd(task.objective, broadcast.params, data, self.personal)
