"""FedMeta with UGA: Yao, Huang, Zhang, Li, Sun, "Federated Learning with Unbiased Gradient Aggregation and
Controllable Meta Updating", FL-NeurIPS workshop 2019, Algorithms 1 (UGA) and 2 (FedMeta).

Two changes to FedAvg, each of use without the other. UGA: a client keeps the trace of its steps, so that its
model w_k is a function of w_t, and sends the gradient of its loss at w_k with respect to w_t: all gradients
that the server averages are taken at the same point. FedMeta: the server then steps on examples of its own,

    w_{t+1} = w_t − η_g Σ_k n_k/n ∇_{w_t} L(w_k(w_t); D_k)
    w_{t+1} ← w_{t+1} − η_meta ∇L(w_{t+1}; D_meta)

`uga=False` is FedMeta around FedAvg, the form in which Shen et al. 2023 (FedPA) compare with it;
`meta.lr=0` is UGA alone.

Departures: a client sends −η_g times its gradient, so that a reply is a move of the model in both forms.
`local.steps`, if set, is the length of the trace in place of E − 1 epochs. D_meta is the server's proxy; the
step on it may be several, of any optimizer. The authors' η, η_g and η_meta are for other data: the defaults
are ours. The personalized model is the broadcast one fine-tuned on the client's data, which the paper does
not do.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.func import grad

from apiece.errors import ApieceError
from apiece.local import sgd
from apiece.method import Client, Method, Model, Reply, Round, Span
from apiece.optim import DEFAULT, Recipe
from apiece.params import Params
from apiece.shard import Shard
from apiece.task import Task


@dataclass(frozen=True)
class FedMetaProxy(Method):
    """Gradients through the clients' training, averaged; then the server trains on its proxy data."""

    paper = "Yao et al. 2019"
    kind = "global"
    needs_proxy = True
    search = {"local.lr": Span(0.001, 0.1), "eta_g": Span(0.1, 2.0), "meta.lr": Span(0.01, 0.5)}

    eta_g: float = 1.0
    uga: bool = True
    local: Recipe = Recipe(lr=0.01, epochs=2)  # η and E
    personal: Recipe = Recipe(lr=0.1, epochs=5)
    meta: Recipe = Recipe(lr=0.1, batch_size=0, steps=1)  # η_meta

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "meta", self.meta.over(DEFAULT).checked("meta"))
        if not self.eta_g > 0:
            raise ApieceError(f"eta_g must be positive, got {self.eta_g}")
        if self.uga and self.local.epochs < 1:
            raise ApieceError("local.epochs must be at least 1: the last epoch evaluates the gradient")

    def init(self, task: Task, params: Params, key: int) -> Model:
        task.need_proxy()
        return Model(params)

    def broadcast(self, server: Model, round: Round) -> Model:
        return server

    def client_update(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Reply:
        w_t, E = broadcast.params, self.local.epochs
        if not self.uga:
            w_k = sgd(task.objective, w_t, data, self.local)
            return Reply(w_k - w_t, weight=data.size, model=w_k)

        def evaluated(w: Params) -> tuple[Tensor, Params]:
            """L(w_k; D_k), through the steps that led from `w` to w_k."""
            w_k = sgd(task.objective, w, data, self.local._replace(epochs=E - 1))
            return task.objective(w_k, data.all()), w_k

        g_k, w_k = grad(evaluated, has_aux=True)(w_t)
        return Reply(-self.eta_g * g_k, weight=data.size, model=w_k)

    def server_update(self, task: Task, server: Model, update: Params, round: Round) -> Model:
        return Model(sgd(task.objective, server.params + update, task.need_proxy().at(round.key), self.meta))

    def personalize(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Params:
        return sgd(task.objective, broadcast.params, data, self.personal)
