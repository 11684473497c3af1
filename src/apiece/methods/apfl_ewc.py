"""APFL-EWC: Ni, Shen, Zhang, "Adaptive personalized federated learning for heterogeneous data: a method based
on parameter decomposition and continual learning" (in Chinese), Scientia Sinica Informationis 52, 2022,
Algorithm 1. The paper calls it APFL; it is not the mixture of Deng et al. 2020 of the same name.

Departures:
- Algorithm 1 finds a plateau after the cohort has answered and then uses gradients it did not ask for, and
  never lowers `flag`. Here a plateau in round t makes round t + 1 ask; F changes when t + 1 closes.
- F goes down in every round: Eq. (6) needs it in every round, and whoever is sampled may never have had it.
- Clients square their gradients themselves: the same bytes, and Eq. (5) becomes the mean of what they send.
- `preserving` starts w_k so that a client's first decomposed model is the shared one; the paper's start,
  m = 1 and w_k = w_S, gives (σ(1) + 1)·w_S and is the default.
- The window takes the paper's global loss, Eq. (1) over all clients; a server has only its cohort's: here
  their mean weighted by n_k, of the models before the round (`client_update`).
- Algorithm 1 has no preset rounds; the text gives two versions of them, and `preset` is that of §4.2.1.
Not in the paper, ours: M_k = 1 is read as the value before the sigmoid; the window's length; the standard
deviation is the population's, so that one loss alone has 0; what a unit is besides dense and convolutional
(`units`); clients without m_k, w_k are scored with plain w_S; `personalize` is one more local training.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apiece import tree
from apiece.errors import ApieceError
from apiece.local import grad, loop, sgd
from apiece.method import Method, Reply, Round, Span
from apiece.optim import Recipe
from apiece.params import Params
from apiece.shard import Batch, Shard
from apiece.task import Task


class Watch(NamedTuple):
    """What the server remembers of the training losses."""

    losses: Tensor  # L_win, the newest last; zeros where it is not filled yet
    held: Tensor  # losses in it, at most its length
    mean: Tensor  # μ_old and σ_old: of the last plateau
    std: Tensor
    peak: Tensor  # p: the losses have risen since


class Shared(NamedTuple):
    """The server's state."""

    params: Params  # w_S
    importance: Params  # F, the diagonal
    watch: Watch
    flag: Tensor  # a plateau was found: the next cohort is to send gradients


class Sent(NamedTuple):
    params: Params  # w_S^t
    importance: Params
    decomposed: bool
    ask: bool  # for gradients


class Answer(NamedTuple):
    shared: Params  # w_S(k) − w_S^t
    loss: Tensor
    squares: Params | tuple[()]  # of the mean gradient at w_S^t; only if asked for


class Own(NamedTuple):
    """What stays with the client."""

    m: Params  # transfer vectors before the sigmoid
    w: Params  # w_k
    known: Tensor  # 0 before its first decomposed round, then 1


def units(name: str, w: Tensor) -> str:
    """The transfer vector of a tensor: one entry per row, shared by a module's tensors of as many rows.

    Rows are the output units of dense and convolutional layers (weight and bias share them), the channels of
    a normalization and the gates of each layer and direction of a recurrent one. A parameter outside of any
    module stands alone.
    """
    module, _, leaf = name.rpartition(".")
    layer = re.search(r"_l\d+(_reverse)?$", leaf)
    return f"{module or leaf}{layer[0] if layer else ''}{list(w.shape[:1])}"


def gates(m: Params, w: Params) -> Params:
    """σ(m), shaped to scale each tensor of `w` row by row."""
    return Params(
        {
            name: m[units(name, t)].sigmoid().reshape((*t.shape[:1], *[1] * (t.dim() - 1)))
            for name, t in w.items()
        }
    )


def join(**parts: Params) -> Params:
    """All parts as one point to train: `own.fc.weight` is `fc.weight` of the part `own`."""
    return Params({f"{part}.{name}": t for part, params in parts.items() for name, t in params.items()})


def part(joined: Params, name: str) -> Params:
    mine, _ = joined.split((name,))
    return Params({key.removeprefix(f"{name}."): t for key, t in mine.items()})


def compose(joined: Params) -> Params:
    """Eq. (3), σ written out: W = w_S ⊙ σ(m) + w_k, or w_S where nothing is decomposed yet."""
    w_S, m, w_k = (part(joined, name) for name in ("shared", "transfer", "own"))
    return w_S * gates(m, w_S) + w_k if w_k else w_S


def mean(fn: Callable[[Batch], Any], zero: Any, data: Shard, batch_size: int) -> Any:
    """Mean over all examples of what `fn` gives as the mean of a batch; in batches, to bound memory."""

    def step(total: Any, batch: Batch) -> Any:
        return total + fn(batch) * batch.weight.sum()

    return loop(step, zero, data.batches(batch_size)) / data.size.clamp(min=1)


