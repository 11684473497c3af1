"""Personalized FedAvg: Jiang, Konečný, Rush, Kannan, "Improving Federated Learning Personalization via Model
Agnostic Meta Learning", 2019, Algorithm 2.

Line 1 is `first`, FedAvg(E) with momentum on the server; line 2 is `then`, Reptile(K) with Adam there; line 3
is `personalize`, with the clients' optimizer.
Departures: the paper gives neither Adam's numbers (here its usual ones, lr 0.001) nor the epochs of
personalization (here E). It switches after 500 of 700 rounds; here after 35, as early in the default 50.
"""

from __future__ import annotations

from dataclasses import dataclass

from apiece.method import Method, Span
from apiece.methods.fedavg import FedAvg
from apiece.methods.reptile import Reptile
from apiece.optim import Recipe, Rule
from apiece.wrappers.stages import Staged


@dataclass(frozen=True)
class PersonalizedFedAvg(Staged):
    """FedAvg(E) with server momentum, then Reptile(K) with server Adam: good at once, better adapted."""

    paper = "Jiang et al. 2019"
    kind = "meta"
    search = {
        "first.local.lr": Span(0.01, 0.5),
        "then.local.lr": Span(0.01, 0.5),
        "then.outer.lr": Span(1e-4, 1e-2),
    }

    first: Method = FedAvg(
        local=Recipe(lr=0.02, batch_size=20, epochs=10),
        outer=Rule("sgd", lr=1.0, momentum=0.9),
    )
    then: Method = Reptile(
        local=Recipe(lr=0.02, batch_size=20, steps=10),
        personal=Recipe(epochs=10),
        outer=Rule("adam", lr=0.001),
    )
    switch: int = 35