@dataclass(frozen=True)
class ApflEwc(Method):
    """A shared model, scaled per unit and shifted by each client; what matters in it moves slowly (EWC)."""

    paper = "Ni et al. 2022"
    kind = "personalized"
    search = {"local.lr": Span(0.01, 0.5), "mu": Span(0.01, 10.0)}

    mu: float = 1.0
    lam: float = 1.0
    z: int = 2
    window: int = 5
    delta_mu: float = 1.0
    delta_sigma: float = 0.5
    preset: tuple[int, ...] = (0, 1, 2)
    preserving: bool = False
    local: Recipe = Recipe(epochs=5)
    personal: Recipe = Recipe()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ApieceError(f"window must be at least 1, got {self.window}")
        if self.mu < 0 or not 0 <= self.lam <= 1:
            raise ApieceError(f"mu ≥ 0 and 0 ≤ lam ≤ 1 are needed, got mu={self.mu}, lam={self.lam}")

    def init(self, task: Task, params: Params, key: int) -> Shared:
        zero = torch.zeros((), device=task.device)
        no = zero > 0
        watch = Watch(torch.zeros(self.window, device=task.device), zero, zero, zero, no)
        return Shared(params, params.zeros(), watch, no)

    def init_client(self, task: Task, broadcast: Sent, start: Params, key: Tensor) -> Own:
        return Own(*self.first(start), torch.zeros((), device=key.device))

    def first(self, w_S: Params) -> tuple[Params, Params]:
        """Line 21: m_k and w_k of a client that has none."""
        m = Params({units(name, w): w.new_ones(w.shape[:1]) for name, w in w_S.items()})
        return m, w_S - w_S * gates(m, w_S) if self.preserving else w_S

    def broadcast(self, server: Shared, round: Round) -> Sent:
        # Reading the flag waits for a GPU, once a round: what clients are asked for is static.
        ask = round.index in self.preset or bool(server.flag)
        return Sent(server.params, server.importance, round.index - self.z > 0, ask)

    def train(self, task: Task, sent: Sent, client: Own, data: Shard, recipe: Recipe) -> Params:
        """Lines 20-23: Eq. (6) minimised over w_S alone or, once decomposed, w_S, m_k and w_k together."""

        def objective(joined: Params, batch: Batch) -> Tensor:
            drift = part(joined, "shared") - sent.params
            return task.objective(compose(joined), batch) + self.mu / 2 * (sent.importance * drift).dot(drift)

        start = join(shared=sent.params)
        if sent.decomposed:
            m, w_k = tree.where(client.known > 0, (client.m, client.w), self.first(sent.params))
            start = join(shared=sent.params, transfer=m, own=w_k)
        return sgd(objective, start, data, recipe)

    def client_update(self, task: Task, broadcast: Sent, client: Own, data: Shard) -> Reply:
        """Lines 19-24. The loss is of the model the client had before the round, on its training examples."""
        w_t = broadcast.params
        before = self.initial(task, broadcast, client)
        zero = torch.zeros((), device=data.key.device)
        loss = mean(lambda batch: task.loss(before, batch), zero, data, self.local.batch_size)
        squares: Params | tuple[()] = ()
        if broadcast.ask:
            g = mean(lambda batch: grad(task.loss)(w_t, batch), w_t.zeros(), data, self.local.batch_size)
            squares = g * g
        after = self.train(task, broadcast, client, data, self.local)
        if broadcast.decomposed:
            own = Own(part(after, "transfer"), part(after, "own"), torch.ones_like(client.known))
            state = tree.where(data.size > 0, own, client)
        else:
            state = client
        answer = Answer(part(after, "shared") - w_t, loss, squares)
        return Reply(answer, state, data.size, compose(after), {"loss": loss, "known": client.known})

    def server_update(self, task: Task, server: Shared, update: Answer, round: Round) -> Shared:
        """Lines 8-16; all means are weighted by n_k."""
        F = server.importance
        if isinstance(update.squares, Params):
            F = self.lam * F + update.squares
        watch, plateau = self.look(server.watch, update.loss)
        return Shared(server.params + update.shared, F, watch, plateau)

    def look(self, watch: Watch, loss: Tensor) -> tuple[Watch, Tensor]:
        """Lines 9-16: the watch with one more loss, and whether the window lies on a plateau."""
        losses = torch.cat([watch.losses[1:], loss[None]])
        held = (watch.held + 1).clamp(max=self.window)
        filled = torch.arange(self.window, device=loss.device) >= self.window - held
        mu = losses.sum() / held
        sigma = (torch.where(filled, (losses - mu) ** 2, 0.0).sum() / held).sqrt()
        plateau = watch.peak & (mu < self.delta_mu) & (sigma < self.delta_sigma)
        mu_old, sigma_old = tree.where(plateau, (mu, sigma), (watch.mean, watch.std))
        peak = (watch.peak & ~plateau) | (mu > mu_old + sigma_old)
        return Watch(losses, held, mu_old, sigma_old, peak), plateau

    def initial(self, task: Task, broadcast: Sent, client: Own) -> Params:
        """The paper's model of a client between its rounds."""
        own = compose(join(shared=broadcast.params, transfer=client.m, own=client.w))
        model: Params = tree.where(client.known > 0, own, broadcast.params)
        return model

    def personalize(self, task: Task, broadcast: Sent, client: Own, data: Shard) -> Params:
        return compose(self.train(task, broadcast, client, data, self.personal))
